"""Builds models whose parameters have no memory, and makes their values one by one.

deferred_init.py    the block inside which models are built
materialize.py      makes the values of its parameters
recorder.py         the mode that watches a model being built
calls.py            puts a call onto the tape
storage_records.py  what a storage holds now
tape.py             operations, and how they are repeated
"""

from shardwise.model.meta.deferred_init import on_meta
from shardwise.model.meta.materialize import (
    is_deferred,
    make_real,
    materialise,
    materialise_by_reset,
)

__all__ = ["is_deferred", "make_real", "materialise", "materialise_by_reset", "on_meta"]
