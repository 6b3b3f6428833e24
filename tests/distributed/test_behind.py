"""Bounded staleness (--behind): islands sum gradients at every step and use them some steps later,
against a plain loop of a few lines."""

import gc
import json
from collections import deque

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import schema
from shardwise.islands.bounded_staleness import SumsReport
from shardwise.messages.printable import in_bytes
from tests.distributed.test_islands import (
    ROWS,
    STEPS,
    batches,
    flat,
    loss_of,
    mlp,
    optimizer_of,
    put,
    rounded,
)

BEHIND = 2
CLIP = 0.05

# -- the plain loop ------------------------------------------------------------------------------


def gradient_of(model, rows):
    """Return the gradient of the sum over `rows`, flat, and the loss."""
    model.zero_grad()
    loss = loss_of(model, rows)
    loss.backward()
    held = nn.ParameterList([nn.Parameter(p.grad * len(rows)) for p in model.parameters()])
    return flat(held), loss.item() * len(rows)


def step(model, optimizer, mean, max_norm):
    """Update by the flat `mean`, and return its norm."""
    held = mlp()
    put(held, mean)
    for parameter, other in zip(model.parameters(), held.parameters(), strict=True):
        parameter.grad = other.detach().clone()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm.item()


def plain(behind, sizes, *, optimizer="adamw", wire="fp32", max_norm=CLIP, steps=STEPS):
    """Train islands with these numbers of rows, using gradients of `behind` steps before.

    Returns loss and norm of each step, and the weights.
    """
    model, flying, found = mlp(), deque(), []
    optimizer, residuals = optimizer_of(optimizer, model), [0.0] * len(sizes)
    for batch in batches(steps):
        total, loss = 0.0, 0.0
        for k, rows in enumerate(batch.split(sizes)):
            mine, its_loss = gradient_of(model, rows)
            sent = rounded(mine + residuals[k], wire)
            residuals[k] = mine + residuals[k] - sent
            total, loss = total + sent, loss + its_loss
        flying.append((total, loss))
        if len(flying) > behind:
            total, loss = flying.popleft()
            norm = step(model, optimizer, total / sum(sizes), max_norm)
            found.append((loss / sum(sizes), norm))
    return found, flat(model)


# -- the engine ----------------------------------------------------------------------------------


def trained(world, settings, sizes=None, optimizer="adamw"):
    """Return the figures that the engine returned for each step, and the weights."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of(optimizer, model), **settings)
    found = []
    for batch in batches():
        rows = world.share(batch) if sizes is None else batch.split(sizes)[world.rank]
        engine.backward(loss_of(model, rows), weight=len(rows))
        found.append(engine.step(max_norm=CLIP))
    with engine.full_parameters():
        weights = flat(model)
    engine.close()
    assert torch.equal(flat(model), weights)
    return found, weights


def check(found, expected, behind):
    """Check that all ranks have the plain loop's weights and figures, and the same bits."""
    figures, weights = expected
    for stats, mine in found:
        assert torch.equal(mine, found[0][1])
        assert torch.allclose(mine, weights, rtol=1e-8, atol=1e-10)
        assert [each.skipped for each in stats] == [n < behind for n in range(STEPS)]
        assert [each.staleness for each in stats] == [
            min(behind, max(n - behind, 0)) for n in range(STEPS)
        ]
        assert all(each.waited >= 0 for each in stats)
        used = [(each.loss, each.grad_norm) for each in stats[behind:]]
        assert used == [pytest.approx(each, rel=1e-8) for each in figures]
        assert {each.weight for each in stats[behind:]} == {ROWS}


@pytest.mark.parametrize(
    ("behind", "wire"),
    [
        (BEHIND, "fp32"),
        (0, "int8"),
        (BEHIND, "int4"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((0, "fp32"), (BEHIND, "int8"), (0, "int4"))
        ),
    ],
)
def test_equals_a_plain_loop(group, behind, wire):
    """Islands have different numbers of rows, gradients are clipped, and the loss of the wire is
    sent later."""
    found = group(2, islands=2, behind=behind)(trained, {"wire": wire}, [12, 4])
    check(found, plain(behind, [12, 4], wire=wire), behind)


