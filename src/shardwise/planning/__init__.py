"""`shardwise plan`: predicts memory, time and cost of a script's placements before they are rented.

- record.py      what was observed of one step, the seam between memory and time
- catalogue.py   devices and links with their figures, each with its source: hardware/*.toml
- cluster.py     a cluster as it is written, such as 4x8xH100
"""
