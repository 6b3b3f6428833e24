"""Defines all errors that Shardwise raises, in one hierarchy.

    ShardwiseError
    ├── ConfigError          a flag, variable, TOML key or keyword is wrong
    │   ├── PlacementError   a row of the placement table is not supported
    │   └── BadSchedule      a schedule does not accept these keywords (shardwise.deepspeed)
    ├── LaunchError          a run cannot start: script not found, port in use
    │   └── RankFailed       a rank of sw.launch failed; raised in the process that called it
    ├── ModelError           a model or optimizer cannot be trained with these settings
    │   ├── ModelMismatch    ranks built different models
    │   └── BrokenView       user code replaced a tensor that the engine owns
    ├── UsageError           a call at the wrong time: step without backward, bare backward
    │   ├── GradientAccess   a gradient was used between backward and step
    │   ├── ParameterAccess  a sharded parameter was used outside a forward pass
    │   ├── OrderError       a sharded unit is needed when other ranks do not expect it
    │   ├── BadCall          invalid arguments
    │   ├── HookOrder        zero_grad before step, or too many backward passes
    │   │                    (shardwise.horovod)
    │   └── FailedAssertion  one of DeepSpeed's assertions failed (shardwise.deepspeed)
    ├── DataError            a dataset, sampler or batch cannot be divided among ranks
    ├── MetricsError         ranks measured different metrics
    ├── CheckpointError      a checkpoint cannot be written, found or read
    │   ├── CheckpointNotWritten  the disk is full, read-only or failing
    │   ├── FolderInUse         another job saves to the same folder
    │   ├── BrokenCheckpoint    truncated, inconsistent, or with a wrong checksum
    │   └── CheckpointMismatch  belongs to a different model or optimizer
    ├── TierError            a folder or disk cannot hold a state, or failed while it did
    ├── NonFiniteError       a gradient or loss became NaN or infinite
    ├── GuardError           --guard found a corrupted state or a wrong computation
    └── CollectiveError      a collective failed; the cause is usually on another rank
        ├── PeerLost         another rank exited
        └── HorovodInternalError  an operation of shardwise.horovod failed

Each message states the values involved, and ends with what to do.
"""

from collections.abc import Iterable
from typing import Self


class ShardwiseError(Exception):
    """Base class of all errors that Shardwise raises on purpose.

    Attributes:
        at_fault: Ranks that the message names as the cause, if the cause is not this rank.
    """

    at_fault: tuple[int, ...] = ()

    def blaming(self, ranks: Iterable[int]) -> Self:
        """Set the ranks that caused the error, and return the error itself."""
        self.at_fault = tuple(ranks)
        return self


class ConfigError(ShardwiseError):
    """Raised if a setting is unknown, misspelt, of the wrong type or out of range."""


class PlacementError(ConfigError):
    """Raised if a row of the placement table is not supported.

    The message names the cell at fault and the nearest supported row.
    """


class BadSchedule(ConfigError, ValueError):
    """Raised if a schedule in a DeepSpeed config does not accept its keywords.

    Also a ValueError, as in DeepSpeed.
    """


class LaunchError(ShardwiseError):
    """Raised if a run cannot start, or a process cannot find the other ranks."""


class RankFailed(LaunchError):
    """Raised by `sw.launch` if a rank failed. The message ends with that rank's traceback.

    Attributes:
        rank: The first rank that failed, or None if unknown.
        exit_code: The exit code that `shardwise run` would have.
    """

    def __init__(self, message: str, *, rank: int | None, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class ModelError(ShardwiseError):
    """Raised if a model or an optimizer cannot be trained with these settings."""


class ModelMismatch(ModelError):
    """Raised if ranks built different models. The message names the first difference."""


class BrokenView(ModelError):
    """Raised if user code replaced a parameter or its storage while the engine owns it."""


class UsageError(ShardwiseError):
    """Raised for a call that would silently give wrong results. The message says what to write."""


class GradientAccess(UsageError):
    """Raised if a gradient is read or changed while it belongs to the engine."""


class ParameterAccess(UsageError):
    """Raised if a sharded parameter is read or written while this rank has only a part of it."""


class OrderError(UsageError):
    """Raised if this rank needs a sharded unit at a point where other ranks do not gather it."""


class BadCall(UsageError, ValueError, RuntimeError):
    """Raised for invalid arguments, such as a name that a pending operation already uses.

    It is both a ValueError and a RuntimeError, because Horovod raises the former in Python and the
    latter in C++ code.
    """


class HookOrder(UsageError, AssertionError):
    """Raised if backward, synchronize, step and zero_grad run in an order that loses gradients.

    Also an AssertionError, as in Horovod.
    """


class FailedAssertion(UsageError, AssertionError):
    """Raised if there is no model, or if tags differ between ranks.

    Also an AssertionError, as in DeepSpeed.
    """


class DataError(ShardwiseError):
    """Raised if a dataset, a sampler or a batch cannot be divided among the ranks."""


class MetricsError(ShardwiseError):
    """Raised if ranks measured different metrics."""


class CheckpointError(ShardwiseError):
    """Raised if a checkpoint cannot be written, found or read."""


class CheckpointNotWritten(CheckpointError):
    """Raised if the disk is full, read-only or failing. Earlier checkpoints are intact."""


class FolderInUse(CheckpointError):
    """Raised if another job saves to the same folder."""


class BrokenCheckpoint(CheckpointError):
    """Raised if a checkpoint file is truncated, inconsistent, or was changed after writing."""


class CheckpointMismatch(CheckpointError):
    """Raised if a checkpoint belongs to a different model or optimizer. Lists all differences."""


class TierError(ShardwiseError):
    """Raised if a folder or a disk cannot store a state, or failed while storing one."""


class NonFiniteError(ShardwiseError):
    """Raised if a loss or gradient is NaN or infinite. Names the parameter, rank and samples."""


class GuardError(ShardwiseError):
    """Raised by `--guard` if it finds a corrupted state or a wrong computation.

    The message names the step, the tensor and, if known, the rank.
    """


class CollectiveError(ShardwiseError):
    """Raised if a collective failed on this rank. The cause is usually on another rank."""


class PeerLost(CollectiveError):
    """Raised if another rank exited or died while this rank was waiting for it."""


class HorovodInternalError(CollectiveError, RuntimeError):
    """Raised if an operation of `shardwise.horovod` failed because ranks disagree or one exited.

    The name and the base class RuntimeError are the same as in Horovod.
    """