def test_behind_0_equals_one_island(group):
    settings = {"zero": 1}
    found = group(2, islands=2, behind=0)(trained, settings)
    (expected, weights), _ = group(2)(trained, settings)
    for stats, mine in found:
        assert torch.allclose(mine, weights, rtol=1e-8, atol=1e-10)
        for each, other in zip(stats, expected, strict=True):
            assert (each.loss, each.grad_norm, each.weight) == pytest.approx(
                (other.loss, other.grad_norm, other.weight), rel=1e-8
            )


LAYOUTS = [
    *(pytest.param({"zero": row}, marks=pytest.mark.full) for row in (0, 1)),
    {"zero": 2, "offload_optimizer": "nvme"},
    {"zero": 3},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_result_does_not_depend_on_the_row(group, layout, tmp_path):
    if "offload_optimizer" in layout:
        layout = layout | {"offload_optimizer": f"nvme:{tmp_path}"}
    found = group(4, islands=2, behind=BEHIND)(trained, {"wire": "bf16"} | layout)
    check(found, plain(BEHIND, [8, 8], wire="bf16"), BEHIND)


@pytest.mark.parametrize("split", ["tensor", pytest.param("pipeline", marks=pytest.mark.full)])
def test_split_replicas(group, split):
    found = group(4, islands=2, behind=BEHIND, **{split: 2})(split_case, 1)
    check(found, plain(BEHIND, [8, 8]), BEHIND)


def split_case(world, zero):
    model = mlp()
    plan = {"0": "colwise", "2": "rowwise"} if world.tensor_size > 1 else None
    engine = sw.Engine(model, optimizer_of("adamw", model), tensor_plan=plan, zero=zero)
    found = []
    for batch in batches():
        engine.forward_backward(lambda rows: loss_of(model, rows), world.share(batch))
        found.append(engine.step(max_norm=CLIP))
    with engine.full_parameters():
        weights = flat(model)
    engine.close()
    return found, weights


# -- saves in mid-flight -------------------------------------------------------------------------


def part_case(world, folder, first, last, settings, saves=()):
    """Make steps from `first` on, and return the weights after each."""
    model = mlp()
    if settings.get("channels"):
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    settings = {key: value for key, value in settings.items() if key != "channels"}
    engine = sw.Engine(model, optimizer_of("adamw", model), **settings)
    assert engine.resume(folder) == first
    found = []
    for number, batch in enumerate(batches(9)[first:last], first + 1):
        engine.backward(loss_of(model, world.share(batch)))
        stats = engine.step(max_norm=CLIP)
        found.append((stats.loss, stats.grad_norm, stats.staleness))
        if number in saves:
            engine.save(folder, background=number % 2 == 0)
    with engine.full_parameters():
        weights = flat(model)
    engine.close()
    return found, weights


@pytest.mark.parametrize(
    ("saved", "settings"),
    [
        (1, {"zero": 0, "wire": "int8"}),
        (4, {"zero": 2, "wire": "int4", "channels": True}),
        (5, {"zero": 3, "precision": "bf16", "ema_decay": 0.5}),
    ],
    ids=str,
)
def test_resume_in_mid_flight_is_bit_exact(group, tmp_path, saved, settings):
    ranks = group(4, islands=2, behind=BEHIND)
    whole = ranks(part_case, tmp_path / "none", 0, 8, settings)
    first = ranks(part_case, tmp_path / "a", 0, 6, settings, (saved,))
    again = ranks(part_case, tmp_path / "a", saved, 8, settings)
    for (steps, weights), (begun, _), (rest, others) in zip(whole, first, again, strict=True):
        assert repr(begun) == repr(steps[:6])
        assert repr(rest) == repr(steps[saved:])
        assert torch.equal(weights, others)
    document = json.loads((tmp_path / f"a/step-{saved}/checkpoint.json").read_text())
    kept = {"model", "optimizer", "outer"} | ({"average"} if "ema_decay" in settings else set())
    residuals = {"island-0", "island-1"} if "wire" in settings else set()
    assert set(document["sets"]) - ({"optimizer"} if saved == 1 else set()) == (
        kept - ({"optimizer"} if saved == 1 else set()) | residuals
    )
    assert [each["step"] for each in document["behind"]["waiting"]] == [
        step for step in (saved - 1, saved) if step
    ]


def test_schema_knows_the_fields_of_reports():
    assert SumsReport._fields == schema.REPORTED


def test_resumes_with_any_number_of_islands(group, tmp_path):
    """Without islands, sums in transit are dropped. With more islands and fewer steps behind, they
    are used."""
    settings = {"wire": "int8"}
    found = group(4, islands=2, behind=BEHIND)(part_case, tmp_path, 0, 5, settings, (5,))
    weights = found[0][1]
    for _, mine in group(2)(part_case, tmp_path, 5, 5, {"zero": 1}):
        assert torch.equal(mine, weights)
    for steps, mine in group(2, islands=2, behind=1)(part_case, tmp_path, 5, 6, settings):
        assert [staleness for *_, staleness in steps] == [1]
        assert not torch.equal(mine, weights)
    for steps, mine in group(2, islands=2)(part_case, tmp_path, 5, 6, {"equal_every": 1}):
        assert len(steps) == 1
        assert not torch.equal(mine, weights)


def test_resumes_from_the_mean_of_averaging_islands(group, tmp_path):
    found = group(2, islands=2)(part_case, tmp_path, 0, 4, {"equal_every": 3}, (4,))
    first, second = group(2, islands=2, behind=1)(part_case, tmp_path, 4, 4, {})
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], found[0][1])


