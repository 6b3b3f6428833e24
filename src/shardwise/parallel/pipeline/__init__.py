"""Layers shared out over the ranks of a replica: every rank runs the whole program, and in it only
its own layers."""

from shardwise.parallel.pipeline import atoms, halves
from shardwise.parallel.pipeline.atoms import Cut
from shardwise.parallel.pipeline.forwards import install
from shardwise.parallel.pipeline.line import Line
from shardwise.parallel.pipeline.schedule import Action, order_of
from shardwise.parallel.pipeline.timing import LayerTimes
from shardwise.parallel.pipeline.values import Piece, Run

__all__ = [
    "Action",
    "Cut",
    "LayerTimes",
    "Line",
    "Piece",
    "Run",
    "atoms",
    "halves",
    "install",
    "order_of",
]
