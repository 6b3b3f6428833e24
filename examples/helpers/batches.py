"""A check of the batch settings of a run."""

import sys

import shardwise as sw


def refuse_batch_per_worker(world: sw.World, script: str, why: str) -> None:
    """Exit if --batch worker would multiply the batch size of `script`; `why` is the reason."""
    if world.settings.batch == "worker":
        world.print(
            f"{script}: {why}. Leave --batch worker out; with shardwise scale, leave --kind weak "
            "out.",
            file=sys.stderr,
        )
        sys.exit(2)
