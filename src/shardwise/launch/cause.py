"""What the end of a process most likely means, in words."""

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

GIGABYTE = 10**9

UNCAUGHT = "exit code 1"
"""The end of a Python process by an error that nobody caught."""

_WORDS = {
    signal.SIGSEGV: "a crash in native code: a driver, an extension, or memory used after its end",
    signal.SIGABRT: "native code gave up; what it said stands above",
    signal.SIGFPE: "a crash in native code: an integer division by zero",
    signal.SIGILL: "an instruction that this CPU does not have: a package built for another one",
    signal.SIGTERM: "something outside asked it to end: a scheduler's limit, or a person",
    signal.SIGINT: "it was interrupted",
    signal.SIGHUP: "its terminal was closed",
    signal.SIGPIPE: "what read its output was gone",
    signal.SIGXCPU: "it used up its limit of CPU time (ulimit -t)",
    signal.SIGXFSZ: "a file grew beyond its limit (ulimit -f)",
}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of a host now. `total` and `available` in bytes, None where not known.

    `kills` counts what the out-of-memory killer has ended in our control group.
    """

    total: int | None = None
    available: int | None = None
    kills: int | None = None


def of_exit(code: int, *, before: Memory, now: Memory, peak: int) -> str:
    """Words for the way a process ended: `code` as subprocess has it, negative for a signal.

    `before` and `now` are the host's memory at the start and after, `peak` the process's largest
    resident set in bytes.
    """
    if code >= 0:
        return f"exit code {code}{_shell_signal(code)}"
    name = signal_name(-code)
    if -code == signal.SIGKILL:
        return f"{name}, {_killed(before, now, peak)}"
    if -code == signal.SIGBUS:
        return f"{name}: {_bus_error()}"
    words = _WORDS.get(signal.Signals(-code)) if name.startswith("SIG") else None
    return f"{name}: {words}" if words else name


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shell_signal(code: int) -> str:
    if code <= 128 or not signal_name(code - 128).startswith("SIG"):
        return ""
    return f" (a shell's word for {signal_name(code - 128)})"


def _killed(before: Memory, now: Memory, peak: int) -> str:
    if before.kills is not None and now.kills is not None and now.kills > before.kills:
        who = "by the out-of-memory killer: the kernel has counted it"
    else:
        who = "most likely by the out-of-memory killer (if nobody typed kill -9)"
    used = f"Its memory had reached {_size(peak)}"
    if now.total is not None and now.available is not None:
        used += f"; the host has {_size(now.total)}, of which {_size(now.available)} are free now"
    return (
        f"{who}. {used}. Against a lack of memory: a smaller --micro-batch-size, "
        "a higher --zero, fewer ranks on this host, or fewer DataLoader workers"
    )


def _bus_error() -> str:
    free = ""
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        free = f" ({_size(usage.free)} of {_size(usage.total)} free now)"
    return (
        f"shared memory may be full: /dev/shm{free}, through which DataLoader workers hand over "
        "batches. Make it larger (docker run --shm-size) or use fewer workers"
    )


def _size(count: int) -> str:
    return f"{count / GIGABYTE:.1f} GB"


def memory() -> Memory:
    """This host's memory now, as far as it can be read."""
    fields = {}
    for line in _text(Path("/proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return Memory(
        total=fields.get("MemTotal"), available=fields.get("MemAvailable"), kills=_kills()
    )


def _kills() -> int | None:
    """The `oom_kill` count of the control group we are in, in either version of that system."""
    groups = [line.split(":", 2) for line in _text(Path("/proc/self/cgroup")).splitlines()]
    places = [
        Path("/sys/fs/cgroup/memory.events"),
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
    ]
    for _, controllers, path in groups:
        inside = path.lstrip("/")
        if controllers == "":
            places.insert(0, Path("/sys/fs/cgroup", inside, "memory.events"))
        elif "memory" in controllers.split(","):
            places.insert(0, Path("/sys/fs/cgroup/memory", inside, "memory.oom_control"))
    for place in places:
        for line in _text(place).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
