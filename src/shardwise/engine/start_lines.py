"""Prints the startup summary.

It shows the run's settings, and warns if results depend on the number of workers.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

from shardwise.engine import pipeline_parallel, tensor_parallel
from shardwise.engine.build import States
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.loss_terms import LossTerms
from shardwise.layout.placement import DEVICE, Placement, Tier
from shardwise.layout.sum_tree import node_sizes
from shardwise.messages.printable import in_bytes, in_short, many
from shardwise.model import units
from shardwise.model.activations import Activations
from shardwise.model.precision import NARROW
from shardwise.model.sync_batch_norm import is_out_of_reach
from shardwise.states.storage import nf4_storage
from shardwise.states.storage.quantised_storage import nbytes_of
from shardwise.world.world import World

_NAMES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
"""Maps the placement's names of the states to words for messages."""


def announce_engine(world: World, spec: EngineSpec, states: States) -> None:
    """Print the startup summary of a new engine.

    The first line shows workers, transport, placement and precision. The second shows the model,
    the size of its states, and their tiers. More lines follow for split layers, exact mode,
    islands, and optimizers that were classified by a trial update. With `--trial`, a message about
    the trial is printed even if the summary is disabled.
    """
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
    if spec.experts is not None:
        world.print(f"  expert parallel over {world.expert_size}: {spec.experts.describe()}")
        for name, reason in spec.experts.reasons_unsplit.items():
            world.print(f"  whole, not split: {name}: {reason}")
    if spec.context is not None and (words := spec.context.describe()):
        world.print(f"  context parallel over {world.context_size}: {words}")
    for loss in spec.chunked_losses:
        world.print(f"  loss in chunks of tokens: {type(loss.model).__name__} never has all scores")
    if spec.pipeline is not None:
        cut = spec.pipeline.partition
        stages = f"{many(cut.stages, 'stage')} ({spec.settings.schedule})"
        world.print(f"  {stages}: {pipeline_parallel.describe_stages(cut)}")
    if spec.micro_shards is not None:
        count = spec.micro_shards.count
        sizes = ", ".join(str(size) for size in node_sizes(count))
        world.print(
            f"  exact: {many(count, 'micro-shard')} per step, summed in one tree, one thread per "
            f"worker: the same bits on {sizes} workers"
        )
    if world.survival is not None:
        copies = ""
        if states.copies is not None:
            copies = "; each worker keeps a second copy of another one's sharded states"
        most = spec.settings.survive
        lost = f"{many(most, 'worker')} {'is' if most == 1 else 'are'} lost at once"
        world.print(f"  continues if at most {lost}{copies}")
        if line := world.survival.group.divisions.describe(world.size):
            world.print(f"  {line}")
    if states.hooks is not None:
        world.print(f"  {states.hooks.describe()}")
    for name, others in sorted(_optimizers_by_trial(states).items()):
        world.print(
            f"  {name}: its state is cut within tensors, because in a trial it updated each "
            f"element independently{others}; if later steps look at whole tensors: --zero 0"
        )


def announce_activations(world: World, spec: EngineSpec, activations: Activations) -> None:
    """Print how activations are recomputed or stored, unless that is the default."""
    line = activations.describe()
    if line and not spec.settings.quiet:
        world.print(f"  activations: {line}")


def announce_batch(
    world: World, spec: EngineSpec, parts: int | None, *, averaged: bool = False
) -> None:
    """Print how the first batch is split, and why results depend on the number of workers.

    `averaged` is True if losses are averaged across workers. `parts` is the number of micro-batches
    that pass through the pipeline, or None if the whole batch passes through it at once.
    """
    if spec.pipeline is None and parts is None and spec.settings.microbatches is not None:
        world.say_once(
            f"--microbatches {spec.settings.microbatches} has no effect, because engine.backward "
            "does not cut a batch: write engine.forward_backward, or remove it"
        )
    if spec.settings.quiet:
        return
    world.print(_batch_line(world, averaged=averaged))
    if spec.pipeline is not None and parts is not None:
        world.print(f"  it goes through the stages in {many(parts, 'part')}")
    elif spec.pipeline is not None and spec.pipeline.partition.stages == spec.pipeline.group.size:
        unused = "" if spec.settings.microbatches is None else ", and --microbatches has no effect"
        world.print(
            f"  engine.backward runs stage after stage, one worker at a time{unused}: "
            "engine.forward_backward keeps all workers busy"
        )
    streams = world.current_batch.training_streams()
    # A batch can be split by forward_backward or by the Loader.
    parts = max([parts or 1, *(stream.plan.micro_batches for stream in streams)])
    outside = outside_promise(spec, parts) if spec.micro_shards is None else []
    if outside:
        world.print(f"  the result depends on the number of workers: {'; '.join(outside)}")


