"""Ranks that are killed while they save, and what is left to go on from.

- trying.py: a seed becomes a kill; the run that has it, and that which goes on
- __main__.py: python -m tests.save_kills --kills 200 --seed 1
"""
