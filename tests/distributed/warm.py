"""Imports everything that ranks need, in the process from which they are forked.

Garbage collection writes to every object it visits, which copies memory pages that forked processes
share. So all imported objects are frozen here once, and ranks never visit them.
"""

import contextlib
import gc
from importlib import import_module

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.pipelining
import torch.utils.data  # noqa: F401

import shardwise
import shardwise.cli.main
import shardwise.deepspeed
import shardwise.horovod

for name in shardwise.__all__:  # else each rank imports them, when it first uses one
    getattr(shardwise, name)

# Not our bridges to them, nor lightning, which asks for its rank when it is imported.
for library in ("accelerate", "transformers.trainer", "peft", "torchmetrics"):
    with contextlib.suppress(ImportError):  # its tests are skipped
        import_module(library)

with contextlib.suppress(ImportError):
    from transformers import (  # noqa: F401
        GPT2LMHeadModel,
        LlamaForCausalLM,
        MixtralForCausalLM,
        T5ForConditionalGeneration,
    )

gc.collect()
gc.freeze()
