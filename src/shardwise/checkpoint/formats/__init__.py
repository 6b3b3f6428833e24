"""Reads and writes checkpoints of other libraries, behind one interface.

saved.py           the interface: `Checkpoint`, with its model, optimizers and progress
recognise.py       finds the format of a path and opens it: start here
own.py             Shardwise's own checkpoints
safetensors_files.py   safetensors: one file, a split set, adapters of PEFT
torch_files.py     torch.save: weights, training dicts, Lightning, Composer, timm, EMA files
dcp.py             torch DCP: FSDP, torchtitan, Composer, Lightning's and Accelerate's sharded saves
megatron.py        Megatron-Core, which stores DCP in a layout of its own
nanotron.py        nanotron: one file per tensor and tensor-parallel rank
run_folders.py     folders of a run: the Transformers Trainer, Accelerate
deepspeed_folders.py   DeepSpeed

training_dict.py   finds model, optimizers, step and schedulers in nested dicts
optimizers.py      optimizer states, by name or by position
rules.py           renames, splits, fuses and transposes tensors

importing.py       writes any of them as a Shardwise checkpoint
exporting.py       writes any of them for another library
comparing.py       compares two checkpoints, and computes fingerprints

To add a format, write a module with a function that returns a `Checkpoint` or None, and add it to
FORMATS in recognise.py.
"""
