"""Prints the lines at the start of a run: what is on, and what depends on the number of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from shardwise.engine import pipeline_parallel, tensor_parallel
from shardwise.engine.build import States
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.loss_terms import LossTerms
from shardwise.layout.placement import DEVICE, Placement, Tier
from shardwise.layout.sum_tree import MicroShards, node_sizes
from shardwise.messages.printable import in_bytes, in_short, many
from shardwise.model import units
from shardwise.model.activations import Activations
from shardwise.model.precision import NARROW
from shardwise.model.sync_batch_norm import is_out_of_reach
from shardwise.world.world import World

_NAMES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
"""What the states are called, by name of the placement's table."""


def announce_engine(world: World, spec: EngineSpec, states: States) -> None:
    """Two lines: the workers, transport, row and precision; the model, the bytes of its states,
    and which of them rest on another tier. A third where layers are split, or the exact mode is
    on. A trial is told of in any case."""
    if world.settings.trial:
        world.print("shardwise: trial: nothing is resumed, saved or exported")
    if spec.settings.quiet:
        return
    world.print(_run_line(world, spec))
    world.print(_model_line(spec, states))
    if spec.tensor is not None:
        split = tensor_parallel.describe_split(spec.tensor)
        world.print(f"  tensor parallel over {world.tensor_size}: {split}")
        for words in tensor_parallel.describe_unsplit(spec.tensor):
            world.print(f"  whole, not split: {words}")
    if spec.pipeline is not None:
        world.print(_stages_line(spec))
    if spec.micro_shards is not None:
        world.print(_exact_line(spec.micro_shards))
    if states.hooks is not None:
        world.print(f"  {states.hooks.describe()}")
    for name, others in sorted(_tried(states).items()):
        world.print(
            f"  {name}: its state is cut within tensors, since a trial found each element updated "
            f"by itself{others}; whole tensors, if it looks at those later: --zero 0"
        )


def announce_activations(world: World, spec: EngineSpec, activations: Activations) -> None:
    """A line on what is recomputed and where activations rest, when it is not the usual."""
    line = activations.describe()
    if line and not spec.settings.quiet:
        world.print(f"  activations: {line}")


def announce_batch(
    world: World, spec: EngineSpec, parts: int | None, *, averaged: bool = False
) -> None:
    """The last lines, at the first backward: the batch, whether losses are `averaged` over the
    workers, in how many `parts` it goes through the stages (None: whole, from one to the next), and
    what promise 1 does not cover."""
    if spec.pipeline is None and parts is None and spec.settings.microbatches is not None:
        world.say_once(
            f"--microbatches {spec.settings.microbatches} does nothing, since engine.backward "
            "takes a batch as it is: write engine.forward_backward, or leave it out"
        )
    if spec.settings.quiet:
        return
    world.print(_batch_line(world, averaged=averaged))
    if spec.pipeline is not None and parts is not None:
        world.print(f"  it goes through the stages in {many(parts, 'part')}")
    elif spec.pipeline is not None and spec.pipeline.partition.stages == spec.pipeline.group.size:
        world.print(_in_turn_line(spec))
    streams = world.current_batch.training_streams()
    parts = max([parts or 1, *(stream.plan.micro_batches for stream in streams)])
    outside = outside_promise(spec, parts) if spec.micro_shards is None else []
    if outside:
        world.print(f"  not the same on every number of workers: {'; '.join(outside)}")


def announce_loss(world: World, spec: EngineSpec, terms: LossTerms, *, is_said: bool) -> None:
    """Lines on the first loss: how it is weighed where its graph does not say so for certain, and
    what makes it depend on the number of workers. `is_said`: the user has said how to weigh it."""
    if spec.settings.quiet:
        return
    if terms.curved and spec.micro_shards is None:
        world.print(
            "  not the same on every number of workers: the loss is no mean and no sum over the "
            f"batch, but a function of them ({', '.join(terms.curved)})"
        )
    if is_said:
        return
    unread = [term.source for term in terms.terms if term.kind == "unread"]
    if unread:
        world.print(
            f"  the graph of this loss does not show what it is a mean over ({', '.join(unread)}): "
            "it is weighed by rows. For another number write engine.backward(loss, weight=n)"
        )
    if terms.is_sum:
        sources = ", ".join(dict.fromkeys(term.source for term in terms.terms))
        world.print(
            f"  losses are sums over the batch (from {sources}): those of all workers and "
            "backwards are added"
        )
    for number in terms.guessed:
        world.print(
            f"  this loss is a sum divided by {number:g}, which is taken for the number of its "
            'items: if it is a constant, write reduction="sum"'
        )


def announce_kinds(world: World, spec: EngineSpec, kinds: Sequence[str]) -> None:
    """A line, once, on a step whose losses of several batches are means over items of several
    `kinds`."""
    if not spec.settings.quiet:
        world.say_once(
            f"losses of one step are means over items of several kinds ({', '.join(kinds)}). Each "
            "counts by the number of its items. To weigh them by rows, write for each of them "
            "engine.backward(loss, weight=rows)."
        )


