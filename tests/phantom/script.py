"""Runs a script in a process that has a simulated device: `python script.py SCRIPT ARGUMENTS`.

It is for the benchmarks and their processes. They read from the device's counters what torch's
profiler would report of a GPU. No time passes, so copies take none.
"""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

WAYS = {"up": "copy up", "down": "copy down"}


def main(script: str, *arguments: str) -> None:
    """Become a process with a device, and then run the script."""
    sys.path[0] = str(ROOT)
    if "torch" not in sys.modules:  # otherwise this process was forked from one that has a device
        from tests.phantom import rank

        rank.become()
    sys.path[0] = str(Path(script).parent)
    sys.path.append(str(ROOT))
    import crew
    import device_trace

    crew.PYTHON = [sys.executable, __file__]
    device_trace.recorded = recorded
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


@contextmanager
def recorded() -> Iterator[Callable[[], Any]]:
    """Replaces `device_trace.recorded`."""
    import device_trace

    from tests.phantom.streams import Device

    order, copied = Device.order, Counter[str]()
    kernel = order.kernel

    def counting(stream: str, name: str, reads: Any = (), writes: Any = ()) -> None:
        spans = list(writes)
        copied[name] += sum(span.end - span.first for span in spans)
        kernel(stream, name, reads, spans)

    order.begin()
    order.kernel = counting  # type: ignore[method-assign]
    found: list[Any] = []
    yield lambda: found[0]
    order.kernel = kernel  # type: ignore[method-assign]
    copies = {
        way: device_trace.Copies(order.kernels[name], copied[name], None)
        for way, name in WAYS.items()
    }
    launches = sum(n for name, n in order.kernels.items() if name not in WAYS.values())
    found.append(device_trace.Seen(launches, sum(order.synchronisations.values()), copies))


if __name__ == "__main__":
    main(*sys.argv[1:])
