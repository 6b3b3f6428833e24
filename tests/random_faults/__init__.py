"""Ranks that are killed, stopped or fail at random places of a run, and what is said of it.

- drawing.py: a seed becomes a fault
- faulty.py: the script that has it
- judging.py: what came of it, and whether that is what is promised
- __main__.py: python -m tests.random_faults --faults 200 --seed 1
"""