def announce_weight(world: World, spec: EngineSpec, terms: LossTerms, items: float) -> None:
    """A line, after the first step, on the items of a loss that is a mean over others than rows."""
    main = terms.main
    if main is not None and not main.has_rows and not spec.settings.quiet:
        what = "labels" if main.source == "cross_entropy" else "items"
        world.print(f"  weight: {items:,.10g} {what} per step, from {main.source}")


def _tried(states: States) -> dict[str, str]:
    """The optimizers whose tensors are cut because of a trial, and what is said of their groups
    that stay whole. Where some do, the name has the groups that are cut."""
    found: dict[str, str] = {}
    for optimizer in dict.fromkeys(group.optimizer for group in states.optimizer.groups):
        mine = [group for group in states.optimizer.groups if group.optimizer is optimizer]
        cut = sorted({g.index for g in mine if not g.whole and not g.kind.known})
        whole = sorted({g.index for g in mine if g.whole})
        name = type(optimizer).__name__
        if cut and whole:
            found[f"{name}, parameter {_groups(cut)}"] = (
                f" (tensors of {_groups(whole)} stay whole)"
            )
        elif cut:
            found[name] = ""
    return found


def _groups(numbers: list[int]) -> str:
    return f"group{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _run_line(world: World, spec: EngineSpec) -> str:
    some = "" if world.local_size == world.size else f", {world.local_size} of them"
    mesh = "" if world.mesh.is_flat else f" = {world.mesh.in_words()}"
    workers = f"{many(world.size, 'worker')}{mesh}{some} on {world.host} ({world.device.type})"
    transport = f"over {world.collectives.name}, " if world.size > 1 else ""
    row = f"{spec.placement.name} ({sharded_states(spec.placement)})"
    seed = f"seed {world.seed} ({world.seed_source})"
    if not world.settings.reseed:
        seed = "generators as the script seeds them"
    return f"shardwise: {workers}, {transport}{row}, {precision_in_words(spec)}, {seed}"


def precision_in_words(spec: EngineSpec) -> str:
    """The preset; where that leaves a model in the dtypes that it has, those of what is trained."""
    if spec.settings.precision != "fp32":
        return spec.settings.precision
    dtypes = dict.fromkeys(t.dtype for t in spec.located() if t.parameter.requires_grad)
    return " and ".join(_DTYPES.get(dtype, str(dtype)) for dtype in dtypes)


_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16 with fp32 masters",
    torch.float16: "fp16 with fp32 masters",
}
"""What is said of parameters that are trained as they are."""


def _stages_line(spec: EngineSpec) -> str:
    assert spec.pipeline is not None
    cut = spec.pipeline.partition
    stages = many(cut.stages, "stage")
    return f"  {stages} ({spec.settings.schedule}): {pipeline_parallel.describe_stages(cut)}"


def _exact_line(shards: MicroShards) -> str:
    sizes = ", ".join(str(size) for size in node_sizes(shards.count))
    cut = f"{many(shards.count, 'micro-shard')} per step, summed in one tree"
    return f"  exact: {cut}, one thread per worker: the same bits on {sizes} workers"


def sharded_states(placement: Placement) -> str:
    """What a placement shards, in words."""
    sharded = [name for state, name in _NAMES.items() if placement.is_sharded(state)]
    return (", ".join(sharded) + " sharded") if sharded else "all replicated"


def _model_line(spec: EngineSpec, states: States) -> str:
    trained = states.parameters.named
    if spec.pipeline is not None:
        trained = [t for t in spec.located() if t.parameter.requires_grad]
    count = sum(named.whole_shape.numel() for named in trained)
    line = f"  model: {in_short(count)} parameters in {many(_unit_count(spec, states), 'unit')}"
    line += f", state {in_bytes(states.expected_bytes())} per worker"
    if spec.placement.level and spec.data_group.size > 1:
        replicated = _replicated_bytes(spec, states)
        # Of a tiny model the padding of intervals is more than what sharding saves.
        padded = "padding included; " if states.expected_bytes() > replicated else ""
        line += f" ({padded}replicated: {in_bytes(replicated)})"
    elsewhere = _elsewhere(spec, states)
    return f"{line}, of it {elsewhere}" if elsewhere else line


def _unit_count(spec: EngineSpec, states: States) -> int:
    """How many units there are, the rest of each model among them where it has parameters."""
    if states.shown is not None:
        return sum(bool(unit.buckets) for unit in states.shown.residency.units)
    count = 0
    for model in spec.models:
        found = units.find_units(model, spec.settings.units)
        inside = {parameter for _, unit in found for parameter in unit.parameters()}
        count += len(found) + any(parameter not in inside for parameter in model.parameters())
    return count


def _elsewhere(spec: EngineSpec, states: States) -> str:
    """Which states rest on another tier than the device, in words; empty when none does."""
    resting: dict[Tier, list[str]] = {}
    for state, nbytes in states.bytes_by_state().items():
        tier = spec.placement.tier(state)
        if tier != DEVICE:
            resting.setdefault(tier, []).append(f"{_NAMES[state]} {in_bytes(nbytes)}")
    here = "where these workers compute, so that nothing moves"
    return "; ".join(
        f"on {tier}{f' ({here})' if tier.kind == spec.device.type else ''}: {', '.join(parts)}"
        for tier, parts in resting.items()
    )


