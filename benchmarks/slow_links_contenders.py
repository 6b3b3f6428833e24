"""Who sends what over a slow link: the contenders of slow_links.py, and what formulas say of each.

Payload of one of two ranks, with P parameters in fp32:

    DDP, ZERO_0             4 P a step: of an all-reduce each sends half of the sum twice
    PowerSGD, rank r        4 r (n + m) a step for a matrix of n x m, or as DDP where that is more
    PostLocalSGD, DiLoCo    4 P in H steps
    islands                 the bytes of the wire in H steps: 4, 2, 1 + 4/256 or 1/2 + 4/256 each
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from contenders import Contender
from shardwise.config.outer_optimizer import BLOCK
from shardwise.islands.wire import Wire
from workloads import Gpt

WIRES = {
    name: Wire(name).nbytes(BLOCK, torch.float32) / BLOCK
    for name in ("fp32", "bf16", "int8", "int4")
}
"""Bytes of a value."""

OUTER = (0.7, 0.9)
"""Rate and momentum of the outer Nesterov, for those that have one."""

RANK = 4
"""Of PowerSGD."""


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


NAMES = ("ddp", "power-sgd", "post-local-sgd", "torchft", "synchronous", *WIRES, "late")
"""Words of --contenders; `late` is every wire with --late, int8-late one of them."""


def chosen(names: Sequence[str], workload: Gpt, every: int, late: int) -> list[Sender]:
    """Those of `names`, or all."""
    ours = [_ours(wire, workload, every, 0) for wire in WIRES]
    ours += [_ours(wire, workload, every, late) for wire in WIRES]
    found = [*_peers(workload, every), *ours]
    if list(names) == ["all"]:
        return found
    wanted = set(names) | ({f"{wire}-late" for wire in WIRES} if "late" in names else set())
    return [sender for sender in found if sender.key in wanted]


def _peers(workload: Gpt, every: int) -> list[Sender]:
    whole = 4.0 * workload.parameters
    outer = {"lr": OUTER[0], "momentum": OUTER[1]}
    return [
        Sender(Contender(key="ddp", label="torch DDP", module="ddp"), whole),
        Sender(
            _made("power-sgd", f"torch PowerSGD, rank {RANK}", "power_sgd", rank=RANK),
            power_sgd_bytes(workload, RANK),
        ),
        Sender(
            _made(
                "post-local-sgd", f"torch PostLocalSGD, H {every}", "post_local_sgd", every=every
            ),
            whole,
            every,
        ),
        Sender(
            _made("torchft", f"torchft DiLoCo, H {every}", "torchft", every=every, **outer),
            whole,
            every,
        ),
        Sender(_made("synchronous", "Shardwise ZERO_0", "shardwise", zero=0), whole),
    ]


def _ours(wire: str, workload: Gpt, every: int, late: int) -> Sender:
    settings = {"islands": 2, "equal_every": every, "wire": wire, "late": late}
    outer = f"nesterov:{OUTER[0]},{OUTER[1]}"
    said = f", late {late}" if late else ""
    made = _made(
        f"{wire}-late" if late else wire,
        f"Shardwise, H {every}, {wire}{said}",
        "shardwise",
        zero=0,
        outer=outer,
        **settings,
    )
    return Sender(made, WIRES[wire] * workload.parameters, every, late)


def _made(key: str, label: str, module: str, **options: object) -> Contender:
    return Contender(key=key, label=label, module=module, options=options, same_work=False)


def power_sgd_bytes(workload: Gpt, rank: int) -> float:
    """What PowerSGD sends of each step's gradients, 4 bytes a value: of a matrix of n x m two of
    rank r, where these are less than half as many values (its least rate of compression is 2)."""
    return 4.0 * sum(_compressed(shape, rank) for shape in shapes(workload))


def _compressed(shape: tuple[int, ...], rank: int) -> int:
    if len(shape) == 1:
        return shape[0]
    n, m = shape
    r = min(n, m, rank)
    return r * (n + m) if 2 * r * (n + m) < n * m else n * m


def shapes(workload: Gpt) -> list[tuple[int, ...]]:
    """The shapes of the model's parameters, in their order."""
    w = workload.width
    block: list[tuple[int, ...]] = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,)]
    block += [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    ends: list[tuple[int, ...]] = [(w,), (w,), (workload.vocabulary, w)]
    return [(workload.vocabulary, w), (workload.sequence, w), *block * workload.layers, *ends]
