"""Finds this host's addresses and interfaces, and opens rank 0's listening sockets."""

import errno
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.net.hosts import LOOPBACK, Host

_GET_ADDRESS = 0xC0206921 if sys.platform == "darwin" else 0x8915
"""The ioctl request SIOCGIFADDR, which returns an interface's IPv4 address."""

_ANY_PORT = 9
"""An arbitrary port, because connecting a datagram socket sends nothing."""


def address_of_interface(name: str) -> str:
    """Return the address of interface `name`, preferring IPv4.

    Raises LaunchError if `name` is unknown or has no address. The message lists the interfaces.
    """
    found = [address for interface, address in _addresses() if interface == name]
    if found:
        return found[0]
    known = ", ".join(f"{interface} ({address})" for interface, address in _addresses())
    if name in dict(_indices()):
        raise LaunchError(
            f"--interface {name} has no address on this host. Interfaces with an address: {known}."
        )
    raise LaunchError(
        f"--interface {name}: this host has no such interface. Its interfaces are: {known}."
    )


def all_addresses(names: Collection[str] = ()) -> list[str]:
    """Return all addresses of the interfaces `names`, or of all interfaces except loopback."""
    return [
        address
        for name, address in _addresses()
        if (name in names if names else not ip_address(address).is_loopback)
    ]


def interface_of(address: str) -> str | None:
    """Return the name of this host's interface that has `address`, or None."""
    plain = address.partition("%")[0]
    return next((name for name, held in _addresses() if held == plain), None)


def address_towards(peer: str) -> str:
    """Return this host's source address for packets to `peer`, a host name or address.

    Raises LaunchError if `peer` is unknown or there is no route to it.
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
            f"There is no route from this host to {peer}: {error.strerror}. Name the network "
            "interface that reaches all hosts, with --interface NAME."
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether `host` is "localhost" or a loopback address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def is_here(host: Host) -> bool:
    """Return whether `host` is this host and does not specify a user."""
    if host.user is not None:
        return False
    if host.name in ("localhost", socket.gethostname()):
        return True
    name = host.name
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        # Binding succeeds only if the name resolves to an address of this host.
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield this host's (interface, address) pairs, IPv4 first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, _ in _indices():
            if (held := _address_four(probe, name)) is not None:
                yield name, held
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, _, _, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _address_four(probe: socket.socket, name: str) -> str | None:
    request = struct.pack("256s", os.fsencode(name)[:15])
    try:
        found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
            return None
        raise
    return socket.inet_ntoa(found[20:24])


def _indices() -> list[tuple[str, int]]:
    return [(name, index) for index, name in socket.if_nameindex()]


def listen(
    address: str, port: int, instead: str = "Leave out --port to take a free one."
) -> socket.socket:
    """Listen on `port` at `address`. Port 0 lets the kernel choose a free port.

    Raises LaunchError if the port is in use or cannot be bound. It ends with `instead`, the advice.
    """
    # Rank 0 inherits this socket, so no other process can take the port before rank 0 listens.
    if address == LOOPBACK:
        _check_loopback()
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"Port {port} on {address} is in use by another process. {instead}"
            ) from None
        raise LaunchError(
            f"Cannot listen on port {port} of {address}: {error.strerror}. {instead}"
        ) from None


def _check_loopback() -> None:
    """Raise LaunchError if the loopback interface is down, as in a new network namespace."""
    # Listening succeeds even then, and the ranks would keep trying to connect until --timeout.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, _ANY_PORT))
        except OSError as error:
            raise LaunchError(
                f"Ranks on this host connect over {LOOPBACK}, which cannot be reached "
                f"({error.strerror}): is the loopback interface down? Try: ip link set lo up"
            ) from None


def reserve_port(address: str) -> socket.socket:
    """Reserve a free port for MASTER_PORT. Raises LaunchError if no port can be bound."""
    # Bind without listening, so that a script on this host can still listen on the port when it
    # calls torch's init_process_group.
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, 0))
    except OSError as error:
        reserved.close()
        raise LaunchError(f"Cannot reserve a port on {address}: {error.strerror}.") from None
    return reserved


def listen_everywhere() -> socket.socket:
    """Listen on all addresses of this host, on a free port chosen by the kernel."""
    # Use IPv6 only on hosts without an IPv4 address. torch warns about clients whose address it
    # cannot resolve to a name, and few networks resolve IPv4 addresses mapped into IPv6.
    try:
        socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except socket.gaierror:
        if socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            return socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)
