"""Counts the launches, host synchronisations and copies of some steps on a GPU, by torch's
profiler."""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANGE = "counted steps"
"""The name of the profiler's range around the steps. The profiler's own start and end are outside:
in them the host waits as well."""

WAYS = {"up": "HtoD", "down": "DtoH"}
"""The two directions between host and device, and the profiler's names of their copies."""

HIDEABLE = 20.0
"""Microseconds from which on a copy counts in the hidden share: shorter ones carry a few numbers
that the host waits for, and count as synchronisations."""

Span = tuple[float, float]
"""Start and end, in microseconds."""


@dataclass
class Copies:
    """All copies one way: their number, bytes and microseconds, and the share of the time of large
    ones in which a kernel ran. None: unknown."""

    count: int = 0
    nbytes: int | None = 0
    took: float | None = 0.0
    hidden: float | None = None


@dataclass
class Seen:
    """Counts of some steps; None: the profiler saw nothing of the device, for the reason
    `why_not`."""

    launches: int | None
    synchronisations: int | None
    copies: dict[str, Copies]
    why_not: str = ""


@contextmanager
def recorded() -> Iterator[Callable[[], Seen]]:
    """Profile the block; after it, the yielded function returns the counts."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    found: list[Seen] = []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(RANGE):
            yield lambda: found[0]
        torch.cuda.synchronize()  # the profile must contain all work that the steps submitted
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            found.append(seen_in(json.loads(path.read_text())["traceEvents"]))
    except Exception as error:  # the times of the steps are valid without a trace
        found.append(_nothing(f"{type(error).__name__}: {error}"))


def seen_in(events: Sequence[Mapping[str, Any]]) -> Seen:
    """Count in a trace's events (Chrome's format, as torch writes it), within the range."""
    whole = [event for event in events if "dur" in event]
    calls = [e for e in whole if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    if not calls:
        return _nothing("the trace has no calls of CUDA")
    first, end = next(
        _span(e) for e in whole if e["name"] == RANGE and e.get("cat") == "user_annotation"
    )
    names = [event["name"] for event in calls if first <= event["ts"] <= end]
    # A graph of kernels is one launch.
    launched = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
    blocking = ("cudaMemcpy", "cuMemcpyDtoH", "cuMemcpyHtoD")
    kernels = _union(_span(e) for e in whole if e.get("cat") == "kernel")
    copied = [e for e in whole if e.get("cat") == "gpu_memcpy"]
    return Seen(
        launches=sum(name.startswith(launched) for name in names),
        synchronisations=sum("Synchronize" in name or name in blocking for name in names),
        copies={
            way: _copies([e for e in copied if word in e["name"]], kernels)
            for way, word in WAYS.items()
        },
    )


def _nothing(why: str) -> Seen:
    return Seen(None, None, {way: Copies(0, None, None) for way in WAYS}, why)


def _copies(events: Sequence[Mapping[str, Any]], kernels: Sequence[Span]) -> Copies:
    large = [_span(event) for event in events if event["dur"] >= HIDEABLE]
    total = sum(b - a for a, b in large)
    hidden = sum(max(0.0, min(end, b) - max(start, a)) for start, end in large for a, b in kernels)
    return Copies(
        count=len(events),
        nbytes=sum(int(event["args"]["bytes"]) for event in events),
        took=sum(event["dur"] for event in events),
        hidden=hidden / total if total else None,
    )


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return the moments covered by any of `spans`, as spans that do not touch."""
    joined: list[Span] = []
    for first, end in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((first, end))
    return joined
