"""Observes a script: runs it in a separate process for one step, and reads the recorded step.

A second run with half the batch shows which tensors grow with the batch. For other batch sizes,
every size is extrapolated from these two runs, linearly in the number of samples.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import LaunchError
from shardwise.launch.flags import ADOPTED
from shardwise.net.python_command import python_words
from shardwise.tools.plan.record import Operation, StepRecord, TensorLife
from shardwise.tools.warm.warm_ranks import WarmRanks

OBSERVER = "shardwise.tools.plan.observer"

LINES_OF_OUTPUT = 12
"""Number of output lines to show of a script that failed."""


@dataclass(frozen=True)
class Script:
    """The script to observe.

    `words` are the script and its arguments, or `-m MODULE` and its arguments. `flags` are flags of
    `shardwise run`.
    """

    words: tuple[str, ...]
    flags: tuple[str, ...] = ()
    adopt: str = ""
    """Libraries whose classes are replaced with Shardwise's (--adopt), separated by commas."""
    fuses: bool = False
    """Whether the devices have CUDA's fused kernels for RMSNorm and attention with dropout."""

    @property
    def run_words(self) -> tuple[str, ...]:
        """The program to run and its arguments, after `adopt` has been applied."""
        return ("-m", "shardwise.adopt", self.adopt, *self.words) if self.adopt else self.words

    @property
    def name(self) -> str:
        """The script's name in messages."""
        return " ".join(self.words[:2]) if self.words[0] == "-m" else self.words[0]


@dataclass(frozen=True)
class ObservedStep:
    """A step that was observed with one or two batch sizes."""

    large: StepRecord
    small: StepRecord | None = None

    @property
    def scales(self) -> bool:
        """Whether results extrapolate to other batch sizes: both runs have the same operations."""
        return self.small is not None and _alike(self.large, self.small)

    def knows(self, samples: int) -> bool:
        """Return whether `at(samples)` can return a record."""
        seen = [each.batch_size for each in (self.large, self.small) if each is not None]
        return samples in seen or self.scales

    def at(self, samples: int) -> StepRecord:
        """Return the record of a micro-batch of `samples` samples.

        Raises LaunchError if this size was not observed and results cannot be extrapolated to it.
        """
        # Return observed records as they are, because fitted sizes are rounded.
        if samples == self.large.batch_size:
            return self.large
        if self.small is not None and samples == self.small.batch_size:
            return self.small
        if self.small is None or not self.scales:
            raise LaunchError(
                f"The step was observed with {self.large.batch_size} samples, and its operations "
                f"with {samples} samples are unknown: {self.difference()}."
            )
        return _fitted(self.small, self.large, samples)

    def difference(self) -> str:
        """Return why results cannot be extrapolated to other batch sizes, or "" if they can."""
        large, small = self.large, self.small
        if small is None:
            return "it was observed with one batch size only"
        if self.scales:
            return ""
        sizes = f"with {large.batch_size} and with {small.batch_size} samples"
        for one, other in zip_longest(large.operations, small.operations):
            if one is None or other is None or one.name != other.name:
                names = " and ".join(each.name if each else "no more" for each in (one, other))
                line = next((each.line for each in (one, other) if each is not None), "")
                return f"{sizes} it makes different operations: {names}" + (
                    f" ({line})" if line else ""
                )
        return f"{sizes} its tensors have different lifetimes"


OnRun = Callable[[str], None]
"""Called before each run of the script, with a description of the run."""


def warm_observers(script: Script) -> WarmRanks:
    """Return a warm process from which the observations of `script` are forked."""
    return WarmRanks(
        script.words, OBSERVER, os.environ, prepare=f"{OBSERVER}:skip_initial_values", servers=1
    )


class Way(NamedTuple):
    """The settings of an observation, which are those that change a step's operations."""

    activations: str = "kept"
    tensor: int = 1
    context: int = 1
    method: str = ""
    """The `--context-method`, or "" without context parallelism."""
    spread: bool = False
    """True if tensor parallelism leaves experts whole, so that `--expert` can spread them."""

    def __str__(self) -> str:
        axes = f", --tensor {self.tensor}" if self.tensor > 1 else ""
        axes += ", --expert" if self.spread else ""
        axes += f", --context {self.context} ({self.method})" if self.context > 1 else ""
        return f"activations {self.activations}{axes}"


PLAIN = Way()
"""An observation on one rank, without recomputation."""


def observe_sizes(
    script: Script,
    way: Way = PLAIN,
    on_run: OnRun = lambda _: None,
    warm: WarmRanks | None = None,
) -> ObservedStep:
    """Observe the first rank of `script` with the script's own batch size and with half of it.

    If `warm` is set, the script's processes are forked from it. Raises LaunchError if the script
    cannot be observed. The message names the line of the script.
    """
    configured = replace(script, flags=(*script.flags, "--activations", way.activations))
    on_run(f"its own batch, {way}")
    large = observe(configured, way=way, warm=warm)
    half = large.batch_size // 2
    # Without an sw.Loader, the observer cannot change the batch size.
    if half < 1 or not large.total_batch:
        return ObservedStep(large)
    on_run(f"half of the batch, {way}")
    small = observe(configured, half, way=way, warm=warm)
    # The script may ignore its Loader, or share batches of a fixed size by world.share.
    return ObservedStep(large, small if small.batch_size != large.batch_size else None)