def announce_loss(world: World, spec: EngineSpec, terms: LossTerms, *, is_said: bool) -> None:
    """Print how the first loss is weighted if that is uncertain.

    Also print a warning if the result depends on the number of workers. `is_said` is True if the
    user passed a weight or a reduction.
    """
    if spec.settings.quiet:
        return
    if terms.curved and spec.micro_shards is None:
        world.print(
            "  the result depends on the number of workers: the loss is not a mean or a sum over "
            f"the batch, but a function of them ({', '.join(terms.curved)})"
        )
    if is_said:
        return
    unread = [term.source for term in terms.terms if term.kind == "unread"]
    if unread:
        world.print(
            "  the graph of this loss does not show how many items it is a mean over "
            f"({', '.join(unread)}): it is weighted by rows. For another number write "
            "engine.backward(loss, weight=n)"
        )
    if terms.is_sum:
        sources = ", ".join(dict.fromkeys(term.source for term in terms.terms))
        world.print(
            f"  losses are sums over the batch (from {sources}): the losses of all workers and "
            "backwards are added"
        )
    for number in terms.guessed:
        world.print(
            f"  this loss is a sum divided by {number:g}, which is assumed to be the number of its "
            'items: if it is a constant, write reduction="sum"'
        )


def announce_weight(world: World, spec: EngineSpec, terms: LossTerms, items: float) -> None:
    """After the first step, print the number of items if the loss is not a mean over rows."""
    main = terms.main
    if main is not None and not main.has_rows and not spec.settings.quiet:
        noun = "labels" if main.source == "cross_entropy" else "items"
        world.print(f"  weight: {items:,.10g} {noun} per step, from {main.source}")


def _optimizers_by_trial(states: States) -> dict[str, str]:
    """Return the optimizers whose tensors are split because a trial update showed that they can be.

    The keys are the optimizers' names, and the values are notes. If all parameter groups of an
    optimizer are split, its note is "". Otherwise the key also lists the groups that are split, and
    the note lists the others.
    """
    notes: dict[str, str] = {}
    for optimizer in dict.fromkeys(group.optimizer for group in states.optimizer.groups):
        # There is one group object per bucket, so the same `index` may occur several times.
        mine = [group for group in states.optimizer.groups if group.optimizer is optimizer]
        cut = sorted({g.index for g in mine if not g.whole and not g.kind.known})
        whole = sorted({g.index for g in mine if g.whole})
        name = type(optimizer).__name__
        if cut and whole:
            notes[f"{name}, parameter {_groups(cut)}"] = (
                f" (tensors of {_groups(whole)} stay whole)"
            )
        elif cut:
            notes[name] = ""
    return notes


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
        seed = "generators seeded by the script"
    return f"shardwise: {workers}, {transport}{row}, {precision_in_words(spec)}, {seed}"


def precision_in_words(spec: EngineSpec) -> str:
    """Return the precision preset or, for fp32, the dtypes of the trained parameters.

    If frozen weights are stored in 4 bits, the result says so.
    """
    narrow = ", frozen linear weights in nf4" if spec.settings.quantises_frozen else ""
    if spec.settings.precision != "fp32":
        return spec.settings.precision + narrow
    dtypes = dict.fromkeys(t.dtype for t in spec.located() if t.parameter.requires_grad)
    return " and ".join(_DTYPES.get(dtype, str(dtype)) for dtype in dtypes) + narrow


_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16 with fp32 masters",
    torch.float16: "fp16 with fp32 masters",
}
"""Maps dtypes of trained parameters to words."""


