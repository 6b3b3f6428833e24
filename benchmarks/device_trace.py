"""What some steps asked of a GPU, as torch's profiler saw it: launches, host synchronisations, and
the copies between host and device beside the kernels."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANGE = "counted steps"
"""The name of the profiler's range that holds the steps, and not the profiler's own start and end,
which let the host wait as well."""

WAYS = {"up": "HtoD", "down": "DtoH"}
"""The two directions between host and device, and how the profiler's copies name them."""

HIDEABLE = 20.0
"""Microseconds from which on a copy counts in the share that is hidden: those of a few numbers
that are waited for are a matter of synchronisations."""

Span = tuple[float, float]
"""First and end, in microseconds."""


@dataclass
class Copies:
    """All copies one way: their number and bytes, the microseconds that they took, and of those of
    the large ones the share in which a kernel ran. None: unknown."""

    count: int = 0
    nbytes: int | None = 0
    took: float | None = 0.0
    hidden: float | None = None


@dataclass
class Seen:
    """What was seen in some steps; None: the profiler saw nothing of the device."""

    launches: int | None
    synchronisations: int | None
    copies: dict[str, Copies]
    why_not: str = ""
    """Why nothing was seen."""


@contextmanager
def recorded() -> Iterator[Callable[[], Seen]]:
    """Profile the block; the function that is given tells, after the block, what was seen."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    found: list[Seen] = []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(RANGE):
            yield lambda: found[0]
        torch.cuda.synchronize()  # what the steps asked for is to be in the profile
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            found.append(seen_in(json.loads(path.read_text())["traceEvents"]))
    except Exception as error:  # the steps were taken: their times count without the trace
        found.append(_nothing(f"{type(error).__name__}: {error}"))


def seen_in(events: Sequence[Mapping[str, Any]]) -> Seen:
    """What a trace's events (Chrome's format, as torch writes it) tell of the range."""
    whole = [event for event in events if "dur" in event]
    calls = [e for e in whole if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    if not calls:
        return _nothing("the trace has no calls of CUDA")
    first, end = next(
        _span(e) for e in whole if e["name"] == RANGE and e.get("cat") == "user_annotation"
    )
    names = [event["name"] for event in calls if first <= event["ts"] <= end]
    kernels = _union(_span(e) for e in whole if e.get("cat") == "kernel")
    copied = [e for e in whole if e.get("cat") == "gpu_memcpy"]
    return Seen(
        launches=sum(map(_launches, names)),
        synchronisations=sum(map(_waits, names)),
        copies={
            way: _copies([e for e in copied if word in e["name"]], kernels)
            for way, word in WAYS.items()
        },
    )


def _nothing(why: str) -> Seen:
    return Seen(None, None, {way: Copies(0, None, None) for way in WAYS}, why)


def _launches(call: str) -> bool:
    """Whether a call of the runtime or the driver starts a kernel (or a graph of them)."""
    return call.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch"))


def _waits(call: str) -> bool:
    """Whether the host waits for the device in it."""
    return "Synchronize" in call or call in ("cudaMemcpy", "cuMemcpyDtoH", "cuMemcpyHtoD")


def _copies(events: Sequence[Mapping[str, Any]], kernels: Sequence[Span]) -> Copies:
    large = [_span(event) for event in events if event["dur"] >= HIDEABLE]
    total = sum(b - a for a, b in large)
    return Copies(
        count=len(events),
        nbytes=sum(int(event["args"]["bytes"]) for event in events),
        took=sum(event["dur"] for event in events),
        hidden=sum(_shared(span, kernels) for span in large) / total if total else None,
    )


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _union(spans: Iterable[Span]) -> list[Span]:
    """The moments that any of `spans` has, as spans that do not touch."""
    joined: list[Span] = []
    for first, end in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((first, end))
    return joined


def _shared(span: Span, joined: Sequence[Span]) -> float:
    return sum(max(0.0, min(span[1], b) - max(span[0], a)) for a, b in joined)