def observe(
    script: Script, samples: int | None = None, *, way: Way = PLAIN, warm: WarmRanks | None = None
) -> StepRecord:
    """Run `script` up to its first step. If set, `samples` replaces its Loader's batch size."""
    with tempfile.TemporaryDirectory(prefix="shardwise-plan-") as folder:
        # The record is written to a file rather than a pipe, to keep it separate from the script's
        # output.
        path = Path(folder) / "record.json"
        sizes = [str(samples or 0), str(way.tensor), str(way.context), way.method]
        sizes += [str(int(way.spread)), str(int(script.fuses))]
        arguments = [str(path), *sizes, *script.run_words]
        cold = ["-m", OBSERVER, *arguments]
        # Always observe on the CPU: the shapes of fake tensors do not depend on the device.
        command = [
            *(*python_words("shardwise"), "run", "-n", "1", "--trial", "--quiet"),
            *("--device", "cpu", *script.flags),
            *(warm.words(0, arguments) if warm and warm.are_running else cold),
        ]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ,
            check=False,
        )
        # If there is a record, ignore the exit code: the script may have failed while exiting.
        if path.exists():
            return StepRecord.read(path)
        raise LaunchError(_why(script, path.with_suffix(".error"), done.stdout, done.returncode))


def _why(script: Script, error: Path, output: bytes, code: int) -> str:
    """Return the error message for a run that wrote no record.

    It contains the reason and the line of the script if they are known, and otherwise the last
    lines of the output.
    """
    if error.exists():
        failure = json.loads(error.read_text())
        line = f" at {failure['line']}" if failure["line"] else ""
        why = failure["why"].rstrip(".")
        return f"{script.name} could not be observed{line}: {why}. {_advice(why)}"
    lines = output.decode(errors="replace").strip().splitlines()[-LINES_OF_OUTPUT:]
    return "\n".join([f"{script.name} failed (exit code {code}) before its first step:", *lines])


def _advice(why: str) -> str:
    """Return advice for a script that could not be observed because of `why`."""
    missing = re.match(r"ModuleNotFoundError: No module named '(\w+)", why)
    # With --adopt, Shardwise provides the classes that a script imports from this library.
    if missing and missing[1] in ADOPTED:
        return f"Observe a script of {missing[1]} with --adopt {missing[1]}."
    if missing:
        return "Install it in the environment of shardwise."
    if "an sw.Engine" in why:
        return f"For a script of {', '.join(ADOPTED)}, add --adopt and that name."
    return (
        "Parameters have no values during the observation. Skip code that needs values before the "
        "first engine.step(), for example behind a flag of the script."
    )


def _alike(one: StepRecord, other: StepRecord) -> bool:
    """Return whether two records have the same operations and tensors."""
    lengths = [
        (len(r.operations), len(r.tensors), len(r.routed), len(r.exchanged)) for r in (one, other)
    ]
    if lengths[0] != lengths[1]:
        return False
    # Sizes can only be fitted if operation n and tensor n correspond in both records.
    same = all(a.name == b.name for a, b in zip(one.operations, other.operations, strict=True))
    return same and all(
        (a.born, a.died, a.source) == (b.born, b.died, b.source)
        for a, b in zip(one.tensors, other.tensors, strict=True)
    )


def _fitted(small: StepRecord, large: StepRecord, samples: int) -> StepRecord:
    """Return the record for `samples` samples, extrapolated linearly from two records."""
    part = (samples - small.batch_size) / (large.batch_size - small.batch_size)

    def line(low: int, high: int) -> int:
        return max(0, round(low + (high - low) * part))

    def operation(low: Operation, high: Operation) -> Operation:
        shapes = tuple(
            tuple(line(a, b) for a, b in zip(one, two, strict=True))
            # After a squeeze, a dim may exist for some batch sizes only. It cannot be fitted.
            if len(one) == len(two)
            else two
            for one, two in zip(low.shapes, high.shapes, strict=True)
        )
        return replace(
            high,
            flops=line(low.flops, high.flops),
            bytes=line(low.bytes, high.bytes),
            shapes=shapes,
        )

    def tensor(low: TensorLife, high: TensorLife) -> TensorLife:
        shape = tuple(line(a, b) for a, b in zip(low.shape, high.shape, strict=False))
        return replace(high, nbytes=line(low.nbytes, high.nbytes), shape=shape)

    return replace(
        large,
        operations=tuple(map(operation, small.operations, large.operations)),
        tensors=tuple(map(tensor, small.tensors, large.tensors)),
        routed=tuple(
            replace(b, nbytes=line(a.nbytes, b.nbytes))
            for a, b in zip(small.routed, large.routed, strict=True)
        ),
        exchanged=tuple(
            replace(b, nbytes=line(a.nbytes, b.nbytes))
            for a, b in zip(small.exchanged, large.exchanged, strict=True)
        ),
        batch_size=samples,
    )
