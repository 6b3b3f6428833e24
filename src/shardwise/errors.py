"""Every error that Shardwise raises, in one tree.

    ShardwiseError
    ├── ConfigError          a flag, variable, TOML key or keyword is wrong
    │   ├── PlacementError   an illegal row of the placement table
    │   └── BadSchedule      a schedule does not take these keywords (shardwise.deepspeed)
    ├── LaunchError          a run cannot start: no such script, a port in use
    │   └── RankFailed       a rank of sw.launch failed; raised in the process that called it
    ├── ModelError           a model or optimizer cannot be trained with these settings
    │   ├── ModelMismatch    ranks built different models
    │   └── BrokenView       user code replaced a tensor that the engine owns
    ├── UsageError           a call at the wrong time: step without backward, bare backward
    │   ├── GradientAccess   a gradient was used between backward and step
    │   ├── ParameterAccess  a sharded parameter was used outside of a forward
    │   ├── OrderError       a sharded unit is needed when other ranks do not expect it
    │   ├── BadCall          invalid arguments
    │   ├── HookOrder        zero_grad before step, or too many backwards (shardwise.horovod)
    │   └── FailedAssertion  an assertion of DeepSpeed's fails (shardwise.deepspeed)
    ├── DataError            a dataset, sampler or batch cannot be divided among ranks
    ├── MetricsError         ranks measured different metrics
    ├── CheckpointError      a checkpoint cannot be written, found or read
    │   ├── CheckpointNotWritten  the disk is full, read-only or failing
    │   ├── FolderInUse         another job saves there
    │   ├── BrokenCheckpoint    truncated, inconsistent, or with a wrong checksum
    │   └── CheckpointMismatch  of another model or optimizer
    ├── TierError            a folder or disk cannot hold a state, or failed while it did
    ├── NonFiniteError       a gradient or loss became NaN or infinite
    └── CollectiveError      a collective failed; the cause is usually on another rank
        ├── PeerLost         another rank ended
        └── HorovodInternalError  an operation of shardwise.horovod failed

A message states the values, and ends with what to do.
"""

from collections.abc import Iterable
from typing import Self


class ShardwiseError(Exception):
    """The base class of all errors that Shardwise raises on purpose.

    Attributes:
        at_fault: Ranks that the message names as the cause, if that is not this rank.
    """

    at_fault: tuple[int, ...] = ()

    def blaming(self, ranks: Iterable[int]) -> Self:
        """Set the ranks that are the cause, and return the error itself."""
        self.at_fault = tuple(ranks)
        return self


class ConfigError(ShardwiseError):
    """A setting that is unknown, misspelt, of the wrong type or out of range."""


class PlacementError(ConfigError):
    """An illegal row of the placement table; names the cell and the nearest legal row."""


class BadSchedule(ConfigError, ValueError):
    """A schedule of DeepSpeed's JSON does not take these keywords; a ValueError, as there."""


class LaunchError(ShardwiseError):
    """A run cannot start, or a process cannot find the other ranks."""


class RankFailed(LaunchError):
    """A rank of `sw.launch` failed. The message ends with the traceback of that rank.

    It is raised in the process that called `sw.launch`.

    Attributes:
        rank: The first rank that failed; None if unknown.
        exit_code: The exit code that `shardwise run` would have.
    """

    def __init__(self, message: str, *, rank: int | None, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class ModelError(ShardwiseError):
    """A model or an optimizer cannot be trained with these settings."""


class ModelMismatch(ModelError):
    """Ranks built different models; names the first difference."""


class BrokenView(ModelError):
    """User code replaced a parameter or its storage after the engine took it over."""


class UsageError(ShardwiseError):
    """A call that would be silently wrong; the message contains the line to write instead."""


class GradientAccess(UsageError):
    """A gradient was read or changed while it belongs to the engine."""


class ParameterAccess(UsageError):
    """A sharded parameter was read or written while this rank has only a part of it."""


class OrderError(UsageError):
    """A sharded unit is needed outside of the common order of gathers."""


class BadCall(UsageError, ValueError, RuntimeError):
    """Invalid arguments, such as a name that is already in use by a pending operation.

    Both a ValueError, which Horovod raises in Python, and a RuntimeError, which its C++ raises.
    """


class HookOrder(UsageError, AssertionError):
    """Backward, synchronize, step and zero_grad in an order that would lose gradients.

    An AssertionError, as in Horovod.
    """


class FailedAssertion(UsageError, AssertionError):
    """No model, or tags that differ between ranks; an AssertionError, as in DeepSpeed."""


class DataError(ShardwiseError):
    """A dataset, a sampler or a batch cannot be divided among the ranks."""


class MetricsError(ShardwiseError):
    """Ranks measured different metrics."""


class CheckpointError(ShardwiseError):
    """A checkpoint cannot be written, found or read."""


class CheckpointNotWritten(CheckpointError):
    """The disk is full, read-only or failing. Earlier checkpoints are intact."""


class FolderInUse(CheckpointError):
    """Another job saves into the same folder."""


class BrokenCheckpoint(CheckpointError):
    """A file of a checkpoint is truncated, inconsistent, or was changed after it was written."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model or optimizer; names all differences."""


class TierError(ShardwiseError):
    """A folder or a disk cannot hold a state, or failed while it held one."""


class NonFiniteError(ShardwiseError):
    """A loss or a gradient became NaN or infinite; names the parameter, rank and samples."""


class CollectiveError(ShardwiseError):
    """A collective failed on this rank; the cause is usually on another one."""


class PeerLost(CollectiveError):
    """Another rank ended or died while this one waited for it."""


class HorovodInternalError(CollectiveError, RuntimeError):
    """An operation of `shardwise.horovod` failed: ranks disagree on it, or one has ended.

    The name and the base class RuntimeError are the same as in Horovod.
    """
