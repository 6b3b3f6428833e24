"""Reads failure classes from TOML files: their rates, and the hardware that they take down.

Every value has a source, as in the device catalogue. A class's rate is either a count in an
observed run, or a number per component and 1,000 days:

    [class.gpu]
    title = "faulty GPU"
    scope = "device"                                    # device, host, rack, pod or job
    count = { value = 148, from = "table" }             # or per_1000_days
    detect_seconds = { value = 60, from = "assumed" }   # from the failure until the run has stopped
    repair_hours = { value = 24, from = "assumed" }     # until hosts return (default: not removed)

By default, the rate of a failure that takes down no hardware (`scope = "job"`) is per job,
regardless of the job's size. With `per = { value = "device", from = "assumed" }`, it is per device
(or host, rack, pod), so it grows with the size of the run. This suits a software bug that any rank
may trigger.

With `planned = true`, the run saves before it stops. With `slowdown`, the run does not stop.
Instead, it runs at the slow component's pace for `lasts_hours`.
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
    """The arrangement of a cluster's devices in hosts, racks and pods."""

    hosts: int
    devices_per_host: int
    hosts_per_rack: int
    racks_per_pod: int

    @property
    def devices(self) -> int:
        return self.hosts * self.devices_per_host

    def components(self, scope: str) -> int:
        """Return the number of components of `scope`, including a partly filled rack or pod."""
        racks = math.ceil(self.hosts / self.hosts_per_rack)
        return {
            "device": self.devices,
            "host": self.hosts,
            "rack": racks,
            "pod": math.ceil(racks / self.racks_per_pod),
            "job": 1,
        }[scope]

    def hosts_at(self, scope: str, place: int) -> range:
        """Return the hosts that fail if component `place` of `scope` fails (none for a job)."""
        # A failure of scope "job" takes down no hardware.
        if scope == "job":
            return range(0)
        if scope in ("device", "host"):
            host = place // self.devices_per_host if scope == "device" else place
            return range(host, host + 1)
        several = self.hosts_per_rack * (self.racks_per_pod if scope == "pod" else 1)
        return range(place * several, min((place + 1) * several, self.hosts))

    def hosts_of(self, scope: str) -> int:
        """Return how many hosts go down if a component of `scope` fails."""
        rack = min(self.hosts_per_rack, self.hosts)
        pod = min(rack * self.racks_per_pod, self.hosts)
        return {"device": 1, "host": 1, "rack": rack, "pod": pod, "job": 0}[scope]


@dataclass(frozen=True)
class FailureClass:
    """A kind of failure.

    Attributes:
        name: Name in the catalogue.
        title: Description.
        scope: Hardware that the failure takes down: "device", "host", "rack", "pod", or "job" for
            none.
        rate: Failures per second and component of kind `per`.
        per: Kind of component whose number the total rate is proportional to. It differs from
            `scope` only for job failures that are more frequent on more hardware.
        detect: Seconds until the failure is noticed.
        repair: Mean time in seconds until the hosts return, or 0 if they stay in the run.
        planned: True if the run saves before it stops.
        slowdown: Slowdown factor of the run. If it is 1, the run stops instead.
        lasts: Mean duration of the slowdown in seconds.
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
        """Return the total failures per second of all components."""
        return topology.components(self.per) * self.rate


@dataclass(frozen=True)
class Failures:
    """The content of a failure file."""

    title: str
    classes: tuple[FailureClass, ...]
    hosts_per_rack: int
    racks_per_pod: int
    sources: Mapping[str, Source] = field(default_factory=dict)
    """The source of each value by class and key, such as "gpu.count"."""


def names() -> list[str]:
    """Return the names of the package's own failure files."""
    return sorted(each.stem for each in OWN.glob("*.toml"))


def read_failures(name: str) -> Failures:
    """Read the package's failure file with this name, or the .toml file at this path.

    The name "none" means no failures. Raises ConfigError if there is no such file, or at the first
    invalid entry.
    """
    if name == "none":
        return Failures("no failures", (), 1, 1)
    path = Path(name) if name.endswith(".toml") else OWN / f"{name}.toml"
    if not path.is_file():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--failures {name}: no such file.{hint} Write none, "
            f"{', '.join(names())}, or the path of your own .toml file."
        )
    return _Reading(path).failures()


class _Reading(SourcedFile):
    """Reads the tables of one failure file."""

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
            raise self.wrong("observed must be a table [observed].")
        self.only(entry, _OBSERVED, "[observed]")
        numbers = {key: self._number(value, f"observed.{key}") for key, value in entry.items()}
        if broken := [key for key in numbers if key != "days" and numbers[key] % 1]:
            raise self.wrong(f"[observed] {broken[0]} must be an integer.")
        return numbers

    def _class(
        self, name: str, entry: Mapping[str, Any], observed: Mapping[str, float]
    ) -> FailureClass:
        where = f"[class.{name}]"
        self.only(entry, ("title", "scope", "per", "planned", *_NUMBERS), where)
        scope = self.text(entry, "scope", where)
        if scope not in SCOPES:
            raise self.wrong(f"{where} scope must be one of {', '.join(SCOPES)}, not {scope!r}.")
        per = self._per(entry, name, scope)
        values = {
            key: self._number(entry[key], f"{name}.{key}") for key in _NUMBERS if key in entry
        }
        if values.get("slowdown", 2.0) <= 1 or ("slowdown" in values) != ("lasts_hours" in values):
            raise self.wrong(
                f"{where} slowdown must be above 1, and needs lasts_hours (and the reverse)."
            )
        return FailureClass(
            name=name,
            title=self.text(entry, "title", where),
            scope=scope,
            rate=self._rate(where, per, values, observed),
            per=per,
            detect=values.get("detect_seconds", 0.0),
            repair=values.get("repair_hours", 0.0) * HOUR,
            planned=entry.get("planned") is True,
            slowdown=values.get("slowdown", 1.0),
            lasts=values.get("lasts_hours", 0.0) * HOUR,
        )

    def _rate(
        self, where: str, per: str, values: Mapping[str, float], observed: Mapping[str, float]
    ) -> float:
        """Return the failures per second and component of kind `per`."""
        if ("count" in values) == ("per_1000_days" in values):
            raise self.wrong(f"{where} needs either count or per_1000_days.")
        if "per_1000_days" in values:
            return values["per_1000_days"] / (1000 * DAY)
        if missing := [key for key in _OBSERVED[:3] if key not in observed]:
            raise self.wrong(f"{where} has a count, so [observed] needs {missing[0]}.")
        # The rate per component needs the number of components in the observed run.
        hosts = math.ceil(observed["devices"] / observed["devices_per_host"])
        seen = Topology(
            hosts,
            int(observed["devices_per_host"]),
            int(observed.get("hosts_per_rack", 1)),
            int(observed.get("racks_per_pod", 1)),
        )
        return values["count"] / (observed["days"] * DAY * seen.components(per))

    def _per(self, entry: Mapping[str, Any], name: str, scope: str) -> str:
        """Return the kind of component for `FailureClass.per` (`scope` by default)."""
        if "per" not in entry:
            return scope
        value, self._found[f"{name}.per"] = self.sourced(entry["per"], f"{name}.per")
        if scope != "job" or value not in SCOPES:
            raise self.wrong(
                f"[class.{name}] per must be one of {', '.join(SCOPES)}, and needs scope job: "
                f"it is {value!r}, and the scope is {scope}."
            )
        return str(value)

    def _number(self, entry: Any, where: str) -> float:
        """Return the number in `entry`, and store its source under `where`."""
        value, self._found[where] = self.number(entry, where)
        return value
