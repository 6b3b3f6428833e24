"""Flip random bits in guarded runs, or count false alarms in clean ones.

python -m tests.bit_flips --flips 300 --seed 1      seeds 1 to 300
python -m tests.bit_flips --flip 17                 only seed 17, with all details
python -m tests.bit_flips --clean 20000             20,000 clean steps, in runs of random settings
"""

import sys
from contextlib import closing

import click

from tests.bit_flips.flipping import COMMAND, Runner, count_clean
from tests.distributed.group import Groups
from tests.seeded import console


@click.command(help=__doc__.replace("\npython", "\n\npython"))
@click.option("--flips", default=100, help="How many to try.")
@click.option("--seed", default=1, help="The first one's seed.")
@click.option("--flip", type=int, help="Try the one of this seed.")
@click.option("--clean", "steps", type=int, help="Make so many clean steps instead.")
def main(flips: int, seed: int, flip: int | None, steps: int | None) -> None:
    """Run the command."""
    with closing(Groups()) as groups:
        if steps is not None:
            fine = count_clean(groups, steps, seed)
        elif flip is not None:
            result = Runner(groups)(flip)
            fine = result.kind in COMMAND.fine
            console.print(f"{result.kind}: {result.words}\n{result.story}", markup=False)
        else:
            fine = COMMAND.many(Runner(groups), seed, flips)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
