"""Parses cluster specs such as `8xH100`, `4x8xH100` or `here` into hosts, devices and links."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from shardwise.errors import ConfigError
from shardwise.tools.plan.catalogue import Catalogue, Device, NetworkLink

HERE = "here"
"""The catalogue's name for this machine. `shardwise plan --calibrate` adds it."""


@dataclass(frozen=True)
class Cluster:
    """Hosts with identical devices, and the links inside a host and between hosts."""

    hosts: int
    per_host: int
    device: Device
    inside: NetworkLink
    between: NetworkLink

    @property
    def devices(self) -> int:
        return self.hosts * self.per_host

    def part(self, devices: int) -> Cluster:
        """Return the smallest part of this cluster that has at least `devices` devices."""
        if devices <= self.per_host:
            return Cluster(1, devices, self.device, self.inside, self.between)
        hosts = -(-devices // self.per_host)
        return Cluster(hosts, self.per_host, self.device, self.inside, self.between)

    def __str__(self) -> str:
        hosts = f"{self.hosts}x" if self.hosts > 1 else ""
        return f"{hosts}{self.per_host}x{self.device.name}"


def parse_cluster(text: str, catalogue: Catalogue) -> Cluster:
    """Parse a cluster spec: `DEVICE`, `NxDEVICE`, `HOSTSxNxDEVICE`, `here` or `Nxhere`.

    If the number of hosts is omitted, it follows from the catalogue's devices per host: `16xH100`
    means two hosts with 8 devices each. Raises ConfigError for an invalid spec, an unknown device,
    or a number of devices that does not fill its hosts.
    """
    counts, name = _counts(text)
    if name.lower() == HERE and HERE not in catalogue.devices:
        raise ConfigError(
            f"--on {text}: this machine is not measured. Run shardwise plan --calibrate first."
        )
    if name.lower() == HERE:
        return _here(text, counts, catalogue)
    device = catalogue.device(name)
    if len(counts) == 2:
        hosts, per_host = counts
    else:
        total = counts[0] if counts else 1
        hosts, per_host = _filled(text, total, device)
    inside = catalogue.link(device.inside, device.name)
    return Cluster(hosts, per_host, device, inside, catalogue.link(device.between, device.name))


def _here(text: str, counts: list[int], catalogue: Catalogue) -> Cluster:
    """Return this machine as a cluster, as measured with the given rank count (default 1)."""
    ranks = counts[0] if counts else 1
    # Ranks share cores, memory and links, so measurements with n ranks cannot be scaled to a
    # different number of ranks.
    measured = [n for n in range(1, 257) if name_here(n) in catalogue.devices]
    if len(counts) == 2 or ranks not in measured:
        listed = ", ".join(f"{n}x{HERE}" for n in measured)
        raise ConfigError(f"--on {text}: this machine was measured as {listed}. Use one of these.")
    device = catalogue.devices[name_here(ranks)]
    link = catalogue.link(device.inside, device.name)
    return Cluster(1, ranks, replace(device, name=HERE), link, link)


def name_here(ranks: int) -> str:
    """Return the catalogue's name for this machine as measured with `ranks` concurrent ranks."""
    return HERE if ranks == 1 else f"{HERE}-{ranks}"


def _counts(text: str) -> tuple[list[int], str]:
    match = re.fullmatch(r"(?:(\d+)[x*×])?(?:(\d+)[x*×])?([A-Za-z][\w.+-]*)", text.strip())
    if match is None:
        raise ConfigError(
            f"--on {text!r} is not a cluster: write DEVICE, 8xDEVICE or HOSTSx8xDEVICE, such as "
            "8xH100 or 4x8xH100, or here."
        )
    counts = [int(each) for each in match.groups()[:2] if each is not None]
    if 0 in counts:
        raise ConfigError(f"--on {text!r} has no devices: write 1 or more.")
    return counts, match.group(3)


def _filled(text: str, total: int, device: Device) -> tuple[int, int]:
    """Return the number of hosts and the number of devices per host for `total` devices."""
    if total <= device.per_host:
        return 1, total
    if total % device.per_host:
        raise ConfigError(
            f"--on {text!r}: {total} devices do not fill hosts of {device.per_host}. Write "
            f"HOSTSxDEVICESx{device.name}, such as {total // device.per_host}x{device.per_host}"
            f"x{device.name}."
        )
    return total // device.per_host, device.per_host
