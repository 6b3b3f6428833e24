"""Damages checkpoints randomly, as a disk, a copy or a person might, and checks loading them.

- training.py: the run that saves the checkpoints, and resumes from a damaged one
- damaging.py: turns a seed into damage to a copy of them
- judging.py: judges whether the result is as the documentation promises
- __main__.py: python -m tests.checkpoint_damage --damages 1000 --seed 1
"""
