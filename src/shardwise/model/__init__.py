"""What the engine does to a model, which stays the user's own object.

precision.py        presets, masters, the loss scale
sync_batch_norm.py  BatchNorm over all ranks
statistics.py       the exchange of its statistics between them, in turn
buffers.py          running statistics, kept in step
units.py            the repeated blocks
meta/               parameters without memory; their values, one by one
activations.py      kept or recomputed, resting on a tier
recomputation.py    a unit's forward, run again in backward
replay.py           what it must not do again
saved_tensors.py    what autograd saves, moved
away.py             the ways off a device
export.py           one plain safetensors file
"""
