"""Input that cannot be, by every way that there is, and what is made of it.

- drawing.py: a seed becomes a bad input: flags, variables, TOML, hostfiles, contradictions, ...
- values.py: texts that no setting of a kind takes
- trying.py: it is given to the real command line, in a process that is forked, or a real one
- judging.py: what came of it, and whether that is what is promised
- __main__.py: python -m tests.bad_input --inputs 1000 --seed 1
"""
