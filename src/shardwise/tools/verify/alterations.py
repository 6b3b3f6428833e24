"""Alters a script's behaviour to test a possible cause of a difference.

`verify` reports a cause only if removing it makes the difference between placements disappear.

    sampler      every DistributedSampler yields all samples, as on a single rank
    batches      divides a library's per-worker batch size, so that the total stays the same
    split        random_split uses the same fixed generator on all ranks
    draws        all ranks draw the same random numbers after each step
    noise        random tensors with a row per sample are drawn for the total batch
    collate      collate_fn is called for each sample alone, with random draws that depend on it
    loss         multiplies losses by a factor
    weight       ignores weight= and reduction=, so that losses are weighted by their graphs
    lr           uses the reference's learning rates, step by step
    dropout      disables dropout
    sum          the script's own sums over ranks return their input
    averaged     averages the named module tensors across ranks after each step
    rank         the script sees rank 0 on every rank
    size         the script sees a world size of 1
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import shardwise
from shardwise.model.module_records import joined
from shardwise.tools.verify import watching
from shardwise.world import randomness
from shardwise.world.randomness import seed_cpu, seed_from
from shardwise.world.world import World, current

MAKE_LOADERS = ("transformers.", "shardwise.deepspeed.")
"""Modules that create a DataLoader from the user's dataset and batch size."""


def apply(alter: Mapping[str, Any]) -> None:
    """Apply the alterations in `alter` (values by name) for the lifetime of this process."""
    for name, value in alter.items():
        _ALTERATIONS[name](value)


