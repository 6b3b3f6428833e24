"""Compiled units whose activations are split by tokens: the results of plain PyTorch."""

import copy
import re
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.parallel.tensor import compiled_units
from tests.distributed import sequence_programs as programs
from tests.distributed.sequence_programs import (
    ALIKE,
    OUTPUTS,
    PIECES,
    PLAN,
    REGIONS,
    SHAPES,
)
from tests.distributed.test_tensor_compile import start_afresh


def train_steps(model, shapes, step_of):
    """Train one step of each shape. Return the losses, gradient norms and outputs."""
    found = []
    for step, (rows, tokens) in enumerate(shapes):
        draw = torch.Generator().manual_seed(step)
        dtype = next(model.parameters()).dtype
        output, more = model(torch.randn(rows, tokens, 4, generator=draw).to(dtype))
        loss, norm = step_of(output.square().mean() + more)
        found += [output.detach(), torch.tensor([loss, norm], dtype=torch.double)]
    return found


def train_plain(model, shapes):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step_of(loss):
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return train_steps(model, shapes, step_of), model.state_dict()


def train(model, shapes, backend="aot_eager", **settings):
    start_afresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    settings = {"sequence_parallel": True, "compile": True, "tensor_plan": PLAN} | settings
    with (
        mock.patch.object(compiled_units, "BACKEND", backend),
        # A program has more kinds of shapes than torch compiles by default.
        mock.patch.object(torch._dynamo.config, "recompile_limit", 32),
    ):
        engine = sw.Engine(model, optimizer, bucket_mb=0.005, **settings)

        def step_of(loss):
            engine.backward(loss)
            stats = engine.step(max_norm=0.5)
            return stats.loss, stats.grad_norm

        try:
            found = train_steps(model, shapes, step_of)
            with engine.full_parameters():
                return found, {name: value.clone() for name, value in model.state_dict().items()}
        finally:
            engine.close()


def compare(world, chosen, settings, shapes):
    """Train programs, and compare with plain PyTorch. Return the refusal of each, or None.

    A program is a seed, or pieces and an output.
    """
    refusals = []
    for each in chosen:
        model = programs.build(each) if isinstance(each, int) else programs.make(*each)
        names = [piece.__name__ for piece in model.blocks[0].pieces]
        expected = train_plain(copy.deepcopy(model), shapes)
        try:
            found = train(model, shapes, **settings)
        except UsageError as error:
            refusals.append(str(error))
            continue
        torch.testing.assert_close(
            *(found, expected),
            rtol=1e-8,
            atol=1e-10,
            check_dtype=False,
            msg=lambda text, names=names: f"{names}: {text}",
        )
        refusals.append(None)
    return refusals


def accepts(group, chosen, size=2, shapes=SHAPES, **settings):
    for refusals in group(size, tensor=size)(compare, chosen, settings, shapes, limit=380):
        assert refusals == [None] * len(chosen)


def alone(piece, *, first):
    others = [] if piece in REGIONS else [programs.region]
    return [piece, *others] if first else [*others, piece]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([(ALIKE, programs.with_parts)], marks=pytest.mark.full),
        [
            (
                [programs.stopped_gate, programs.without_grad, programs.with_table],
                programs.with_parts,
            ),
        ],
        [
            (
                [programs.gathering_inside, programs.reversed_in_place, programs.nested],
                programs.with_object,
            ),
        ],
        [([programs.written_inside, programs.reads_weights], programs.plain)],
        *(
            pytest.param(
                [(alone(each, first=first),) for each in pieces[start : start + 10]],
                marks=pytest.mark.full,
            )
            for first in (True, False)
            for pieces in [PIECES + REGIONS]
            for start in range(0, len(PIECES + REGIONS), 10)
        ),
        pytest.param([([programs.region], each) for each in OUTPUTS], marks=pytest.mark.full),
    ],
)
def test_programs_equal_one_process(group, chosen):
    accepts(group, chosen, shapes=SHAPES[:1] if len(chosen) == 1 else SHAPES)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"zero": 3, "activations": "recomputed", "shapes": SHAPES[:2]}, marks=pytest.mark.slow
        ),
        pytest.param({"size": 3}, marks=pytest.mark.full),
        pytest.param({"backend": "inductor"}, marks=pytest.mark.full),
        pytest.param({"backend": "inductor", "zero": 3}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_programs_equal_one_process_with_settings(group, settings):
    accepts(group, [(ALIKE, programs.plain)], **settings)


def test_split_weights_have_sizes_of_parts_between_layers(group):
    chosen = [([programs.reads_weights],)]
    accepts(group, chosen, shapes=SHAPES[:1], sequence_parallel=False)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 60, 5))
def test_random_programs_equal_one_process(group, first):
    accepts(group, list(range(first, first + 5)))


@pytest.mark.parametrize(
    "refused",
    [
        {
            programs.token_written: r"writes in place \(setitem\).*sequence_programs.py",
            programs.view_taken_before: r"writes in place \(iadd\)",
            programs.recalled: "traces as one graph",
            programs.input_written: r"writes in place \(iadd\)",
            programs.input_hooked: "registers a hook on its input",
            programs.stored: "stores its input",
            programs.checkpointed: "traces as one graph",
            programs.part_stored: "stores a value from between two split layers",
            programs.full_used_inside: "uses a value from outside",
            programs.ends_on_tokens: "to part of a layer",
            programs.part_in_buffer: "writes a value from between two split layers",
        },
        pytest.param(
            {
                programs.view_written: r"writes in place \(add_\)",
                programs.into: r"writes in place \(add\)",
                programs.contiguous_written: r"writes in place \(iadd\)",
                programs.differentiated: "traces as one graph",
            },
            marks=pytest.mark.full,
        ),
    ],
)
def test_refuses_what_no_part_can_represent(group, refused):
    chosen = [(alone(each, first=True),) for each in refused]
    outputs = [programs.with_whole_view, programs.with_alias]
    chosen += [([programs.region], each) for each in outputs]
    for refusals in group(2, tensor=2)(compare, chosen, {}, SHAPES[:1], limit=300):
        for text, expected in zip(
            refusals, [*refused.values(), *["returns a view"] * 2], strict=True
        ):
            assert re.search(expected, text)


@pytest.mark.full
def test_hooks_and_stored_tensors_after_a_region_are_exact(group):
    pieces = [programs.hooked, programs.input_hooked, programs.stored, programs.input_written]
    accepts(group, [(alone(each, first=False),) for each in pieces])


def autocast(world, compiled):
    model = programs.make([programs.shared_gated, programs.norm_by_hand], programs.plain).float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16):
        found, after = train(model, SHAPES[:1], compile=compiled)
    return found, {name: value - before[name] for name, value in after.items()}


def test_autocast_equals_eager_tokens(group):
    for (found, updates), (eager_found, eager_updates) in zip(
        *(group(2, tensor=2)(autocast, each, limit=300) for each in (True, False)), strict=True
    ):
        torch.testing.assert_close(found, eager_found, rtol=2e-2, atol=2e-2)
        for name, update in eager_updates.items():
            assert torch.dist(updates[name], update) <= 0.05 * update.norm(), name
