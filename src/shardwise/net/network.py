"""Finds addresses and interfaces of this host, and opens the sockets that rank 0 listens on."""

import errno
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.net.hosts import LOOPBACK, Host

_GET_ADDRESS = 0xC0206921 if sys.platform == "darwin" else 0x8915
"""The request SIOCGIFADDR of ioctl."""

_ANY_PORT = 9
"""Connecting a datagram socket sends nothing, so any port will do."""


def address_of_interface(name: str) -> str:
    """The address of interface `name`, IPv4 before IPv6; LaunchError says which there are."""
    found = [address for interface, address in _addresses() if interface == name]
    if found:
        return found[0]
    known = ", ".join(f"{interface} ({address})" for interface, address in _addresses())
    if name in dict(_indices()):
        raise LaunchError(f"--interface {name} has no address here. With one are: {known}.")
    raise LaunchError(f"--interface {name}: there is no such interface here. Known are: {known}.")


def interface_of(address: str) -> str | None:
    """The interface that has `address`; None where no interface of this host does."""
    plain = address.partition("%")[0]
    return next((name for name, held in _addresses() if held == plain), None)


def address_towards(peer: str) -> str:
    """The address of this host from which packets to `peer` (a name or an address) leave.

    Raises LaunchError where `peer` is unknown or no route leads there.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            peer, _ANY_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"No route leads from this host to {peer}: {error.strerror}. Name the interface of the "
            "network that all hosts share, with --interface NAME."
        ) from None


def is_here(host: Host) -> bool:
    """Whether `host` is this host itself; not where another user is asked for."""
    if host.user is not None:
        return False
    if host.name in ("localhost", socket.gethostname()):
        return True
    name = host.name
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def _addresses() -> Iterator[tuple[str, str]]:
    """Interface and address, IPv4 first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, _ in _indices():
            if (held := _address_four(probe, name)) is not None:
                yield name, held
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, _, _, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _address_four(probe: socket.socket, name: str) -> str | None:
    asked = struct.pack("256s", os.fsencode(name)[:15])
    try:
        found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, asked)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
            return None
        raise
    return socket.inet_ntoa(found[20:24])


def _indices() -> list[tuple[str, int]]:
    return [(name, index) for index, name in socket.if_nameindex()]


def listen(address: str, port: int) -> socket.socket:
    """Open a socket that listens on `port`, or with 0 on one that the kernel chooses.

    Rank 0 inherits it, so no other process can take the port in between. Raises LaunchError.
    """
    if address == LOOPBACK:
        _check_loopback()
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"Port {port} on {address} is in use by another process. "
                "Leave --port out, and a free one is taken."
            ) from None
        raise LaunchError(
            f"Port {port} on {address} cannot be listened on: {error.strerror}. "
            "Leave --port out, and a free one is taken."
        ) from None


def _check_loopback() -> None:
    """Raise LaunchError if the loopback interface is down, as in a new network namespace: one can
    listen there all the same, and ranks would try to connect until --timeout."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, _ANY_PORT))
        except OSError as error:
            raise LaunchError(
                f"Ranks on this host connect over {LOOPBACK}, which cannot be reached "
                f"({error.strerror}): is the loopback interface down? Try: ip link set lo up"
            ) from None


def reserve_port(address: str) -> socket.socket:
    """Reserve a port that the kernel chooses, for MASTER_PORT.

    It does not listen, so that a script on this host can, by torch's own init_process_group.
    Raises LaunchError.
    """
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, 0))
    except OSError as error:
        made.close()
        raise LaunchError(f"No port on {address} can be had: {error.strerror}.") from None
    return made


def listen_everywhere() -> socket.socket:
    """Open a socket that listens on every address of this host, on a port of the kernel's choice.

    IPv6 is for hosts that have nothing else: torch warns of a client whose name it cannot find,
    and few networks know a name for an IPv4 address in IPv6's clothes.
    """
    try:
        socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except socket.gaierror:
        if socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            return socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)
