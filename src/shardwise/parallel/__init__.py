"""Layers split over the ranks of a replica (tensor parallelism).

cuts.py       how single modules are cut
attention.py  attention, by heads
plan.py       which modules, by patterns of the user's
split.py      the models cut, put together, given back
modules.py    what the class of a split module becomes
uses.py       weights that a line computes with outside of their layers
hooks.py      hooks of the user's that would see a part
paths.py      what is computed between split layers that was not tried
regions.py    where ranks go apart and come together, in forward and backward
replica.py    who they are
draws.py      what they draw
tokens.py     tensors of which each rank has some tokens
retold.py     those, given whole to a split layer, kept in parts for backward
"""