def _sampler(value: Any) -> None:
    kind: Any = torch.utils.data.DistributedSampler
    plain = kind.__init__

    @wraps(plain)
    def alone(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        # Map positional arguments to names, in the order of DistributedSampler's signature.
        more = dict(
            zip(("num_replicas", "rank", "shuffle", "seed", "drop_last"), args, strict=False)
        )
        plain(self, dataset, **{**more, **kwargs, "num_replicas": 1, "rank": 0})

    kind.__init__ = alone


def _batches(size: int) -> None:
    kind: Any = torch.utils.data.DataLoader
    plain = kind.__init__

    @wraps(plain)
    def divided(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        # Divide the batch size only of the loader that the user, or a library for the user,
        # creates. Libraries wrap it in further loaders, whose batch size is already divided.
        first = watching.caller(1) is not None or watching.module_of(1).startswith(MAKE_LOADERS)
        if first and batch_size and current().size > 1:
            batch_size = max(1, batch_size // size)
        # All workers do the same, so the total over all workers is the script's batch size.
        plain(self, dataset, batch_size, *args, **kwargs)

    kind.__init__ = divided


def _split(value: Any) -> None:
    plain = torch.utils.data.random_split

    @wraps(plain)
    def alike(dataset: Any, lengths: Any, generator: Any = None) -> Any:
        return plain(dataset, lengths, generator or torch.Generator().manual_seed(0))

    torch.utils.data.random_split = alike
    torch.utils.data.dataset.random_split = alike


def _draws(value: Any) -> None:
    def after(engine: Any) -> None:
        # The seed is different in each step, and the same on all ranks.
        randomness.seed_everything(seed_from(current().seed, "alike", engine.steps))

    _around_step(after=after)


def _noise(value: Any) -> None:
    for name in watching.NOISE:
        _draw_for_total_batch(name)


def _draw_for_total_batch(name: str) -> None:
    plain = getattr(torch, name)

    @wraps(plain)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        drawn = plain(*args, **kwargs)
        if watching.caller(1) is None or not watching.has_rows_of_batch(drawn, kwargs):
            return drawn
        shape = drawn.shape[1:]

        def make(rows: int) -> Tensor:
            if name.endswith("_like"):
                return plain(args[0].new_empty(rows, *shape), *args[1:], **kwargs)  # type: ignore[no-any-return]
            # Arguments that are not part of the shape, such as the bounds of randint.
            sized = "size" in kwargs or not isinstance(args[-1], int)
            bounds = args[: len(args) - ("size" not in kwargs)] if sized else ()
            more = {key: each for key, each in kwargs.items() if key != "size"}
            return plain(*bounds, (rows, *shape), **more)  # type: ignore[no-any-return]

        return current().draw(make)

    setattr(torch, name, drawing)


def _collate(value: Any) -> None:
    kind: Any = shardwise.Loader
    plain = kind.__init__

    @wraps(plain)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("collate_fn") is not None:
            kwargs["collate_fn"] = _CollatesEachSample(kwargs["collate_fn"])
        plain(self, *args, **kwargs)

    kind.__init__ = made


class _CollatesEachSample:
    """Calls `collate` with one sample at a time, and concatenates the results along dim 0."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        collated = []
        for sample in samples:
            # Seed by the sample's value, because its index is unknown here.
            seed_cpu(seed_from("collate", *map(_fingerprint, pytree.tree_leaves(sample))))
            collated.append(self._collate([sample]))
        return pytree.tree_map(
            lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else each[0], *collated
        )


def _fingerprint(leaf: Any) -> str | int:
    """Return a number or a text that depends only on the value of `leaf`."""
    if not isinstance(leaf, Tensor):
        return str(leaf)
    return zlib.crc32(leaf.flatten().contiguous().view(torch.uint8).numpy().tobytes())


def _loss(factor: float) -> None:
    engine: Any = shardwise.Engine
    backward, through = engine.backward, engine.forward_backward

    @wraps(backward)
    def scaled(self: Any, loss: Tensor, **kwargs: Any) -> Any:
        return backward(self, loss * factor, **kwargs)

    @wraps(through)
    def scaled_through(self: Any, loss_of: Callable[..., Tensor], *batch: Any, **kw: Any) -> Any:
        return through(self, lambda *part: loss_of(*part) * factor, *batch, **kw)

    engine.backward, engine.forward_backward = scaled, scaled_through


def _weight(value: Any) -> None:
    engine: Any = shardwise.Engine

    def unweighted(plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Without these arguments, the engine derives the weights of losses from their graphs.
            return plain(self, *args, **{**kwargs, "weight": None, "reduction": "mean"})

        return call

    engine.backward = unweighted(engine.backward)
    engine.forward_backward = unweighted(engine.forward_backward)


def _lr(rates: Mapping[str, list[list[float]]]) -> None:
    """Override learning rates. `rates` maps each engine to its rates by step and group."""
    held: dict[int, list[float]] = {}
    numbers: dict[int, int] = {}

    def before(engine: Any) -> None:
        # Number only engines that step, because `rates` contains no others.
        number = numbers.setdefault(id(engine), len(numbers))
        groups = _groups(engine)
        held[id(engine)] = [group["lr"] for group in groups]
        several = rates[str(number)]
        reference_rates = several[min(engine.steps, len(several) - 1)]
        for group, rate in zip(groups, reference_rates, strict=True):
            group["lr"] = rate

    # Restore the script's rates after the step, because a scheduler computes the next rate from the
    # current one.
    def after(engine: Any) -> None:
        for group, rate in zip(_groups(engine), held[id(engine)], strict=True):
            group["lr"] = rate

    _around_step(before=before, after=after)


def _groups(engine: Any) -> list[dict[str, Any]]:
    return [g for o in engine.verified[1] for g in o.param_groups if "lr" in g]


def _dropout(value: Any) -> None:
    for name in watching.DROPOUTS:
        plain = getattr(F, name)
        setattr(F, name, _undropped(name, plain))
    # Attention and nn.RNN never call F.dropout. Attention takes the probability as its fifth
    # argument, nn.RNN as an attribute.
    attend: Any = F.scaled_dot_product_attention

    @wraps(attend)
    def whole(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        return attend(*args, **{k: 0.0 if k == "dropout_p" else v for k, v in kwargs.items()})

    F.scaled_dot_product_attention = whole
    engine: Any = shardwise.Engine
    init = engine.__init__

    @wraps(init)
    def without(self: Any, models: Any, optimizers: Any, **kwargs: Any) -> None:
        init(self, models, optimizers, **kwargs)
        for module in (inner for model in self.verified[0] for inner in model.modules()):
            if isinstance(module, torch.nn.RNNBase):
                module.dropout = 0.0

    engine.__init__ = without


def _undropped(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def undropped(*args: Any, **kwargs: Any) -> Any:
        if name == "rrelu":  # it has no p, but uses a fixed slope in evaluation mode
            return plain(args[0], training=False)
        return plain(args[0], p=0.0)

    return undropped


def _sum(value: Any) -> None:
    plain, reduce = World.sum, torch.distributed.all_reduce

    @wraps(plain)
    def unsummed(self: World, tensor: Tensor, groups: Any = None) -> Tensor:
        # Alter only calls from user code, because the library and metrics need their own sums.
        if watching.caller(1) is None:
            return plain(self, tensor, groups)
        return tensor.detach().clone()

    @wraps(reduce)
    def unreduced(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if watching.caller(1) is None:
            return reduce(tensor, *args, **kwargs)
        return None

    World.sum, torch.distributed.all_reduce = unsummed, unreduced  # type: ignore[method-assign, assignment]


def _averaged(names: Sequence[str]) -> None:
    def after(engine: Any) -> None:
        world, models = current(), engine.verified[0]
        several = len(models) > 1
        for number, model in enumerate(models):
            prefix = f"models[{number}]" if several else ""
            for path, module in model.named_modules():
                for key, tensor in [*vars(module).items(), *module._buffers.items()]:
                    if joined(prefix, path, key) in names and tensor.is_floating_point():
                        setattr(module, key, World.sum(world, tensor) / world.size)

    _around_step(after=after)


def _rank(value: Any) -> None:
    for name in watching.RANKS:
        # 0 for every kind of rank, and True for is_main.
        vars(World)[name].pretended = name == "is_main" or 0
    _pretend(torch.distributed, "get_rank", 0)
    _pretend_in_horovod("rank", 0)
    _pretend_in_environment("RANK", "LOCAL_RANK", "GROUP_RANK")


def _size(value: Any) -> None:
    # A script that sees a world of one rank must also see rank 0, or it would index out of range.
    _rank(value)
    for name in watching.SIZES:
        vars(World)[name].pretended = 1
    _pretend(torch.distributed, "get_world_size", 1)
    _pretend_in_horovod("size", 1)


def _pretend_in_horovod(topic: str, value: int) -> None:
    horovod = sys.modules.get("shardwise.horovod")  # imported only if the script uses Horovod
    for name, of in watching.HOROVOD.items():
        if horovod is not None and of == topic:
            _pretend(horovod, name, value)


def _pretend(owner: Any, name: str, value: int) -> None:
    plain = getattr(owner, name)

    @wraps(plain)
    def pretending(*args: Any, **kwargs: Any) -> Any:
        # Calls from the library itself still return the true value.
        mine = watching.caller(1)
        return plain(*args, **kwargs) if mine is None else value

    setattr(owner, name, pretending)


def _pretend_in_environment(*names: str) -> None:
    """Patch `sw.init` to set the environment variables `names` to 0 before it returns."""
    # Not before, because `sw.init` reads this process's rank from them.
    plain = shardwise.init

    @wraps(plain)
    def init(*args: Any, **kwargs: Any) -> Any:
        world = plain(*args, **kwargs)
        os.environ.update(dict.fromkeys(names, "0"))
        return world

    shardwise.init = init


def _around_step(
    before: Callable[[Any], None] | None = None, after: Callable[[Any], None] | None = None
) -> None:
    engine: Any = shardwise.Engine
    plain = engine.step

    @wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self)
        try:
            return plain(self, *args, **kwargs)
        finally:
            if after is not None:
                after(self)

    engine.step = step


_ALTERATIONS: dict[str, Callable[[Any], None]] = {
    "sampler": _sampler,
    "batches": _batches,
    "split": _split,
    "draws": _draws,
    "noise": _noise,
    "collate": _collate,
    "loss": _loss,
    "weight": _weight,
    "lr": _lr,
    "dropout": _dropout,
    "sum": _sum,
    "averaged": _averaged,
    "rank": _rank,
    "size": _size,
}
