"""Reads data in one order for any number of ranks, and gives each rank its share."""

from shardwise.data.loader import Loader
from shardwise.data.steps import LoaderStep

__all__ = ["Loader", "LoaderStep"]
