"""The data classes of a random program: frozen, with literals, so that its repr is the program."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Net:
    """A model: a stem for its `modality`, `blocks` that keep the shape, and a head.

    A block is a name in blocks.py; `late:2` has a number. `checkpoint` is how the model's own
    forward recomputes its blocks: "", "reentrant" or "nonreentrant".
    """

    modality: str = "features"
    blocks: tuple[str, ...] = ("residual",)
    tied: bool = False
    checkpoint: str = ""
    embedding: Options = ()
    channels_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer of one model. `groups`: "one", "decay" (matrices and the rest) or "layers".

    With `rest`, `name` trains matrices and a separate AdamW everything else. `later` names a child
    of the model that is added by add_param_group during training.
    """

    name: str = "sgd"
    options: Options = ()
    groups: str = "one"
    rest: bool = False
    later: str = ""
    schedule: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A batch, its forward and its backwards.

    `losses` are added. Each has its own forward, unless `shared`: then they have one graph. For
    "tokens" the number of items is passed as the weight. For "ignored" and "class_weights", which
    are also means over other items than rows, it is not.
    `cuts` is None for even shares (world.share), else the seed of uneven ones cut by hand. With
    `explicit` the weight is passed; it is `factor` for each item. `between`: an evaluation runs
    between the batch and its forward. `last`: `last=` is passed.
    """

    rows: int = 6
    losses: tuple[str, ...] = ("mse",)
    shared: bool = False
    cuts: int | None = None
    explicit: bool = False
    factor: int = 1
    between: bool = False
    last: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """Events `before` the step, its parts, and the norm to clip by.

    If `ahead` is true, all forward passes of the step run before its first backward pass.
    """

    before: tuple[str, ...] = ()
    parts: tuple[Part, ...] = (Part(),)
    clip: float | None = None
    ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of Shardwise; `call` is "backward" or "forward_backward"."""

    size: int = 1
    zero: int = 0
    bucket_mb: float = 25.0
    activations: str = "kept"
    overlap: bool = True
    transport: str = "auto"
    offload: tuple[str, ...] = ()
    exact: int | None = None
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    microbatches: int | None = None
    micro_batch_size: int | None = None
    call: str = "backward"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps under one configuration. Between two phases there is a save and a load."""

    config: Config = Config()
    steps: tuple[Step, ...] = (Step(),)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A whole program.

    `family`: "one" model; "chain", two models one after the other in one engine; "gan", two models
    with an engine each, the second of which judges the first. `feed`: "share", "loader",
    or "stream": a Loader of an iterable dataset with shard().
    `warm` steps run without an engine, before it exists. `average` is an AveragedModel that the
    script updates after each step.
    """

    seed: int = 0
    family: str = "one"
    nets: tuple[Net, ...] = (Net(),)
    optimizers: tuple[Optimizer, ...] = (Optimizer(),)
    phases: tuple[Phase, ...] = (Phase(),)
    feed: str = "share"
    warm: int = 0
    ema: float | None = None
    average: bool = False

    @property
    def synchronised(self) -> bool:
        """Return whether a BatchNorm needs statistics across all workers."""
        return any(block.startswith("batch_norm") for net in self.nets for block in net.blocks)

    @property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the models of each engine."""
        return ((0,), (1,)) if self.family == "gan" else (tuple(range(len(self.nets))),)

    @property
    def single(self) -> bool:
        """Return whether a part of it is computed in less than fp64."""
        return any(block == "single" for net in self.nets for block in net.blocks)

    def steps(self) -> Iterator[tuple[int, Step]]:
        """Return all steps with their numbers."""
        yield from enumerate(step for phase in self.phases for step in phase.steps)

    def first_step(self, phase: int) -> int:
        """Return the number of a phase's first step."""
        return sum(len(each.steps) for each in self.phases[:phase])

    def before_phase(self, phase: int) -> list[str]:
        """Return the events of earlier phases, in order."""
        return [
            event for each in self.phases[:phase] for step in each.steps for event in step.before
        ]


def readable(value: Any, indent: int = 0) -> str:
    """Return an expression for `value` over several lines, without default values."""
    if not is_dataclass(value):
        if isinstance(value, tuple) and any(is_dataclass(each) for each in value):
            inner = "".join(
                f"{' ' * (indent + 4)}{readable(each, indent + 4)},\n" for each in value
            )
            return f"(\n{inner}{' ' * indent})"
        return repr(value)
    said = [
        (field.name, getattr(value, field.name))
        for field in fields(value)
        if getattr(value, field.name) != field.default
    ]
    short = ", ".join(f"{name}={value!r}" for name, value in said)
    if not any(isinstance(each, tuple) and any(map(is_dataclass, each)) for _, each in said) and (
        not any(is_dataclass(each) for _, each in said)
    ):
        return f"{type(value).__name__}({short})"
    inner = "".join(
        f"{' ' * (indent + 4)}{name}={readable(each, indent + 4)},\n" for name, each in said
    )
    return f"{type(value).__name__}(\n{inner}{' ' * indent})"
