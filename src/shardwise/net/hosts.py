"""Parses a run's hosts (`-H`, hostfiles) and assigns ranks to them.

All of these forms are supported:

    -H alice@node1:4,[fd00::2]:2        as in mpirun

    node1 slots=4                       a hostfile in Open MPI's form (DeepSpeed's too)
    [fd00::2] slots=2 max_slots=2

    node1:4                             a hostfile in MPICH's form
    [fd00::2]:2                         # a comment
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import hexdigits

from shardwise.config.values import MOST_ON_A_HOST, MOST_RANKS
from shardwise.errors import LaunchError
from shardwise.messages.printable import many

LOOPBACK = "127.0.0.1"
"""The address of rank 0 if all ranks are on a single host."""


@dataclass(frozen=True)
class Host:
    """A host: its name or address for ssh, its slots (None if not given), and the login name."""

    name: str
    slots: int | None = None
    user: str | None = None

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"

    @property
    def login(self) -> str:
        """The ssh destination: user@name, or just the name if no user is given."""
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True)
class Share:
    """The ranks assigned to one host: `count` consecutive ranks, starting at `first`.

    `spares` are the ranks that wait on this host to replace lost ones.
    """

    host: Host
    first: int
    count: int
    spares: tuple[int, ...] = ()

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def every(self) -> tuple[int, ...]:
        """The ranks and the spares."""
        return (*self.numbers, *self.spares)

    @property
    def ranks(self) -> str:
        """The ranks as text for messages: "rank 3" or "ranks 0-3", and "spare 4"."""
        last = self.first + self.count - 1
        words = [f"rank {last}" if self.count == 1 else f"ranks {self.first}-{last}"]
        spares = ", ".join(map(str, self.spares))
        named = [f"spare{'s' * (len(self.spares) > 1)} {spares}"] if spares else []
        return " and ".join((words if self.count else []) + named)


_NAME = r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
# No part may start with a hyphen: ssh would parse the host as an option, such as -oProxyCommand=x.
_HOST = re.compile(
    r"((?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    rf"(\[(?P<six>[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?)\]|(?P<name>{_NAME}))"
    r"(:(?P<slots>[^:]*))?"
)


def from_list(text: str) -> list[Host]:
    """Parse the comma-separated hosts of `-H`. Raises LaunchError if one is malformed."""
    hosts = []
    for word in text.split(","):
        try:
            hosts.append(host_of(word.strip()))
        except ValueError as fault:
            raise LaunchError(f"-H {text}: {fault}") from None
    return merge(hosts)


def read(path: Path) -> list[Host]:
    """Read the hostfile at `path`. Raises LaunchError if it cannot be read or parsed."""
    try:
        # Reading a FIFO or a terminal would block forever.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise LaunchError(
                f"The hostfile {path} is not a regular file: name a file with one host per line."
            )
        return from_file(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"The hostfile {path} cannot be read: {why}.") from None


def from_file(text: str, name: str) -> list[Host]:
    """Parse the text of a hostfile.

    Raises LaunchError if a line is malformed. The message gives its location as `name`:line.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts.append(_with_options(host_of(words[0]), words[1:]))
        except ValueError as fault:
            raise LaunchError(f"{name}:{number}: {fault}") from None
    if not hosts:
        raise LaunchError(f"{name} contains no hosts. Write one per line, such as: node1 slots=4")
    return merge(hosts)


def merge(hosts: Sequence[Host]) -> list[Host]:
    """Merge repeated hosts at their first position and add up their slots: `h1,h1` is `h1:2`."""
    found: dict[str, Host] = {}
    for host in hosts:
        before = found.get(host.login)
        slots = host.slots if before is None else (before.slots or 1) + (host.slots or 1)
        found[host.login] = replace(host, slots=slots)
    return list(found.values())


