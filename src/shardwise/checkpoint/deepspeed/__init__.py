"""Reads DeepSpeed checkpoints, without DeepSpeed, and without running code from their pickles.

inert.py         loads a file of torch.save: a closed list of builders, all else as plain records
folders.py       finds the files of one save, and reports missing ones
flat_groups.py   computes the position of each parameter in flat partitions (pure)
partitions.py    reads tensors that are split over the partitions that ranks saved
save.py          one save: the model's tensors by name, and its other contents
as_checkpoint.py presents a save, with its optimizer, as one of our checkpoints
convert.py       writes the model of a save to one plain fp32 file
"""
