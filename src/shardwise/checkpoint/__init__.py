"""Reads and writes checkpoints: files that know nothing of the run that wrote them.

format.py          safetensors by the letter: headers, dtypes, split sets, names of files (pure)
checksum.py        CRC-32 of a tensor from those of its parts (pure)
json_values.py     values of schedulers and the like as JSON, and back
file_system.py     opens plain files only; removes what can be removed
folder_lock.py     lets one job at a time save into a folder
atomic_folders.py  makes a draft complete at one moment; finds those that are
writer.py          writes a rank's byte ranges into files that all write
background.py      does the same beside training
schema.py          what may stand beside the tensors (pure)
document.py        what stands there, and its own sum
reader.py          reads tensors of any file by ranges
tensor_names.py    finds which tensor of a file is which of a model
export.py          writes one plain file, safetensors or .pt
tools.py           inspects, verifies, exports
commands.py        the same as commands
deepspeed/         reads what DeepSpeed saved
"""
