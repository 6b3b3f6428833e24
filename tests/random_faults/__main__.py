"""Tries faults of ranks at random places of a run, and checks the launcher's report.

python -m tests.random_faults --faults 200 --seed 1     seeds 1 to 200
python -m tests.random_faults --fault 17                only seed 17, with its whole output
"""

from functools import partial

from tests.random_faults.judging import COMMAND, Runner
from tests.seeded import in_folder

if __name__ == "__main__":
    COMMAND.run(partial(in_folder, Runner))
