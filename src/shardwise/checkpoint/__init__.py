"""Reads and writes checkpoints: files that know nothing of the run that wrote them.

format.py       safetensors by the letter: headers, split sets, names of files (pure)
byte_ranges.py  which bytes of which file a rank's elements are (pure)
checksum.py     CRC-32 of a tensor from those of its parts (pure)
plain.py        values of schedulers and the like as JSON, and back
dtypes.py       torch's dtypes by the names that safetensors has
regular.py      files that are opened to be read: no pipes, no folders
leftovers.py    what is to be removed, and cannot always be
claim.py        one job at a time saves into a folder
folders.py      which checkpoints are complete; how one becomes so at a single moment
writer.py       a rank's byte ranges into files that all write
background.py   the same beside training
schema.py       what may stand beside the tensors (pure)
document.py     what stands there, and its own sum
reader.py       tensors of any file, read by ranges
names.py        which tensor of a file is which of a model
export.py       one plain file, safetensors or .pt
tools.py        inspect, verify, export
commands.py     the same as commands
"""
