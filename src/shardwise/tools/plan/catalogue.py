"""Reads the catalogue of devices and links from TOML files. Every value has a source.

A file contains any number of sources, devices and links. The package's own files are in hardware/.
Users can add files in `$XDG_CONFIG_HOME/shardwise/hardware` or with `--hardware`. Their devices and
links replace those with the same name.

    [sources.sheet]
    text = "data sheet"
    date = "2024-09"

    [device.H100]
    title = "NVIDIA H100 SXM5 80 GB"
    inside = "nvlink4"              # the link between devices of one host
    between = "infiniband-400"      # the link between hosts, per device
    per_host = 8
    bf16_tflops = { value = 989, from = "sheet" }
    ...
"""

from __future__ import annotations

import difflib
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.tools.plan.sourced_toml import Source, SourcedFile, as_float

GIB = float(2**30)
OWN = Path(__file__).parent / "hardware"

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")

SCALES: dict[str, float] = {
    **{f"{dtype}_tflops": 1e12 for dtype in DTYPES},
    "memory_gib": GIB,
    "memory_tb_per_s": 1e12,
    "host_gb_per_s": 1e9,
    "host_memory_gib": GIB,
    "host_memory_gb_per_s": 1e9,
    "disk_gb_per_s": 1e9,
    "watts": 1.0,
    "host_watts": 1.0,
    "dollars_low": 1.0,
    "dollars_high": 1.0,
    "overlap": 1.0,
}
"""The numeric keys of a device, each with the factor that converts its value to bytes, FLOP/s,
bytes/s, watts or dollars per hour. Host values are the share of one device. `overlap` is the
fraction of a collective's time that does not slow down concurrent computation (default 1)."""

NEEDED = ("memory_gib", "memory_tb_per_s")
CURVES = ("matmul", *(f"matmul_{dtype}" for dtype in DTYPES), "memory", "memory_unvectorised")
_DEVICE_WORDS = ("title", "inside", "between")
_LINK_SCALES = {"gb_per_s": 1e9, "latency_us": 1e-6}


@dataclass(frozen=True)
class Curve:
    """A quantity as a function of size, given by points (size, value) with increasing sizes.

    Between two points, the value is linear in the logarithm of the size. Below the first point and
    above the last one, it is constant.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """Return the value at `size`, in the unit of the points."""
        # Interpolate in log(size), because measured sizes grow geometrically from point to point.
        sizes = [each for each, _ in self.points]
        after = bisect_right(sizes, size)
        if after == 0:
            return self.points[0][1]
        if after == len(sizes):
            return self.points[-1][1]
        (low, first), (high, second) = self.points[after - 1], self.points[after]
        part = math.log(size / low) / math.log(high / low)
        return first + part * (second - first)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device of the catalogue.

    Attributes:
        name: Name in cluster specs, such as "H100".
        title: Full name.
        inside: Name of the link between devices on the same host.
        between: Name of the link between hosts.
        per_host: Devices per host.
        numbers: Values by name (see SCALES), in bytes, bytes/s, FLOP/s, watts or dollars per hour.
        curves: Efficiency as a fraction of the peak: "matmul" as a function of an operation's
            size in GFLOP, "memory" as a function of the number of megabytes that it moves. If
            given, "memory_unvectorised" replaces "memory" for element-wise operators whose tensors
            differ in shape, strides or dtype.
        launch: Time to launch an operation, in seconds.
        sources: Source of each value.
        aliases: Other names of the device.
        calibrated: True if `shardwise plan --calibrate` measured the device.
    """

    name: str
    title: str
    inside: str
    between: str
    per_host: int
    numbers: Mapping[str, float]
    curves: Mapping[str, Curve]
    launch: float
    sources: Mapping[str, Source] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    calibrated: bool = False

    @property
    def memory(self) -> int:
        """The size of the device's memory in bytes."""
        return int(self.numbers["memory_gib"])

    @property
    def is_assumed(self) -> bool:
        """Whether the matmul efficiency is an assumption rather than a measurement."""
        source = self.sources.get("matmul")
        return source is not None and source.text.startswith("assumed")

    @property
    def bandwidth(self) -> float:
        """The peak bandwidth of the device's memory in bytes/s."""
        return self.numbers["memory_tb_per_s"]

    def flops(self, dtype: str) -> float:
        """Return the peak rate of dense matrix products in FLOP/s.

        Raises ConfigError if the catalogue has no peak rate for `dtype`.
        """
        peak = self.numbers.get(f"{dtype}_tflops")
        if peak is None:
            others = ", ".join(each for each in DTYPES if f"{each}_tflops" in self.numbers)
            raise ConfigError(
                f"The catalogue has no {dtype}_tflops for {self.name}, only {others}. "
                "Add it with its source in a file for --hardware, or plan for another precision."
            )
        return peak

    def number(self, name: str) -> float | None:
        """Return the value `name` (see SCALES), or None if the catalogue lacks it."""
        return self.numbers.get(name)


