"""Computes where each element of each state is stored. Pure arithmetic: no processes, no files.

placement.py      which states are sharded, and the tier of each
bucket_layout.py  packs parameters into flat buckets and assigns an interval to each rank
byte_ranges.py    byte ranges of a tensor in a checkpoint file
shards.py         the part of a split tensor that each rank holds
extents.py        allocates ranges of a file or of memory
sum_tree.py       the order in which the exact mode adds micro-shards
fingerprints.py   checksums of a tensor that do not depend on how it is sharded
packed_flags.py   packs flags into fp64 numbers
"""
