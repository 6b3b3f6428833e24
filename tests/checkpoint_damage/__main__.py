"""Damage checkpoints at random, and check their loads.

python -m tests.checkpoint_damage --damages 1000 --seed 1     seeds 1 to 1000
python -m tests.checkpoint_damage --damage 17                 only seed 17, with all details
"""

from functools import partial

from tests.checkpoint_damage.judging import COMMAND, Runner
from tests.seeded import with_ranks

if __name__ == "__main__":
    COMMAND.run(partial(with_ranks, lambda groups, folder: Runner(groups(2), folder)))
