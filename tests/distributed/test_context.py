"""`--context`: training on parts of sequences equals training on whole ones in one process."""

import contextlib
import io
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import DataError, GuardError, ModelError, UsageError
from shardwise.layout.bucket_layout import even_cuts
from shardwise.parallel.tensor import compiled_units
from tests.distributed import contexts
from tests.distributed.contexts import WIDTH, WORDS, Model, Problem, plain, trained
from tests.distributed.group import Groups

ROUTED = {"balance": 0.3, "z_loss": 0.05, "bias_rate": 0.02}
"""Router losses and a selection bias."""

RECOMPUTED = {"activations": "recomputed"}

CASES = {
    # ranks, parts per sequence, training, and other axes of the mesh
    "zero 0": (2, 2, Problem(settings={"zero": 0})),
    "zero 1": (2, 2, Problem("adamw", settings={"zero": 1})),
    "zero 2": (2, 2, Problem("adamw", rows=(2, 3), settings={"zero": 2})),
    "zero 3": (2, 2, Problem(rows=(2, 1), settings={"zero": 3})),
    "one part": (2, 1, Problem(rows=(3,), settings={"zero": 1})),
    "four parts": (4, 4, Problem(length=11, settings={"zero": 3})),
    "two groups": (4, 2, Problem(rows=(3, 1), length=7, settings={"zero": 2})),
    "grouped heads": (2, 2, Problem(groups=2)),
    "fewer groups than parts": (4, 4, Problem(groups=2, length=9, settings={"zero": 1})),
    "padding": (2, 2, Problem(mask="padding", rows=(3,))),
    # As many heads as tokens: dimension 1 of this mask looks like whole sequences.
    "bias of each head": (2, 2, Problem(mask="bias", heads=8, groups=2, length=8)),
    "documents, gathered": (2, 2, Problem(mask="documents", rows=(3,), method="gathered")),
    "three heads": (4, 4, Problem("adamw", heads=3, groups=1, length=13, settings={"zero": 3})),
    "a part without labels": (2, 2, Problem(unlabelled=6, settings={"zero": 2})),
    "a part without labels, divided by 0": (2, 2, Problem(unlabelled=6, own_mean=True)),
    # Parts of sequences are tokens like others, also for router losses of the whole batch.
    "experts": (2, 2, Problem(experts=ROUTED, unlabelled=6, own_mean=True, settings={"zero": 2})),
    "spread experts": (2, 2, Problem(experts=ROUTED, rows=(2, 3)), {"expert": 2}),
    "recomputed": (2, 2, Problem(settings={"zero": 3, "activations": "recomputed"})),
    "sequence first": (4, 2, Problem(first=True, rows=(4, 2), length=8, settings={"zero": 1})),
    "sequence first, padding": (2, 2, Problem(first=True, mask="padding", rows=(4,), length=8)),
}


SPREAD = {
    f"{optimizer}, zero {zero}, {context} x {expert}": (
        4,
        context,
        Problem(optimizer, rows=(2, 3), experts=ROUTED, settings={"zero": zero}),
        {"expert": expert},
    )
    for optimizer in ("sgd", "adamw")
    for zero in range(4)
    for context, expert in ((2, 2), (2, 4), (4, 2))
}


SPLIT = {"rows": (2, 3), "length": 11}
TENSOR = {
    # training with --tensor 2 --context 2
    "zero 0": Problem(**SPLIT, settings={"zero": 0}),
    "zero 1, padding": Problem(mask="padding", settings={"zero": 1}),
    "zero 2, AdamW": Problem("adamw", **SPLIT, settings={"zero": 2}),
    "zero 3, AdamW, grouped heads": Problem("adamw", **SPLIT, groups=2, settings={"zero": 3}),
    "recomputed": Problem(**SPLIT, settings={"zero": 3, "activations": "recomputed"}),
    "sequence parallel": Problem(
        **SPLIT, settings={"zero": 2, "sequence_parallel": True, "activations": "recomputed"}
    ),
    "gathered": Problem(mask="documents", method="gathered", unlabelled=6, own_mean=True),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "sequence parallel" else pytest.mark.full) for n in TENSOR],
)
def test_equals_one_process_with_split_layers(group, name):
    check(group, 4, 2, TENSOR[name], tensor=2)


PLANNED = {
    # modules that compute attention themselves
    "causal": (2, 2, Problem(own_core=True, settings={"zero": 1})),
    "recomputed": (
        4,
        4,
        Problem("adamw", own_core=True, groups=2, settings={"zero": 3} | RECOMPUTED),
    ),
    "documents": (2, 2, Problem(own_core=True, mask="documents", rows=(3,))),
    "padding": (2, 2, Problem(own_core=True, mask="padding", rows=(3,))),
    "offsets": (4, 2, Problem(own_core=True, mask="offsets", rows=(3, 1), length=16)),
    "in stages": (
        4,
        2,
        Problem(own_core=True, rows=(4,), scheduled=True, settings={"zero": 2}),
        {"pipeline": 2},
    ),
    "in stages, documents": (
        4,
        2,
        Problem(own_core=True, mask="documents", groups=2, rows=(4,), scheduled=True),
        {"pipeline": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n,
            marks=()
            if n in ("recomputed", "offsets", "in stages, documents")
            else pytest.mark.full,
        )
        for n in PLANNED
    ],
)
def test_planned_attention_equals_one_process(group, name):
    size, context, problem, *axes = PLANNED[name]
    check(group, size, context, problem, **(axes[0] if axes else {}))


def plan_errors(world: sw.World) -> list[str]:
    """Return the errors of plans that do not fit the model."""
    said = []
    for plan, heads in ((["blocks.*.core"], 3), (["blocks.*.norm"], 4), (["cores"], 4)):
        model = Problem(heads=heads, groups=heads, own_core=True).model()
        optimizer = torch.optim.SGD(model.parameters())
        engine = None
        try:
            engine = sw.Engine(model, optimizer, context_plan=plan, quiet=True)
            ids, positions, _, _ = world.share(Problem().batches(0)[0])
            model(ids, positions)
        except ModelError as error:
            said.append(str(error))
        finally:
            if engine is not None:
                engine.close()
    return said


def test_refuses_plans_that_do_not_fit(group):
    for heads, norm, missing in group(2, context=2)(plan_errors):
        assert "blocks.0.core has 3 heads of queries" in heads
        assert "blocks.0.norm takes tensors of shapes" in norm
        assert "no module is called cores" in missing


