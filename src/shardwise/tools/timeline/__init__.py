"""The command `shardwise timeline`: shows how a run's steps spent their time.

reading.py     reads the files that `shardwise.timeline` writes
steps.py       divides each rank's steps into kinds of work (no I/O)
slowest.py     finds the slowest rank and the reason (no I/O)
tables.py      formats the results as tables and JSON
commands.py    the command
"""