# -- refusals and divergence ---------------------------------------------------------------------


def refused_case(world, settings, words):
    model = mlp()
    with pytest.raises(sw.errors.ConfigError, match=words):
        sw.Engine(model, optimizer_of("sgd", model), **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"equal_every": 30}, "--equal-every 30 cannot be combined with --behind 2"),
        ({"late": 1}, "--late 1 cannot be combined with --behind 2"),
        ({"outer": "nesterov:0.7,0.9"}, "--outer nesterov:0.7,0.9 cannot be combined with"),
        ({"sync_batch_norm": True}, "--islands 2 cannot be combined with --sync-batch-norm"),
    ],
)
def test_rejects_contradicting_settings(group, settings, words):
    group(2, islands=2, behind=BEHIND)(refused_case, settings, words)


def apart(world, engine, model, optimizer, what):
    """Make four steps; island 1 does something different."""
    for number, batch in enumerate(batches(4)):
        if what == "weights" and number == 0 and world.rank == 1:
            with torch.no_grad():
                model[0].weight[0, 0] += 1
        if what == "rate" and number == 1:
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + world.rank)
        if what == "steps" and number == 1:
            engine._state.steps += world.rank
        engine.backward(loss_of(model, world.share(batch)))
        engine.step()


def stops_case(world, what, words):
    """Check that all ranks raise for a model or loop that does not work."""
    model = mlp()
    if what == "buffers":
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    optimizer = optimizer_of("sgd", model)
    engine = sw.Engine(model, optimizer)
    with pytest.raises(sw.errors.ShardwiseError, match=words):
        apart(world, engine, model, optimizer, what)
    engine.close()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("buffers", "--behind 2 does not work with a model whose forward changes buffers"),
        ("weights", "weights before step 1 differ between island 1 and island 0"),
        ("rate", "optimizers' options.*differ between island 1 and island 0 at step 2"),
        ("steps", "Island 1 has made 2 steps, but island 0 1"),
    ],
)
def test_raises_when_islands_diverge(group, what, words):
    group(2, islands=2, behind=BEHIND)(stops_case, what, words)


