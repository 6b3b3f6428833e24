"""Who takes part. One file per contender; each has `build(job, **options)`, which returns the
function that trains one step: (inputs, targets) to this rank's loss.

This table is read by the process that starts the ranks, so nothing here imports torch or a peer:
a peer that is not installed fails in its own rank and is reported as such.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of the table: the file that builds it, and with which options."""

    key: str
    label: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    """Runs as one process on the whole batch, whatever the number of ranks."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for its ranks, beside those that all get."""
    one_batch: bool = False
    """Its ranks are one replica of the model: each gets the whole batch."""
    same_work: bool = True
    """Its losses are those of everyone else, or the run is worthless."""


PLAIN = Contender(key="plain", label="one process", module="plain", alone=True)

APART = Contender(key="apart", label="ranks, no exchange", module="apart", same_work=False)

PEERS = {
    "apart": [APART],
    "ddp": [Contender(key="ddp", label="torch DDP", module="ddp")],
    "zro": [Contender(key="zro", label="DDP + ZeroRedundancy", module="zero_redundancy")],
    "fsdp2": [
        Contender(key="fsdp2", label="FSDP2", module="fsdp2", options={"reshard": True}),
        Contender(
            key="fsdp2-keep", label="FSDP2, no reshard", module="fsdp2", options={"reshard": False}
        ),
    ],
    "deepspeed": [
        Contender(
            key=f"deepspeed-{stage}",
            label=f"DeepSpeed ZeRO-{stage}",
            module="deepspeed",
            options={"stage": stage},
        )
        for stage in range(4)
    ],
    "adopted": [
        Contender(
            key=f"adopted-{stage}",
            label=f"shardwise.deepspeed, {stage}",
            module="deepspeed",
            options={"stage": stage, "library": "shardwise.deepspeed"},
        )
        for stage in range(4)
    ],
    "accelerate": [Contender(key="accelerate", label="Accelerate", module="accelerate")],
    "lightning": [Contender(key="lightning", label="Lightning Fabric", module="lightning")],
    "horovod": [Contender(key="horovod", label="shardwise.horovod", module="horovod")],
}
"""A name of --peers, and the lines it stands for."""

LIBRARIES = {
    "accelerate": ("Accelerate", "accelerate"),
    "trainer": ("transformers' Trainer", "trainer"),
    "fabric": ("Fabric", "lightning"),
    "lightning": ("Lightning's Trainer", "lightning_trainer"),
}
"""The libraries that have a bridge: what they are called, and the file that builds them."""

WITHOUT_FSDP = ("trainer",)
"""Those that take no FSDP on the CPU, nor a model that FSDP2 has sharded."""


def bridged(library: str, rows: Sequence[int]) -> list[Contender]:
    """A library as it comes, over DDP and FSDP2, and over the `rows` of Shardwise."""
    label, module = LIBRARIES[library]
    stock = ["ddp"] if library in WITHOUT_FSDP else ["ddp", "fsdp2"]
    names = {"ddp": "DDP", "fsdp2": "FSDP2"}
    return [
        Contender(
            key=f"{library}-{under}",
            label=f"{label}, {names[under]}",
            module=module,
            options={"under": under},
        )
        for under in stock
    ] + [
        Contender(
            key=f"{library}-{zero}",
            label=f"{label}, Shardwise ZERO_{zero}",
            module=module,
            options={"under": "shardwise", "zero": zero},
        )
        for zero in rows
    ]


OFFLOADED = {
    "fsdp2": [
        Contender(
            key="fsdp2-cpu",
            label="FSDP2, CPU offload",
            module="fsdp2",
            options={"reshard": True, "offload": True},
        )
    ],
    "deepspeed": [
        Contender(
            key="deepspeed-3-cpu",
            label="DeepSpeed ZeRO-3, optimizer on cpu",
            module="deepspeed",
            options={"stage": 3, "offload": "cpu"},
        )
    ],
}
"""What is beside states that rest on the host: by name, as PEERS."""


def copies(megabytes: int) -> list[Contender]:
    """Bare copies of so much between pinned memory and the device: one way, and both at once."""
    ways = {"up": "to the device", "down": "to the host", "up-down": "both ways at once"}
    return [
        Contender(
            key=f"copies-{way}",
            label=f"copies {words}, pinned",
            module="copies",
            options={"up": "up" in way, "down": "down" in way, "megabytes": megabytes},
            alone=True,
            same_work=False,
        )
        for way, words in ways.items()
    ]


def row(zero: int, transport: str = "auto") -> Contender:
    """Our own contender for one row of the placement table; `transport` as of --transport."""
    over = "" if transport == "auto" else f", {transport}"
    return Contender(
        key=f"shardwise-{zero}{over.replace(', ', '-')}",
        label=f"Shardwise ZERO_{zero}{over}",
        module="shardwise",
        options={"zero": zero, "transport": transport},
    )


def on_host(zero: int) -> Contender:
    """The row with all that may rest on the host: gradients and optimizer state, and parameters
    where they are sharded."""
    states = ["optimizer", "params"] if zero == 3 else ["optimizer"]
    return Contender(
        key=f"shardwise-{zero}-cpu",
        label=f"Shardwise ZERO_{zero}, {' and '.join(states)} on cpu",
        module="shardwise",
        options={"zero": zero} | {f"offload_{state}": "cpu" for state in states},
    )


def on_disk(zero: int, folder: str) -> Contender:
    """The row with all that may rest on a disk in `folder`: the optimizer state, and parameters
    where they are sharded."""
    offloaded = {"offload_optimizer": f"nvme:{folder}"}
    if zero == 3:
        offloaded["offload_params"] = f"nvme:{folder}"
    return Contender(
        key=f"shardwise-{zero}-nvme",
        label=f"Shardwise ZERO_{zero}, nvme",
        module="shardwise",
        options={"zero": zero} | offloaded,
    )


def chosen(
    peers: Sequence[str],
    rows: Sequence[int],
    transports: Sequence[str] = ("auto",),
    disk: str | None = None,
) -> list[Contender]:
    """The contenders of a table: one process first, for the limit. Raises ValueError.

    With a folder on a `disk`, each row that shards its optimizer state also with that there.
    """
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        raise ValueError(f"No such peer: {', '.join(unknown)}. There are {', '.join(PEERS)}.")
    ours = [row(zero, transport) for transport in transports for zero in rows]
    ours += [on_disk(zero, disk) for zero in rows if zero and disk is not None]
    return [PLAIN, *(line for peer in peers for line in PEERS[peer]), *ours]