STAGES = {
    # training with --pipeline 2 --context 2, and other axes of the mesh
    "plain loop": (4, Problem(settings={"zero": 1})),
    "1f1b": (4, Problem("adamw", rows=(4,), scheduled=True, settings={"zero": 2})),
    "gpipe, recomputed": (
        4,
        Problem(
            rows=(3, 2),
            scheduled=True,
            settings={"schedule": "gpipe", "zero": 3, "activations": "recomputed"},
        ),
    ),
    "interleaved": (
        4,
        Problem("adamw", rows=(5,), scheduled=True, settings={"schedule": "interleaved"}),
    ),
    "zero-bubble": (4, Problem(rows=(4,), scheduled=True, settings={"schedule": "zero-bubble"})),
    "a part without labels, divided by 0": (
        4,
        Problem(rows=(4,), unlabelled=6, own_mean=True, scheduled=True, settings={"zero": 2}),
    ),
    "documents, gathered": (
        4,
        Problem(mask="documents", method="gathered", rows=(3,), scheduled=True),
    ),
    "one row": (4, Problem(rows=(1,), scheduled=True, settings={"zero": 3})),
    "two replicas": (8, Problem("adamw", rows=(5,), scheduled=True, settings={"zero": 3})),
    "split layers": (8, Problem(rows=(4,), scheduled=True, settings={"zero": 2}), {"tensor": 2}),
    # One micro-batch, because each has its own router losses.
    "spread experts": (
        4,
        Problem(rows=(4,), experts=ROUTED, scheduled=True, settings={"zero": 1, "microbatches": 1}),
        {"expert": 2},
    ),
    "spread experts in a plain loop": (
        4,
        Problem("adamw", rows=(2, 3), experts=ROUTED, settings={"zero": 3}),
        {"expert": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("1f1b", "interleaved") else pytest.mark.full)
        for n in STAGES
    ],
)
def test_equals_one_process_in_stages(group, name):
    size, problem, *axes = STAGES[name]
    check(group, size, 2, problem, pipeline=2, **(axes[0] if axes else {}))


def exchange_lines(world: sw.World, problem: Problem) -> list[str]:
    """Return the lines about bytes of attention, of an engine that prints and of a quiet one."""
    said = io.StringIO()
    for quiet in (False, True):
        model = problem.model()
        optimizer = problem.optimizer_of(model)
        with contextlib.redirect_stdout(said):
            engine = sw.Engine(model, optimizer, quiet=quiet, **problem.settings)
            batch = world.share(problem.batches(0)[0])
            if problem.scheduled:
                engine.forward_backward(
                    lambda *part: problem.loss_of(model, part),  # noqa: B023, called at once
                    *batch,
                    weight=lambda *part: int((part[-1] != -100).sum()),
                )
            else:
                problem.loss_of(model, batch)
        engine.close()
    return [line for line in said.getvalue().splitlines() if "layer and micro-batch" in line]


@pytest.mark.parametrize(
    ("axes", "problem"),
    [
        ({}, Problem(rows=(4,), length=16)),
        (
            {"pipeline": 2},
            Problem(rows=(8,), length=16, scheduled=True, settings={"microbatches": 2}),
        ),
    ],
    ids=["plain loop", "in stages"],
)
def test_prints_bytes_of_attention_once(group, axes, problem):
    """A trial, which sends fewer bytes, is not described, nor is a quiet engine."""
    size = 2 * axes.get("pipeline", 1)
    first, *others = group(size, context=2, **axes)(exchange_lines, problem)
    (line,) = first
    assert "attention exchanges heads (Ulysses): 8.2 kB per worker" in line
    assert not any(others)


def unweighted_in_stages(world: sw.World) -> str:
    """Return the error of a loss without a weight."""
    problem = Problem()
    model = problem.model()
    engine = sw.Engine(model, problem.optimizer_of(model), quiet=True)
    try:
        engine.backward(problem.loss_of(model, world.share(problem.batches(0)[0])))
    except UsageError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


def test_refuses_unweighted_losses_on_all_stages(group):
    """Otherwise the stage that knows the number of labels would wait for the other stages."""
    for said in group(4, context=2, pipeline=2)(unweighted_in_stages):
        assert "cannot read over how many items this loss is a mean" in said


class RootAttention(Model):
    """Also calls attention outside of all layers, on the stage that has the embeddings."""

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(positions)
        heads = x.unflatten(2, (4, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x) @ self.words.weight.T


def root_model() -> RootAttention:
    """Return the same model in every process."""
    torch.manual_seed(3)
    return RootAttention().double()


def steps_with_root_attention(world: sw.World) -> tuple[float, float]:
    """Return the loss and the gradient norm of one step."""
    model, problem = root_model(), Problem(rows=(4,))
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), zero=1, quiet=True)
    engine.forward_backward(
        lambda *part: problem.loss_of(model, part),
        *world.share(problem.batches(0)[0]),
        weight=lambda *part: int((part[-1] != -100).sum()),
    )
    stats = engine.step(max_norm=1e9)
    engine.close()
    return float(stats.loss), float(stats.grad_norm)


def test_attention_between_layers_runs_on_one_stage(group):
    model, problem = root_model(), Problem(rows=(4,))
    loss = problem.loss_of(model, problem.batches(0)[0])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for ours in group(4, context=2, pipeline=2)(steps_with_root_attention):
        assert ours == pytest.approx((loss.item(), norm.item()), rel=1e-8)


@pytest.mark.full
def test_equals_one_process_on_three_axes(group):
    problem = Problem("adamw", rows=(3,), settings={"zero": 3})
    check(group, 8, 2, problem, tensor=2)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(group, name):
    size, context, problem, *axes = CASES[name]
    check(group, size, context, problem, **(axes[0] if axes else {}))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "adamw, zero 3, 2 x 4" else pytest.mark.full)
        for name in SPREAD
    ],
)
def test_spreads_experts_over_parts_of_sequences(group, name):
    size, context, problem, axes = SPREAD[name]
    check(group, size, context, problem, **axes)


def random_case(seed: int) -> tuple[int, int, Problem]:
    """Return the ranks, the parts per sequence, and the training of a seed."""
    draw = Random(seed)
    size = draw.choice([2, 4])
    context = draw.choice([1, 2, 4]) if size == 4 else 2
    heads = draw.choice([1, 2, 3, 4, 8])
    groups = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    length = draw.randint(2 * context, 16)
    settings: dict[str, object] = {"zero": draw.randrange(4)}
    if draw.random() < 0.3:
        settings["activations"] = "recomputed"
    problem = Problem(
        draw.choice(["sgd", "adamw"]),
        # Some batches have fewer rows than there are shares.
        rows=tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3))),
        length=length,
        heads=heads,
        groups=groups,
        mask=draw.choice(["", "", "padding", "documents", "window", "bias"]),
        unlabelled=draw.randrange(length - 1) if draw.random() < 0.5 else 0,
        own_mean=draw.random() < 0.3,
        seed=seed,
        settings=settings,
        method=draw.choice(["auto", "ulysses" if heads % context == 0 else "gathered"]),
    )
    if heads % context == 0 and draw.random() < 0.25:
        problem = replace(problem, mask="offsets", own_core=True)
    if problem.mask in ("", "padding", "offsets") and draw.random() < 0.4:
        problem = replace(problem, first=True)
    return size, context, problem


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 300))]
)
def test_random_program_equals_one_process(group, seed):
    check(group, *random_case(seed))


