"""Faults of ranks at random places of a run, and checks of the launcher's report.

- drawing.py: draws a fault from a seed
- faulty.py: the script with the fault
- judging.py: runs a fault, and compares the report with the promised one
- __main__.py: python -m tests.random_faults --faults 200 --seed 1
"""
