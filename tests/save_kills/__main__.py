"""Kill ranks at random moments around a save, and check the next run.

python -m tests.save_kills --kills 200 --seed 1     seeds 1 to 200
python -m tests.save_kills --kill 17                only seed 17, with all details
"""

from functools import partial

from tests.save_kills.trying import COMMAND, SIZE, Runner
from tests.seeded import with_ranks

if __name__ == "__main__":
    COMMAND.run(partial(with_ranks, lambda groups, folder: Runner(groups(SIZE), folder)))