def closure_case(world):
    model = mlp()
    engine = sw.Engine(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(sw.errors.UsageError, match=r"LBFGS calls the closure .* --behind 2"):
        engine.step(closure=lambda: None)
    engine.close()


def test_rejects_optimizer_with_closure(group):
    group(2, islands=2, behind=BEHIND)(closure_case)


# -- values that are not finite ------------------------------------------------------------------


def not_finite_case(world, settings, stops):
    """Give island 1 a NaN in step 2; return for each step if it was skipped, and the loss scale."""
    model = mlp().float()
    engine = sw.Engine(model, optimizer_of("sgd", model), quiet=True, **settings)
    seen = []
    for number, batch in enumerate(batches(6), 1):
        loss = loss_of(model, world.share(batch.float()))
        engine.backward(loss * torch.nan if (world.rank, number) == (1, 2) else loss)
        if stops and number == 2 and world.rank == 1:
            with pytest.raises(sw.errors.NonFiniteError, match="Step 1: the gradient is not fin"):
                engine.step()
        if stops and number == 2:
            break
        seen.append((engine.step().skipped, engine.loss_scale))
    weights = flat(model)
    engine.close()
    return seen, weights


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({"nonfinite": "skip", "wire": "int8"}, [1.0] * 6),
        ({"precision": "fp16-mixed"}, [65536.0] * 3 + [32768.0] * 3),
    ],
    ids=str,
)
def test_all_islands_skip_a_step_that_is_not_finite(group, settings, scales):
    (seen, mine), (theirs, others) = group(2, islands=2, behind=BEHIND)(
        not_finite_case, settings, False
    )
    assert seen == theirs
    assert seen == list(zip([True, True, False, True, False, False], scales, strict=True))
    assert torch.equal(mine, others)
    assert not torch.equal(mine, flat(mlp().float()))


def test_island_raises_before_it_sends(group):
    group(2, islands=2, behind=BEHIND)(not_finite_case, {}, True)


# -- repeated steps, and gradients that the user writes ------------------------------------------


def abandoned_case(world, how, settings):
    """Begin the third step with another batch first. Nothing of it may remain."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("adamw", model), **settings)
    for number, batch in enumerate(batches()):
        if number == 2 and how is not None:
            engine.backward(loss_of(model, world.share(batch.neg())))
            begin_in_vain(engine, how)
        engine.backward(loss_of(model, world.share(batch)))
        engine.step(max_norm=CLIP)
    engine.close()
    return flat(model)


def begin_in_vain(engine, how):
    if how == "reduce":
        engine.reduce()
        engine.zero_grad()
        return
    with pytest.raises(KeyError), engine.full_gradients():
        raise KeyError


@pytest.mark.parametrize(
    ("how", "behind", "settings"),
    [
        ("reduce", BEHIND, {"wire": "int4"}),
        ("full_gradients", 1, {"zero": 3}),
        ("full_gradients", 0, {"wire": "int8"}),
    ],
)
def test_repeated_step_leaves_nothing(group, how, behind, settings):
    """Neither its messages nor the loss of the wire."""
    ranks = group(2, islands=2, behind=behind)
    expected = ranks(abandoned_case, None, settings)
    for mine, theirs in zip(ranks(abandoned_case, how, settings), expected, strict=True):
        assert torch.equal(mine, theirs)


def lonely_case(world):
    """Repeat the last step on island 1 only."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model))
    for number, batch in enumerate(batches(4)):
        if number == 3 and world.rank == 1:
            engine.backward(loss_of(model, world.share(batch)))
            engine.reduce()
            engine.zero_grad()
        engine.backward(loss_of(model, world.share(batch)))
        engine.step()
    words = "Rank 1 has sent gradients 5 times, but rank 0 4 times"
    with pytest.raises(sw.errors.UsageError, match=words):
        engine.close()


def test_step_repeated_on_one_island_raises_at_close(group):
    group(2, islands=2, behind=BEHIND)(lonely_case)


