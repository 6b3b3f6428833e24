"""The data: one order for any number of ranks, and each rank's share of it."""

from shardwise.data.loader import Loader
from shardwise.data.steps import LoaderStep

__all__ = ["Loader", "LoaderStep"]
