"""What a random program is: frozen data of literals, so that its repr is the program."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Net:
    """A model: a stem for its `modality`, `blocks` that keep the shape, and a head.

    A block is the name of one in blocks.py; `late:2` is one with a number. `checkpoint` is how
    the model's own forward recomputes its blocks: "", "reentrant" or "nonreentrant".
    """

    modality: str = "features"
    blocks: tuple[str, ...] = ("residual",)
    tied: bool = False
    checkpoint: str = ""
    embedding: Options = ()
    channels_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What trains one model. `groups`: "one", "decay" (matrices and the rest) or "layers".

    With `rest` matrices go to `name` and everything else to an AdamW of its own. `later` names a
    child of the model that is added by add_param_group on the way.
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

    `losses` are added up, each of a forward of its own unless `shared`, where they have one graph.
    Of "tokens" the number of items is told as the weight; of "ignored" and "class_weights", which
    are means over other items than rows as well, it is not.
    `cuts` is None for even shares (world.share), else the seed of uneven ones cut by hand. With
    `explicit` the weight is told; it is `factor` for each item. `between`: an evaluation comes
    between the batch and its forward. `last` says whether `last=` is told.
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
    """What comes `before` it (events), its parts, and the norm to clip by.

    With `ahead` all forwards of the step come before its first backward.
    """

    before: tuple[str, ...] = ()
    parts: tuple[Part, ...] = (Part(),)
    clip: float | None = None
    ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """How Shardwise runs it; `call` is "backward" or "forward_backward"."""

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
    """Steps under one configuration. Between two phases stand a save and a load."""

    config: Config = Config()
    steps: tuple[Step, ...] = (Step(),)


@dataclass(frozen=True, kw_only=True)
class Program:
    """All of it.

    `family`: "one" model; "chain", two models one after the other in one engine; "gan", two models
    with an engine each, the second of which judges the first. `feed`: "share", "loader",
    or "stream": a Loader of an iterable dataset with shard().
    `warm` steps are made by hand before there is an engine. `average` is an AveragedModel that the
    script updates by hand after each step.
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
        """Whether some BatchNorm needs statistics over all workers."""
        return any(block.startswith("batch_norm") for net in self.nets for block in net.blocks)

    @property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """By engine the numbers of its models."""
        return ((0,), (1,)) if self.family == "gan" else (tuple(range(len(self.nets))),)

    @property
    def single(self) -> bool:
        """Whether a part of it is computed in less than fp64."""
        return any(block == "single" for net in self.nets for block in net.blocks)

    def steps(self) -> Iterator[tuple[int, Step]]:
        """All steps with their numbers."""
        yield from enumerate(step for phase in self.phases for step in phase.steps)

    def first_step(self, phase: int) -> int:
        """The number of a phase's first step."""
        return sum(len(each.steps) for each in self.phases[:phase])

    def before_phase(self, phase: int) -> list[str]:
        """The events of earlier phases, in their order."""
        return [
            event for each in self.phases[:phase] for step in each.steps for event in step.before
        ]


def readable(value: Any, indent: int = 0) -> str:
    """The expression that makes `value`, without what is as it is by default, over lines."""
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
