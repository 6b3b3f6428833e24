"""Reads and writes checkpoints of other libraries, behind one interface.

saved.py           the interface: `Checkpoint`, with its model, optimizers and progress
recognise.py       recognises the format of a path and opens it: start here
own.py             Shardwise's own checkpoints
safetensors_files.py   safetensors: one file, a split set, PEFT adapters
torch_files.py     torch.save: weights, training dicts, Lightning, Composer, timm, EMA files
dcp.py             torch DCP: FSDP, torchtitan, Composer, Lightning's and Accelerate's sharded saves
megatron.py        Megatron-Core: DCP with Megatron's own layout
nanotron.py        nanotron: one file per tensor and tensor-parallel rank
run_folders.py     run folders of the Transformers Trainer and of Accelerate
deepspeed_folders.py   DeepSpeed

training_dict.py   finds model, optimizers, step and schedulers in nested dicts
optimizers.py      identifies the parameters of optimizer state, by name or by position
rules.py           renames, splits, fuses and transposes tensors

importing.py       writes a checkpoint of any format as a Shardwise checkpoint
exporting.py       writes a checkpoint of any format for another library
comparing.py       compares two checkpoints, and computes fingerprints

To add a format, write a module with a function that returns a `Checkpoint` or None, and add it to
FORMATS in recognise.py.
"""