def spread(
    hosts: Sequence[Host],
    *,
    total: int | None = None,
    per_host: int | None = None,
    spares: int = 0,
    more: str = "",
) -> list[Share]:
    """Assign consecutive ranks to hosts, in the order of `hosts`.

    Spares are assigned to the slots that are left, and then to the last host.

    Args:
        hosts: The hosts and their slots.
        total: The number of ranks, or None for one rank per slot. Earlier hosts are filled first.
        per_host: The number of slots on hosts that do not specify one (default 1).
        spares: The number of spares.
        more: How the user gets more slots, for an error (default: as the slots of these hosts).

    Raises:
        LaunchError: The ranks do not fit on the hosts, or `per_host` contradicts a host's slots.
    """
    for host in hosts:
        if per_host is not None and host.slots not in (None, per_host):
            raise LaunchError(
                f"--nproc-per-node {per_host} contradicts the {host.slots} slots of {host.name}: "
                "give only one of the two."
            )
    slots = [host.slots or per_host or 1 for host in hosts]
    if max(slots) > MOST_ON_A_HOST:
        raise LaunchError(f"{max(slots)} ranks on one host: the limit is {MOST_ON_A_HOST}.")
    if sum(slots) > MOST_RANKS:
        raise LaunchError(f"{sum(slots)} ranks: the limit for a run is {MOST_RANKS}.")
    if total is not None and total > sum(slots):
        more = more or f"Increase their slots ({hosts[0].name}:{-(-total // len(hosts))})"
        raise LaunchError(
            f"-n {total}: {many(len(hosts), 'host')} with {many(sum(slots), 'slot')} in total. "
            f"{more}, or write -n {sum(slots)} or less."
        )
    if total is not None and total < 1:
        raise LaunchError(f"-n {total}: a run has at least one rank; write -n 1 or more.")
    left = sum(slots) if total is None else total
    shares, first, next_spare = [], 0, left
    for host, room in zip(hosts, slots, strict=True):
        count = max(0, min(room, left - first))
        waiting = left + spares - next_spare
        if host is not hosts[-1]:
            waiting = min(waiting, room - count)
        if count or waiting:
            numbers = tuple(range(next_spare, next_spare + waiting))
            shares.append(Share(host, first if count else 0, count, numbers))
            first, next_spare = first + count, next_spare + waiting
    return shares


def host_of(word: str) -> Host:
    """Parse a host of the form `user@name:slots`. Raises ValueError with a message for the user."""
    if max(map(len, re.split(r"[.@:]", word))) > 64 or len(word) > 320:
        raise ValueError(f"{word[:40] + '...'!r} is too long for a host name.")
    found = _HOST.fullmatch(word)
    if found is None:
        if set(word) <= set(hexdigits + ":.") and word.count(":") > 1:
            raise ValueError(f"{word!r}: write an IPv6 address in brackets, such as [{word}]:4.")
        raise ValueError(f"{word!r} is not a host. Write for example node1:4 or alice@10.0.0.7:4.")
    slots = None if found["slots"] is None else _slots(found["slots"], word)
    return Host(found["six"] or found["name"], slots, found["user"])


def _with_options(host: Host, words: Sequence[str]) -> Host:
    """Apply Open MPI's host options (`slots=N`, `max_slots=N`) to `host`.

    Raises ValueError if an option is unknown or contradicts the host's slots.
    """
    most = None
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in ("slots", "max_slots", "max-slots"):
            raise ValueError(
                f"{word!r} is not an option of host {host.name}. Write slots=4, or {host.name}:4."
            )
        number = _slots(value, word)
        if key != "slots":
            most = number
        elif host.slots is not None:
            raise ValueError(f"{host.name} has :{host.slots} and {word}: write only one of them.")
        else:
            host = replace(host, slots=number)
    if most is not None and host.slots is not None and host.slots > most:
        raise ValueError(f"{host.name} has {host.slots} slots, more than max_slots={most}.")
    return host


def _slots(text: str, word: str) -> int:
    if not text.isascii() or not text.isdigit() or not text.strip("0"):
        raise ValueError(f"{word!r}: the number of slots takes a number above 0, not {text!r}.")
    if len(text) > 9 or int(text) > MOST_ON_A_HOST:
        raise ValueError(f"{word!r}: the limit for one host is {MOST_ON_A_HOST} slots.")
    return int(text)


def ranks(text: str, size: int, flag: str) -> tuple[int, ...]:
    """Parse a list of ranks such as "0,2-3".

    Raises LaunchError if the list is malformed or a rank is not below `size`. The message names
    `flag`.
    """
    found: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() and len(end) < 10 for end in ends):
            raise LaunchError(f"{flag} {text}: {word!r} is not a rank. Write for example 0,2-3.")
        low, high = int(ends[0]), int(ends[1])
        if low > high:
            raise LaunchError(f"{flag} {text}: {word!r} ends before it begins. Write {high}-{low}.")
        if high >= size:
            raise LaunchError(f"{flag} {text}: the {size} ranks of this run are 0 to {size - 1}.")
        found.update(range(low, high + 1))
    return tuple(sorted(found))
