"""Reads settings from flags, environment, files and the script, and merges them by precedence."""

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import deepspeed, values
from shardwise.config.settings import FIELDS, Settings, flag
from shardwise.errors import ConfigError
from shardwise.messages.other_libraries import hint as hint_at_other_library

FLAGS_VARIABLE = "SHARDWISE_FLAGS"
"""Variable that passes the flags of `shardwise run` to the ranks, as a JSON object of strings."""

PREFIX = "SHARDWISE_"

ENVIRONMENT = "environment"
"""The name of the source that reads our own variables."""

FLAG = "flag"
"""The name of the strongest source in messages."""

FILE = "file"
"""The first word in the name of a source that is a TOML file."""

SCRIPT = "the script"
"""The name of the weakest source in messages."""


@dataclass(frozen=True)
class SettingsSource:
    """A source of settings, with its name for messages and its raw values."""

    name: str
    values: Mapping[str, Any]


def parse(name: str, value: Any, source: str) -> Any:
    """Convert the raw value of setting `name` to the setting's type.

    Raises ConfigError, naming `source`, if the setting is unknown or the value is invalid.
    """
    try:
        field = FIELDS[name]
    except KeyError:
        raise unknown_key(name, FIELDS, source) from None
    if value is None:
        return field.default
    kind = field.metadata["parse"]
    try:
        return kind(values.as_text(value, kind))
    except ValueError as wanted:
        places = {FLAG: flag(name), ENVIRONMENT: f"variable {PREFIX}{name.upper()}"}
        place = places.get(source, f"{source}: {name}")
        raise ConfigError(f"{place} takes {wanted}, not {value!r}.") from None


FLAGS_ALONE = (
    *("-n", "-np", "-m", "-H", "-x", "--nproc-per-node", "--host", "--hosts", "--hostfile"),
    *("--machinefile", "--port", "--interface", "--config", "--ssh", "--ssh-port", "--python"),
    *("--dry-run", "--nnodes", "--rdzv-endpoint", "--rdzv-id", "--node-rank", "--restarts"),
    *("--adopt", "--max-restarts", "--log-dir", "--show", "--host-timeout", "--grace"),
    *("--deepspeed", "--elastic-islands"),
)
"""Launcher flags that are not settings, such as those for hosts and output."""


def unknown_key(name: str, known: Iterable[str], source: str) -> ConfigError:
    """Return the error for an unknown key. It suggests the most similar known key.

    The suggestion is spelled as in `source`, for example with hyphens in a TOML file.
    """
    said = f"{source}: there is no setting {name!r}."
    for alone in FLAGS_ALONE:
        if alone.lstrip("-") == name.replace("_", "-"):
            return ConfigError(f"{said} {alone} is only a flag of shardwise run: pass it there.")
    if hint := hint_at_other_library(name):
        return ConfigError(f"{said} {hint}")
    if source.startswith(FILE):
        known = [each.replace("_", "-") for each in known]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known settings: {', '.join(known)}."
    return ConfigError(f"{said} {hint}")


_ELSEWHERE = {
    "device": "sw.init",
    "seed": "sw.init",
    "reseed": "sw.init",
    "timeout": "sw.init",
    "warn_after": "sw.init",
    "transport": "sw.init",
    "exact": "sw.init",
    "tensor": "sw.init",
    "expert": "sw.init",
    "context": "sw.init",
    "pipeline": "sw.init",
    "islands": "sw.init",
    "behind": "sw.init",
    "rendezvous": "sw.init",
    "timeline": "sw.init",
    "micro_batch_size": "sw.Loader",
    "step_tokens": "sw.Loader",
    "micro_batch_tokens": "sw.Loader",
    "batch": "sw.init",
    "record": "sw.init",
    "record_tensors": "sw.init",
    "stop_after": "sw.init",
    "trial": "sw.init",
    "survive": "sw.init",
    "spares": "sw.init",
}


OF_THE_ENGINE = FIELDS.keys() - _ELSEWHERE.keys()
"""The settings that are keyword arguments of `sw.Engine`."""


def refuse_elsewhere(keywords: Mapping[str, Any], caller: str) -> None:
    """Raise ConfigError if a keyword is an argument of a function other than `caller`."""
    for name in keywords:
        if name in _ELSEWHERE:
            raise ConfigError(
                f"{name} is not a setting of the {caller}: pass it to {_ELSEWHERE[name]}(...), or "
                f"as the flag {flag(name)}."
            )


def sources(environ: Mapping[str, str], keywords: Mapping[str, Any]) -> list[SettingsSource]:
    """Return the sources of this process's settings, strongest first.

    Raises ConfigError if a key is unknown or a file cannot be read.
    """
    # Flags are read first because they name the files. They take precedence over variables because
    # a job script may export variables for all of its runs.
    flags = _passed_flags(environ)
    config = flags.pop("config", None) or environ.get(PREFIX + "CONFIG")
    flags.pop("deepspeed", None)  # a source, not a setting
    of_deepspeed = json_of_deepspeed(environ)
    found = [SettingsSource(FLAG, flags), SettingsSource(ENVIRONMENT, _from_environment(environ))]
    # Sources are ordered by strength: our own variables take precedence over Horovod's.
    if environ.get(HOROVOD_TIMELINE, "") not in _NO_FILE:
        found.append(SettingsSource(HOROVOD_TIMELINE, {"timeline": environ[HOROVOD_TIMELINE]}))
    if config:
        found.append(SettingsSource(f"{FILE} {config}", _from_toml(Path(config))))
    if of_deepspeed:
        settings = deepspeed.parse(of_deepspeed).settings
        found.append(SettingsSource(f"DeepSpeed's {of_deepspeed}", settings))
    found.append(SettingsSource(SCRIPT, keywords))
    return found


