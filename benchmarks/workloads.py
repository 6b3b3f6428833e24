"""What is trained: the configurations, as data. Nothing here imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Gpt:
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
    """The global norm that gradients are clipped to; 0: they are not."""
    lr: ClassVar[float] = 3e-4

    @property
    def head_count(self) -> int:
        return self.heads or max(1, self.width // 64)

    @property
    def parameters(self) -> int:
        """How many numbers it trains."""
        block = 12 * self.width**2 + 13 * self.width
        tables = (1 if self.tied else 2) * self.vocabulary
        return self.layers * block + (tables + self.sequence + 2) * self.width

    def describe(self) -> str:
        """One line for the head of a table."""
        return (
            f"{self.name}: GPT, width {self.width}, {self.layers} layers, {self.head_count} heads, "
            f"vocabulary {self.vocabulary}, sequence {self.sequence}, batch {self.batch}"
            f"{_clipped(self.clip)}"
        )


@dataclass(frozen=True, kw_only=True)
class Llama:
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

    @property
    def parameters(self) -> int:
        """Number of trainable elements."""
        kv_width = self.width // self.heads * self.kv_heads
        block = 2 * self.width * (self.width + kv_width + 1) + 3 * self.width * self.inner
        return self.layers * block + (2 * self.vocabulary + 1) * self.width

    def describe(self) -> str:
        """One line for the head of a table."""
        return (
            f"{self.name}: Llama-like, width {self.width}, {self.layers} layers, {self.heads} and "
            f"{self.kv_heads} heads, vocabulary {self.vocabulary}, sequence {self.sequence}, batch "
            f"{self.batch}{_clipped(self.clip)}"
        )


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """A ResNet on random images of `image` x `image` pixels; `width` is the first stage's number
    of channels, `batch` the TOTAL number of images, cut over the ranks. Of depth 34 it has basic
    blocks and GroupNorm, of depth 50 bottlenecks and BatchNorm."""

    name: str
    width: int
    image: int
    classes: int
    batch: int
    depth: int = 34
    clip: int = 0
    # Convolutions of another number of rows are rounded otherwise, and AdamW's first steps go by
    # the sign of a gradient: with larger ones, losses of the same work part in the third decimal.
    lr: ClassVar[float] = 1e-6

    def describe(self) -> str:
        """One line for the head of a table."""
        return (
            f"{self.name}: ResNet-{self.depth}, {self.width} channels, {self.norm}, images of "
            f"{self.image} x {self.image}, {self.classes} classes, batch {self.batch}"
            f"{_clipped(self.clip)}"
        )

    @property
    def norm(self) -> str:
        """The kind of its normalisations."""
        return "BatchNorm" if self.depth == 50 else "GroupNorm"


def _clipped(norm: int) -> str:
    return f", gradients clipped to a norm of {norm}" if norm else ""


Workload = Gpt | Llama | ResNet

SIZES = sorted({field.name for kind in (Gpt, Llama, ResNet) for field in fields(kind)} - {"name"})
"""What a flag may change in a configuration."""

PRECISIONS = ("fp32", "tf32", "bf16", "bf16-mixed")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """On what, and in which arithmetic, all contenders of a table train.

    `precision` is one of PRECISIONS: fp32 with TF32 off, fp32 with it on, all in bf16, or autocast.
    `compiled` names the backend by which torch.compile makes each block a graph; "": none does.
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
    """`workload` as numbers and names, for another process."""
    kind = next(name for name, made in KINDS.items() if isinstance(workload, made))
    return {"kind": kind} | asdict(workload)


def understood(told: Mapping[str, Any]) -> Workload:
    """The workload that was `told`."""
    sizes = {name: value for name, value in told.items() if name != "kind"}
    return KINDS[told["kind"]](**sizes)


CONFIGURATIONS: dict[str, Workload] = {
    # Compute-bound: the arithmetic of a step outweighs the gradients it has to move.
    "A": Gpt(name="A", width=384, layers=8, vocabulary=8192, sequence=128, batch=8),
    # Communication-bound: more parameters, a quarter of the tokens.
    "C": Gpt(name="C", width=512, layers=8, vocabulary=8192, sequence=64, batch=4),
    # Convolutions, whose backward is long before its gradients are large.
    "R": ResNet(name="R", width=64, image=64, classes=1000, batch=16),
    # Next to no arithmetic: its step shows what an engine adds, for 17 units.
    "small": Gpt(name="small", width=64, layers=16, vocabulary=256, sequence=32, batch=4),
}


ON_A_DEVICE: dict[str, Workload] = {
    "resnet50": ResNet(name="resnet50", width=64, image=224, classes=1000, batch=128, depth=50),
    "gpt-125m": Gpt(
        name="gpt-125m", width=768, layers=12, vocabulary=50304, sequence=1024, batch=8
    ),
    "gpt-1.3b": Gpt(
        name="gpt-1.3b", width=2048, layers=24, vocabulary=50304, sequence=1024, batch=4
    ),
    "gpt2-124m": Gpt(
        name="gpt2-124m",
        width=768,
        layers=12,
        vocabulary=50304,
        sequence=1024,
        batch=32,
        tied=1,
    ),
    "llama-1.1b": Llama(
        name="llama-1.1b",
        width=2048,
        layers=22,
        heads=32,
        kv_heads=4,
        inner=5632,
        vocabulary=32000,
        sequence=2048,
        batch=8,
    ),
}
"""For one accelerator: sizes that keep it busy. The heads of gpt-125m and gpt-1.3b are not tied to
their embeddings, so that they have 163M and 1.42B parameters. gpt2-124m has GPT-2's own sizes with
the vocabulary padded to a multiple of 64, llama-1.1b those of TinyLlama (arXiv:2401.02385)."""


def changed(workload: Workload, given: Mapping[str, int]) -> Workload:
    """`workload` in those `given` sizes that it has."""
    own = {name: given[name] for name in given if hasattr(workload, name)}
    return replace(workload, name=f"{workload.name}, changed", **own) if own else workload


def named(names: Sequence[str], given: Mapping[str, int], ranks: Sequence[int]) -> list[Workload]:
    """The configurations as the sizes `given` change them. Raises ValueError."""
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
    """Refuse what the peers would train wrongly. Raises ValueError."""
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
