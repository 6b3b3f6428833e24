"""Modifies the user's model in place: hooks, precision, activations.

precision.py              precision presets, fp32 masters
loss_scale.py             the loss scale for fp16
sync_batch_norm.py        BatchNorm synchronised across all ranks
batch_norm_statistics.py  exchanges BatchNorm statistics between ranks, in gather order
buffers.py                keeps running statistics identical on all ranks
micro_shard_buffers.py    makes buffers independent of the number of ranks, in the exact mode
units.py                  the repeated blocks of a model
unit_hooks.py             hooks that report when a unit's parameters are needed
module_hooks.py           our hooks and replaced `forward` methods, which copies and pickles omit
meta/                     parameters without memory, whose values are computed one at a time
activations.py            activations: kept, recomputed, or offloaded to a tier
recomputation.py          runs a unit's forward pass again in the backward pass
unit_attributes.py        attributes that a forward pass changes
activation_offload.py     offloads the tensors that autograd saves
offloaded_tensor.py       one such tensor, on the host or on disk
module_records.py         inputs, order and tensors of modules, for `shardwise verify`
optimizer_access.py       access to the full optimizer state for user code
forward_events.py         forward passes in the timeline
"""
