"""Invalid input from every source, and checks that the command refuses it in one sentence.

- drawing.py: draws an invalid input from a seed: flags, variables, TOML, hostfiles, ...
- values.py: invalid values by type of setting
- trying.py: gives the input to the real command line, in a forked or a new process
- judging.py: judges the result
- __main__.py: python -m tests.bad_input --inputs 1000 --seed 1
"""
