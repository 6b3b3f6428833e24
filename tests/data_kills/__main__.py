"""Kill ranks at random moments, resume at other sizes, and check that samples are used once.

python -m tests.data_kills --trainings 200 --seed 1     seeds 1 to 200
python -m tests.data_kills --training 17                only seed 17, with all details
"""

from functools import partial

from tests.data_kills.trying import COMMAND, Runner
from tests.seeded import with_ranks

if __name__ == "__main__":
    COMMAND.run(partial(with_ranks, Runner))
