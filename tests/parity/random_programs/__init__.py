"""Random training programs, each run by plain PyTorch in one process and by Shardwise on ranks.

- program.py: the data classes of a program, whose repr is the program
- drawing.py: draws a program from a seed; sense.py: decides which programs make sense
- further.py: adds features to the programs of some seeds, and changes no others
- blocks.py, models.py, optimizers.py: the models, their data and their optimizers
- plain.py: runs a program as a plain script, in one process that imports nothing of ours
- sharded.py: runs the same program on ranks of Shardwise
- comparing.py: finds differences, and the first of them
- running.py: runs one program on both sides, and returns the result
- shrinking.py: finds the smallest program with the same result
- refusals.py: the valid refusals, each with its reason
- __main__.py: python -m tests.parity.random_programs --programs 1000 --seed 1
"""
