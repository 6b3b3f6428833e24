"""Saves and loads an engine, in a format that any placement and world size can read.

Saving, in call order:

checkpoints.py     decides where and when to save, and which checkpoint to resume from
saver.py           runs one save (plan, write, publish), in the foreground or the background
save_tensors.py    plans the files, passes on a rank's byte ranges, builds the documents
writer.py          writes byte ranges into the shared files, with checksums
background.py      writes copies in a thread while training continues
atomic_folders.py  publishes a draft by renaming it; lists the complete checkpoints
folder_lock.py     lets only one job at a time save into a folder

Loading:

loader.py          runs one load, validated on all ranks before anything changes
source.py          opens files of any supported format, and locates each tensor's best values
load_tensors.py    fills the states from ranges of files
reader.py          reads element ranges of tensors from any supported file
tensor_names.py    matches the names in a file to the names in a model

Contents of a checkpoint. To add something, start here:

engine_fields.py   fields of checkpoint.json: step counters, seeds, scales
tracking.py        objects that users track, including their data loaders
optimizer_fields.py, attribute_values.py   options, scalar state and attributes of optimizers
tensors.py, tensor_spans.py   tensors by name, and the intervals that a rank owns
extra_sets.py      hook for additional tensor sets and fields
schema.py          valid values of each field of checkpoint.json

The format, which is independent of the engine:

format.py          safetensors: headers, dtypes, split sets, file names
document.py        checkpoint.json, with its own checksum
json_values.py     encodes scheduler states and similar values as JSON, and decodes them
checksum.py        computes a tensor's CRC-32 from the checksums of its parts
file_system.py     opens regular files only; removes files and folders where possible
agreement.py       raises one rank's error on every rank
spec_view.py, engine_view.py   protocols for the parts of an engine that this package uses

Tools that need no running engine:

export.py          writes a model to one safetensors or .pt file
tools.py, commands.py   inspect, verify and accept a checkpoint
deepspeed/         reads DeepSpeed checkpoints
formats/           reads and writes checkpoints of all libraries, behind one interface
format_commands.py   show, diff, import, export and fingerprint, for all formats
console.py         prints the output of the commands

For inference:

publishing.py      publishes weights: every rank writes or sends its own parts
"""
