"""Reads a DeepSpeed JSON as a source of settings. Pure, except for reading the file.

- keys.py: the table of keys: mapped to a setting, ignored, or refused
- document.py: reads the JSON from a file or a dict, and checks its keys
- batches.py: solves for the three batch sizes
- job.py: turns the JSON into settings and options of a training loop
- describe.py: describes the result in lines for the user
"""

from shardwise.config.deepspeed.batches import Batches, solve
from shardwise.config.deepspeed.describe import lines, short_lines, table
from shardwise.config.deepspeed.document import read
from shardwise.config.deepspeed.job import DeepSpeedJob, parse

__all__ = ["Batches", "DeepSpeedJob", "lines", "parse", "read", "short_lines", "solve", "table"]