@dataclass(frozen=True)
class NetworkLink:
    """A link between devices.

    `bandwidth` is the rate that collectives achieve per device in one direction ("bus bandwidth"),
    in bytes/s. `latency` is the overhead per message in seconds.
    """

    name: str
    title: str
    bandwidth: float
    latency: float
    sources: Mapping[str, Source] = field(default_factory=dict)


@dataclass(frozen=True)
class Catalogue:
    """Devices and links by name."""

    devices: Mapping[str, Device]
    links: Mapping[str, NetworkLink]

    def device(self, name: str) -> Device:
        """Return the device with this name or alias (case-insensitive).

        Raises ConfigError if there is no such device.
        """
        devices = self.devices.values()
        names = {word.lower(): each for each in devices for word in (each.name, *each.aliases)}
        if (device := names.get(name.lower())) is not None:
            return device
        # Compare in lower case, but suggest the name as the catalogue spells it.
        near = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f" Did you mean {names[near[0]].name}?" if near else ""
        raise ConfigError(
            f"The catalogue has no device {name!r}.{hint} Known devices: "
            f"{', '.join(sorted(self.devices))}. Add yours in a file for --hardware."
        )

    def link(self, name: str, device: str) -> NetworkLink:
        """Return the link `name` of `device`. Raises ConfigError if no file defines it."""
        if (link := self.links.get(name)) is None:
            raise ConfigError(
                f"The device {device} names the link {name!r}, which no file of the catalogue "
                f"defines. Known links: {', '.join(sorted(self.links))}."
            )
        return link


