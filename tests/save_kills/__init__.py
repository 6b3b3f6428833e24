"""Kills of ranks during a save, and checks of the next run.

- trying.py: turns a seed into a kill; runs the training with the kill, and the next run
- __main__.py: python -m tests.save_kills --kills 200 --seed 1
"""