def sharded_states(placement: Placement) -> str:
    """Describe which states a placement shards."""
    sharded = [name for state, name in _NAMES.items() if placement.is_sharded(state)]
    return (", ".join(sharded) + " sharded") if sharded else "all replicated"


def _model_line(spec: EngineSpec, states: States) -> str:
    trained = states.parameters.named
    if spec.pipeline is not None:
        # The states contain only this stage's layers, but the line describes the full model.
        trained = [t for t in spec.located() if t.parameter.requires_grad]
    count = sum(named.whole_shape.numel() for named in trained)
    line = f"  model: {in_short(count)} parameters in {many(_unit_count(spec, states), 'unit')}"
    line += f", state {in_bytes(states.expected_bytes())} per worker"
    if spec.placement.level and spec.data_group.size > 1:
        replicated = _replicated_bytes(spec, states)
        # For a tiny model, padding may exceed what sharding saves.
        padded = "padding included; " if states.expected_bytes() > replicated else ""
        line += f" ({padded}replicated: {in_bytes(replicated)})"
    elsewhere = _elsewhere(spec, states)
    return f"{line}, of which {elsewhere}" if elsewhere else line


def _unit_count(spec: EngineSpec, states: States) -> int:
    """Return the number of units. A model's parameters outside its blocks form one more unit."""
    if states.shown is not None:
        return sum(bool(unit.buckets) for unit in states.shown.residency.units)
    count = 0
    for model in spec.models:
        blocks = units.find_units(model, spec.settings.units)
        inside = {parameter for _, unit in blocks for parameter in unit.parameters()}
        count += len(blocks) + any(parameter not in inside for parameter in model.parameters())
    return count


def _elsewhere(spec: EngineSpec, states: States) -> str:
    """Describe the states on tiers other than the device, or return "" if there are none."""
    offloaded: dict[Tier, list[str]] = {}
    for state, nbytes in states.bytes_by_state().items():
        tier = spec.placement.tier(state)
        if tier != DEVICE:
            offloaded.setdefault(tier, []).append(f"{_NAMES[state]} {in_bytes(nbytes)}")
    here = "the device of these workers, so nothing moves"
    return "; ".join(
        f"on {tier}{f' ({here})' if tier.kind == spec.device.type else ''}: {', '.join(parts)}"
        for tier, parts in offloaded.items()
    )


def _replicated_bytes(spec: EngineSpec, states: States) -> int:
    """Return the bytes per rank that the same states would need if they were replicated.

    Excludes padding.
    """
    total = 0
    anchor = 0 if states.hooks is None else states.hooks.copies
    for index, bucket in enumerate(states.parameters.buckets):
        dtype, _ = states.parameters.kind(index)
        is_narrow = dtype in NARROW
        # Parameters and gradients have the parameter's dtype; moments, master, average and anchor
        # are fp32.
        wide = 4 if is_narrow else dtype.itemsize
        mastered = is_narrow and not (spec.settings.rounds_masters and dtype == torch.bfloat16)
        kept = mastered + (spec.settings.ema_decay is not None) + anchor
        moments = len(states.optimizer.groups[index].kind.tensor_keys)
        for slot in bucket.slots:
            total += slot.numel * (2 * dtype.itemsize + kept * wide)
            if spec.settings.quantises_state:
                total += moments * nbytes_of(slot.numel, wide)
            else:
                total += moments * slot.numel * wide
    for named, _ in states.parameters.frozen_bytes():
        for each in named:
            numel, size = each.shape.numel(), each.dtype.itemsize
            is_narrow = each.parameter in spec.quantised_weights
            total += nf4_storage.nbytes_of(numel, size) if is_narrow else numel * size
    return total


