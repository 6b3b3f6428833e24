"""The data loader: one order of samples for any number of ranks, cut into a share per rank."""

from shardwise.data.loader import Loader
from shardwise.data.steps import LoaderStep

__all__ = ["Loader", "LoaderStep"]
