"""Reads what DeepSpeed saved, without DeepSpeed, and without running what its pickles name.

inert.py         loads a file of torch.save: a closed list of builders, all else as plain records
folders.py       finds the files of one save, and says which are missing
flat_groups.py   computes where each parameter lies in flat partitions (pure)
fragments.py     reads tensors that are cut over several flat ones
partitions.py    the partitions that the ranks saved, and the optimizer's state over them
save.py          one save: the model's tensors by name, and what stands beside them
optimizer.py     its optimizer, as a checkpoint of ours holds one
as_checkpoint.py the whole in the place of a checkpoint of ours
convert.py       its model as one plain file in fp32
commands.py      the same as a command
"""
