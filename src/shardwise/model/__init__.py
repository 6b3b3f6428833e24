"""What the engine does to a model, which stays the user's own object.

precision.py        presets, masters, the loss scale
sync_batch_norm.py  BatchNorm over all ranks
buffers.py          running statistics, kept in step
units.py            the repeated blocks
export.py           one plain safetensors file
"""
