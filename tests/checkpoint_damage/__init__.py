"""Checkpoints damaged in every way that a disk, a copy or a person has, and what is made of them.

- training.py: the run whose checkpoints they are, and how it goes on from a damaged one
- damaging.py: a seed becomes a damage to a copy of them
- judging.py: what came of it, and whether that is what is promised
- __main__.py: python -m tests.checkpoint_damage --damages 1000 --seed 1
"""
