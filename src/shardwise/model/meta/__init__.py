"""Deferred initialisation: parameters without storage, whose values are computed one at a time.

deferred_init.py    `on_meta`, the context manager that defers parameters
materialize.py      computes the values of a deferred parameter
recorder.py         dispatch mode that records how a model is built
calls.py            converts a torch call into an operation on the tape
storage_records.py  tracks the current content of each storage
tape.py             stores operations, and replays them
"""

from shardwise.model.meta.deferred_init import on_meta
from shardwise.model.meta.materialize import (
    is_deferred,
    make_real,
    materialise,
    materialise_by_reset,
)

__all__ = ["is_deferred", "make_real", "materialise", "materialise_by_reset", "on_meta"]