def uneven_case(world, steps, more):
    """Run more steps on one island. Afterwards the model is complete and the engine closed."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), zero=3)
    try:
        for batch in batches(steps + more[world.rank]):
            engine.backward(loss_of(model, batch))
            engine.step()
        said = ""
    except sw.errors.UsageError as error:
        said = str(error)
    with pytest.raises(sw.errors.UsageError, match="has sent gradients") as raised:
        engine.close()
    gradient_of(model, batches(1)[0])
    return said, str(raised.value)


def test_one_more_step_on_one_island_raises_at_close(group):
    for said, closing in group(2, islands=2, behind=BEHIND)(uneven_case, 4, (1, 0)):
        assert not said
        assert "Rank 0 has sent gradients 5 times, but rank 1 4 times" in closing


@pytest.mark.parametrize("behind", [0, BEHIND])
def test_many_more_steps_on_one_island_raise_without_waiting(group, behind):
    first, second = group(2, islands=2, behind=behind)(uneven_case, 4, (0, 9))
    assert not first[0]
    assert "Island 0 has closed its engine" in second[0]
    assert "before step 5, but other islands make that step" in second[0]
    words = f"Rank 1 has sent gradients {5 + behind} times, but rank 0 4 times"
    assert words in first[1]
    assert words in second[1]


def gradients_written_case(world):
    """Write the gradients of all islands on worker 0."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), zero=2)
    for number, batch in enumerate(batches(4)):
        engine.backward(loss_of(model, world.share(batch)))
        with engine.full_gradients():
            shown = [parameter.grad is not None for parameter in model.parameters()]
            if number >= BEHIND:
                for parameter in model.parameters():
                    parameter.grad.fill_(1.0 + world.rank)
        stats = engine.step()
        assert shown == [number >= BEHIND] * 4
        assert stats.skipped == (number < BEHIND)
    count = sum(parameter.numel() for parameter in model.parameters())
    engine.close()
    return stats.grad_norm, count, flat(model)


def test_gradients_written_by_worker_0_reach_all_islands(group):
    found = group(4, islands=2, behind=BEHIND)(gradients_written_case)
    for norm, count, weights in found:
        assert norm == pytest.approx(count**0.5)
        assert torch.equal(weights, found[0][2])


def mended_case(world, fill):
    """Give island 1 a NaN in step 2, and replace it by `fill` in the gradients of all islands."""
    model = mlp()
    model[0].spare = nn.Linear(2, 2).double()  # parameters without any gradient
    engine = sw.Engine(model, optimizer_of("sgd", model), nonfinite="skip", quiet=True)
    seen = []
    for number, batch in enumerate(batches(5), 1):
        loss = loss_of(model, world.share(batch))
        engine.backward(loss * torch.nan if (world.rank, number) == (1, 2) else loss)
        with engine.full_gradients():
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            seen.append(any(bool(grad.isnan().all()) for grad in grads))
            for grad in grads:
                grad.nan_to_num_(fill)
        stats = engine.step()
        assert stats.skipped == (number <= BEHIND)
        if seen[-1]:
            count = sum(grad.numel() for grad in grads)
            assert stats.grad_norm == pytest.approx(fill * count**0.5)
    engine.close()
    return seen, flat(model)


def test_user_can_replace_nan_gradients(group):
    """As with every ZeRO stage, no island uses its own gradients instead."""
    first, second = group(2, islands=2, behind=BEHIND)(mended_case, 0.5)
    assert first[0] == second[0] == [False, False, False, True, False]
    assert torch.equal(first[1], second[1])


def dropped_case(world):
    """Drop engines without close(). Only messages in transit of the last one remain."""
    from shardwise.islands import delayed_sums

    left = []
    for _ in range(3):
        model = mlp()
        engine = sw.Engine(model, optimizer_of("sgd", model))
        for batch in batches(3):
            engine.backward(loss_of(model, world.share(batch)))
            engine.step()
        del engine
        gc.collect()
        left.append([len(flights) for flights in delayed_sums._ORPHANED])
    model = mlp()
    sw.Engine(model, optimizer_of("sgd", model)).close()
    return left, sum(map(len, delayed_sums._ORPHANED))


def test_dropped_engines_leave_nothing(group):
    for left, orphans in group(2, islands=2, behind=BEHIND)(dropped_case):
        assert left == [[BEHIND]] * 3
        assert not orphans