def random_split_case(seed: int) -> tuple[int, Problem, dict[str, int]]:
    """Return the ranks, the training and the axes of a seed: layers are split, or in stages."""
    draw = Random(1000 + seed)
    axes = draw.choice(
        [{"tensor": 2}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]
    )
    each = axes.get("tensor", 1)
    heads = draw.choice([2, 4, 8] if each > 1 else [1, 2, 3, 4, 8])
    groups = draw.choice([n for n in range(each, heads + 1, each) if heads % n == 0])
    length = draw.randint(4, 16)
    settings: dict[str, object] = {"zero": draw.randrange(4)}
    if draw.random() < 0.4:
        settings["activations"] = "recomputed"
    if each > 1 and draw.random() < 0.5:
        settings["sequence_parallel"] = True
    scheduled = "pipeline" in axes and draw.random() < 0.8
    if scheduled:
        settings["schedule"] = draw.choice(["1f1b", "gpipe", "interleaved", "zero-bubble"])
        if settings["schedule"] == "zero-bubble":
            settings |= {"zero": draw.randrange(3), "activations": "kept"}
    return (
        2 * each * axes.get("pipeline", 1),
        Problem(
            draw.choice(["sgd", "adamw"]),
            rows=tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 2))),
            length=length,
            heads=heads,
            groups=groups,
            # A bias is a mask of all heads, but with --tensor a worker has only some of them.
            mask=draw.choice(["", "", "padding", "documents", "window"] + ["bias"] * (each == 1)),
            unlabelled=draw.randrange(length - 1) if draw.random() < 0.5 else 0,
            own_mean=draw.random() < 0.3,
            scheduled=scheduled,
            seed=seed,
            settings=settings,
            method=draw.choice(["auto", "gathered"]),
        ),
        axes,
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 100))]
)
def test_random_program_of_split_layers_equals_one_process(group, seed):
    size, problem, axes = random_split_case(seed)
    check(group, size, 2, problem, **axes)


