"""Which batches the flags of a run ask for, against those that a script makes itself."""

import sys

import shardwise as sw


def refuse_those_of_each(world: sw.World, script: str, why: str) -> None:
    """Exit where --batch worker multiplies the batch_size of every Loader; `why` not that of
    `script`."""
    if world.settings.batch == "worker":
        world.print(
            f"{script}: {why}: leave --batch worker out, or of shardwise scale --kind weak.",
            file=sys.stderr,
        )
        sys.exit(2)
