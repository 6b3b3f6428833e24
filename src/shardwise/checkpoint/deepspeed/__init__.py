"""Reads what DeepSpeed saved, without DeepSpeed, and without running what its pickles name.

inert.py         loads a file of torch.save: a closed list of builders, all else as plain records
folders.py       finds the files of one save, and says which are missing
flat_groups.py   computes where each parameter is in flat partitions (pure)
partitions.py    reads tensors that are cut over the partitions that the ranks saved
save.py          one save: the model's tensors by name, and what stands next to them
as_checkpoint.py presents it, with its optimizer, as a checkpoint of ours
convert.py       writes its model as one plain file in fp32
"""