def bytes_case(world, settings):
    """Compare the counted bytes next to the states with the memory between two steps."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), **settings)
    for batch in batches(4):
        engine.backward(loss_of(model, world.share(batch)))
        engine.step()
    delayed = engine._states.hooks.sums
    messages = [message for flight in delayed.flights for message in flight.sums]
    held = [*(message.rows for message in messages), *(r.loaded() for r in delayed.residuals)]
    nbytes = sum(tensor.nbytes for tensor in held)
    found = delayed.state_bytes, nbytes
    table = sw.engine.describe.table_of(engine._spec, engine._states, "memory")
    assert table.caption == f"and in addition: {in_bytes(nbytes)} of gradients between islands"
    engine.close()
    return found


@pytest.mark.parametrize("settings", [{"zero": 2, "wire": "int8"}, {"wire": "bf16"}], ids=str)
def test_counts_bytes_of_messages_in_transit(group, settings):
    for counted, held in group(4, islands=2, behind=BEHIND)(bytes_case, settings):
        assert counted == held


# -- behaviour that does not depend on islands ---------------------------------------------------


def used_case(world):
    """A parameter without a gradient on any island keeps its value and its step count."""
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double()
    engine = sw.Engine(model, optimizer_of("adamw", model), zero=1)
    norms = []
    for number, batch in enumerate(batches(4)):
        use = 1 if number == 1 else 0
        rows = world.share(batch)
        loss = loss_of(model[0], rows) * 0.5 + loss_of(model[use], rows) * 0.5
        engine.backward(loss)
        norms.append(engine.reduce())
        with engine.full_gradients():
            grads = [p.grad is not None for p in model.parameters()]
        engine.step()
    state = engine.optimizer_state_dict()["state"]
    counts = [float(state[index]["step"]) if index in state else 0.0 for index in range(4)]
    engine.close()
    return grads, norms, counts


def test_parameters_used_in_one_step_only(group):
    for grads, norms, counts in group(2, islands=2, behind=BEHIND)(used_case):
        assert grads == [True, True, True, True]  # of step 2, used in step 4
        assert norms[:2] == [0.0, 0.0]
        assert min(norms[2:]) > 0
        assert counts == [2.0, 2.0, 1.0, 1.0]


def rate_case(world):
    optimizer = optimizer_of("sgd", mlp())
    return sw.lr.ScaledLR(optimizer, steps_per_epoch=4, warmup_epochs=0).multiplier


def test_learning_rate_scales_with_all_workers(group):
    assert group(4, islands=2, behind=BEHIND)(rate_case) == [4.0] * 4


def written_case(world):
    """Rank 0 writes values that only it knows, at any time."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), zero=3)
    for batch in batches(4):
        engine.backward(loss_of(model, world.share(batch)))
        engine.step()
    with engine.full_parameters(write=True):
        if world.rank == 0:
            for parameter in model.parameters():
                parameter.fill_(2.0)
    with engine.full_parameters():
        found = flat(model)
    engine.close()
    return found


def test_weights_written_by_rank_0_reach_all_islands(group):
    for found in group(4, islands=2, behind=BEHIND)(written_case):
        assert set(found.unique().tolist()) == {0.0, 2.0}


def grows_case(world):
    """A new layout of the states drops messages in transit on all islands."""
    model = mlp()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.2)
    model[0].requires_grad_(False)
    engine = sw.Engine(model, optimizer)
    skipped = []
    for number, batch in enumerate(batches(7)):
        engine.backward(loss_of(model, world.share(batch)))
        skipped.append(engine.step().skipped)
        if number == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
    engine.close()
    return skipped, flat(model)


def test_adds_a_parameter_group(group):
    (skipped, mine), (_, theirs) = group(2, islands=2, behind=BEHIND)(grows_case)
    assert skipped == [True, True, False, True, True, False, False]
    assert torch.equal(mine, theirs)


def said_case(world):
    model, lines = mlp(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "print", lambda line: lines.append(line))
        engine = sw.Engine(model, optimizer_of("sgd", model), wire="int8", quiet=False)
    title = sw.engine.describe.table_of(engine._spec, engine._states, "memory").title
    engine.close()
    return lines, title


def test_start_lines_describe_the_exchange(group):
    lines, title = group(4, islands=2, behind=BEHIND)(said_case)[0]
    rule = "gradients synchronised every step, sent as int8, used 2 steps later"
    assert lines[2] == f"  2 islands of 2 workers: {rule}: 232 B sent per worker and step"
    assert title == f"ZERO_0 on 4 ranks over memory, 2 islands; bytes per rank; {rule}"
