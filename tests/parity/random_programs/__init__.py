"""Random training programs, each run by plain PyTorch in one process and by Shardwise on ranks.

- program.py: what a program is, data that prints as it is written
- drawing.py: a seed becomes a program; sense.py: which programs make sense
- further.py: adds features to some seeds, and leaves the programs of the others as they were
- blocks.py, models.py, optimizers.py: what is trained, on what, and by what
- plain.py: run as anyone would, in one process that imports nothing of ours
- sharded.py: the same on ranks of Shardwise
- comparing.py: what differs, and where first
- running.py: one program on both sides, and what came of it
- shrinking.py: the smallest program with the same outcome
- refusals.py: the refusals that are right, each with its reason
- __main__.py: python -m tests.parity.random_programs --programs 1000 --seed 1
"""