def check(group: Groups, size: int, context: int, problem: Problem, **axes: int) -> None:
    """Compare a training on `size` ranks with one in this process."""
    expected = plain(problem)
    method = {} if context == 1 else {"context_method": problem.method}
    everyone = group(size, context=context, **axes, **method)(trained, problem)
    replica = axes.get("tensor", 1) * axes.get("pipeline", 1)
    for rank, ours in enumerate(everyone):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)
        # Evaluation is cut as well: the first rows of the last batch, and a part of each.
        whole = expected["logits"]
        for dim, number, index in (
            (0, size // replica // context, rank // replica // context),
            (1, context, rank // replica % context),
        ):
            cuts = even_cuts(whole.size(dim), number)
            whole = whole.narrow(dim, cuts[index], cuts[index + 1] - cuts[index])
        if whole.size(0):  # otherwise this rank evaluated a stand-in
            torch.testing.assert_close(ours["logits"], whole, rtol=1e-8, atol=1e-10)


def read_loader(world: sw.World) -> list[list[list[int]]]:
    data = torch.arange(4 * 5).view(4, 5)
    return [batch.tolist() for batch in sw.Loader(data, batch_size=2)]


def test_loader_cuts_sequences(group):
    parts = group(2, context=2)(read_loader)
    assert parts[0] == [[[0, 1], [5, 6]], [[10, 11], [15, 16]]]
    assert parts[1] == [[[2, 3, 4], [7, 8, 9]], [[12, 13, 14], [17, 18, 19]]]


class Encoder(nn.Module):
    """torch's encoder, which takes (length, rows) by default."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 12, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(ids), dtype=torch.float64)
        return self.head(self.encoder(self.words(ids) + self.places(positions), mask))


def trained_encoder(world: sw.World | None) -> list[float]:
    torch.manual_seed(7)
    model, losses = Encoder().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    engine = None if world is None else sw.Engine(model, optimizer, zero=2, quiet=True)
    for step in range(3):
        ids, positions, _, labels = Problem(first=True, rows=(4,), length=8).batches(step)[0]
        if world is not None:
            ids, positions, labels = world.share((ids, positions, labels), dim=1, sequence_dim=0)
        loss = F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten())
        if engine is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        else:
            engine.backward(loss)
            losses.append(engine.step().loss)
    if engine is not None:
        with pytest.raises(UsageError, match="micro-batches from dimension 0"):
            engine.forward_backward(lambda *_: None, ids, weight=lambda *_: 1)
        loss = F.cross_entropy(model(ids, positions)[:-1].flatten(0, 1), labels[1:].flatten())
        with pytest.raises(UsageError, match="leaves out the last of this worker's"):
            engine.backward(loss)
        engine.close()
    return losses


def test_encoder_of_torch_on_sequences_along_dimension_0(group):
    expected = trained_encoder(None)
    for losses in group(2, context=2)(trained_encoder):
        assert losses == pytest.approx(expected, rel=1e-8)


def shifted(world: sw.World, when: str) -> list[str]:
    """Train on labels that are shifted before or after the split. Return the messages."""
    said: list[str] = []
    with mock.patch.object(sw.World, "say_once", lambda _, line: said.append(line)):
        problem = Problem(rows=(4,))
        model = problem.model()
        engine = sw.Engine(model, problem.optimizer_of(model), quiet=True)
        for step in range(5):
            ids, positions, _, labels = problem.batches(step)[0]
            labels[:, ::3] = 1  # some tokens before each cut have a label
            if when == "before":
                labels = F.pad(labels[:, 1:], (0, 1), value=-100)
            ids, positions, labels = world.share((ids, positions, labels))
            if when == "after":
                labels = F.pad(labels[:, 1:], (0, 1), value=-100)
            logits = model(ids, positions)
            engine.backward(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            engine.step()
        engine.close()
    return said


def test_says_that_labels_were_shifted_after_the_split(group):
    assert group(2, context=2)(shifted, "before") == [[], []]
    (said,), others = group(2, context=2)(shifted, "after")
    assert "the first label of the next worker's part is lost" in said
    assert others == []


class Features(Model):
    """Takes tokens with `features` features, and a mask over pairs of tokens."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inward = nn.Linear(features, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x, None if mask is None else mask[:, None])
        return x


def outputs_of_features(world: sw.World, features: int) -> list[Tensor]:
    """Return the output for a part of sequences of 12 tokens, and the part it should equal."""
    torch.manual_seed(3)
    model = Features(features).double()
    whole = {"x": torch.randn(3, 12, features).double()}
    if features != 12:
        bias = torch.full((12, 12), -torch.inf).triu(1)
        whole["mask"] = bias.double().expand(3, 12, 12)
    expected = world.share(model(**whole).detach())
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    found = model(**world.share(whole)).detach()
    engine.close()
    return [found, expected]


@pytest.mark.parametrize("features", [5, 12])
def test_tells_features_from_masks_of_pairs(group, features):
    for found, expected in group(2, context=2)(outputs_of_features, features):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


class Offsets(Model):
    """Computes the attention of each document outside of attention modules."""

    def forward(self, ids: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        x = (self.words(ids) + self.places(positions)).flatten(0, 1)[None, None]
        each = x.split(offsets.diff().tolist(), 2)
        found = [F.scaled_dot_product_attention(x, x, x, is_causal=True) for x in each]
        return torch.cat(found, 2).view(*ids.shape, -1) @ self.words.weight.T


def offsets_outside(world: sw.World) -> str:
    torch.manual_seed(3)
    model = Offsets().double()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    ids, positions, *_ = Problem().batches(0)[0]
    ids, positions = world.share((ids, positions))
    with pytest.raises(ModelError) as caught:
        model(ids, positions, torch.tensor([0, 5, 9, 18], dtype=torch.int32))
    engine.close()
    return str(caught.value)


def test_refuses_offsets_outside_of_a_planned_module(group):
    for said in group(2, context=2)(offsets_outside):
        assert "offsets of documents (cu_seqlens)" in said
        assert "context_plan=" in said


def one_more_step(world: sw.World, problem: Problem, step: int, folder: Path) -> dict[str, Tensor]:
    """Resume, unless this is the first step, train one step, and save."""
    model = problem.model()
    engine = sw.Engine(model, problem.optimizer_of(model), quiet=True, **problem.settings)
    assert engine.resume(folder) == step
    batch = world.share(problem.batches(step)[0])
    engine.backward(problem.loss_of(model, batch))
    engine.step(max_norm=0.5)
    engine.save(folder)
    with engine.full_parameters():
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.close()
    return values


@pytest.mark.parametrize("sizes", [(4, 1, 4), pytest.param((1, 2, 4, 1), marks=pytest.mark.full)])
def test_resumes_at_other_context(group, tmp_path, sizes):
    problem = Problem("adamw", steps=len(sizes), settings={"zero": 2})
    for step, size in enumerate(sizes):
        everyone = group(size, context=size)(one_more_step, problem, step, tmp_path / "saved")
    for ours in everyone:
        for name, value in plain(problem)["values"].items():
            torch.testing.assert_close(ours[name], value, rtol=1e-8, atol=1e-10)


# -- torch.compile --------------------------------------------------------------------------


def evaluated_between(world: sw.World, own_core: bool) -> list[list[float]]:
    """Return the norms of steps with and without an evaluation before the backward pass."""
    norms = []
    for evaluates in (False, True):
        problem = Problem(own_core=own_core, rows=(4,))
        model = problem.model()
        planned = ["blocks.*.core"] if own_core else None
        optimizer = problem.optimizer_of(model)
        engine = sw.Engine(model, optimizer, context_plan=planned, quiet=True, **RECOMPUTED)
        norms.append([])
        for step in range(2):
            loss = problem.loss_of(model, world.share(problem.batches(step)[0]))
            if evaluates:
                with torch.no_grad():
                    ids = torch.arange(12).view(2, 6) % WORDS
                    model(*world.share((ids, torch.arange(6).expand(2, 6))))
            engine.backward(loss)
            norms[-1].append(engine.step(max_norm=1e9).grad_norm)
        engine.close()
    return norms


@pytest.mark.parametrize("own_core", [False, True])
def test_recomputes_after_an_evaluation_of_another_length(group, own_core):
    for without, with_evaluation in group(2, context=2)(evaluated_between, own_core):
        assert with_evaluation == without


def start_compiling() -> None:
    """Forget all graphs, and ignore the warnings that torch.compile itself causes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Dynamo itself inspects it, for any input that is not a leaf.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    # Dynamo creates an object of this class when it traces an autograd.Function.
    warnings.filterwarnings("ignore", ".*Function'> should not be instantiated", DeprecationWarning)
    # Inductor imports a module that uses it.
    warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)


def compiled(world: sw.World, problem: Problem, backend: str) -> dict[str, Any]:
    """Train with compiled blocks. Also return the numbers of compilations and graph breaks."""
    start_compiling()
    # Units with split layers have another compiler.
    with (
        mock.patch.object(compiled_units, "BACKEND", backend),
        mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)),
    ):
        results = trained(world, problem)
    counters = torch._dynamo.utils.counters
    return {
        **results,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }


GATHERED = {"context_method": "gathered"}
COMPILED: dict[str, tuple[int, dict[str, Any], str, Problem]] = {
    # parts per sequence, other settings of the run, backend, training
    # The part of rank 1 has 4 tokens of 9, and then 4 of 8.
    "lengths": (2, {}, "aot_eager", Problem(shrinks=1, settings={"zero": 3})),
    "gathered, recomputed": (2, GATHERED, "aot_eager", Problem(settings=RECOMPUTED)),
    "four parts": (4, {}, "aot_eager", Problem(length=11, settings={"zero": 3} | RECOMPUTED)),
    "padding": (3, {}, "aot_eager", Problem(mask="padding", settings={"zero": 2})),
    "bias": (2, {}, "aot_eager", Problem(mask="bias", settings={"zero": 0})),
    "tensor": (2, {"tensor": 2}, "aot_eager", Problem(settings={"zero": 3})),
    "split by tokens": (
        2,
        {"tensor": 2, "sequence_parallel": True},
        "aot_eager",
        Problem(settings={"zero": 3}),
    ),
    "inductor, recomputed": (2, {}, "inductor", Problem(settings=RECOMPUTED)),
    "inductor, gathered": (2, GATHERED, "inductor", Problem(settings={"zero": 0})),
}


@pytest.mark.parametrize(
    ("parts", "axes", "backend", "problem"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.full if number else pytest.mark.slow)
        for number, (name, case) in enumerate(COMPILED.items())
    ],
)
def test_compiled_equals_one_process(group, parts, axes, backend, problem):
    """Each second micro-batch has fewer rows, so that blocks are compiled twice."""
    problem = replace(problem, optimizer="adamw", steps=2, rows=(3, 2))
    expected = plain(problem)
    problem = replace(problem, settings={"compile": True, **problem.settings})
    size = parts * axes.get("tensor", 1)
    for ours in group(size, context=parts, **axes)(compiled, problem, backend, limit=380):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)
        assert ours["breaks"] == {}
        assert ours["graphs"] <= 3  # two in training, one in evaluation


class Windows(nn.Module):
    """Causal attention within windows of 6 tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Tensor:
        del others
        windows = zip(q.split(6, 2), k.split(6, 2), v.split(6, 2), strict=True)
        found = [F.scaled_dot_product_attention(*each, is_causal=True) for each in windows]
        return torch.cat(found, 2)


def compiled_windows(world: sw.World, problem: Problem) -> dict[str, Any]:
    with mock.patch.object(contexts, "Core", Windows):
        return compiled(world, problem, "aot_eager")


@pytest.mark.full
def test_compiled_planned_attention_in_windows(group):
    """A window is as long as the part of a rank, but its tokens are not to be exchanged."""
    problem = Problem(own_core=True, length=12, steps=1)
    with mock.patch.object(contexts, "Core", Windows):
        expected = plain(problem)
    problem = replace(problem, settings={"compile": True})
    for ours in group(2, context=2)(compiled_windows, problem, limit=100):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)


class EndsInAttention(contexts.Block):
    """A block that saves nothing for the backward pass after its last exchange of tokens."""

    def forward(self, x: Tensor, mask: Tensor | None, offsets: Tensor | None = None) -> Tensor:
        del mask, offsets
        x = x + self.narrow(F.gelu(self.wide(self.norm2(self.out(x)))))
        h, shape = self.norm(x), (*x.shape[:2], self.heads, -1)
        q, k, v = (each(h).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + found.transpose(1, 2).flatten(2)


def compiled_on_rank_0(world: sw.World, problem: Problem) -> dict[str, Any]:
    """Train with blocks that torch compiles on rank 0 only, as at its limit of recompilations."""
    start_compiling()
    compiler = partial(torch.compile, backend="aot_eager")
    if world.rank > 0:
        compiler = partial(lambda forward: forward)
    blocks = mock.patch.object(contexts, "Block", EndsInAttention)
    with blocks, mock.patch.object(torch, "compile", compiler):
        return trained(world, problem)


@pytest.mark.parametrize("method", ["gathered", pytest.param("ulysses", marks=pytest.mark.full)])
def test_recomputes_units_that_are_compiled_on_one_rank_only(group, method):
    problem = Problem(length=8, steps=1)
    with mock.patch.object(contexts, "Block", EndsInAttention):
        expected = plain(problem)
    problem = replace(problem, settings={"compile": True} | RECOMPUTED)
    ranks = group(2, context=2, context_method=method)
    for ours in ranks(compiled_on_rank_0, problem, limit=60):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)


class Checkpointed(contexts.Block):
    """A block that recomputes itself."""

    def forward(self, *args: Any) -> Tensor:
        return checkpoint(super().forward, *args, use_reentrant=False)  # type: ignore[no-any-return]


def compiled_checkpoints(world: sw.World, problem: Problem) -> dict[str, Any]:
    with mock.patch.object(contexts, "Block", Checkpointed):
        return compiled(world, problem, "aot_eager")


@pytest.mark.full
def test_compiled_units_with_checkpoints(group):
    problem = Problem("adamw", steps=2, rows=(3, 2))
    expected = plain(problem)
    problem = replace(problem, settings={"compile": True})
    for ours in group(2, context=2)(compiled_checkpoints, problem, limit=100):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)


def evaluated_compiled(world: sw.World) -> list[list[Tensor]]:
    """Train a step with compiled blocks. Return outputs for other lengths, and the expected."""
    start_compiling()
    problem = Problem(settings={"compile": True})
    reference, model = problem.model(), problem.model()
    optimizer = problem.optimizer_of(reference)
    batch = problem.batches(0)[0]
    problem.loss_of(reference, batch).backward()
    optimizer.step()
    found = []
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        optimizer = problem.optimizer_of(model)
        engine = sw.Engine(model, optimizer, quiet=True, **problem.settings)
        engine.backward(problem.loss_of(model, world.share(batch)))
        engine.step()
        for length in (7, 9, 12):
            ids, positions, *_ = replace(problem, length=length).batches(1)[0]
            with torch.inference_mode():
                expected = world.share(reference(ids, positions))
                found.append([model(*world.share((ids, positions))).clone(), expected.clone()])
        engine.close()
    return found


@pytest.mark.full
@pytest.mark.parametrize("method", ["ulysses", "gathered"])
def test_compiled_units_evaluate_other_lengths_in_inference_mode(group, method):
    for pairs in group(2, context=2, context_method=method)(evaluated_compiled, limit=100):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def compiled_whole(world: sw.World) -> dict[str, Any]:
    """Train a model that the script compiles, in graphs around the attention."""
    start_compiling()
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph

    def compile_model(model: nn.Module) -> nn.Module:
        model.compile(backend=backend)
        return model

    results = trained(world, Problem("adamw", steps=2, settings={"zero": 3}), compile_model)
    assert len(graphs) > 3, graphs
    return results


@pytest.mark.full
def test_compiled_model_equals_one_process(group):
    expected = plain(Problem("adamw", steps=2))
    for ours in group(2, context=2)(compiled_whole):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)


