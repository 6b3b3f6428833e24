"""The settings of a run: what they are, and which of four sources wins.

A setting comes from, in order of precedence: a flag of `shardwise run`, an environment variable
SHARDWISE_<NAME> (for those who start with torchrun or srun), a TOML file, a keyword in the
script. This is the one place where strings become types. Pure: nothing here starts or prints.
"""

import dataclasses
import difflib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.placement import DEVICE, STATES, Placement, Tier

FLAGS_VARIABLE = "SHARDWISE_FLAGS"
"""`shardwise run` hands its flags to the ranks in this variable, as a JSON object of strings."""

PREFIX = "SHARDWISE_"

FLAG = "flag"
"""The name of the strongest source, in messages."""

FILE = "file"
"""What the name of a TOML file as a source begins with."""

PRECISIONS = ("fp32", "bf16-mixed", "bf16", "fp16-mixed")


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def _integer(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("a whole number") from None
        if value < low:
            raise ValueError(f"a whole number of {low} or more")
        return value

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("a number above 0")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise ValueError("a number between 0 and 1")
    return value


def _switch(text: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True}
    words |= {"false": False, "no": False, "off": False, "0": False}
    try:
        return words[text.strip().lower()]
    except KeyError:
        raise ValueError("on or off") from None


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return text

    return parse


def _rendezvous(text: str) -> str:
    host, _, port = text.rpartition(":")
    if os.sep not in text and not (host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("HOST:PORT of rank 0, or a folder that all hosts share, with a / in it")
    return text


def _states(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in STATES]:
        raise ValueError(f"names out of {', '.join(STATES)}, not {unknown[0]!r}")
    return names


def _file(text: str) -> Path:
    if not text.strip() or text.endswith(os.sep):
        raise ValueError("the name of a file")
    return Path(text)


def _folder(text: str) -> str:
    if not text.strip():
        raise ValueError("the name of a folder")
    return text


def _patterns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("names of modules, such as encoder.layer.*")
    return names


def _setting(
    default: Any,
    parse: Callable[[str], Any],
    group: str,
    help: str,
    metavar: str = "",
    *,
    rare: bool = False,
) -> Any:
    """A field of Settings; `metavar` is empty for an on/off switch, `rare` keeps it out of the
    first screen of help."""
    metadata = {"parse": parse, "group": group, "help": help, "metavar": metavar, "rare": rare}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run. The command line's flags are made from these fields."""

    device: str = _setting(
        "auto",
        _one_of("auto", "cpu", "cuda"),
        "where",
        "auto: a GPU per local rank where there are enough, else CPU",
        "auto|cpu|cuda",
    )
    transport: str = _setting(
        "auto",
        _one_of("auto", "shared", "gloo"),
        "where",
        "auto: NCCL, shared memory or Gloo; by gloo ranks share a GPU",
        "auto|shared|gloo",
    )
    rendezvous: str | None = _setting(
        None,
        _rendezvous,
        "where",
        "where ranks of mpirun or srun meet, if it cannot be found out",
        "HOST:PORT|DIR/",
        rare=True,
    )
    zero: int | None = _setting(
        None,
        _integer(0),
        "spread",
        "0 replicates all; 1 shards optimizer state; 2 gradients; 3 all",
        "0|1|2|3",
    )
    shard: tuple[str, ...] | None = _setting(
        None,
        _states,
        "spread",
        "the same by name, such as gradients,optimizer",
        "STATES",
        rare=True,
    )
    offload_optimizer: Tier | None = _setting(
        None, Tier.parse, "spread", "optimizer state (and gradients) rest there", "cpu|nvme:DIR"
    )
    offload_params: Tier | None = _setting(
        None, Tier.parse, "spread", "sharded parameters rest there", "cpu|nvme:DIR"
    )
    offload_gradients: Tier | None = _setting(
        None, Tier.parse, "spread", "sharded gradients rest there", "cpu|nvme:DIR", rare=True
    )
    shard_within: str = _setting(
        "all",
        _one_of("all", "host"),
        "spread",
        "host: shard in each host, replicate between",
        "all|host",
    )
    units: tuple[str, ...] | None = _setting(
        None,
        _patterns,
        "spread",
        "modules gathered as a whole; default: repeated blocks",
        "NAMES",
        rare=True,
    )
    tensor: int = _setting(
        1, _integer(1), "spread", "split every layer over T neighbouring workers", "T"
    )
    sequence_parallel: bool = _setting(
        False,
        _switch,
        "spread",
        "with --tensor: norms and residuals by tokens, on one worker each",
        rare=True,
    )
    pipeline: int = _setting(
        1, _integer(1), "spread", "share layers out over P workers, in stages", "P"
    )
    microbatches: int | None = _setting(
        None,
        _integer(1),
        "spread",
        "parts of a batch that follow each other through the stages",
        "M",
        rare=True,
    )
    schedule: str = _setting(
        "1f1b",
        _one_of(*SCHEDULES),
        "spread",
        "order of the stages: " + ", ".join(SCHEDULES),
        "NAME",
        rare=True,
    )
    stages: tuple[str, ...] | None = _setting(
        None,
        _patterns,
        "spread",
        "modules at which a new stage begins; default: alike in parameters",
        "NAMES",
        rare=True,
    )
    micro_batch_size: int | None = _setting(
        None, _integer(1), "spread", "samples per worker per backward; the rest accumulates", "M"
    )
    batch: str = _setting(
        "total",
        _one_of("total", "worker"),
        "spread",
        "what a Loader's batch_size counts: the whole, or each worker's",
        "total|worker",
        rare=True,
    )
    exact: int | None = _setting(
        None, _integer(1), "spread", "V micro-shards per step: same bits on 1, 2, 4, ... V", "V"
    )
    bucket_mb: float = _setting(
        25.0, _positive, "spread", "size of a flat bucket in MB", "MB", rare=True
    )
    overlap: bool = _setting(True, _switch, "spread", "reduce gradients beside backward", rare=True)
    activations: str = _setting(
        "kept",
        _one_of("kept", "recomputed"),
        "spread",
        "recomputed: backward runs each unit again",
        "kept|recomputed",
    )
    offload_activations: Tier = _setting(
        DEVICE, Tier.parse, "spread", "what forward saves for backward rests there", "cpu|nvme:DIR"
    )
    sync_batch_norm: bool = _setting(
        False, _switch, "spread", "BatchNorm statistics over all workers"
    )
    precision: str = _setting(
        "fp32", _one_of(*PRECISIONS), "precision", "fp32, bf16-mixed, bf16 or fp16-mixed", "P"
    )
    reduce_dtype: str = _setting(
        "fp32",
        _one_of("fp32", "param"),
        "precision",
        "sum 16-bit gradients in fp32, or in their own dtype",
        "fp32|param",
        rare=True,
    )
    compile: bool = _setting(False, _switch, "precision", "torch.compile each unit, hooks outside")
    nonfinite: str = _setting(
        "stop",
        _one_of("stop", "skip"),
        "recover",
        "a NaN gradient stops the run, or skips the step",
        "stop|skip",
        rare=True,
    )
    save_failure: str = _setting(
        "stop",
        _one_of("stop", "continue"),
        "recover",
        "no room for a checkpoint: stop, or train on",
        "stop|continue",
        rare=True,
    )
    trial: bool = _setting(
        False,
        _switch,
        "recover",
        "leave no trace: nothing is resumed, saved or exported",
        rare=True,
    )
    seed: int | None = _setting(None, _integer(0), "recover", "overrides the script's seed", "S")
    timeout: float = _setting(
        300.0, _positive, "watch", "seconds a collective may wait for a rank", "SECONDS"
    )
    warn_after: float = _setting(
        60.0,
        _positive,
        "watch",
        "seconds of waiting until it is said for whom",
        "SECONDS",
        rare=True,
    )
    ema_decay: float | None = _setting(
        None,
        _fraction,
        "precision",
        "keep an exponential moving average of the weights",
        "D",
        rare=True,
    )
    timeline: Path | None = _setting(
        None, _file, "watch", "where time goes, event by event, as Chrome trace JSON", "FILE"
    )
    record: str | None = _setting(
        None,
        _folder,
        "watch",
        "write what each step took there, for shardwise scale",
        "DIR",
        rare=True,
    )
    stop_after: int | None = _setting(
        None,
        _integer(1),
        "watch",
        "end the run, with success, after so many steps",
        "STEPS",
        rare=True,
    )
    time_layers: Path | None = _setting(
        None,
        _file,
        "watch",
        "write there how long each layer takes, for shardwise split",
        "FILE",
        rare=True,
    )
    quiet: bool = _setting(
        False, _switch, "watch", "do not print the lines at the start", rare=True
    )

    @property
    def placement(self) -> Placement:
        """The row that `zero` or `shard` asks for; ZERO_0 when neither does."""
        if self.shard is not None:
            row = Placement.sharding(self.shard)
            if self.zero is not None and self.zero != row.level:
                raise ConfigError(
                    f"zero={self.zero} and shard={','.join(self.shard)} ask for different rows "
                    f"({Placement.zero(self.zero).name} and {row.name}): give one of them."
                )
        else:
            row = Placement.zero(self.zero or 0)
        return row.resting(
            parameters=self.offload_params or DEVICE,
            gradients=self.offload_gradients,
            optimizer=self.offload_optimizer or DEVICE,
        )


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


@dataclass(frozen=True)
class Source:
    """One place that settings come from: a name for messages, and its values as given."""

    name: str
    values: Mapping[str, Any]


def flag(name: str) -> str:
    """The spelling of a setting on the command line: micro_batch_size is --micro-batch-size."""
    return "--" + name.replace("_", "-")


def parse(name: str, value: Any, source: str) -> Any:
    """`value` of setting `name` in its type; raises ConfigError with `source` in the message."""
    try:
        field = FIELDS[name]
    except KeyError:
        raise unknown_key(name, FIELDS, source) from None
    if value is None:
        return field.default
    text = ",".join(value) if isinstance(value, list | tuple) else str(value)
    try:
        return field.metadata["parse"](text)
    except ValueError as wanted:
        place = flag(name) if source == FLAG else f"{source}: {name}"
        raise ConfigError(f"{place} takes {wanted}, not {value!r}.") from None


FLAGS_ALONE = (
    *("-n", "-np", "-m", "-H", "-x", "--nproc-per-node", "--host", "--hosts", "--hostfile"),
    *("--machinefile", "--port", "--interface", "--config", "--ssh", "--ssh-port", "--python"),
    *("--dry-run", "--nnodes", "--rdzv-endpoint", "--rdzv-id", "--node-rank", "--restarts"),
    *("--max-restarts", "--log-dir", "--show", "--host-timeout", "--grace"),
)
"""The flags of the launcher, which are no settings: where ranks run, and what is shown of them."""


def unknown_key(name: str, known: Iterable[str], source: str) -> ConfigError:
    """The error for a key that does not exist, naming the nearest one that does, as it is spelt in
    the `source`."""
    said = f"{source}: there is no setting {name!r}."
    for alone in FLAGS_ALONE:
        if alone.lstrip("-") == name.replace("_", "-"):
            return ConfigError(f"{said} {alone} is a flag of shardwise run alone: give it there.")
    if source.startswith(FILE):
        known = [each.replace("_", "-") for each in known]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known are: {', '.join(known)}."
    return ConfigError(f"{said} {hint}")


_ELSEWHERE = {
    "device": "sw.init",
    "seed": "sw.init",
    "timeout": "sw.init",
    "warn_after": "sw.init",
    "transport": "sw.init",
    "exact": "sw.init",
    "tensor": "sw.init",
    "rendezvous": "sw.init",
    "timeline": "sw.init",
    "micro_batch_size": "sw.Loader",
    "batch": "sw.init",
    "record": "sw.init",
    "stop_after": "sw.init",
    "trial": "sw.init",
}


OF_THE_ENGINE = FIELDS.keys() - _ELSEWHERE.keys()
"""The settings that are keywords of `sw.Engine`."""


def refuse_elsewhere(keywords: Mapping[str, Any], caller: str) -> None:
    """Raise ConfigError for a keyword of `sw.Engine` that would have no effect there."""
    for name in keywords:
        if name in _ELSEWHERE:
            raise ConfigError(
                f"{name} is no setting of the {caller}: give it to {_ELSEWHERE[name]}(...), or as "
                f"the flag {flag(name)}."
            )


def sources(environ: Mapping[str, str], keywords: Mapping[str, Any]) -> list[Source]:
    """The sources of this process, strongest first. Raises ConfigError for an unknown key."""
    flags: dict[str, str] = json.loads(environ.get(FLAGS_VARIABLE, "{}"))
    config = flags.pop("config", None) or environ.get(PREFIX + "CONFIG")
    found = [Source(FLAG, flags), Source("environment", _from_environment(environ))]
    if config:
        found.append(Source(f"{FILE} {config}", _from_toml(Path(config))))
    found.append(Source("the script", keywords))
    return found


def winning(found: list[Source]) -> dict[str, tuple[Any, str]]:
    """By name of a setting its value and where that came from, given `found` (strongest first)."""
    winners: dict[str, tuple[Any, str]] = {}
    for source in found:
        for name, raw in source.values.items():
            winners.setdefault(name, (parse(name, raw, source.name), source.name))
    return winners


def resolve(found: list[Source]) -> tuple[Settings, list[str]]:
    """Merge `found` (strongest first) into Settings, and say in words what overrides what."""
    winners = winning(found)
    values = {name: value for name, (value, _) in winners.items()}
    overrides = [
        f"{as_given(name, *winners[name])} overrides {_plain(value)} ({source.name})"
        for source in found
        for name, raw in source.values.items()
        if (value := parse(name, raw, source.name)) != values[name]
    ]
    # A row said in one way by a stronger source must not clash with the other way in a weaker.
    if {"zero", "shard"} <= values.keys():
        order = [source.name for source in found]
        ranks = {name: order.index(winners[name][1]) for name in ("zero", "shard")}
        if ranks["zero"] != ranks["shard"]:
            weaker = max(ranks, key=lambda name: ranks[name])
            stronger = "zero" if weaker == "shard" else "shard"
            overrides.append(
                f"{as_given(stronger, *winners[stronger])} overrides "
                f"{as_given(weaker, *winners[weaker])}"
            )
            del values[weaker]
    return Settings(**values), overrides


def load(keywords: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """The settings of this process, given the keywords that the script wrote."""
    return resolve(sources(os.environ, keywords))


def as_given(name: str, value: Any, source: str) -> str:
    """A setting in words, such as "zero=2 (flag)"."""
    return f"{name}={_plain(value)} ({source})"


def _plain(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


_NOT_SETTINGS = {"FLAGS", "CONFIG", "SECRET"}
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
"""Horovod's variable for the same, understood as well."""

_NO_FILE = ("", "DYNAMIC")
"""What Horovod takes there for none, and for a timeline that the script starts itself."""
_LAUNCH_PREFIX = PREFIX + "LAUNCH_"


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """SHARDWISE_<NAME> variables, but for those that the launcher itself sets (_LAUNCH_), and what
    Horovod has a variable for."""
    values = {}
    if environ.get(HOROVOD_TIMELINE, "") not in _NO_FILE:
        values["timeline"] = environ[HOROVOD_TIMELINE]
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable.startswith(_LAUNCH_PREFIX):
            continue
        name = variable.removeprefix(PREFIX)
        if name in _NOT_SETTINGS:
            continue
        if name.lower() not in FIELDS:
            raise unknown_key(name.lower(), FIELDS, f"environment variable {variable}")
        values[name.lower()] = value
    return values


def _from_toml(path: Path) -> dict[str, Any]:
    """The top level of a TOML file; keys are setting names, with hyphens or underscores."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The config file {path} is not TOML: {error}.") from None
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise unknown_key(key, FIELDS, f"{FILE} {path}")
        values[name] = value
    return values