def _batch_line(world: World, *, averaged: bool) -> str:
    if averaged:
        return "  batch: each worker's own, from the script; losses are averaged over workers"
    streams = world.current_batch.training_streams()
    plan = streams[-1].plan if streams else None
    if plan is not None and plan.tokens is not None:
        replicas = _shares(world)
        return f"  batch: up to {plan.tokens:,} tokens per step, on {replicas} together"
    if plan is None or plan.batch_size is None:
        return _unknown_batch(world)
    each = math.ceil(plan.batch_size / (world.data_size * plan.micro_batches))
    replicas = _shares(world)
    parts = [replicas, many(plan.micro_batches, "micro-batch", "es")]
    up_to = "" if each * world.data_size * plan.micro_batches == plan.batch_size else "up to "
    line = f"  batch: {plan.batch_size} = {' x '.join(parts)} x {up_to}{each}"
    if streams[-1].passing:  # the number of batches per step is not known yet
        line += f" of each {streams[-1].name}; those before one engine.step() are added"
    if plan.steps_per_epoch is not None:
        line += f", {plan.steps_per_epoch:,} steps per epoch"
    if (islands := world.groups_apart) > 1:
        up_to = "up to " if plan.batch_size % islands else ""
        line += f"; a step of an island has {up_to}{math.ceil(plan.batch_size / islands)} of them"
    return line


def _shares(world: World) -> str:
    """Return in words how many workers, replicas or context groups share a batch."""
    if world.context_size > 1:
        return many(world.data_size, "context group")
    return many(world.data_size, "worker" if world.mesh.replica == 1 else "replica")


def _unknown_batch(world: World) -> str:
    owner = "context group" if world.context_size > 1 else "worker"
    line = f"  batch: each {owner}'s own, from the script"
    if world.size == 1 or world.current_batch.streams:
        return line
    return (
        f"{line}; no sw.Loader is in use, and a plain DataLoader gives every worker the whole "
        "dataset. To give each worker its share, use sw.Loader(...) or world.share(batch)."
    )


def outside_promise(spec: EngineSpec, micro_batches: int = 1) -> list[str]:
    """Return the reasons why results depend on the number of workers or `micro_batches`."""
    counts: dict[str, int] = {}
    for module in (m for model in spec.models for m in model.modules()):
        reason = _reason(module, spec.settings.sync_batch_norm, micro_batches)
        if reason is not None:
            counts[reason] = counts.get(reason, 0) + 1
    return [f"{reason} ({many(count, 'module')})" for reason, count in counts.items()]


def _reason(module: nn.Module, synchronised: bool, micro_batches: int) -> str | None:
    if module.training and _has_dropout(module):
        return "dropout: each worker draws its own mask, unless --exact V is set"
    is_normal = isinstance(module, nn.modules.batchnorm._BatchNorm)
    if is_normal and not synchronised:
        remedy = " without micro-batches" if micro_batches > 1 else ""
        return f"BatchNorm with per-worker statistics, unless --sync-batch-norm{remedy} is set"
    if is_normal and not is_out_of_reach(module) and micro_batches > 1:
        return (
            f"BatchNorm, whose statistics are over each of {micro_batches} micro-batches of all "
            "workers: without micro-batches they are over the whole batch"
        )
    if is_out_of_reach(module) and synchronised:
        kind = type(module).__name__
        return f"{kind}, whose normalisation --sync-batch-norm cannot synchronise"
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq, which counts within each worker's share"
    return None


def _has_dropout(module: nn.Module) -> bool:
    """Return whether the forward pass of `module` drops values at random in training mode."""
    # Treat attributes `p` and `drop...` as probabilities only if the module's name, or that of a
    # function called in its forward or of its argument, contains a word of _DRAWING. Otherwise `p`
    # may be the exponent of a norm.
    code = getattr(type(module).forward, "__code__", None)
    named = getattr(code, "co_names", ())
    # `self.drop` alone does not draw, so leave out the names of the probabilities themselves.
    names = [each for each in named if not isinstance(vars(module).get(each), float)]
    names.append(type(module).__name__.lower())
    # The compiler stores the names of keyword arguments as tuples of constants.
    keywords = [each for each in getattr(code, "co_consts", ()) if isinstance(each, tuple)]
    names += [each for each in itertools.chain(*keywords) if isinstance(each, str)]
    chances = [getattr(module, "dropout", None)]
    if any(word in name for name in names for word in _DRAWING):
        chances += [value for name, value in vars(module).items() if "drop" in name]
        chances.append(getattr(module, "p", None))
    return any(isinstance(chance, float) and 0 < chance <= 1 for chance in chances)


_DRAWING = ("drop", "bernoulli", "rand", "stochastic")
"""Words in the names of modules and functions that draw random numbers."""
