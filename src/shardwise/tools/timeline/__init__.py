"""The command `shardwise timeline`: shows where the time of a run's steps went.

reading.py     reads the files that `shardwise.timeline` writes
steps.py       divides each rank's steps into kinds of work (pure)
slowest.py     finds the slowest rank and the reason (pure)
tables.py      formats both as tables
commands.py    the command
"""
