"""Saves and loads an engine, in a format that any placement and world size can read.

Saving, in the order of the calls:

checkpoints.py     where and when to save; which checkpoint to resume from
saver.py           one save: plan, write, publish; in the foreground or in the background
save_tensors.py    plans the files, passes on a rank's byte ranges, builds the documents
writer.py          writes byte ranges into the shared files, with checksums
background.py      writes copies in a thread, while training continues
atomic_folders.py  publishes a draft by a rename; lists the complete checkpoints
folder_lock.py     lets one job at a time save into a folder

Loading:

loader.py          one load, checked on all ranks before anything changes
source.py          opens files from any source, and finds the best values of a tensor
load_tensors.py    fills the states from ranges of files
reader.py          reads tensors of any file by ranges
tensor_names.py    matches the names in a file to the names in a model

Contents of a checkpoint; to add something, start here:

engine_fields.py   step counters, seeds, scales: fields of checkpoint.json
tracking.py        objects that users track, and their data loaders
optimizer_fields.py, attribute_values.py   options, numbers and attributes of optimizers
tensors.py, tensor_spans.py   tensors by name, and the intervals that a rank owns
extra_sets.py      hook for additional sets of tensors and fields
schema.py          valid values of each field of checkpoint.json

The format, which is independent of the engine:

format.py          safetensors: headers, dtypes, split sets, file names
document.py        checkpoint.json with its own checksum
json_values.py     encodes scheduler states and similar values as JSON, and decodes them
checksum.py        CRC-32 of a tensor from the checksums of its parts
file_system.py     opens regular files only; removes files and folders where possible
agreement.py       raises the error of one rank on all ranks
spec_view.py, engine_view.py   the parts of an engine that this package uses

For users without a run:

export.py          writes one plain file, safetensors or .pt
tools.py, commands.py   inspect, verify, accept and export a checkpoint
deepspeed/         reads DeepSpeed checkpoints
"""
