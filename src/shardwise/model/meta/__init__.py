"""Builds models whose parameters have no memory, and makes their values one by one.

block.py     the block inside which models are built
values.py    what comes out of it
recorder.py  the mode that watches a model being built
calls.py     a call on its way onto the tape
records.py   what a storage holds now
tape.py      operations, and how they are repeated
heap.py      memory for a moment
"""

from shardwise.model.meta.deferred_init import on_meta
from shardwise.model.meta.materialize import (
    is_deferred,
    make_real,
    materialise,
    materialise_by_reset,
)

__all__ = ["is_deferred", "make_real", "materialise", "materialise_by_reset", "on_meta"]
