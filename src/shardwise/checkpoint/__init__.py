"""Saves and loads an engine, in a format that any placement and number of ranks can read.

Saving, in the order of the calls:

checkpoints.py     where and when to save; which checkpoint to continue from
saver.py           one save: plan, write, publish; at once or in the background
save_tensors.py    plans the files, hands out a rank's byte ranges, makes the documents
writer.py          writes byte ranges into files that all ranks write, and sums them
background.py      writes copies in a thread, while training continues
atomic_folders.py  publishes a draft by a rename; lists what is complete
folder_lock.py     lets one job at a time save into a folder

Loading:

loader.py          one load, checked on all ranks before anything changes
source.py          opens files of any origin, and finds the best values of a tensor
load_tensors.py    fills the states from ranges of files
reader.py          reads tensors of any file by ranges
tensor_names.py    matches the names of a file with those of a model

What a checkpoint holds; to add something, start here:

engine_fields.py   step counters, seeds, scales: fields of checkpoint.json
tracking.py        what users track, and their data loaders
optimizer_fields.py, attribute_values.py   options, numbers and attributes of optimizers
tensors.py, tensor_spans.py   tensors by name, and the intervals that a rank has
extra_sets.py      hook for further sets of tensors and fields
schema.py          which values each field of checkpoint.json may have

The format, which knows no engine:

format.py          safetensors: headers, dtypes, split sets, names of files
document.py        checkpoint.json with its own checksum
json_values.py     values of schedulers and the like as JSON, and back
checksum.py        CRC-32 of a tensor from those of its parts
file_system.py     opens plain files only; removes what can be removed
agreement.py       raises the error of one rank on all ranks
spec_view.py, engine_view.py   what this package uses of an engine

For users without a run:

export.py          writes one plain file, safetensors or .pt
tools.py, commands.py   inspect, verify, accept and export a checkpoint
deepspeed/         reads what DeepSpeed saved
"""
