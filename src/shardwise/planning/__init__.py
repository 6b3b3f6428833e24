"""`shardwise plan`: predicts memory, time and cost of a script's placements before they are rented.

record.py holds what was observed of one step, the seam between memory and time.
"""