def _replicated_bytes(spec: EngineSpec, states: States) -> int:
    """Bytes of the same states if every rank held them whole, without padding."""
    total = 0
    anchor = 0 if states.hooks is None else states.hooks.copies
    for index, bucket in enumerate(states.parameters.buckets):
        dtype, _ = states.parameters.kind(index)
        is_narrow = dtype in NARROW
        moments = len(states.optimizer.groups[index].kind.tensor_keys)
        kept = moments + is_narrow + (spec.settings.ema_decay is not None) + anchor
        each = 2 * dtype.itemsize + kept * (4 if is_narrow else dtype.itemsize)
        total += sum(slot.numel for slot in bucket.slots) * each
    for named, _ in states.parameters.frozen_bytes():
        total += sum(each.shape.numel() * each.dtype.itemsize for each in named)
    return total


def _in_turn_line(spec: EngineSpec) -> str:
    unused = "" if spec.settings.microbatches is None else ", and --microbatches does nothing"
    return (
        f"  engine.backward goes from stage to stage, one worker at a time{unused}: "
        "engine.forward_backward keeps all busy"
    )


def _batch_line(world: World, *, averaged: bool) -> str:
    if averaged:
        return "  batch: as the script gives it to each worker, whose losses are averaged"
    streams = world.current_batch.training_streams()
    plan = streams[-1].plan if streams else None
    if plan is None or plan.batch_size is None:
        return _unknown_batch(world)
    each = math.ceil(plan.batch_size / (world.data_size * plan.micro_batches))
    replicas = many(world.data_size, "worker" if world.mesh.replica == 1 else "replica")
    parts = [replicas, many(plan.micro_batches, "micro-batch", "es")]
    up_to = "" if each * world.data_size * plan.micro_batches == plan.batch_size else "up to "
    line = f"  batch: {plan.batch_size} = {' x '.join(parts)} x {up_to}{each}"
    if streams[-1].passing:  # nobody knows yet how many come before engine.step()
        line += f" of each {streams[-1].name}; those before one engine.step() add up"
    if plan.steps_per_epoch is not None:
        line += f", {plan.steps_per_epoch:,} steps per epoch"
    if (islands := world.groups_apart) > 1:
        up_to = "up to " if plan.batch_size % islands else ""
        line += f"; a step of an island has {up_to}{math.ceil(plan.batch_size / islands)} of them"
    return line


def _unknown_batch(world: World) -> str:
    line = "  batch: as the script gives it to each worker"
    if world.size == 1 or world.current_batch.streams:
        return line
    return (
        f"{line}; no sw.Loader is in use, and a plain DataLoader gives every worker the whole "
        "dataset. sw.Loader(...) or world.share(batch) gives each its share."
    )


def outside_promise(spec: EngineSpec, micro_batches: int = 1) -> list[str]:
    """What a model does that makes results depend on the number of workers, or on how many
    `micro_batches` a step is cut into."""
    found: dict[str, int] = {}
    for module in (m for model in spec.models for m in model.modules()):
        reason = _reason(module, spec.settings.sync_batch_norm, micro_batches)
        if reason is not None:
            found[reason] = found.get(reason, 0) + 1
    return [f"{reason} ({many(count, 'module')})" for reason, count in found.items()]


def _reason(module: nn.Module, synchronised: bool, micro_batches: int) -> str | None:
    if module.training and _drops(module):
        return "dropout in forward"
    is_normal = isinstance(module, nn.modules.batchnorm._BatchNorm)
    if is_normal and not synchronised:
        parts = " and no micro-batches bring" if micro_batches > 1 else " brings"
        return f"BatchNorm with per-worker statistics, --sync-batch-norm{parts} it in"
    if is_normal and not is_out_of_reach(module) and micro_batches > 1:
        return (
            f"BatchNorm, which sees {micro_batches} micro-batches one by one, each over all "
            "workers: the whole batch without micro-batches"
        )
    if is_out_of_reach(module) and synchronised:
        kind = type(module).__name__
        return f"{kind}, which normalises by itself, out of reach of --sync-batch-norm"
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq, which counts in each worker's share"
    return None


def _drops(module: nn.Module) -> bool:
    """Whether a forward of `module` in training drops values by chance.

    A number `p` is a chance if the module is called after one, or its forward calls something that
    is: elsewhere it may be the exponent of a norm.
    """
    code = getattr(type(module).forward, "__code__", None)
    names = [type(module).__name__.lower(), *getattr(code, "co_names", ())]
    draws = any(word in name for name in names for word in _DRAWING)
    chances = [getattr(module, "dropout", None), getattr(module, "p", None) if draws else None]
    return any(isinstance(chance, float) and 0 < chance <= 1 for chance in chances)


_DRAWING = ("drop", "bernoulli", "rand", "stochastic")
"""Parts of names of what draws."""
