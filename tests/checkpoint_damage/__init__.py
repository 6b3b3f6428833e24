"""Checkpoints with random damage, as by a disk, a copy or a person, and checks of their loads.

- training.py: the run that saves the checkpoints, and its resume from a damaged one
- damaging.py: turns a seed into damage to a copy of them
- judging.py: judges whether the result is what the documentation promises
- __main__.py: python -m tests.checkpoint_damage --damages 1000 --seed 1
"""
