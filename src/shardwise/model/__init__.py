"""Changes to the user's model, which stays the user's own object: hooks, precision, activations.

precision.py              presets, masters
loss_scale.py             the loss scale of fp16
sync_batch_norm.py        BatchNorm over all ranks
batch_norm_statistics.py  the exchange of its statistics between them, in gather order
buffers.py                running statistics, kept in step
micro_shard_buffers.py    the same in the exact mode
units.py                  the repeated blocks
unit_hooks.py             hooks that say when a unit's parameters are needed
module_hooks.py           hooks and forwards of ours, which copies and pickles leave out
meta/                     parameters without memory; their values, one by one
activations.py            kept or recomputed, resting on a tier
recomputation.py          a unit's forward, run again in backward
unit_attributes.py        what a forward changes beside buffers
activation_offload.py     what autograd saves, moved
offloaded_tensor.py       one such tensor on its way to the host or a disk
forward_events.py         forwards in the timeline
"""
