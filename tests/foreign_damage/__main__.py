"""Damage checkpoints of other libraries at random, and read them.

python -m tests.foreign_damage --damages 200 --seed 1     seeds 1 to 200
python -m tests.foreign_damage --damage 17                only seed 17, with all details
"""

from functools import partial

from tests.foreign_damage import COMMAND, Runner
from tests.seeded import in_folder

if __name__ == "__main__":
    COMMAND.run(partial(in_folder, Runner))
