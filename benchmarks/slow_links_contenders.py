"""The contenders of slow_links.py, and the bytes of each by formula.

Payload of one of two ranks, with P parameters in fp32:

    DDP, ZERO_0             4 P a step: of an all-reduce each sends half of the sum twice
    PowerSGD, rank r        4 r (n + m) a step for a matrix of n x m, or as DDP if that is more
    PostLocalSGD, DiLoCo    4 P in H steps
    islands                 the bytes of the wire in H steps: 4, 2, 1 + 4/256 or 1/2 + 4/256 each
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from contenders import Contender
from shardwise.islands.wire import BLOCK, Wire
from workloads import Gpt

WIRES = {
    name: Wire(name).nbytes(BLOCK, torch.float32) / BLOCK
    for name in ("fp32", "bf16", "int8", "int4")
}
"""Bytes of a value."""

RATE, MOMENTUM = 0.7, 0.9
"""Of the outer Nesterov, for contenders that have one."""

RANK = 4
"""Of PowerSGD."""

NAMES = ("ddp", "power-sgd", "post-local-sgd", "torchft", "synchronous", *WIRES, "late")
"""Words of --contenders; `late` is every wire with --late, int8-late one of them."""


@dataclass(frozen=True)
class Sender:
    """A contender that sends `payload` bytes in `every` steps."""

    contender: Contender
    payload: float
    every: int = 1
    late: int = 0

    @property
    def key(self) -> str:
        """Its name in files."""
        return self.contender.key

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.contender.label


def chosen(names: Sequence[str], workload: Gpt, every: int, late: int) -> list[Sender]:
    """Return the contenders with these `names`, or all."""
    whole = 4.0 * workload.parameters

    def taker(key: str, label: str, build: str, **options: Any) -> Contender:
        return Contender(key=key, label=label, build=build, options=options, same_work=False)

    def ours(wire: str, late: int) -> Sender:
        made = taker(
            f"{wire}-late" if late else wire,
            f"Shardwise, H {every}, {wire}" + (f", late {late}" if late else ""),
            "ours:build",
            zero=0,
            islands=2,
            equal_every=every,
            wire=wire,
            late=late,
            outer=f"nesterov:{RATE},{MOMENTUM}",
        )
        return Sender(made, WIRES[wire] * workload.parameters, every, late)

    power = taker("power-sgd", f"torch PowerSGD, rank {RANK}", "torch_peers:power_sgd", rank=RANK)
    local = taker(
        "post-local-sgd",
        f"torch PostLocalSGD, H {every}",
        "torch_peers:post_local_sgd",
        every=every,
    )
    diloco = taker(
        "torchft", f"torchft DiLoCo, H {every}", "torchft", every=every, lr=RATE, momentum=MOMENTUM
    )
    found = [
        Sender(taker("ddp", "torch DDP", "torch_peers:ddp"), whole),
        Sender(power, 4.0 * sum(_compressed(shape, RANK) for shape in shapes(workload))),
        Sender(local, whole, every),
        Sender(diloco, whole, every),
        Sender(taker("synchronous", "Shardwise ZERO_0", "ours:build", zero=0), whole),
        *(ours(wire, 0) for wire in WIRES),
        *(ours(wire, late) for wire in WIRES),
    ]
    if list(names) == ["all"]:
        return found
    wanted = set(names) | ({f"{wire}-late" for wire in WIRES} if "late" in names else set())
    return [sender for sender in found if sender.key in wanted]


def _compressed(shape: tuple[int, ...], rank: int) -> int:
    """Return the values that PowerSGD sends of a gradient: two thin matrices if these have less
    than half as many values (its least rate of compression is 2)."""
    if len(shape) == 1:
        return shape[0]
    n, m = shape
    r = min(n, m, rank)
    return r * (n + m) if 2 * r * (n + m) < n * m else n * m


def shapes(workload: Gpt) -> list[tuple[int, ...]]:
    """Return the shapes of the model's parameters, in their order."""
    w = workload.width
    block: list[tuple[int, ...]] = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,)]
    block += [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    ends: list[tuple[int, ...]] = [(w,), (w,), (workload.vocabulary, w)]
    return [(workload.vocabulary, w), (workload.sequence, w), *block * workload.layers, *ends]
