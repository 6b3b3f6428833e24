"""Defines all settings of a run. The command-line flags are generated from them."""

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
    """Define a field of Settings.

    If `metavar` is empty, the flag is an on/off switch. If `rare` is true, the setting is shown
    only by `--help-all`.
    """
    metadata = {"parse": parse, "group": group, "help": help, "metavar": metavar, "rare": rare}
    return dataclasses.field(default=default, metadata=metadata)


def _switch(group: str, help: str, *, default: bool = False, rare: bool = False) -> Any:
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
    """Define a setting whose value is one of `words`. The default is the first word."""
    return _setting(
        group,
        help,
        values.one_of(*words),
        metavar or "|".join(words),
        default=default or words[0],
        rare=rare,
    )


def _tier(group: str, help: str, *, default: Tier | None = None, rare: bool = False) -> Any:
    return _setting(group, help, values.tier, "cpu|nvme:DIR", default=default, rare=rare)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run. The command-line flags are generated from these fields."""

    device: str = _choice(
        "where",
        "auto: one GPU per local rank if there are enough, else CPU",
        ("auto", "cpu", "cuda"),
    )
    transport: str = _choice(
        "where",
        "auto: NCCL, shared memory or Gloo; gloo: ranks may share a GPU",
        ("auto", "shared", "gloo"),
        rare=True,
    )
    rendezvous: str | None = _setting(
        "where",
        "meeting place of ranks under mpirun or srun (default: detected)",
        values.rendezvous,
        "HOST:PORT|DIR/",
        rare=True,
    )
    # The default is None rather than 0, here and below: a value that was not given must neither
    # contradict another setting, such as `shard`, nor be reported as having no effect.
    zero: int | None = _setting(
        "spread",
        "shard: 1 optimizer state, 2 also gradients, 3 all (default 0)",
        values.whole(0, 3),
        "0|1|2|3",
    )
    shard: tuple[str, ...] | None = _setting(
        "spread",
        "states to shard, by name, such as gradients,optimizer",
        values.states,
        "STATES",
        rare=True,
    )
    offload_optimizer: Tier | None = _tier(
        "spread", "keep optimizer state (and gradients) in CPU memory or on disk"
    )
    offload_params: Tier | None = _tier(
        "spread", "keep sharded parameters in CPU memory or on disk"
    )
    offload_gradients: Tier | None = _tier(
        "spread", "keep sharded gradients in CPU memory or on disk", rare=True
    )
    shard_within: str = _choice(
        "spread", "host: shard within each host, replicate across hosts", ("all", "host"), rare=True
    )
    units: tuple[str, ...] | None = _setting(
        "spread",
        "modules to gather as a whole (default: repeated blocks)",
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
        "spread", "with --tensor: split norms and residuals by tokens", rare=True
    )
    expert: int = _setting(
        "spread",
        "expert parallel: spread experts over E workers",
        values.whole(1, values.MOST_RANKS),
        "E",
        default=1,
    )
    context: int = _setting(
        "spread",
        "context parallel: cut every sequence over C workers",
        values.whole(1, values.MOST_RANKS),
        "C",
        default=1,
    )
    context_method: str = _choice(
        "spread",
        "with --context: exchange heads, or gather keys and values",
        ("auto", "ulysses", "gathered"),
        rare=True,
    )
    pipeline: int = _setting(
        "spread",
        "pipeline parallel: stages of layers on P workers",
        values.whole(1, values.MOST_RANKS),
        "P",
        default=1,
    )
    microbatches: int | None = _setting(
        "spread",
        "micro-batches per step of the pipeline",
        values.whole(1),
        "M",
        rare=True,
    )
    schedule: str = _choice(
        "spread",
        "pipeline schedule: " + ", ".join(SCHEDULES),
        SCHEDULES,
        "NAME",
        default="1f1b",
        rare=True,
    )
    stages: tuple[str, ...] | None = _setting(
        "spread",
        "modules that start a stage (default: equal parameter counts)",
        values.patterns,
        "NAMES",
        rare=True,
    )
    # The number of islands may be unknown until the rendezvous, because "host" means one per host.
    islands: int | str = _setting(
        "islands",
        "groups of workers that step on their own; host: one per host",
        values.islands,
        "host|N",
        default=1,
        rare=True,
    )
    equal_every: int | None = _setting(
        "islands",
        "synchronise parameters across islands every H steps (default 30)",
        values.whole(1),
        "H",
        rare=True,
    )
    outer: Outer = _setting(
        "islands",
        "outer update: mean, or nesterov:LR,MOMENTUM of the mean (DiLoCo)",
        Outer.parse,
        "OUTER",
        default=Outer(),
        rare=True,
    )
    wire: str = _choice(
        "islands",
        "format that islands send values in: fp32, bf16, int8, int4",
        FORMATS,
        "W",
        rare=True,
    )
    late: int = _setting(
        "islands",
        "apply differences T steps after sending them; steps continue",
        values.whole(0),
        "T",
        default=0,
        rare=True,
    )
    behind: int | None = _setting(
        "islands",
        "synchronise gradients instead, and use them S steps later",
        values.whole(0),
        "S",
        rare=True,
    )
    micro_batch_size: int | None = _setting(
        "spread", "samples per worker and backward; gradients accumulate", values.whole(1), "M"
    )
    step_tokens: int | None = _setting(
        "spread",
        "tokens per step of all workers, for a sw.Loader with length=",
        values.whole(1),
        "T",
        rare=True,
    )
    micro_batch_tokens: int | None = _setting(
        "spread",
        "padded tokens per worker and backward, with sw.Loader(tokens=)",
        values.whole(1),
        "M",
        rare=True,
    )
    batch: str = _choice(
        "spread",
        "whether a Loader's batch_size is the total, or per worker",
        ("total", "worker"),
        rare=True,
    )
    exact: int | None = _setting(
        "spread",
        "compute in V micro-shards: same bits on 1, 2, 4, ... V workers",
        values.whole(1, 2**16),
        "V",
    )
    bucket_mb: float = _setting(
        "spread",
        "size of a gradient bucket in MiB",
        values.number(0, 1e6, above=True),
        "MB",
        default=25.0,
        rare=True,
    )
    overlap: bool = _switch(
        "spread", "reduce gradients while backward runs", default=True, rare=True
    )
    activations: str = _choice(
        "spread", "recomputed: rerun each unit during backward", ("kept", "recomputed")
    )
    offload_activations: Tier = _tier(
        "spread", "move saved activations to CPU memory or disk", default=DEVICE, rare=True
    )
    sync_batch_norm: bool = _switch("spread", "compute BatchNorm statistics over all workers")
    precision: str = _choice(
        "precision", "fp32, bf16-mixed, bf16, fp16-mixed or fp64", PRECISIONS, "P"
    )
    reduce_dtype: str = _choice(
        "precision",
        "param: sum 16-bit gradients in their own dtype, not in fp32",
        ("fp32", "param"),
        rare=True,
    )
    optimizer_state: str = _choice(
        "precision",
        "8bit: moments in 8 bits; 8bit-bf16: also no fp32 masters",
        ("full", "8bit", "8bit-bf16"),
        rare=True,
    )
    frozen_weights: str = _choice(
        "precision",
        "nf4: store frozen linear weights in 4 bits (QLoRA)",
        ("full", "nf4"),
        rare=True,
    )
    chunked_loss: bool = _switch(
        "precision", "Transformers: compute head and loss in chunks of tokens", rare=True
    )
    compile: bool = _switch("precision", "compile each unit with torch.compile")
    survive: int = _setting(
        "recover",
        "continue without lost workers, at most K at once",
        values.whole(0, values.MOST_RANKS),
        "K",
        default=0,
        rare=True,
    )
    spares: int = _setting(
        "recover",
        "with --survive: keep S workers ready to replace lost ones",
        values.whole(0, values.MOST_RANKS),
        "S",
        default=0,
        rare=True,
    )
    nonfinite: str = _choice(
        "recover", "on a NaN gradient, stop the run or skip the step", ("stop", "skip"), rare=True
    )
    save_failure: str = _choice(
        "recover",
        "if a checkpoint cannot be written, stop or continue",
        ("stop", "continue"),
        rare=True,
    )
    trial: bool = _switch("recover", "leave no trace: do not resume, save or export", rare=True)
    seed: int | None = _setting(
        "recover", "override the script's random seed", values.whole(0, values.LARGEST_SEED), "S"
    )
    reseed: bool = _switch(
        "recover",
        "seed generators at every step; off: leave them to the script",
        default=True,
        rare=True,
    )
    timeout: float = _setting(
        "watch",
        "seconds that a collective waits for a rank",
        values.number(0, values.LONGEST, above=True),
        "SECONDS",
        default=300.0,
    )
    warn_after: float = _setting(
        "watch",
        "warn after a wait of this many seconds, naming missing ranks",
        values.number(0, values.LONGEST, above=True),
        "SECONDS",
        default=60.0,
        rare=True,
    )
    ema_decay: float | None = _setting(
        "precision",
        "keep an exponential moving average of the weights, with decay D",
        values.fraction,
        "D",
        rare=True,
    )
    guard: int | None = _setting(
        "watch",
        "every K steps, compare copies of states, and compute a step twice",
        values.whole(1),
        "K",
        rare=True,
    )
    guard_action: str = _choice(
        "watch",
        "on an error found by the guard: stop, warn, or copy intact states",
        ("stop", "warn", "restore"),
        rare=True,
    )
    guard_spikes: str = _choice(
        "watch",
        "at a sudden large loss or gradient: warn, skip the step, or stop",
        ("warn", "skip", "stop"),
        rare=True,
    )
    guard_memory: bool = _switch(
        "watch", "with --guard: check the memory of all states in each step", rare=True
    )
    timeline: Path | None = _setting(
        "watch", "write a timeline of the run, as Chrome trace JSON", values.file, "FILE"
    )
    record: str | None = _setting(
        "watch",
        "write the time of each step there, for shardwise scale",
        values.folder,
        "DIR",
        rare=True,
    )
    record_tensors: str | None = _setting(
        "watch",
        "write the tensors of each step there, for shardwise verify",
        values.folder,
        "DIR",
        rare=True,
    )
    stop_after: int | None = _setting(
        "watch",
        "end the run successfully after this many steps",
        values.whole(1),
        "STEPS",
        rare=True,
    )
    time_layers: Path | None = _setting(
        "watch",
        "write the time of each layer there, for shardwise pipeline-plan",
        values.file,
        "FILE",
        rare=True,
    )
    quiet: bool = _switch("watch", "do not print the start lines", rare=True)

    @property
    def splits_a_replica(self) -> bool:
        """True if several ranks hold a replica or its experts, or share sequences."""
        return max(self.tensor, self.pipeline, self.context, self.expert) > 1

    @property
    def quantises_state(self) -> bool:
        """True if optimizer state is stored in 8 bits."""
        return self.optimizer_state != "full"

    @property
    def rounds_masters(self) -> bool:
        """True if bf16 parameters have no fp32 master, and updates are rounded stochastically."""
        return self.optimizer_state == "8bit-bf16"

    @property
    def quantises_frozen(self) -> bool:
        """True if frozen linear weights are stored in 4 bits."""
        return self.frozen_weights == "nf4"

    @property
    def hides_parameters(self) -> bool:
        """True if some parameters have no values between forward and backward passes."""
        return self.quantises_frozen or self.placement.is_sharded("parameters")

    @property
    def placement(self) -> Placement:
        """The placement that `zero` or `shard` selects, or ZERO_0 if neither is set.

        Raises ConfigError if both are set and select different placements.
        """
        if self.shard is not None:
            row = Placement.sharding(self.shard)
            if self.zero is not None and self.zero != row.level:
                raise ConfigError(
                    f"zero={self.zero} and shard={','.join(self.shard)} select different rows of "
                    f"the placement table ({Placement.zero(self.zero).name} and {row.name}): give "
                    "only one of them."
                )
        else:
            row = Placement.zero(self.zero or 0)
        # If no tier is given for gradients, Placement uses the optimizer state's tier.
        return row.resting(
            parameters=self.offload_params or DEVICE,
            gradients=self.offload_gradients,
            optimizer=self.offload_optimizer or DEVICE,
        )

    @property
    def averaging_rule(self) -> IslandRule:
        """The rule for averaging parameters across islands.

        Raises ConfigError if `late` is not less than `equal_every`.
        """
        every = IslandRule.every if self.equal_every is None else self.equal_every
        return IslandRule(every=every, outer=self.outer, wire=self.wire, late=self.late)

    @property
    def staleness_rule(self) -> StalenessRule | None:
        """The rule for synchronising gradients, or None if islands synchronise parameters."""
        if self.behind is None:
            return None
        return StalenessRule(behind=self.behind, wire=self.wire)

    @property
    def equal_in_words(self) -> str:
        """Text that describes what islands synchronise, and when."""
        return (self.staleness_rule or self.averaging_rule).in_words()


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def flag(name: str) -> str:
    """Return the flag for a setting: "--micro-batch-size" for `micro_batch_size`."""
    return "--" + name.replace("_", "-")


_FOR_PARAMETERS = "it is for synchronising parameters, and --behind synchronises gradients"

_INCOMPATIBLE_WITH_BEHIND: dict[str, tuple[Callable[[Settings], bool], str]] = {
    "equal_every": (
        lambda settings: settings.equal_every not in (None, 1),
        f"{_FOR_PARAMETERS}, at every step",
    ),
    "outer": (lambda settings: settings.outer != Outer(), _FOR_PARAMETERS),
    "late": (lambda settings: settings.late > 0, _FOR_PARAMETERS),
    "exact": (
        lambda settings: settings.exact is not None,
        "with islands, results depend on their number",
    ),
}
"""Maps each setting to a function that returns whether it is on, and to the reason why --behind
excludes it."""


_GROUPS = "it makes groups of workers, and these groups are not made again after a loss"
_DISK = "second copies of states are stored in memory"


def _is_on_disk(tier: Tier | None) -> bool:
    return tier is not None and tier.kind == "nvme"


_INCOMPATIBLE_WITH_SURVIVE: dict[str, tuple[Callable[[Settings], bool], str]] = {
    "shard_within": (
        lambda settings: settings.shard_within == "host" and settings.placement.level > 0,
        _GROUPS,
    ),
    "ema_decay": (
        lambda settings: settings.ema_decay is not None and settings.placement.level > 0,
        "a lost worker's part of the averages has no second copy",
    ),
    "offload_params": (lambda settings: _is_on_disk(settings.offload_params), _DISK),
    "offload_gradients": (lambda settings: _is_on_disk(settings.offload_gradients), _DISK),
    "offload_optimizer": (lambda settings: _is_on_disk(settings.offload_optimizer), _DISK),
    "optimizer_state": (
        lambda settings: settings.quantises_state and settings.placement.level > 0,
        "second copies of the optimizer state are in full precision",
    ),
    "frozen_weights": (
        lambda settings: settings.quantises_frozen,
        "a lost worker's forward pass leaves weights expanded",
    ),
    "spares": (
        lambda settings: settings.spares > 0 and settings.splits_a_replica,
        "a spare runs the script alone until it joins, and one worker alone cannot run the model "
        "with --tensor, --pipeline, --context or --expert",
    ),
    "guard": (lambda settings: settings.guard is not None, _GROUPS),
    "islands": (lambda settings: settings.islands != 1, f"{_GROUPS}; see --elastic-islands"),
    "batch": (
        lambda settings: settings.batch != "total",
        "the total batch would shrink with the number of workers",
    ),
    "sync_batch_norm": (
        lambda settings: settings.sync_batch_norm,
        "its sums in the middle of a forward pass are not repeated",
    ),
    "reseed": (
        lambda settings: not settings.reseed,
        "a repeated step would continue with other random numbers",
    ),
    "timeline": (lambda settings: settings.timeline is not None, _GROUPS),
    "record_tensors": (
        lambda settings: settings.record_tensors is not None,
        "a repeated step would be recorded twice",
    ),
}
"""Maps each setting to a function that returns whether it is on, and to the reason why --survive
excludes it."""


def check_survival(settings: Settings) -> None:
    """Raise ConfigError if a setting cannot be combined with --survive."""
    if not settings.survive:
        return
    for name, (is_on, why) in _INCOMPATIBLE_WITH_SURVIVE.items():
        if is_on(settings):
            raise ConfigError(
                f"{flag(name)} {getattr(settings, name)} cannot be combined with "
                f"--survive {settings.survive}: {why}. Leave one of them out."
            )


_SPLIT_WEIGHTS = ("tensor", "expert", "pipeline")
"""Axes that split weights, or move them between ranks, in full precision."""


def _check_frozen_weights(settings: Settings) -> None:
    """Raise ConfigError if a setting cannot be combined with --frozen-weights nf4."""
    if not settings.quantises_frozen:
        return
    if axes := [axis for axis in _SPLIT_WEIGHTS if getattr(settings, axis) > 1]:
        raise ConfigError(
            f"--frozen-weights nf4 cannot be combined with {flag(axes[0])} "
            f"{getattr(settings, axes[0])} yet. Leave one of them out."
        )
    if settings.offload_params not in (None, DEVICE):
        raise ConfigError(
            f"--frozen-weights nf4 cannot be combined with --offload-params "
            f"{settings.offload_params}: 4-bit weights stay on the device. Leave one of them out."
        )


_NEEDS_MASTERS: dict[str, tuple[Callable[[Settings], bool], str]] = {
    "offload_optimizer": (
        lambda settings: settings.offload_optimizer not in (None, DEVICE),
        "without masters, the update works on the parameters, which are on the device",
    ),
    "offload_params": (
        lambda settings: settings.offload_params not in (None, DEVICE),
        "without masters, the update works on the parameters, which would be on the host",
    ),
    "ema_decay": (
        lambda settings: settings.ema_decay is not None,
        "after engine.ema(), parameters are restored from their masters",
    ),
    "islands": (
        lambda settings: settings.islands != 1,
        "islands average masters, and compare them with what they have agreed on",
    ),
}
"""Maps each setting that needs fp32 masters to a function that returns whether it is on, and to the
reason."""

_LOSS_ELSEWHERE = ("tensor", "pipeline", "context")
"""Axes whose engines compute the loss of a model themselves, or split its head."""


def check_contradictions(settings: Settings) -> None:
    """Raise ConfigError if a setting cannot be combined with another one."""
    check_survival(settings)
    disk = settings.offload_optimizer
    if settings.quantises_state and disk is not None and disk.kind == "nvme":
        raise ConfigError(
            f"--optimizer-state {settings.optimizer_state} cannot be combined with "
            f"--offload-optimizer {disk}: it saves memory, and on a disk the state needs none. "
            "Leave one of them out."
        )
    for name, (is_on, why) in _NEEDS_MASTERS.items() if settings.rounds_masters else ():
        if is_on(settings):
            raise ConfigError(
                f"--optimizer-state 8bit-bf16 cannot be combined with {flag(name)} "
                f"{getattr(settings, name)}: {why}. Write --optimizer-state 8bit, or leave one of "
                "them out."
            )
    _check_frozen_weights(settings)
    if settings.chunked_loss and (axes := [a for a in _LOSS_ELSEWHERE if getattr(settings, a) > 1]):
        raise ConfigError(
            f"--chunked-loss cannot be combined with {flag(axes[0])} {getattr(settings, axes[0])} "
            "yet. Leave one of them out, or write sw.chunked_cross_entropy in the model's forward."
        )
    # Checked here rather than where the islands are built, so that the launcher reports it before
    # any rank starts.
    if settings.behind is None:
        return
    for name, (is_on, why) in _INCOMPATIBLE_WITH_BEHIND.items():
        if is_on(settings):
            raise ConfigError(
                f"{flag(name)} {getattr(settings, name)} cannot be combined with "
                f"--behind {settings.behind}: {why}. Leave one of them out."
            )
