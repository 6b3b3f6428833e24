"""Tries invalid input from every source, and checks that the command refuses it in one sentence.

python -m tests.bad_input --inputs 1000 --seed 1     seeds 1 to 1000
python -m tests.bad_input --input 17                 only seed 17, with its whole output
"""

from functools import partial

from tests.bad_input.judging import COMMAND, Runner
from tests.seeded import in_folder

if __name__ == "__main__":
    COMMAND.run(partial(in_folder, Runner))