def json_of_deepspeed(environ: Mapping[str, str]) -> str | None:
    """Return the path of this process's DeepSpeed JSON config, or None if there is none."""
    return _passed_flags(environ).get("deepspeed") or environ.get(PREFIX + "DEEPSPEED") or None


def winning_values(found: list[SettingsSource]) -> dict[str, tuple[Any, str]]:
    """Return each setting's value and the name of its source.

    `found` lists the sources, strongest first.
    """
    winners: dict[str, tuple[Any, str]] = {}
    for source in found:
        for name, raw in source.values.items():
            # The strongest source comes first, so later sources do not replace its value. Weaker
            # values are parsed too, so that mistakes in them are reported.
            winners.setdefault(name, (parse(name, raw, source.name), source.name))
    return winners


def resolve(found: list[SettingsSource]) -> tuple[Settings, list[str]]:
    """Merge the sources `found` (strongest first) into Settings.

    Returns the settings, and messages about overridden values.
    """
    winners = winning_values(found)
    chosen = {name: value for name, (value, _) in winners.items()}
    # Values are compared after parsing, so that --zero 2 does not "override" zero = 2.
    overrides = [
        f"{as_given(name, *winners[name])} overrides {_plain(value)} ({source.name})"
        for source in found
        for name, raw in source.values.items()
        if (value := parse(name, raw, source.name)) != chosen[name]
    ]
    # `zero` and `shard` set the same thing. If a single source sets both, Settings raises an error
    # if they contradict each other. If different sources set them, the stronger one wins, as for
    # any other setting.
    if {"zero", "shard"} <= chosen.keys():
        order = [source.name for source in found]
        ranks = {name: order.index(winners[name][1]) for name in ("zero", "shard")}
        if ranks["zero"] != ranks["shard"]:
            weaker = max(ranks, key=lambda name: ranks[name])
            stronger = "zero" if weaker == "shard" else "shard"
            overrides.append(
                f"{as_given(stronger, *winners[stronger])} overrides "
                f"{as_given(weaker, *winners[weaker])}"
            )
            del chosen[weaker]
    return Settings(**chosen), overrides


def load(keywords: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Return this process's settings, and messages about overridden values.

    Args:
        keywords: Keyword arguments that the script passed to `sw.init` or `sw.Engine`.
    """
    return resolve(sources(os.environ, keywords))


def as_given(name: str, value: Any, source: str) -> str:
    """Format a setting, its value and its source as text, such as "zero=2 (flag)"."""
    return f"{name}={_plain(value)} ({source})"


def _plain(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


_IDENTITY = {"RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "ALONE"}
"""Variables that tell a process its rank (see net/launchers/detection.py)."""

_NOT_SETTINGS = {"FLAGS", "CONFIG", "DEEPSPEED", "SECRET", *_IDENTITY}
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
"""Horovod's variable for the timeline file, accepted here too."""

_NO_FILE = ("", "DYNAMIC")
"""Values of HOROVOD_TIMELINE that are not file names.

DYNAMIC means that the script starts the timeline.
"""
_LAUNCH_PREFIX = PREFIX + "LAUNCH_"


def _passed_flags(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the flags that `shardwise run` passed to this rank.

    Raises ConfigError if the environment variable that holds them is malformed.
    """
    text = environ.get(FLAGS_VARIABLE, "{}")
    try:
        flags = json.loads(text)
    except (ValueError, RecursionError):
        flags = None
    if not isinstance(flags, dict) or not all(isinstance(each, str) for each in flags.values()):
        raise ConfigError(
            f"{FLAGS_VARIABLE} is {text[:80]!r}, which is not a JSON object of strings. Only "
            "shardwise run sets this variable: unset it, and write settings as SHARDWISE_<NAME>."
        )
    return flags


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings from SHARDWISE_<NAME> variables, except the launcher's (_LAUNCH_).

    Raises ConfigError if a variable is unknown, or if a setting is given twice.
    """
    found: dict[str, str] = {}
    spelt: dict[str, str] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable.startswith(_LAUNCH_PREFIX):
            continue
        name = variable.removeprefix(PREFIX)
        if name in _NOT_SETTINGS:
            continue
        if name.lower() not in FIELDS:
            raise unknown_key(name.lower(), FIELDS, f"environment variable {variable}")
        # Variables are case-sensitive but settings are not, so one spelling would hide the other.
        if name.lower() in found:
            raise _twice("The environment", spelt[name.lower()], variable)
        found[name.lower()], spelt[name.lower()] = value, variable
    return found


def _from_toml(path: Path) -> dict[str, Any]:
    """Return the settings from a TOML file. Keys may be spelled with hyphens or underscores.

    Raises ConfigError if a key is unknown or given twice.
    """
    found: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for key, value in _table(path).items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise unknown_key(key, FIELDS, f"{FILE} {path}")
        if name in found:
            raise _twice(f"The config file {path}", spelt[name], key)
        found[name], spelt[name] = value, key
    return found


def _table(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises ConfigError if it cannot be read or is not valid TOML."""
    try:
        # Reading a FIFO or a terminal would block forever.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"The config file {path} is not a regular file: name a TOML file.")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"The config file {path} cannot be read: {why}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The config file {path} is not UTF-8 at byte {error.start}. TOML is UTF-8: save the "
            "file as UTF-8."
        ) from None
    except RecursionError:
        raise ConfigError(f"The config file {path} is not TOML: it is nested too deeply.") from None
    except ValueError as error:  # from tomllib, or from int() for numbers that are too long
        raise ConfigError(f"The config file {path} is not TOML: {error}.") from None


def _twice(where: str, first: str, second: str) -> ConfigError:
    return ConfigError(
        f"{where} has {first} and {second}, which are the same setting: leave one of them out."
    )
