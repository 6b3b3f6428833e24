"""The catalogue of failures: classes of what fails, how often, and what it takes with it.

A file is TOML in which every value has its source, as in the catalogue of devices. The rate of a
class is a count over what was observed, or a number per 1,000 days of one component:

    [class.gpu]
    title = "faulty GPU"
    scope = "device"                                    # device, host, rack, pod or job
    count = { value = 148, from = "table" }             # or per_1000_days
    detect_seconds = { value = 60, from = "assumed" }   # from the failure until the run has ended
    repair_hours = { value = 24, from = "assumed" }     # until its hosts are back; none: they stay

A failure that takes no hardware with it (`scope = "job"`) is counted per job, however large. With
`per = { value = "device", from = "assumed" }` it is counted per device, or host, rack or pod: its
rate grows with the run, as that of a software bug does that any rank may meet.

`planned = true`: the run saves first. With `slowdown` nothing stops: for `lasts_hours` the run
goes at the pace of that component.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.tools.plan.sourced_toml import Source, SourcedFile

OWN = Path(__file__).parent / "failures"
SCOPES = ("device", "host", "rack", "pod", "job")
DAY, HOUR = 86400.0, 3600.0
_NUMBERS = (
    *("count", "per_1000_days", "detect_seconds", "repair_hours", "slowdown", "lasts_hours"),
)
_OBSERVED = ("days", "devices", "devices_per_host", "hosts_per_rack", "racks_per_pod")


@dataclass(frozen=True)
class Topology:
    """How many components of each scope `hosts` hosts are."""

    hosts: int
    devices_per_host: int
    hosts_per_rack: int
    racks_per_pod: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.hosts * self.devices_per_host

    def components(self, scope: str) -> int:
        """How many components of `scope` there are; the last rack and pod may not be full."""
        racks = math.ceil(self.hosts / self.hosts_per_rack)
        return {
            "device": self.devices,
            "host": self.hosts,
            "rack": racks,
            "pod": math.ceil(racks / self.racks_per_pod),
            "job": 1,
        }[scope]

    def hosts_at(self, scope: str, place: int) -> range:
        """The hosts that go when component `place` of `scope` does; of a job none."""
        if scope == "job":
            return range(0)
        if scope in ("device", "host"):
            host = place // self.devices_per_host if scope == "device" else place
            return range(host, host + 1)
        several = self.hosts_per_rack * (self.racks_per_pod if scope == "pod" else 1)
        return range(place * several, min((place + 1) * several, self.hosts))

    def hosts_of(self, scope: str) -> int:
        """How many hosts go when a component of `scope` does."""
        rack = min(self.hosts_per_rack, self.hosts)
        pod = min(rack * self.racks_per_pod, self.hosts)
        return {"device": 1, "host": 1, "rack": rack, "pod": pod, "job": 0}[scope]


@dataclass(frozen=True)
class FailureClass:
    """A kind of failure; `rate` is per second and component of `per`.

    `scope` is what fails with it. The two differ where a failure takes no hardware with it (`scope`
    is the job) and comes more often on more of it: `per` is the device or the host then.

    For `detect` seconds nobody notices. Its hosts are back after `repair` seconds in the mean, 0
    where they stay. `slowdown` above 1 only slows the run down, for `lasts` seconds in the mean.
    """

    name: str
    title: str
    scope: str
    rate: float
    per: str
    detect: float = 0.0
    repair: float = 0.0
    planned: bool = False
    slowdown: float = 1.0
    lasts: float = 0.0

    def rate_over(self, topology: Topology) -> float:
        """Return the failures per second of all components."""
        return topology.components(self.per) * self.rate


@dataclass(frozen=True)
class Failures:
    """A file of the catalogue."""

    title: str
    classes: tuple[FailureClass, ...]
    hosts_per_rack: int
    racks_per_pod: int
    sources: Mapping[str, Source] = field(default_factory=dict)
    """By class and key, such as "gpu.count"."""


def names() -> list[str]:
    """The files that come with the package."""
    return sorted(each.stem for each in OWN.glob("*.toml"))


def read_failures(name: str) -> Failures:
    """The file of the package with this name, or the one of this path; "none" is no failure.

    Raises ConfigError of the first mistake in it.
    """
    if name == "none":
        return Failures("no failures", (), 1, 1)
    path = Path(name) if name.endswith(".toml") else OWN / f"{name}.toml"
    if not path.is_file():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--failures {name}: there is no such file.{hint} Write none, "
            f"{', '.join(names())}, or the path of a .toml file of yours."
        )
    return _Reading(path).failures()


class _Reading(SourcedFile):
    """Reads the tables of one file of failures."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._found: dict[str, Source] = {}

    def failures(self) -> Failures:
        tree = self.tree(("title", "observed", "class"))
        observed = self._observed(tree.get("observed", {}))
        classes = tuple(
            self._class(name, entry, observed) for name, entry in self.tables(tree, "class")
        )
        if not classes:
            raise self.wrong("it has no [class.NAME].")
        return Failures(
            self.text(tree, "title", "the file"),
            classes,
            int(observed.get("hosts_per_rack", 1)),
            int(observed.get("racks_per_pod", 1)),
            self._found,
        )

    def _observed(self, entry: Any) -> dict[str, float]:
        if not isinstance(entry, dict):
            raise self.wrong("observed has to be a table [observed].")
        self.only(entry, _OBSERVED, "[observed]")
        found = {key: self._number(value, f"observed.{key}") for key, value in entry.items()}
        if broken := [key for key in found if key != "days" and found[key] % 1]:
            raise self.wrong(f"[observed] {broken[0]} has to be a whole number.")
        return found

    def _class(
        self, name: str, entry: Mapping[str, Any], observed: Mapping[str, float]
    ) -> FailureClass:
        where = f"[class.{name}]"
        self.only(entry, ("title", "scope", "per", "planned", *_NUMBERS), where)
        scope = self.text(entry, "scope", where)
        if scope not in SCOPES:
            raise self.wrong(f"{where} scope is one of {', '.join(SCOPES)}, not {scope!r}.")
        per = self._per(entry, name, scope)
        found = {key: self._number(entry[key], f"{name}.{key}") for key in _NUMBERS if key in entry}
        if found.get("slowdown", 2.0) <= 1 or ("slowdown" in found) != ("lasts_hours" in found):
            raise self.wrong(
                f"{where} slowdown has to be above 1 and comes with lasts_hours, as that with it."
            )
        return FailureClass(
            name=name,
            title=self.text(entry, "title", where),
            scope=scope,
            rate=self._rate(where, per, found, observed),
            per=per,
            detect=found.get("detect_seconds", 0.0),
            repair=found.get("repair_hours", 0.0) * HOUR,
            planned=entry.get("planned") is True,
            slowdown=found.get("slowdown", 1.0),
            lasts=found.get("lasts_hours", 0.0) * HOUR,
        )

    def _rate(
        self, where: str, per: str, found: Mapping[str, float], observed: Mapping[str, float]
    ) -> float:
        """Failures per second and component."""
        if ("count" in found) == ("per_1000_days" in found):
            raise self.wrong(f"{where} needs count or per_1000_days, one of the two.")
        if "per_1000_days" in found:
            return found["per_1000_days"] / (1000 * DAY)
        if missing := [key for key in _OBSERVED[:3] if key not in observed]:
            raise self.wrong(f"{where} has a count, so [observed] needs {missing[0]}.")
        hosts = math.ceil(observed["devices"] / observed["devices_per_host"])
        seen = Topology(
            hosts,
            int(observed["devices_per_host"]),
            int(observed.get("hosts_per_rack", 1)),
            int(observed.get("racks_per_pod", 1)),
        )
        return found["count"] / (observed["days"] * DAY * seen.components(per))

    def _per(self, entry: Mapping[str, Any], name: str, scope: str) -> str:
        """The scope whose components the rate is per."""
        if "per" not in entry:
            return scope
        value, self._found[f"{name}.per"] = self.sourced(entry["per"], f"{name}.per")
        if scope != "job" or value not in SCOPES:
            raise self.wrong(
                f"[class.{name}] per is one of {', '.join(SCOPES)}, and of a class whose scope is "
                f"job; it is {value!r} and the scope is {scope}."
            )
        return str(value)

    def _number(self, entry: Any, where: str) -> float:
        """A number, whose source is kept."""
        value, self._found[where] = self.number(entry, where)
        return value
