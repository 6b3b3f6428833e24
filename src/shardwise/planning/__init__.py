"""Plans a training before anything is rented: memory, time, money.

- catalogue.py   devices and links with their figures, each with its source: hardware/*.toml
- cluster.py     a cluster as it is written, such as 4x8xH100
"""