def compiled_before(world: sw.World) -> None:
    """Run a compiled model with the shapes of a part before an engine replaces attention."""
    torch._dynamo.reset()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    problem = Problem(length=8)
    model = problem.model()
    for block in model.blocks:
        block.compile(backend="eager")
    batch = problem.batches(0)[0]
    problem.loss_of(model, tuple(each[:, :4] for each in batch)).backward()
    model.zero_grad()
    engine = sw.Engine(model, problem.optimizer_of(model), quiet=True)
    loss = problem.loss_of(model, world.share(batch))
    engine.backward(loss)
    expected = problem.loss_of(problem.model(), batch).item()
    assert engine.step().loss == pytest.approx(expected, rel=1e-8)
    engine.close()


@pytest.mark.full
def test_compiled_before_the_engine(group):
    group(2, context=2)(compiled_before)


# -- islands --------------------------------------------------------------------------------


def trained_on_islands(world: sw.World, settings: dict[str, Any]) -> list[Any]:
    """Return losses and the values that islands agree on."""
    problem = Problem("adamw", steps=4, rows=(4,))
    model = problem.model()
    engine = sw.Engine(model, problem.optimizer_of(model), quiet=True, **settings)
    losses = []
    for step in range(problem.steps):
        engine.backward(problem.loss_of(model, world.share(problem.batches(step)[0])))
        losses.append(engine.step().loss)
    with engine.anchor(), engine.full_parameters():
        values = [p.detach().clone() for p in model.parameters()]
    engine.close()
    return [losses, values]