def user_folder() -> Path:
    """Return the user's catalogue folder, `$XDG_CONFIG_HOME/shardwise/hardware`."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "shardwise" / "hardware"


def read_catalogue(added: Iterable[Path | str] = (), *, user: bool = True) -> Catalogue:
    """Read the package's catalogue, then the user's folder (if `user`), then the paths in `added`.

    Later devices and links replace earlier ones with the same name. Raises ConfigError at the first
    invalid entry.
    """
    devices: dict[str, Device] = {}
    links: dict[str, NetworkLink] = {}
    # In order of precedence: package, user, --hardware.
    files = [*sorted(OWN.glob("*.toml"))]
    files += sorted(user_folder().glob("*.toml")) if user else []
    for path in added:
        files += _files(Path(path))
    for file in files:
        content = read_file(file)
        devices |= content.devices
        links |= content.links
    return Catalogue(devices, links)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        if not (files := sorted(path.glob("*.toml"))):
            raise ConfigError(f"--hardware {path}: the folder has no *.toml file.")
        return files
    if not path.is_file():
        raise ConfigError(f"--hardware {path}: no such file or folder.")
    return [path]


def read_file(file: Path) -> Catalogue:
    """Read the devices and links of one file. Raises ConfigError at the first invalid entry."""
    reading = _Reading(file)
    tree = reading.tree(("device", "link"))
    devices = {name: reading.device(entry, name) for name, entry in reading.tables(tree, "device")}
    links = {name: reading.link(entry, name) for name, entry in reading.tables(tree, "link")}
    return Catalogue(devices, links)


class _Reading(SourcedFile):
    """Reads the tables of one catalogue file."""

    def curve(self, entry: Any, where: str) -> tuple[Curve, Source]:
        value, source = self.sourced(entry, where)
        pairs = isinstance(value, list) and all(isinstance(p, list) and len(p) == 2 for p in value)
        if not pairs or not value or not all(_positive(x) for point in value for x in point):
            raise self.wrong(f"{where} must be points [[size, fraction], ...], all above 0.")
        sizes = [point[0] for point in value]
        if sizes != sorted(set(sizes)):
            raise self.wrong(f"{where} must have rising sizes, but has {sizes}.")
        if (most := max(point[1] for point in value)) > 1:
            raise self.wrong(f"{where} has {most}, but a fraction of the peak is at most 1.")
        return Curve(tuple((float(size), float(part)) for size, part in value)), source

    def device(self, entry: Mapping[str, Any], name: str) -> Device:
        where = f"[device.{name}]"
        own = (*_DEVICE_WORDS, "aliases", "per_host", "calibrated", "efficiency")
        self.only(entry, (*own, *SCALES), where)
        if missing := [key for key in NEEDED if key not in entry]:
            raise self.wrong(f"{where} needs {missing[0]}.")
        if not any(f"{dtype}_tflops" in entry for dtype in DTYPES):
            raise self.wrong(f"{where} needs a peak, such as bf16_tflops.")
        numbers = {key: self.number(entry[key], f"{where} {key}") for key in SCALES if key in entry}
        per_host, aliases = entry.get("per_host", 8), entry.get("aliases", [])
        # bool is a subclass of int, but `per_host = true` must not count as 1.
        if isinstance(per_host, bool) or not isinstance(per_host, int) or per_host < 1:
            raise self.wrong(f"{where} per_host must be an integer of devices, 1 or more.")
        if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
            raise self.wrong(f"{where} aliases must be a list of names.")
        curves, launch, sources = self.efficiency(entry.get("efficiency", {}), where)
        words = {key: self.text(entry, key, where, name) for key in _DEVICE_WORDS}
        return Device(
            name=name,
            **words,
            per_host=per_host,
            numbers={key: value * SCALES[key] for key, (value, _) in numbers.items()},
            curves=curves,
            launch=launch,
            sources={key: source for key, (_, source) in numbers.items()} | sources,
            aliases=tuple(aliases),
            calibrated=entry.get("calibrated") is True,
        )

    def efficiency(
        self, entry: Mapping[str, Any], device: str
    ) -> tuple[dict[str, Curve], float, dict[str, Source]]:
        """Return a device's efficiency curves, its launch time in seconds, and their sources."""
        where = f"{device[:-1]}.efficiency]"
        self.only(entry, (*CURVES, "launch_us"), where)
        for key in ("matmul", "memory", "launch_us"):
            if key not in entry:
                raise self.wrong(f"{where} needs {key}.")
        curves = {key: self.curve(entry[key], f"{where} {key}") for key in CURVES if key in entry}
        launch, source = self.number(entry["launch_us"], f"{where} launch_us")
        sources = {key: each for key, (_, each) in curves.items()} | {"launch_us": source}
        return {key: curve for key, (curve, _) in curves.items()}, launch * 1e-6, sources

    def link(self, entry: Mapping[str, Any], name: str) -> NetworkLink:
        where = f"[link.{name}]"
        self.only(entry, ("title", *_LINK_SCALES), where)
        for key in _LINK_SCALES:
            if key not in entry:
                raise self.wrong(f"{where} needs {key}.")
        numbers = {key: self.number(entry[key], f"{where} {key}") for key in _LINK_SCALES}
        bandwidth, latency = (numbers[key][0] * scale for key, scale in _LINK_SCALES.items())
        sources = {key: source for key, (_, source) in numbers.items()}
        return NetworkLink(
            name, self.text(entry, "title", where, name), bandwidth, latency, sources
        )


def _positive(value: Any) -> bool:
    number = as_float(value)
    return number is not None and 0 < number < math.inf
