"""Every error that Shardwise raises, in one tree.

    ShardwiseError
    ├── ConfigError          a flag, variable, TOML key or keyword that cannot be
    │   ├── PlacementError   an illegal row of the placement table
    │   └── BadSchedule      keywords that a schedule does not take (shardwise.deepspeed)
    ├── LaunchError          a run that cannot start: no such script, a port in use
    │   └── RankFailed       a rank of sw.launch failed; raised in the process that called it
    ├── ModelError           a model or optimizer that cannot be trained as asked
    │   ├── ModelMismatch    ranks built different models
    │   └── BrokenView       user code replaced a tensor that the engine owns
    ├── UsageError           a call at the wrong time: step without backward, bare backward
    │   ├── GradientAccess   a gradient touched between backward and step
    │   ├── ParameterAccess  a sharded parameter touched outside of a forward
    │   ├── OrderError       a sharded unit needed where other ranks do not expect it
    │   ├── BadCall          arguments that cannot be
    │   ├── HookOrder        zero_grad before step, or too many backwards (shardwise.horovod)
    │   └── FailedAssertion  what DeepSpeed asserts does not hold (shardwise.deepspeed)
    ├── DataError            a dataset, sampler or batch that cannot be shared out
    ├── MetricsError         ranks disagree on what they measured
    ├── CheckpointError      a checkpoint that cannot be written, found or read
    │   ├── CheckpointNotWritten  a disk that is full, or refuses
    │   ├── FolderInUse         another job saves there
    │   ├── BrokenCheckpoint    cut short, contradicting itself, or with a wrong checksum
    │   └── CheckpointMismatch  of another model or optimizer
    ├── TierError            a folder or disk that cannot hold a state, or failed while it did
    ├── NonFiniteError       a gradient or loss became NaN or infinite
    └── CollectiveError      a collective failed; the cause is usually on another rank
        ├── PeerLost         another rank went away
        └── HorovodInternalError  an operation of shardwise.horovod failed

A message is a sentence with the values in it, and ends with what to do.
"""

from collections.abc import Iterable
from typing import Self


class ShardwiseError(Exception):
    """The root of every error that Shardwise raises on purpose.

    `at_fault` are the ranks that its message names as the cause, where that is not this one.
    """

    at_fault: tuple[int, ...] = ()

    def blaming(self, ranks: Iterable[int]) -> Self:
        """Say which ranks are the cause; returns itself."""
        self.at_fault = tuple(ranks)
        return self


class ConfigError(ShardwiseError):
    """A setting that is unknown, misspelt, of the wrong type or out of range."""


class PlacementError(ConfigError):
    """An illegal row of the placement table; names the cell and the nearest legal row."""


class BadSchedule(ConfigError, ValueError):
    """Keywords that a schedule of DeepSpeed's JSON does not take; a ValueError, as there."""


class LaunchError(ShardwiseError):
    """A run that cannot start, or a process that cannot find the others."""


class RankFailed(LaunchError):
    """A rank of `sw.launch` failed, in the process that called it; the message ends with the
    traceback of that rank.

    `rank` is the first that failed, and `exit_code` the one of the run, as `shardwise run` has it.
    """

    def __init__(self, message: str, *, rank: int | None, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class ModelError(ShardwiseError):
    """A model or an optimizer that cannot be trained as asked."""


class ModelMismatch(ModelError):
    """Ranks built different models; names the first difference."""


class BrokenView(ModelError):
    """User code replaced a parameter or its storage after the engine took it over."""


class UsageError(ShardwiseError):
    """A call that would be silently wrong; the message holds the line to write instead."""


class GradientAccess(UsageError):
    """A gradient was read or changed while it belongs to the engine."""


class ParameterAccess(UsageError):
    """A sharded parameter was read or written where this rank has a part of it only."""


class OrderError(UsageError):
    """A sharded unit is needed out of the order in which all ranks gather units."""


class BadCall(UsageError, ValueError, RuntimeError):
    """Arguments that cannot be, such as a name that is on its way already. A ValueError and a
    RuntimeError: Horovod raises the one for what it looks at in Python, the other below."""


class HookOrder(UsageError, AssertionError):
    """Backward, synchronize, step and zero_grad in an order that would lose gradients; an
    AssertionError, as Horovod's."""


class FailedAssertion(UsageError, AssertionError):
    """No model, or tags that differ between ranks; an AssertionError, as DeepSpeed's."""


class DataError(ShardwiseError):
    """A dataset, a sampler or a batch that cannot be shared out over the ranks."""


class MetricsError(ShardwiseError):
    """Ranks disagree on which metrics they measured."""


class CheckpointError(ShardwiseError):
    """A checkpoint that cannot be written, found or read."""


class CheckpointNotWritten(CheckpointError):
    """A disk is full, read-only, or refuses what a checkpoint writes; those before it are whole."""


class FolderInUse(CheckpointError):
    """Another job saves into the folder that this one was given; names it."""


class BrokenCheckpoint(CheckpointError):
    """A file of a checkpoint is cut short, contradicts itself, or is not what was written."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model or optimizer; names all that differ."""


class TierError(ShardwiseError):
    """A folder or a disk that cannot hold a state, or that failed while it held one."""


class NonFiniteError(ShardwiseError):
    """A loss or a gradient became NaN or infinite; names parameter, rank and samples."""


class CollectiveError(ShardwiseError):
    """A collective failed on this rank; the cause is usually on another one."""


class PeerLost(CollectiveError):
    """Another rank ended or died while this one waited for it."""


class HorovodInternalError(CollectiveError, RuntimeError):
    """An operation of `shardwise.horovod` failed: ranks disagree on it, or one is gone. Of
    Horovod's name, and a RuntimeError as there."""
