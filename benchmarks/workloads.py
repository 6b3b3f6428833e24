"""The workloads: configurations as data. Nothing here imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar


class _Described:
    """A workload that describes itself in the head of a table."""

    def describe(self) -> str:
        """Return its kind and sizes in one line."""
        sizes = {name: value for name, value in asdict(self).items() if value and name != "name"}
        words = ", ".join(f"{name} {value}" for name, value in sizes.items())
        return f"{self.name}: {type(self).__name__}, {words}"


@dataclass(frozen=True, kw_only=True)
class Gpt(_Described):
    """A GPT on random tokens. `batch` is the TOTAL number of rows, cut over the ranks."""

    name: str
    width: int
    layers: int
    vocabulary: int
    sequence: int
    batch: int
    heads: int = 0
    """0: one head per 64 of width."""
    tied: int = 0
    """1: the output head uses the weight of the token embedding, as GPT-2 does."""
    clip: int = 0
    """The global norm for clipping; 0: gradients are not clipped."""
    lr: ClassVar[float] = 3e-4

    @property
    def head_count(self) -> int:
        return self.heads or max(1, self.width // 64)

    @property
    def parameters(self) -> int:
        """Number of trainable elements."""
        block = 12 * self.width**2 + 13 * self.width
        tables = (1 if self.tied else 2) * self.vocabulary
        return self.layers * block + (tables + self.sequence + 2) * self.width


@dataclass(frozen=True, kw_only=True)
class Llama(_Described):
    """A Llama-like model on random tokens; `inner` is the width inside SwiGLU, `batch` the TOTAL
    number of rows, cut over the ranks."""

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    sequence: int
    batch: int
    clip: int = 0
    lr: ClassVar[float] = 3e-4


@dataclass(frozen=True, kw_only=True)
class ResNet(_Described):
    """A ResNet-34 on random images of `image` x `image` pixels; `width` is the first stage's number
    of channels, `batch` the TOTAL number of images, cut over the ranks."""

    name: str
    width: int
    image: int
    classes: int
    batch: int
    clip: int = 0
    # Convolutions of another number of rows are rounded differently, and AdamW's first steps follow
    # the sign of a gradient: with a larger rate, losses of the same work differ in three decimals.
    lr: ClassVar[float] = 1e-6


Workload = Gpt | Llama | ResNet

SIZES = sorted({field.name for kind in (Gpt, Llama, ResNet) for field in fields(kind)} - {"name"})
"""The sizes of a configuration that have a flag."""

PRECISIONS = ("fp32", "tf32", "bf16", "bf16-mixed")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The device and the arithmetic of all contenders of a table.

    `precision` is one of PRECISIONS: fp32 with TF32 off, fp32 with it on, all in bf16, or autocast.
    `compiled` is torch.compile's backend for each block; "": blocks are not compiled.
    """

    device: str = "cpu"
    precision: str = "fp32"
    compiled: str = ""
    threads: int = 1

    def describe(self) -> str:
        """A few words for the head of a table."""
        words = {"fp32": "fp32, TF32 off", "tf32": "fp32, TF32 on"}
        compiled = f", blocks compiled by {self.compiled}" if self.compiled else ""
        return words.get(self.precision, self.precision) + compiled


KINDS = {"gpt": Gpt, "llama": Llama, "resnet": ResNet}


def told(workload: Workload) -> dict[str, Any]:
    """Return `workload` as numbers and names, for JSON."""
    kind = next(name for name, cls in KINDS.items() if isinstance(workload, cls))
    return {"kind": kind} | asdict(workload)


def understood(told: Mapping[str, Any]) -> Workload:
    """Return the workload that `told` has written."""
    sizes = dict(told)
    return KINDS[sizes.pop("kind")](**sizes)


CONFIGURATIONS: dict[str, Workload] = {
    # Compute-bound: the arithmetic of a step outweighs the gradients it has to move.
    "A": Gpt(name="A", width=384, layers=8, vocabulary=8192, sequence=128, batch=8),
    # Communication-bound: more parameters, a quarter of the tokens.
    "C": Gpt(name="C", width=512, layers=8, vocabulary=8192, sequence=64, batch=4),
    # Convolutions, whose backward is long before its gradients are large.
    "R": ResNet(name="R", width=64, image=64, classes=1000, batch=16),
    # Next to no arithmetic: its step shows what an engine adds, for 17 units.
    "small": Gpt(name="small", width=64, layers=16, vocabulary=256, sequence=32, batch=4),
    # One block: about 1 ms of arithmetic.
    "tiny": Gpt(name="tiny", width=64, layers=1, vocabulary=256, sequence=32, batch=4),
}


_TINY_LLAMA = {"heads": 32, "kv_heads": 4, "inner": 5632, "vocabulary": 32000, "sequence": 2048}

ON_A_DEVICE: dict[str, Workload] = {
    "gpt2-124m": Gpt(
        name="gpt2-124m", width=768, layers=12, vocabulary=50304, sequence=1024, batch=32, tied=1
    ),
    "llama-1.1b": Llama(name="llama-1.1b", width=2048, layers=22, batch=8, **_TINY_LLAMA),
}
"""For one accelerator, in sizes that keep it busy: GPT-2's with the vocabulary padded to a
multiple of 64, and TinyLlama's (arXiv:2401.02385)."""


def changed(workload: Workload, given: Mapping[str, int]) -> Workload:
    """Return `workload` with the `given` sizes, as far as it has them."""
    own = {name: given[name] for name in given if hasattr(workload, name)}
    return replace(workload, name=f"{workload.name}, changed", **own) if own else workload


def named(names: Sequence[str], given: Mapping[str, int], ranks: Sequence[int]) -> list[Workload]:
    """Return the configurations with the sizes `given`. Raises ValueError."""
    known = CONFIGURATIONS | ON_A_DEVICE
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"No such configuration: {', '.join(unknown)}. There are {', '.join(known)}."
        )
    chosen = [known[name] for name in names]
    if alien := [name for name in given if not any(hasattr(each, name) for each in chosen)]:
        raise ValueError(f"No chosen configuration has a --{alien[0]}.")
    chosen = [changed(workload, given) for workload in chosen]
    for workload in chosen:
        for size in ranks:
            check(workload, size)
    return chosen


def check(workload: Workload, ranks: int) -> None:
    """Raise ValueError for a workload that the peers would train wrongly."""
    if workload.batch % ranks:
        raise ValueError(
            f"A batch of {workload.batch} rows cannot be cut into {ranks} equal shares; DDP and "
            f"its kin average over ranks, which is only right for equal ones. Choose a --batch "
            f"that {ranks} divides."
        )
    heads = getattr(workload, "head_count", None) or getattr(workload, "heads", 1)
    if workload.width % heads:
        raise ValueError(
            f"A width of {workload.width} cannot be cut into {heads} equal heads; "
            "choose --heads that divides it."
        )
