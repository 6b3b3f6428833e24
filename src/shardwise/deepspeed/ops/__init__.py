"""Implements deepspeed.ops: optimizers under the names of DeepSpeed's kernels.

adam.py  FusedAdam and DeepSpeedCPUAdam
"""

from shardwise.deepspeed.ops import adam

__all__ = ["adam"]
