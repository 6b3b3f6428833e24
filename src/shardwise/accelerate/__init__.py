"""Hugging Face Accelerate on Shardwise engines: `from shardwise.accelerate import Accelerator`.

accelerator.py       the Accelerator, whose prepared models are trained by engines
clipping.py          clip_grad_norm_ and clip_grad_value_
repeated_samples.py  drops the samples that Accelerate repeats, for exact_mean=True
sequence_parts.py    loaders, schedules and gathers with `--context`
optimizer.py         a prepared optimizer, which steps its engine
pretrained.py        save_pretrained of sharded models; resize_token_embeddings
checkpoints.py       save_state and load_state: any placement and number of workers
deepspeed_plugin.py  settings, optimizer and schedule of a DeepSpeed config
refusals.py          errors for options that Shardwise does not support
"""

from shardwise.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
