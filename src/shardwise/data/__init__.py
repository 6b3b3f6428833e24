"""The data loader.

It gives each rank its share of every global batch. The order of the samples does not depend on the
number of ranks.
"""

from shardwise.data.loader import Loader
from shardwise.data.steps import LoaderStep

__all__ = ["Loader", "LoaderStep"]
