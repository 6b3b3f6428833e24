"""The table of contenders. Each names a function `build(job, **options)`, which returns the
function that trains one step: (inputs, targets) to this rank's loss.

The process that starts the ranks reads this table, so nothing here imports torch or a peer: a peer
that is not installed fails in its own rank, and its line says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of a table: the file and function that build it, and their options."""

    key: str
    label: str
    build: str
    """`file:function` in this folder; the function may be left out if it is `build`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    """Runs as one process on the whole batch at every number of ranks."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for its ranks, in addition to those that all get."""
    one_batch: bool = False
    """Its ranks are one replica of the model: each gets the whole batch."""
    same_work: bool = True
    """Its losses must equal all others', or the run is worthless."""


def _one(key: str, label: str, build: str, **options: Any) -> Contender:
    return Contender(key=key, label=label, build=build, options=options)


PLAIN = replace(_one("plain", "one process", "torch_peers:plain"), alone=True)

FSDP2 = _one("fsdp2", "FSDP2", "torch_peers:fsdp2", reshard=True)

FSDP2_ON_HOST = _one(
    "fsdp2-cpu", "FSDP2, CPU offload", "torch_peers:fsdp2", reshard=True, offload=True
)

PEERS = {
    "apart": [
        Contender(
            key="apart", label="ranks, no exchange", build="torch_peers:apart", same_work=False
        )
    ],
    "ddp": [_one("ddp", "torch DDP", "torch_peers:ddp")],
    "zro": [_one("zro", "DDP + ZeroRedundancy", "torch_peers:zero_redundancy")],
    "fsdp2": [FSDP2, _one("fsdp2-keep", "FSDP2, no reshard", "torch_peers:fsdp2", reshard=False)],
    "deepspeed": [
        _one(f"deepspeed-{stage}", f"DeepSpeed ZeRO-{stage}", "deepspeed", stage=stage)
        for stage in range(4)
    ],
    "adopted": [
        _one(
            f"adopted-{stage}",
            f"shardwise.deepspeed, {stage}",
            "deepspeed",
            stage=stage,
            library="shardwise.deepspeed",
        )
        for stage in range(4)
    ],
    "accelerate": [_one("accelerate", "Accelerate", "libraries:accelerate")],
    "lightning": [_one("lightning", "Lightning Fabric", "libraries:fabric")],
}
"""A name of --peers, and its lines."""

LIBRARIES = {
    "accelerate": ("Accelerate", "libraries:accelerate"),
    "trainer": ("transformers' Trainer", "libraries:trainer"),
    "fabric": ("Fabric", "libraries:fabric"),
    "lightning": ("Lightning's Trainer", "libraries:lightning_trainer"),
}
"""The libraries that have a bridge: their labels, and who builds them."""

WITHOUT_FSDP = ("trainer",)
"""Libraries that take no FSDP on the CPU, nor a model that FSDP2 has sharded."""


def bridged(library: str, rows: Sequence[int]) -> list[Contender]:
    """Return a library over DDP and FSDP2, and over the `rows` of Shardwise. Raises ValueError."""
    if library not in LIBRARIES:
        raise ValueError(f"No such library: {library}. There are {', '.join(LIBRARIES)}.")
    label, build = LIBRARIES[library]
    stock = {"ddp": "DDP"} | ({} if library in WITHOUT_FSDP else {"fsdp2": "FSDP2"})
    found = [
        _one(f"{library}-{under}", f"{label}, {name}", build, under=under)
        for under, name in stock.items()
    ]
    return found + [
        _one(
            f"{library}-{zero}",
            f"{label}, Shardwise ZERO_{zero}",
            build,
            under="shardwise",
            zero=zero,
        )
        for zero in rows
    ]


def row(zero: int, transport: str = "auto") -> Contender:
    """Return our own contender for one row of the placement table."""
    over = "" if transport == "auto" else f", {transport}"
    return _one(
        f"shardwise-{zero}{over.replace(', ', '-')}",
        f"Shardwise ZERO_{zero}{over}",
        "ours:build",
        zero=zero,
        transport=transport,
    )


def in_bf16(taker: Contender) -> Contender:
    """Return one of ours with parameters and arithmetic in bf16 and masters in fp32, as FSDP2's
    policy `param_dtype=torch.bfloat16` has it, instead of autocast."""
    return replace(
        taker,
        key=f"{taker.key}-bf16",
        label=f"{taker.label}, bf16 with fp32 masters",
        options=dict(taker.options) | {"precision": "bf16"},
    )


def timed(taker: Contender) -> Contender:
    """Return the contender with a timeline that is recorded."""
    return replace(
        taker,
        key=f"{taker.key}-timeline",
        label=f"{taker.label}, timeline",
        environment={"SHARDWISE_TIMELINE": "timeline.json"},
    )


def offloaded(zero: int, tier: str) -> Contender:
    """Return a row with all states on `tier` ("cpu" or "nvme:FOLDER") that may be there: gradients
    and optimizer state, and parameters if they are sharded."""
    states = ["optimizer", "params"] if zero == 3 else ["optimizer"]
    kind = tier.partition(":")[0]
    words = f"{' and '.join(states)} on cpu" if kind == "cpu" else kind
    return _one(
        f"shardwise-{zero}-{kind}",
        f"Shardwise ZERO_{zero}, {words}",
        "ours:build",
        zero=zero,
        **{f"offload_{state}": tier for state in states},
    )


def chosen(names: Sequence[str]) -> list[Contender]:
    """Return the lines of the peers with these names. Raises ValueError."""
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(f"No such peer: {', '.join(unknown)}. There are {', '.join(PEERS)}.")
    return [line for name in names for line in PEERS[name]]
