"""deepspeed.ops: optimizers under the names that DeepSpeed has for its own kernels.

adam.py  FusedAdam and DeepSpeedCPUAdam
"""

from shardwise.deepspeed.ops import adam

__all__ = ["adam"]
