"""Reads DeepSpeed checkpoints without DeepSpeed, and without running code from their pickles.

inert.py         loads files written by torch.save; turns unknown classes into plain records
folders.py       finds the files of one checkpoint, and reports missing ones
flat_groups.py   computes each parameter's position in flat partitions (no I/O)
partitions.py    reads tensors that are split across the ranks' partitions
save.py          reads one checkpoint: the model's tensors by name, and everything else
as_checkpoint.py presents it, including its optimizer, as a Shardwise checkpoint
convert.py       writes its model to a single fp32 file
"""
