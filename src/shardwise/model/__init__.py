"""Modifies the user's model in place: hooks, precision, activations.

precision.py              precision presets, fp32 masters
loss_scale.py             the loss scale for fp16
sync_batch_norm.py        BatchNorm synchronised across all ranks
batch_norm_statistics.py  exchanges BatchNorm statistics between ranks, in gather order
buffers.py                keeps running statistics identical on all ranks
micro_shard_buffers.py    makes buffers independent of the number of ranks, in the exact mode
units.py                  finds a model's repeated blocks
unit_hooks.py             hooks that report when a unit's parameters are needed
module_hooks.py           our hooks and replaced `forward` methods, hidden from copies and pickles
meta/                     parameters without storage, whose values are computed one at a time
activations.py            keeps, recomputes or offloads activations
recomputation.py          runs a unit's forward pass again in the backward pass
checkpointed_scalars.py   keeps the numbers that autograd saves inside the user's checkpoints
unit_attributes.py        restores attributes that a forward pass changes
activation_offload.py     offloads the tensors that autograd saves
offloaded_tensor.py       one offloaded tensor, in host memory or on disk
module_records.py         records modules' inputs, order and tensors, for `shardwise verify`
optimizer_access.py       gives user code access to the full optimizer state
forward_events.py         records forward passes in the timeline
"""
