"""All settings of a run, from which the flags of the command line are made too. Pure."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import values
from shardwise.errors import ConfigError
from shardwise.placement import DEVICE, Placement, Tier

PRECISIONS = ("fp32", "bf16-mixed", "bf16", "fp16-mixed")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


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
        values.one_of("auto", "cpu", "cuda"),
        "where",
        "auto: a GPU per local rank where there are enough, else CPU",
        "auto|cpu|cuda",
    )
    transport: str = _setting(
        "auto",
        values.one_of("auto", "shared", "gloo"),
        "where",
        "auto: NCCL, shared memory or Gloo; by gloo ranks share a GPU",
        "auto|shared|gloo",
    )
    rendezvous: str | None = _setting(
        None,
        values.rendezvous,
        "where",
        "where ranks of mpirun or srun meet, if it cannot be found out",
        "HOST:PORT|DIR/",
        rare=True,
    )
    zero: int | None = _setting(
        None,
        values.whole(0),
        "spread",
        "0 replicates all; 1 shards optimizer state; 2 gradients; 3 all",
        "0|1|2|3",
    )
    shard: tuple[str, ...] | None = _setting(
        None,
        values.states,
        "spread",
        "the same by name, such as gradients,optimizer",
        "STATES",
        rare=True,
    )
    offload_optimizer: Tier | None = _setting(
        None, values.tier, "spread", "optimizer state (and gradients) rest there", "cpu|nvme:DIR"
    )
    offload_params: Tier | None = _setting(
        None, values.tier, "spread", "sharded parameters rest there", "cpu|nvme:DIR"
    )
    offload_gradients: Tier | None = _setting(
        None, values.tier, "spread", "sharded gradients rest there", "cpu|nvme:DIR", rare=True
    )
    shard_within: str = _setting(
        "all",
        values.one_of("all", "host"),
        "spread",
        "host: shard in each host, replicate between",
        "all|host",
    )
    units: tuple[str, ...] | None = _setting(
        None,
        values.patterns,
        "spread",
        "modules gathered as a whole; default: repeated blocks",
        "NAMES",
        rare=True,
    )
    tensor: int = _setting(
        1,
        values.whole(1, values.MOST_RANKS),
        "spread",
        "split every layer over T neighbouring workers",
        "T",
    )
    sequence_parallel: bool = _setting(
        False,
        values.switch,
        "spread",
        "with --tensor: norms and residuals by tokens, on one worker each",
        rare=True,
    )
    pipeline: int = _setting(
        1,
        values.whole(1, values.MOST_RANKS),
        "spread",
        "share layers out over P workers, in stages",
        "P",
    )
    microbatches: int | None = _setting(
        None,
        values.whole(1),
        "spread",
        "parts of a batch that follow each other through the stages",
        "M",
        rare=True,
    )
    schedule: str = _setting(
        "1f1b",
        values.one_of(*SCHEDULES),
        "spread",
        "order of the stages: " + ", ".join(SCHEDULES),
        "NAME",
        rare=True,
    )
    stages: tuple[str, ...] | None = _setting(
        None,
        values.patterns,
        "spread",
        "modules at which a new stage begins; default: alike in parameters",
        "NAMES",
        rare=True,
    )
    micro_batch_size: int | None = _setting(
        None,
        values.whole(1),
        "spread",
        "samples per worker per backward; the rest accumulates",
        "M",
    )
    batch: str = _setting(
        "total",
        values.one_of("total", "worker"),
        "spread",
        "what a Loader's batch_size counts: the whole, or each worker's",
        "total|worker",
        rare=True,
    )
    exact: int | None = _setting(
        None,
        values.whole(1, 2**16),
        "spread",
        "V micro-shards per step: same bits on 1, 2, 4, ... V",
        "V",
    )
    bucket_mb: float = _setting(
        25.0,
        values.number(0, 1e6, above=True),
        "spread",
        "size of a flat bucket in MB",
        "MB",
        rare=True,
    )
    overlap: bool = _setting(
        True, values.switch, "spread", "reduce gradients beside backward", rare=True
    )
    activations: str = _setting(
        "kept",
        values.one_of("kept", "recomputed"),
        "spread",
        "recomputed: backward runs each unit again",
        "kept|recomputed",
    )
    offload_activations: Tier = _setting(
        DEVICE, values.tier, "spread", "what forward saves for backward rests there", "cpu|nvme:DIR"
    )
    sync_batch_norm: bool = _setting(
        False, values.switch, "spread", "BatchNorm statistics over all workers"
    )
    precision: str = _setting(
        "fp32", values.one_of(*PRECISIONS), "precision", "fp32, bf16-mixed, bf16 or fp16-mixed", "P"
    )
    reduce_dtype: str = _setting(
        "fp32",
        values.one_of("fp32", "param"),
        "precision",
        "sum 16-bit gradients in fp32, or in their own dtype",
        "fp32|param",
        rare=True,
    )
    compile: bool = _setting(
        False, values.switch, "precision", "torch.compile each unit, hooks outside"
    )
    nonfinite: str = _setting(
        "stop",
        values.one_of("stop", "skip"),
        "recover",
        "a NaN gradient stops the run, or skips the step",
        "stop|skip",
        rare=True,
    )
    save_failure: str = _setting(
        "stop",
        values.one_of("stop", "continue"),
        "recover",
        "no room for a checkpoint: stop, or train on",
        "stop|continue",
        rare=True,
    )
    trial: bool = _setting(
        False,
        values.switch,
        "recover",
        "leave no trace: nothing is resumed, saved or exported",
        rare=True,
    )
    seed: int | None = _setting(
        None, values.whole(0, values.LARGEST_SEED), "recover", "overrides the script's seed", "S"
    )
    reseed: bool = _setting(
        True,
        values.switch,
        "recover",
        "seed generators at every step; off: they are the script's own",
        rare=True,
    )
    timeout: float = _setting(
        300.0,
        values.number(0, values.LONGEST, above=True),
        "watch",
        "seconds a collective may wait for a rank",
        "SECONDS",
    )
    warn_after: float = _setting(
        60.0,
        values.number(0, values.LONGEST, above=True),
        "watch",
        "seconds of waiting until it is said for whom",
        "SECONDS",
        rare=True,
    )
    ema_decay: float | None = _setting(
        None,
        values.fraction,
        "precision",
        "keep an exponential moving average of the weights",
        "D",
        rare=True,
    )
    timeline: Path | None = _setting(
        None, values.file, "watch", "where time goes, event by event, as Chrome trace JSON", "FILE"
    )
    record: str | None = _setting(
        None,
        values.folder,
        "watch",
        "write what each step took there, for shardwise scale",
        "DIR",
        rare=True,
    )
    stop_after: int | None = _setting(
        None,
        values.whole(1),
        "watch",
        "end the run, with success, after so many steps",
        "STEPS",
        rare=True,
    )
    time_layers: Path | None = _setting(
        None,
        values.file,
        "watch",
        "write there how long each layer takes, for shardwise split",
        "FILE",
        rare=True,
    )
    quiet: bool = _setting(
        False, values.switch, "watch", "do not print the lines at the start", rare=True
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


def flag(name: str) -> str:
    """The spelling of a setting on the command line: micro_batch_size is --micro-batch-size."""
    return "--" + name.replace("_", "-")
