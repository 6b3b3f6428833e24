"""Positions of all elements of all states: pure arithmetic, without processes or files.

placement.py      which states are sharded, and their tiers
bucket_layout.py  parameters in flat buckets, and the interval of each rank
byte_ranges.py    byte ranges of a tensor in a checkpoint file
shards.py         the part of a split tensor that each rank has
extents.py        free ranges of a file or of memory
sum_tree.py       the order in which the exact mode adds micro-shards
fingerprints.py   sums over a tensor that do not depend on how it is cut
packed_flags.py   flags packed into fp64 numbers
"""
