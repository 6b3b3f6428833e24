"""Settings lists all settings of a run; the flags of the command line are made from it. Pure."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import values
from shardwise.config.outer_optimizer import FORMATS, IslandRule, Outer, StalenessRule
from shardwise.errors import ConfigError
from shardwise.layout.placement import DEVICE, Placement, Tier

PRECISIONS = ("fp32", "bf16-mixed", "bf16", "fp16-mixed", "fp64")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def _setting(
    group: str,
    help: str,
    parse: Callable[[str], Any],
    metavar: str,
    *,
    default: Any = None,
    rare: bool = False,
) -> Any:
    """A field of Settings; `metavar` is empty for an on/off switch, `rare` keeps it out of the
    first screen of help."""
    metadata = {"parse": parse, "group": group, "help": help, "metavar": metavar, "rare": rare}
    return dataclasses.field(default=default, metadata=metadata)


def _switch(group: str, help: str, *, default: bool = False, rare: bool = False) -> Any:
    """A setting that is on or off."""
    return _setting(group, help, values.switch, "", default=default, rare=rare)


def _choice(
    group: str,
    help: str,
    words: Sequence[str],
    metavar: str = "",
    *,
    default: str = "",
    rare: bool = False,
) -> Any:
    """A setting that is one of `words`, the first of them by default."""
    return _setting(
        group,
        help,
        values.one_of(*words),
        metavar or "|".join(words),
        default=default or words[0],
        rare=rare,
    )


def _tier(group: str, help: str, *, default: Tier | None = None, rare: bool = False) -> Any:
    """A setting that says where a state rests."""
    return _setting(group, help, values.tier, "cpu|nvme:DIR", default=default, rare=rare)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run. The command line's flags are made from these fields."""

    device: str = _choice(
        "where",
        "auto: a GPU per local rank where there are enough, else CPU",
        ("auto", "cpu", "cuda"),
    )
    transport: str = _choice(
        "where",
        "auto: NCCL, shared memory or Gloo; by gloo ranks share a GPU",
        ("auto", "shared", "gloo"),
    )
    rendezvous: str | None = _setting(
        "where",
        "where ranks of mpirun or srun meet, if it cannot be found out",
        values.rendezvous,
        "HOST:PORT|DIR/",
        rare=True,
    )
    zero: int | None = _setting(
        "spread",
        "0 replicates all; 1 shards optimizer state; 2 gradients; 3 all",
        values.whole(0),
        "0|1|2|3",
    )
    shard: tuple[str, ...] | None = _setting(
        "spread",
        "the same by name, such as gradients,optimizer",
        values.states,
        "STATES",
        rare=True,
    )
    offload_optimizer: Tier | None = _tier("spread", "optimizer state (and gradients) rest there")
    offload_params: Tier | None = _tier("spread", "sharded parameters rest there")
    offload_gradients: Tier | None = _tier("spread", "sharded gradients rest there", rare=True)
    shard_within: str = _choice(
        "spread", "host: shard in each host, replicate between", ("all", "host"), rare=True
    )
    units: tuple[str, ...] | None = _setting(
        "spread",
        "modules gathered as a whole; default: repeated blocks",
        values.patterns,
        "NAMES",
        rare=True,
    )
    tensor: int = _setting(
        "spread",
        "tensor parallel: split every layer over T workers",
        values.whole(1, values.MOST_RANKS),
        "T",
        default=1,
    )
    sequence_parallel: bool = _switch(
        "spread", "with --tensor: norms and residuals by tokens, on one worker each", rare=True
    )
    pipeline: int = _setting(
        "spread",
        "pipeline parallel: stages on P workers",
        values.whole(1, values.MOST_RANKS),
        "P",
        default=1,
    )
    microbatches: int | None = _setting(
        "spread",
        "micro-batches that follow each other through the stages",
        values.whole(1),
        "M",
        rare=True,
    )
    schedule: str = _choice(
        "spread",
        "order of the stages: " + ", ".join(SCHEDULES),
        SCHEDULES,
        "NAME",
        default="1f1b",
        rare=True,
    )
    stages: tuple[str, ...] | None = _setting(
        "spread",
        "modules at which a new stage begins; default: alike in parameters",
        values.patterns,
        "NAMES",
        rare=True,
    )
    islands: int | str = _setting(
        "islands",
        "workers in N groups that step by themselves; host: one per host",
        values.islands,
        "host|N",
        default=1,
        rare=True,
    )
    equal_every: int | None = _setting(
        "islands",
        "islands make their parameters equal every H steps (default 30)",
        values.whole(1),
        "H",
        rare=True,
    )
    outer: Outer = _setting(
        "islands",
        "how: mean, or nesterov:LR,MOMENTUM over the mean (DiLoCo)",
        Outer.parse,
        "OUTER",
        default=Outer(),
        rare=True,
    )
    wire: str = _choice(
        "islands",
        "how differences or gradients are sent: fp32, bf16, int8, int4",
        FORMATS,
        "W",
        rare=True,
    )
    late: int = _setting(
        "islands",
        "use them T steps after they were sent, and compute meanwhile",
        values.whole(0),
        "T",
        default=0,
        rare=True,
    )
    behind: int | None = _setting(
        "islands",
        "make gradients equal instead, and use them S steps later",
        values.whole(0),
        "S",
        rare=True,
    )
    micro_batch_size: int | None = _setting(
        "spread", "samples per worker per backward; the rest accumulates", values.whole(1), "M"
    )
    batch: str = _choice(
        "spread",
        "what a Loader's batch_size counts: the whole, or each worker's",
        ("total", "worker"),
        rare=True,
    )
    exact: int | None = _setting(
        "spread",
        "V micro-shards per step: same bits on 1, 2, 4, ... V",
        values.whole(1, 2**16),
        "V",
    )
    bucket_mb: float = _setting(
        "spread",
        "size of a flat bucket in MB",
        values.number(0, 1e6, above=True),
        "MB",
        default=25.0,
        rare=True,
    )
    overlap: bool = _switch("spread", "reduce gradients beside backward", default=True, rare=True)
    activations: str = _choice(
        "spread", "recomputed: backward runs each unit again", ("kept", "recomputed")
    )
    offload_activations: Tier = _tier(
        "spread", "what forward saves for backward rests there", default=DEVICE
    )
    sync_batch_norm: bool = _switch("spread", "BatchNorm statistics over all workers")
    precision: str = _choice(
        "precision", "fp32, bf16-mixed, bf16, fp16-mixed or fp64", PRECISIONS, "P"
    )
    reduce_dtype: str = _choice(
        "precision",
        "sum 16-bit gradients in fp32, or in their own dtype",
        ("fp32", "param"),
        rare=True,
    )
    compile: bool = _switch("precision", "torch.compile each unit, hooks outside")
    nonfinite: str = _choice(
        "recover", "a NaN gradient stops the run, or skips the step", ("stop", "skip"), rare=True
    )
    save_failure: str = _choice(
        "recover", "no room for a checkpoint: stop, or train on", ("stop", "continue"), rare=True
    )
    trial: bool = _switch(
        "recover", "leave no trace: nothing is resumed, saved or exported", rare=True
    )
    seed: int | None = _setting(
        "recover", "overrides the script's seed", values.whole(0, values.LARGEST_SEED), "S"
    )
    reseed: bool = _switch(
        "recover",
        "seed generators at every step; off: they are the script's own",
        default=True,
        rare=True,
    )
    timeout: float = _setting(
        "watch",
        "seconds a collective may wait for a rank",
        values.number(0, values.LONGEST, above=True),
        "SECONDS",
        default=300.0,
    )
    warn_after: float = _setting(
        "watch",
        "seconds of waiting until it is said for whom",
        values.number(0, values.LONGEST, above=True),
        "SECONDS",
        default=60.0,
        rare=True,
    )
    ema_decay: float | None = _setting(
        "precision",
        "keep an exponential moving average of the weights",
        values.fraction,
        "D",
        rare=True,
    )
    timeline: Path | None = _setting(
        "watch", "where time goes, event by event, as Chrome trace JSON", values.file, "FILE"
    )
    record: str | None = _setting(
        "watch",
        "write what each step took there, for shardwise scale",
        values.folder,
        "DIR",
        rare=True,
    )
    record_tensors: str | None = _setting(
        "watch",
        "write what each step computes there, for shardwise verify",
        values.folder,
        "DIR",
        rare=True,
    )
    stop_after: int | None = _setting(
        "watch",
        "end the run, with success, after so many steps",
        values.whole(1),
        "STEPS",
        rare=True,
    )
    time_layers: Path | None = _setting(
        "watch",
        "write there how long each layer takes, for shardwise pipeline-plan",
        values.file,
        "FILE",
        rare=True,
    )
    quiet: bool = _switch("watch", "do not print the lines at the start", rare=True)

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

    @property
    def averaging_rule(self) -> IslandRule:
        """How islands average parameters. Raises ConfigError for numbers that do not fit."""
        every = IslandRule.every if self.equal_every is None else self.equal_every
        return IslandRule(every=every, outer=self.outer, wire=self.wire, late=self.late)

    @property
    def staleness_rule(self) -> StalenessRule | None:
        """How islands make their gradients equal; None where they do not."""
        if self.behind is None:
            return None
        return StalenessRule(behind=self.behind, wire=self.wire)

    @property
    def equal_in_words(self) -> str:
        """What islands make equal when."""
        return (self.staleness_rule or self.averaging_rule).in_words()


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def flag(name: str) -> str:
    """The spelling of a setting on the command line: micro_batch_size is --micro-batch-size."""
    return "--" + name.replace("_", "-")


_OF_PARAMETERS = "that is of parameters that are made equal, and --behind makes gradients so"

_BESIDE_BEHIND: dict[str, tuple[Callable[[Settings], bool], str]] = {
    "equal_every": (
        lambda settings: settings.equal_every not in (None, 1),
        f"{_OF_PARAMETERS}, at every step",
    ),
    "outer": (lambda settings: settings.outer != Outer(), _OF_PARAMETERS),
    "late": (lambda settings: settings.late > 0, _OF_PARAMETERS),
    "exact": (
        lambda settings: settings.exact is not None,
        "what islands compute depends on how many there are",
    ),
}


def check_contradictions(settings: Settings) -> None:
    """Raise ConfigError for a setting that does not work with --behind."""
    if settings.behind is None:
        return
    for name, (is_on, why) in _BESIDE_BEHIND.items():
        if is_on(settings):
            raise ConfigError(
                f"--behind {settings.behind} and {flag(name)} {getattr(settings, name)} cannot be "
                f"had together: {why}. Leave one of them out."
            )
