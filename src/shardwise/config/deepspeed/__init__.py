"""Reads DeepSpeed's JSON as a source of settings. Pure, but for the file itself.

- keys.py: each key of the JSON: what it becomes, or why not
- document.py: the JSON of a file or a dict, its keys checked
- batches.py: the three batch sizes, of which two give the third
- job.py: what the JSON asks for, as settings and as what a training loop does
- describe.py: what came of a JSON, in lines
"""

from shardwise.config.deepspeed.batches import Batches, solve
from shardwise.config.deepspeed.describe import lines, short_lines, table
from shardwise.config.deepspeed.document import read
from shardwise.config.deepspeed.job import DeepSpeedJob, parse

__all__ = ["Batches", "DeepSpeedJob", "lines", "parse", "read", "short_lines", "solve", "table"]
