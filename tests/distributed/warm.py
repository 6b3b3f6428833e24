"""Everything that ranks import, for the process that they are forked from.

A collection looks at each object, and so copies each page of memory that a forked process shares
with others: what is imported is put aside here, once, and no rank looks at it again.
"""

import contextlib
import gc

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.pipelining
import torch.utils.data  # noqa: F401

import shardwise
import shardwise.cli  # noqa: F401

with contextlib.suppress(ImportError):
    from transformers import (  # noqa: F401
        GPT2LMHeadModel,
        LlamaForCausalLM,
        MixtralForCausalLM,
        T5ForConditionalGeneration,
    )

gc.collect()
gc.freeze()
