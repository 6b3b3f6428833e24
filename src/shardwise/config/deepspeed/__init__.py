"""Reads a DeepSpeed JSON config as a source of settings. Reading the file is its only I/O.

- keys.py: the table of keys, each mapped to a setting, ignored or rejected
- document.py: reads the config from a file or a dict, and checks its keys
- batches.py: computes missing batch sizes
- job.py: converts the config to settings and options of a training loop
- describe.py: describes the result for the user
"""

from shardwise.config.deepspeed.batches import Batches, solve
from shardwise.config.deepspeed.describe import lines, short_lines, table
from shardwise.config.deepspeed.document import read
from shardwise.config.deepspeed.job import DeepSpeedJob, parse

__all__ = ["Batches", "DeepSpeedJob", "lines", "parse", "read", "short_lines", "solve", "table"]
