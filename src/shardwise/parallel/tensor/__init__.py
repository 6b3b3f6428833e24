"""Tensor parallelism: the layers of a model are split over the ranks of a replica.

module_cuts.py          how single modules are cut
attention.py            attention, by heads
plan.py                 which modules, by patterns of the user's
split_model.py          the models cut, put together, given back
split_modules.py        what the class of a split module becomes
parameter_uses.py       weights that a line computes with outside of their layers
user_hooks.py           hooks of the user's that would see a part
graph_paths.py          what is computed between split layers that was not tried
regions.py              where ranks go apart and come together, in forward and backward
replica.py              who they are
replica_draws.py        what they draw
sequence_parallel.py    tensors of which each rank has some tokens
sequence_regather.py    those, given whole to a split layer, kept in parts for backward
"""
