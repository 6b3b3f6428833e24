"""Layers shared out over the ranks of a replica: every rank runs the whole program, and in it only
its own layers."""

from shardwise.parallel.pipeline import partition, split_backward
from shardwise.parallel.pipeline.layer_times import LayerTimes
from shardwise.parallel.pipeline.partition import Cut
from shardwise.parallel.pipeline.pipeline_group import Line
from shardwise.parallel.pipeline.schedule import Action, order_of
from shardwise.parallel.pipeline.stage_forwards import install
from shardwise.parallel.pipeline.stage_tensors import Piece, Run

__all__ = [
    "Action",
    "Cut",
    "LayerTimes",
    "Line",
    "Piece",
    "Run",
    "install",
    "order_of",
    "partition",
    "split_backward",
]