@pytest.mark.parametrize(
    ("islands", "settings"),
    [
        ({"islands": 2}, {"equal_every": 2, "zero": 2}),
        pytest.param({"islands": 2, "behind": 1}, {}, marks=pytest.mark.full),
    ],
)
def test_islands_of_context_groups_equal_islands_of_one_worker(group, islands, settings):
    expected = group(2, **islands)(trained_on_islands, settings)
    ours = group(4, **islands, context=2)(trained_on_islands, settings)
    for rank, (losses, values) in enumerate(ours):
        # With --behind, the first step has no loss yet.
        assert losses == pytest.approx(expected[rank // 2][0], rel=1e-8, nan_ok=True)
        for mine, theirs in zip(values, expected[rank // 2][1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


# -- dropout ---------------------------------------------------------------------------------


def attention_with_fixed_dropout(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """Drop probabilities by their own digits, so that one process drops the same ones."""
    options.pop("enable_gqa")
    mask = torch.ones(query.size(2), key.size(2)).tril().log().double()
    if not options.pop("is_causal"):
        mask = options["attn_mask"]
        mask = mask.double().log() if mask.dtype == torch.bool else mask
    weights = (query @ key.mT * query.size(3) ** -0.5 + mask).softmax(-1)
    if dropout_p > 0:
        weights = weights * ((weights * 1e3).frac() > dropout_p) / (1 - dropout_p)
    return weights @ value


def trained_with_fixed_dropout(world: sw.World | None, problem: Problem) -> dict[str, Any]:
    before, F.scaled_dot_product_attention = (
        F.scaled_dot_product_attention,
        attention_with_fixed_dropout,
    )
    try:
        return plain(problem) if world is None else trained(world, problem)
    finally:
        F.scaled_dot_product_attention = before


def compiled_with_fixed_dropout(world: sw.World, problem: Problem) -> dict[str, Any]:
    start_compiling()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return trained_with_fixed_dropout(world, problem)


@pytest.mark.parametrize(
    ("method", "train", "settings"),
    [
        ("ulysses", trained_with_fixed_dropout, {}),
        pytest.param("gathered", trained_with_fixed_dropout, {}, marks=pytest.mark.full),
        pytest.param(
            "ulysses", compiled_with_fixed_dropout, {"compile": True}, marks=pytest.mark.full
        ),
    ],
)
def test_drops_attention_like_one_process(group, method, train, settings):
    problem = Problem(dropout=0.4)
    expected = trained_with_fixed_dropout(None, problem)
    assert expected["losses"] != pytest.approx(plain(Problem())["losses"], rel=1e-3)
    problem = replace(problem, settings=settings)
    everyone = group(2, context=2, context_method=method)(train, problem)
    for ours in everyone:
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)


class WithDropout(Model):
    """Records the dropout mask of its embeddings."""

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = F.dropout(self.words(ids) + self.places(positions), 0.3, self.training)
        self.dropped = x.detach() == 0
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x) @ self.words.weight.T


def masks_and_losses(world: sw.World, activations: str) -> list[Any]:
    """Return each step's mask and loss with torch's own dropout."""
    torch.manual_seed(7)
    model = WithDropout(dropout=0.2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    engine = sw.Engine(model, optimizer, quiet=True, activations=activations)
    found = []
    # Draw the batches first, because this gives all workers the same seed.
    for batch in [Problem(length=8).batches(step)[0] for step in range(2)]:
        engine.backward(Problem().loss_of(model, world.share(batch)))
        found.append((model.dropped.flatten().tolist(), engine.step().loss))
    engine.close()
    return found


@pytest.mark.parametrize("method", ["ulysses", pytest.param("gathered", marks=pytest.mark.full)])
def test_each_worker_drops_others_and_recomputes_the_same(group, method):
    ranks = group(2, context=2, context_method=method)
    kept = ranks(masks_and_losses, "kept")
    assert ranks(masks_and_losses, "recomputed") == kept
    masks = [mask for ours in kept for mask, _ in ours]
    assert len({str(mask) for mask in masks}) == 4
    assert 0.15 < sum(map(sum, masks)) / sum(map(len, masks)) < 0.45


# -- models that are not token by token ------------------------------------------------------


def shifted_in(world: sw.World, way: str, how: str) -> tuple[str, list[str]]:
    """Shift labels after the split, `way`: by slices or with an ignored label.

    Train with `how`, a method of the engine. Return the error, and the messages of the main rank.
    """
    said: list[str] = []
    error = "none"
    with mock.patch.object(
        sw.World, "say_once", lambda self, line: said.append(line) if self.is_main else None
    ):
        problem = Problem(rows=(4,))
        model = problem.model()
        engine = sw.Engine(model, problem.optimizer_of(model), quiet=True)

        def loss_of(ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
            logits = model(ids, positions)
            if way == "sliced":
                return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            labels = F.pad(labels[:, 1:], (0, 1), value=-100)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        for step in range(5):
            ids, positions, _, labels = problem.batches(step)[0]
            batch = world.share((ids, positions, labels.clamp(min=1)))
            try:
                if how == "backward":
                    engine.backward(loss_of(*batch), weight=batch[2].numel())
                else:
                    engine.forward_backward(loss_of, *batch, weight=lambda *x: x[2].numel())
                engine.step()
            except UsageError as raised:
                error = str(raised)
                break
        engine.close()
    return error, said


@pytest.mark.parametrize(
    ("how", "pipeline"), [("forward_backward", 1), ("forward_backward", 2), ("backward", 2)]
)
def test_sees_shifts_after_the_split_in_all_loops(group, how, pipeline):
    axes = {"context": 2, "pipeline": pipeline}
    for error, _ in group(2 * pipeline, **axes)(shifted_in, "sliced", how):
        assert "leaves out the last of this worker's tokens" in error
    (error, said), *others = group(2 * pipeline, **axes)(shifted_in, "ignored", how)
    assert error == "none"
    assert sum("the first label of the next worker's part is lost" in line for line in said) == 1
    assert not any(lines for _, lines in others)


class OwnPositions(Model):
    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(ids, torch.arange(ids.size(1)).expand_as(ids), mask)


class Mixing(Model):
    """Changes the embeddings by a function that looks at several tokens."""

    def __init__(self, kind: str, **options: int) -> None:
        super().__init__(**options)
        self.mix = MIXING[kind]()

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.mix(self.words(ids) + self.places(positions))
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x) @ self.words.weight.T


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


class FarShift(nn.Module):
    """Looks at tokens that are farther away than the trial has tokens."""

    def __init__(self, pad: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pad(x)[:, : x.size(1)]


class FarConv(nn.Module):
    def __init__(self, size: int, padding: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, size, padding=padding, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.size(1)].transpose(1, 2)


class FarAssignment(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        moved = torch.zeros_like(x)
        moved[:, 9:] = x[:, :-9]
        return x + moved


class Backwards(Model):
    """Takes inputs (rows, 4, length) and (rows, length, 4), and averages over tokens."""

    def forward(self, ids: Tensor, positions: Tensor, first: Tensor, last: Tensor) -> Tensor:
        assert first.mT.shape == last.shape, "other tokens"
        x = super().forward(ids, positions)
        return x + x.mean(1, keepdim=True)


class Rotated(nn.Module):
    """Rotates features as a rotary embedding does."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([x, x, x, x], -1)[..., :14]
        return x + torch.cat([wide[..., 7:], -wide[..., :7]], -1)[..., :WIDTH]


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


MIXING = {
    "shift": Shift,
    "far shift": lambda: FarShift(lambda x: F.pad(x, (0, 0, 9, 0))),
    "far cat": lambda: FarShift(lambda x: torch.cat([x.new_zeros(len(x), 9, WIDTH), x], 1)),
    "rotated": Rotated,
    "pool": Pool,
    "batch norm": Norm,
    "convolution": Conv,
    "far cat at the end": lambda: FarShift(
        lambda x: torch.cat([x, x.new_zeros(len(x), 9, WIDTH)], 1)[:, 9:]
    ),
    "far replication": lambda: FarShift(
        lambda x: F.pad(x.mT, (9, 0), mode="replicate").mT,
    ),
    "far assignment": FarAssignment,
    "far convolution": lambda: FarConv(3, 5, 5),
    "far causal convolution": lambda: FarConv(2, 10, 10),
}


class OwnAttention(Model):
    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(positions)
        return (x @ x.mT).softmax(-1) @ x @ self.words.weight.T


class Recurrent(Model):
    """Has no attention, so that rows may seem to be tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.lstm(self.words(ids))[0] @ self.words.weight.T


class Loss(Model):
    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        logits = super().forward(ids, positions, mask)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class OneRankFails(Model):
    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        if ids.size(1) == 4 and positions[0, 0] > 0:
            raise RuntimeError("only here")
        return super().forward(ids, positions, mask)


class OwnRandomness(Model):
    """Skips all blocks for some rows, or at some times."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(positions)
        for block in self.blocks:
            x = x + (block(x, mask) - x) * self.draw(len(ids))
        return self.norm(x) @ self.words.weight.T


class Alibi(Model):
    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        distances = positions[:, None, :, None] - positions[:, None, None, :]
        bias = -distances * 0.5 ** torch.arange(1.0, 5.0)[:, None, None]
        return super().forward(ids, positions, bias.masked_fill(distances < 0, -torch.inf))


class Flex(Model):
    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(positions)
        heads = x.view(*ids.shape, 2, -1).transpose(1, 2)
        x = flex_attention(heads, heads, heads)
        return x.transpose(1, 2).flatten(2) @ self.words.weight.T


class LocalMask(Model):
    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(positions)
        causal = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).tril()
        heads = x.view(*ids.shape, 2, -1).transpose(1, 2)
        x = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=causal)
        return x.transpose(1, 2).flatten(2) @ self.words.weight.T


class Cond(Model):
    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(ids, positions, mask)
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


MODELS = {
    "own positions": (OwnPositions, r"places \(Embedding\)"),
    "shift": (lambda: Mixing("shift"), r"mix \(Shift\)"),
    "far shift": (lambda: Mixing("far shift"), "constant_pad_nd .* 9 places apart"),
    "far cat": (lambda: Mixing("far cat"), "cat .* 9 places apart"),
    "far cat at the end": (lambda: Mixing("far cat at the end"), "cat .* 9 places apart"),
    "far replication": (lambda: Mixing("far replication"), "replication_pad1d .* 9 places apart"),
    "far assignment": (lambda: Mixing("far assignment"), "slice .* 9 places apart"),
    "far convolution": (lambda: Mixing("far convolution"), "convolution .* 10 places apart"),
    "far causal convolution": (
        lambda: Mixing("far causal convolution"),
        "convolution .* 10 places apart",
    ),
    "pool": (lambda: Mixing("pool"), r"mix \(Pool\)"),
    "batch norm": (lambda: Mixing("batch norm"), r"mix\.norm \(BatchNorm1d\)"),
    "convolution": (lambda: Mixing("convolution"), r"mix\.conv \(Conv1d\)"),
    "own attention": (OwnAttention, r"its forward \(OwnAttention\)"),
    "recurrent": (Recurrent, r"lstm \(LSTM\)"),
    "loss": (Loss, "returns a loss"),
    "local mask": (LocalMask, r"attention mask .* is made from .* of \d+ tokens"),
    "alibi": (Alibi, r"attention mask .*also for ALiBi"),
    "stochastic depth": (lambda: OwnRandomness(lambda n: torch.rand(n, 1, 1) > 0.1), "random num"),
    "layer drop": (lambda: OwnRandomness(lambda n: random.random() > 0.1), "random numbers"),
    "flex attention": (Flex, "no backward pass on devices of type cpu"),
    "cond": (Cond, "its forward calls a higher-order operator such as torch.cond"),
    "error of one rank": (OneRankFails, "RuntimeError: only here"),
}


def first_forward(world: sw.World, name: str, zero: int) -> str:
    """Return the error of the first forward pass, and check that attention is plain afterwards."""
    model = MODELS[name][0]()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), zero=zero, quiet=True)
    plain = F.scaled_dot_product_attention
    # As many rows as each worker has tokens, or fewer.
    rows, length = (4, 8) if name == "recurrent" else (2, 16 if name.startswith("far") else 7)
    ids = torch.arange(rows * length).view(rows, length) % WORDS
    try:
        model(*world.share((ids, torch.arange(length).expand(rows, length))))
    except ModelError as error:
        return str(error)
    finally:
        engine.close()
        assert F.scaled_dot_product_attention is not plain
    return "no error"


@pytest.mark.parametrize("name", MODELS)
def test_refuses_by_name(group, name):
    for said in group(2, context=2)(first_forward, name, 3 if name == "pool" else 0):
        with pytest.raises(ModelError, match=MODELS[name][1]):
            raise ModelError(said)


def averages(world: sw.World) -> str:
    """Return the error of a batch whose parts have as many tokens as features."""
    model = Backwards()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    ids, positions = torch.arange(16).view(2, 8) % WORDS, torch.arange(8).expand(2, 8)
    batch = ids, positions, torch.ones(2, 4, 8), torch.ones(2, 8, 4)
    try:
        model(*world.share(batch, sequence_dim={2: 2}))
    except ModelError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


def test_shows_the_reason_of_the_right_dimensions(group):
    for said in group(2, context=2)(averages):
        assert "its forward (Backwards) gives a different result" in said


def shifts_far_later(world: sw.World) -> list[str]:
    """Return the errors of batches of several lengths. A shift by 9 needs 10 tokens."""
    model = Mixing("far shift")
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    errors = []
    for length in (8, 9, 7, 16):
        ids = torch.arange(2 * length).view(2, length) % WORDS
        error = "none"
        try:
            logits = model(*world.share((ids, torch.arange(length).expand(2, length))))
            engine.backward(logits.square().mean(), weight=logits.size(1))
            engine.step()
        except ModelError as raised:
            error = str(raised)
        errors.append(error)
    engine.close()
    return errors


def test_short_sequences_do_not_admit_longer_ones(group):
    for *short, long in group(2, context=2)(shifts_far_later):
        assert short == ["none"] * 3
        assert "9 places apart" in long


def rotates_features(world: sw.World) -> float:
    """Return the largest difference of outputs on parts."""
    model = Mixing("rotated").double()
    batch = torch.arange(32).view(2, 16) % WORDS, torch.arange(16).expand(2, 16)
    whole = model(*batch).detach()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    wrong = (model(*world.share(batch)) - world.share(whole)).abs().max()
    engine.close()
    return float(wrong.detach())


def test_features_as_many_as_tokens_are_no_tokens(group):
    # A trial on two parts has 7 tokens.
    assert max(group(2, context=2)(rotates_features)) < 1e-8


def first_step_in_stages(world: sw.World) -> str:
    """Return the error of the first step. Each stage has only a part of the model."""
    model, problem = OwnPositions().double(), Problem(rows=(4,))
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    try:
        engine.forward_backward(
            lambda *part: problem.loss_of(model, part),
            *world.share(problem.batches(0)[0]),
            weight=lambda *part: int((part[-1] != -100).sum()),
        )
    except ModelError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


@pytest.mark.full
def test_refuses_by_name_in_stages(group):
    for said in group(4, context=2, pipeline=2)(first_step_in_stages):
        assert "places (Embedding) gives a different result" in said


class Scale(nn.Module):
    """Returns its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, WIDTH))

    def forward(self) -> Tensor:
        return self.weight[:, :, :WIDTH]


class ReadsWeights(Model):
    """Passes weights between modules, and reads them without operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        assert str(self.places.weight)
        least = float(self.words.weight.detach().numpy().min())
        x = self.scale() * self.words(ids).clamp(min=least) + self.places(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


def reads_weights(world: sw.World) -> Tensor:
    """Return this rank's part of the outputs."""
    torch.manual_seed(3)
    model = ReadsWeights()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    ids = torch.arange(14).view(2, 7) % WORDS
    with torch.no_grad():
        logits = model(*world.share((ids, torch.arange(7).expand(2, 7))))
    engine.close()
    return logits


def test_trial_of_model_that_reads_weights_directly(group):
    torch.manual_seed(3)
    model, ids = ReadsWeights(), torch.arange(14).view(2, 7) % WORDS
    expected = model(ids, torch.arange(7).expand(2, 7)).detach()
    parts = group(2, context=2)(reads_weights)
    torch.testing.assert_close(torch.cat(parts, 1), expected)


def two_engines(world: sw.World) -> None:
    """Train two models in turns, and check that attention is plain after the last engine."""
    plain = F.scaled_dot_product_attention
    models = [Problem(seed=seed).model() for seed in range(2)]
    engines = [
        sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.3), quiet=True)
        for model in models
    ]
    for seed, (engine, model) in enumerate(zip(engines, models, strict=True)):
        problem = Problem(seed=seed)
        engine.backward(problem.loss_of(model, world.share(problem.batches(0)[0])))
        expected = problem.model()
        problem.loss_of(expected, problem.batches(0)[0]).backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 1e9)
        assert engine.step(max_norm=1e9).grad_norm == pytest.approx(norm.item(), rel=1e-8)
    for engine in engines:
        engine.close()
    assert F.scaled_dot_product_attention is plain


def test_two_engines_at_once(group):
    group(2, context=2)(two_engines)


def generates(world: sw.World) -> tuple[Tensor, Tensor]:
    """Run a prompt in the middle of a loop, on all ranks and on one. Return the last logits."""
    problem = Problem(settings={"zero": 3})
    model = problem.model()
    engine = sw.Engine(model, problem.optimizer_of(model), quiet=True, **problem.settings)
    batch = world.share(problem.batches(0)[0])
    own = batch[0].size(1)

    def logits(length: int) -> Tensor:
        ids = torch.arange(length)[None] % WORDS
        with torch.no_grad():
            return model(ids, torch.arange(length)[None])[0, -1]

    assert own not in (3, 7)
    with engine.uneven(), pytest.raises(UsageError, match="takes whole sequences"):
        logits(own)
    engine.backward(problem.loss_of(model, batch))
    engine.step()
    with engine.uneven():
        # The step has used the batch, so this is no longer its part.
        assert logits(own).isfinite().all()
        # Ranks run different numbers of forward passes.
        last = [logits(length) for length in [7, 3, 7][: 1 + 2 * world.rank]][-1]
    with engine.full_parameters():
        whole = "the model takes whole sequences there"
        with torch.enable_grad(), pytest.raises(UsageError, match=whole):
            engine.backward(torch.ones((), requires_grad=True).exp(), weight=1)
        copied = problem.model()
        copied.load_state_dict(model.state_dict())
        if world.is_main:
            torch.testing.assert_close(logits(7), last, rtol=1e-8, atol=1e-10)
    engine.close()
    with torch.no_grad():
        return last, copied(torch.arange(7)[None] % WORDS, torch.arange(7)[None])[0, -1]


def test_generates_on_whole_sequences(group):
    for last, expected in group(2, context=2)(generates):
        torch.testing.assert_close(last, expected, rtol=1e-8, atol=1e-10)


def guarded(world: sw.World, flips: bool) -> str:
    """Train with a guard, and flip a bit of a replicated parameter on rank 1 if `flips`."""
    problem = Problem("adamw", steps=3)
    model = problem.model()
    engine = sw.Engine(model, problem.optimizer_of(model), guard=1, zero=0, quiet=True)
    try:
        for step in range(problem.steps):
            engine.backward(problem.loss_of(model, world.share(problem.batches(step)[0])))
            engine.step()
            if flips and step == 1 and world.rank == 1:
                model.norm.weight.data.view(torch.int64)[0] ^= 1 << 40
        return "no error"
    except GuardError as error:
        return str(error)
    finally:
        engine.close()


def test_guard_compares_copies(group):
    assert group(2, context=2)(guarded, False) == ["no error"] * 2
    for said in group(2, context=2)(guarded, True):
        assert "norm.weight" in said


def misuses(world: sw.World) -> dict[str, str]:
    """Return the error of each misuse."""
    model = Problem().model()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    batch = Problem().batches(0)[0]
    said = {}

    def note(name: str, call: object) -> None:
        try:
            call()  # type: ignore[operator]
        except (UsageError, DataError, ModelError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    note("no batch", lambda: model(batch[0], batch[1]))
    ids, positions, _, labels = world.share(batch)
    note("whole sequences", lambda: model(batch[0], batch[1]))
    note("ddp", lambda: engine.backward(model(ids, positions).sum(), reduction="ddp"))
    note("unread", lambda: engine.backward(model(ids, positions).logsumexp((0, 1, 2))))
    per_row = lambda: model(ids, positions).mean((1, 2)).mean()  # noqa: E731
    note("mean of rows", lambda: engine.backward(per_row()))
    note("unweighted parts", lambda: engine.forward_backward(lambda *_: None, ids, labels))
    note("ddp parts", lambda: engine.forward_backward(lambda *_: None, ids, reduction="ddp"))
    late = lambda: model(ids, positions).transpose(0, 1)[:-1]  # noqa: E731
    shifted = lambda: F.cross_entropy(late().flatten(0, 1), labels.T[1:].flatten())  # noqa: E731
    note("shifted after a transposition", lambda: engine.backward(shifted()))
    note("outside", lambda: F.scaled_dot_product_attention(*[torch.ones(2, 4, ids.size(1), 2)] * 3))
    note("lengths", lambda: world.share((batch[0], torch.ones(2, 3))))
    note("short", lambda: world.share(torch.ones(2, 3)))
    note("draw", lambda: world.draw(torch.randn))
    engine.close()
    return said


def test_refuses_misuse(group):
    for said in group(2, context=2)(misuses):
        assert {name: text.partition(":")[0] for name, text in said.items()} == {
            "no batch": "UsageError",
            "whole sequences": "UsageError",
            "ddp": "UsageError",
            "unread": "UsageError",
            "mean of rows": "UsageError",
            "unweighted parts": "UsageError",
            "ddp parts": "UsageError",
            "shifted after a transposition": "UsageError",
            "outside": "ModelError",
            "lengths": "DataError",
            "short": "DataError",
            "draw": "UsageError",
        }


def attends_elsewhere(world: sw.World) -> None:
    """Recompute attention of another model after a backward pass of the engine that failed."""
    model = Problem().model()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    ids, positions, _, _ = world.share(Problem().batches(0)[0])
    logits = model(ids, positions)

    def fail(grad: Tensor) -> None:
        raise RuntimeError("in a hook")

    logits.register_hook(fail)
    with pytest.raises(RuntimeError, match="in a hook"):
        engine.backward(logits.mean())
    x = torch.randn(1, 1, 12, 2, requires_grad=True)
    checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    engine.close()


def test_failed_backward_leaves_attention_of_others_alone(group):
    group(2, context=2)(attends_elsewhere)
