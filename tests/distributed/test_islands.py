"""Islands that update separately and average parameters, against a plain loop of a few lines."""

import math

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.bridging import joining

STEPS, ROWS, EVERY = 7, 16, 3


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def batches(steps=STEPS):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(steps, ROWS, 6, generator=generator, dtype=torch.float64)


def loss_of(model, rows):
    return (model(rows) - rows[:, :3].sin()).square().mean()


def optimizer_of(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2)
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


# -- the plain loop ----------------------------------------------------------------------------


def flat(model):
    """Return all parameters in the layout of a bucket: last one first, each starting at a multiple
    of 16."""
    parts = [p.detach().reshape(-1) for p in reversed(list(model.parameters()))]
    return torch.cat([nn.functional.pad(part, (0, -part.numel() % 16)) for part in parts])


def put(model, values):
    start = 0
    for parameter in reversed(list(model.parameters())):
        parameter.data = values[start : start + parameter.numel()].view_as(parameter).clone()
        start += -(-parameter.numel() // 16) * 16


def rounded(values, wire):
    if wire == "fp32":
        return values
    if wire == "bf16":
        return values.bfloat16().double()
    most, found = {"int8": 127, "int4": 7}[wire], []
    for block in values.split(256):
        scale = (block.abs().max() / most).float().double()
        found.append((block / scale).round() * scale if scale else block * 0)
    return torch.cat(found)


def plain(count, optimizer, every=EVERY, lr=1.0, momentum=0.0, wire="fp32", late=0):
    """Run local SGD and DiLoCo as in their papers; return the losses, weights and anchor."""
    models = [mlp() for _ in range(count)]
    optimizers = [optimizer_of(optimizer, model) for model in models]
    anchor, velocity = flat(models[0]), 0.0
    residuals, sent, losses = [0.0] * count, [], []
    for step, batch in enumerate(batches(), 1):
        for model, each, rows in zip(models, optimizers, batch.chunk(count), strict=True):
            loss = loss_of(model, rows)
            each.zero_grad()
            loss.backward()
            each.step()
            losses.append(loss.item())
        if step % every == 0:
            sent, differences = [flat(model) for model in models], []
            for k in range(count):
                difference = anchor - sent[k] + residuals[k]
                differences.append(rounded(difference, wire))
                residuals[k] = difference - differences[k]
        if step >= every and step % every == late % every:
            mean = sum(differences) / count
            velocity = momentum * velocity + mean
            anchor = anchor - lr * (mean + momentum * velocity)
            for k, model in enumerate(models):
                put(model, anchor + flat(model) - sent[k])
    return losses, [flat(model) for model in models], anchor


# -- the engine --------------------------------------------------------------------------------


def trained(world, optimizer, settings):
    """Return this island's losses, its weights, and the anchor."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of(optimizer, model), **settings)
    losses = []
    for batch in batches():
        engine.backward(loss_of(model, world.share(batch)))
        losses.append(engine.step().loss)
    with engine.full_parameters():
        mine = flat(model)
    with engine.anchor(), engine.full_parameters():
        anchor = flat(model)
    with engine.full_parameters():
        assert torch.equal(flat(model), mine)
    assert len(engine._spec.step_group.gather_objects(0)) == world.size // world.island_count
    engine.close()
    return losses, mine, anchor


def check(found, expected, count, *, rel=1e-8):
    """Check that all ranks have the plain loop's results for their island, and the same anchor bit
    for bit."""
    _, weights, anchor = expected
    for rank, (_, mine, theirs) in enumerate(found):
        island = rank * count // len(found)
        assert torch.allclose(mine, weights[island], rtol=rel, atol=rel)
        assert torch.allclose(theirs, anchor, rtol=rel, atol=rel)
        assert torch.equal(theirs, found[0][2])


@pytest.mark.parametrize(
    ("optimizer", "settings", "loop"),
    [
        ("sgd", {}, {}),
        ("adamw", {}, {}),
        ("adamw", {"outer": "nesterov:0.7,0.9"}, {"lr": 0.7, "momentum": 0.9}),
        ("adamw", {"late": 2}, {"late": 2}),
        ("adamw", {"wire": "bf16"}, {"wire": "bf16"}),
        ("adamw", {"wire": "int8"}, {"wire": "int8"}),
        (
            "adamw",
            {"wire": "int4", "late": 1, "outer": "nesterov:0.7,0.9"},
            {"wire": "int4", "late": 1, "lr": 0.7, "momentum": 0.9},
        ),
    ],
)
def test_equals_a_plain_loop(group, optimizer, settings, loop):
    found = group(2, islands=2)(trained, optimizer, {"equal_every": EVERY} | settings)
    expected = plain(2, optimizer, **loop)
    check(found, expected, 2)
    for island, (losses, _, _) in enumerate(found):
        alone = expected[0][island::2]
        both = [sum(expected[0][2 * n : 2 * n + 2]) / 2 for n in range(STEPS)]
        boundary = [not settings.get("late") and n % EVERY == EVERY - 1 for n in range(STEPS)]
        wanted = [b if is_all else a for a, b, is_all in zip(alone, both, boundary, strict=True)]
        assert losses == pytest.approx(wanted, rel=1e-8)


LAYOUTS = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 2, "offload_optimizer": "cpu"},
    {"zero": 3},
    {"zero": 2, "offload_optimizer": "nvme"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.full), 2])
def test_result_does_not_depend_on_an_islands_layout(group, layout, late, tmp_path):
    if layout.get("offload_optimizer") == "nvme":
        layout = layout | {"offload_optimizer": f"nvme:{tmp_path}"}
    rules = {"outer": "nesterov:0.7,0.9", "wire": "bf16", "late": late, "bucket_mb": 1000.0}
    found = group(4, islands=2)(trained, "adamw", {"equal_every": EVERY} | rules | layout)
    check(found, plain(2, "adamw", lr=0.7, momentum=0.9, wire="bf16", late=late), 2)


@pytest.mark.full
def test_over_gloo(group):
    found = group(4, islands=2, transport="gloo")(
        trained, "adamw", {"equal_every": EVERY, "wire": "bf16", "zero": 2}
    )
    check(found, plain(2, "adamw", wire="bf16"), 2)


@pytest.mark.parametrize("zero", [0, 3])
def test_each_host_is_an_island(group, zero):
    """Each host has shared memory, and differences are sent over Gloo during steps."""
    ranks = group(4, hosts=[0, 0, 1, 1], islands="host")
    rule = {"equal_every": EVERY, "wire": "int8", "late": 2, "zero": zero, "bucket_mb": 1000.0}
    found = ranks(trained, "adamw", rule)
    ranks(names_case)
    assert torch.equal(found[0][2], found[3][2])
    if zero == 3:
        same_place = group(4, islands=2)(trained, "adamw", rule)
        for mine, theirs in zip(found, same_place, strict=True):
            assert torch.equal(mine[2], theirs[2])


def names_case(world):
    assert (world.island_count, world.peers.name, world.peers.size) == (2, "gloo", 2)
    assert world.step_group.name == "shared memory"


def test_every_step_and_plain_sgd_are_one_large_batch(group):
    for zero in (0, 3):
        found = group(4, islands=2)(trained, "sgd", {"equal_every": 1, "zero": zero})
        losses, (weights,), _ = plain(1, "sgd", every=1)
        check(found, (losses, [weights] * 2, weights), 2)
        for mine, _, _ in found:
            assert mine == pytest.approx(losses, rel=1e-8)


def test_one_island_equals_no_islands(group):
    """There is no anchor, and the bits are the same as without islands."""
    for zero in (0, 2):
        with_one = group(2, islands=1)(trained, "adamw", {"zero": zero})
        without = group(2)(trained, "adamw", {"zero": zero})
        for (losses, mine, _), (theirs, weights, _) in zip(with_one, without, strict=True):
            assert losses == theirs
            assert torch.equal(mine, weights)


def test_hosts_are_islands(group):
    """A single host is one island."""
    assert {each[0] for each in group(2, islands="host")(shape_case)} == {1}


def shape_case(world):
    return world.island_count, world.island_rank, world.data.size, world.data_size


def test_world_describes_islands(group):
    assert group(4, islands=2)(shape_case) == [(2, 0, 2, 4)] * 2 + [(2, 1, 2, 4)] * 2


# -- traffic between islands ---------------------------------------------------------------------


def counted(world, steps, settings):
    """Return for each step the bytes that this rank has sent to other islands."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("adamw", model), **settings)
    engine._spec.hooks.before_step(engine._state)  # compares the initial weights once
    sent = []
    gather = type(world.peers).all_gather

    def all_gather(group, buffer, cuts):
        if group is world.peers:
            sent[-1] += (cuts[1] - cuts[0]) * buffer.itemsize * (group.size - 1)
        return gather(group, buffer, cuts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.peers), "all_gather", all_gather)
        for verb in ("all_reduce", "reduce_scatter", "broadcast", "gather_rows", "barrier"):
            patch.setattr(world.peers, verb, refused, raising=False)
        patch.setattr(world.collectives, "gather_rows", refused, raising=False)
        for batch in batches(steps):
            sent.append(0)
            engine.backward(loss_of(model, world.share(batch)))
            engine.step()
    parts = [bucket.interval(engine._spec.shard_group.rank) for bucket in
             engine._states.parameters.buckets]  # fmt: skip
    engine.close()
    return sent, [end - first for first, end in parts]


def refused(*_):
    raise AssertionError("nothing crosses but differences and reports")


BYTES = {
    "fp32": lambda n: 8 * n,
    "bf16": lambda n: 2 * n,
    "int8": lambda n: n + 4 * math.ceil(n / 256),
    "int4": lambda n: math.ceil(n / 2) + 4 * math.ceil(n / 256),
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("wire", list(BYTES))
def test_sent_bytes_match_the_formula(group, wire, zero):
    for sent, lengths in group(4, islands=2)(
        counted, 6, {"zero": zero, "wire": wire, "equal_every": 3}
    ):
        each = sum(8 + math.ceil(BYTES[wire](n) / 8) * 8 for n in lengths)
        report = 7 * 8
        assert sent == [0, 0, each + report] * 2


def masters_case(world):
    """A file that is saved between boundaries has the common weights, the same on all islands."""
    model = mlp().bfloat16()
    engine = sw.Engine(model, optimizer_of("adamw", model), equal_every=2)
    for batch in batches(3):
        engine.backward(loss_of(model, world.share(batch.bfloat16())))
        engine.step()
    with engine.anchor(), engine.full_parameters():
        weights = [p.detach().clone() for p in model.parameters()]
    masters = engine.optimizer_state_dict()["fp32_master_weights"]
    engine.close()
    return weights, masters


def test_saved_masters_are_the_common_weights(group):
    (weights, masters), (_, others) = group(2, islands=2)(masters_case)
    assert all(masters[i].bfloat16().equal(weight) for i, weight in enumerate(weights))
    assert all(masters[i].equal(others[i]) for i in masters)


# -- inside an island --------------------------------------------------------------------------


def inside_case(world, precision, island):
    """Return losses, norms and weights of clipped steps, each with two backward passes, before any
    average.
    """
    model = mlp().float()
    engine = sw.Engine(model, optimizer_of("adamw", model), precision=precision, zero=2)
    seen = []
    for batch in batches(4):
        mine = world.share(batch.float() if island is None else batch.float().chunk(2)[island])
        for number, part in enumerate(mine.chunk(2)):
            again = None if number == 0 else False
            engine.backward(loss_of(model, part), weight=len(part), same_items=again)
        stats = engine.step(max_norm=0.05)
        seen.append((stats.loss, stats.grad_norm, stats.weight, stats.skipped, engine.loss_scale))
    with engine.full_parameters():
        weights = flat(model)
    engine.close()
    return seen, weights


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_island_equals_a_separate_run(group, precision):
    """Accumulation, clipping and loss scale are separate, with the bits of a separate run."""
    found = group(4, islands=2)(inside_case, precision, None)
    for island in range(2):
        alone = group(2)(inside_case, precision, island)
        for (seen, weights), (theirs, others) in zip(found[2 * island :], alone, strict=False):
            assert seen == theirs
            assert torch.equal(weights, others)


def split_case(world, zero):
    model = mlp()
    plan = {"0": "colwise", "2": "rowwise"} if world.tensor_size > 1 else None
    optimizer = optimizer_of("adamw", model)
    rule = {"equal_every": EVERY, "outer": "nesterov:0.7,0.9", "wire": "bf16"}
    engine = sw.Engine(model, optimizer, tensor_plan=plan, zero=zero, **rule)
    losses = []
    for batch in batches():
        engine.forward_backward(lambda rows: loss_of(model, rows), world.share(batch))
        losses.append(engine.step().loss)
    with engine.full_parameters():
        mine = flat(model)
    with engine.anchor(), engine.full_parameters():
        anchor = flat(model)
    engine.close()
    return losses, mine, anchor


@pytest.mark.parametrize("split", ["tensor", pytest.param("pipeline", marks=pytest.mark.full)])
def test_split_replicas(group, split):
    found = group(4, islands=2, **{split: 2})(split_case, 1)
    check(found, plain(2, "adamw", lr=0.7, momentum=0.9, wire="bf16"), 2)


# -- what users see ------------------------------------------------------------------------------


def normed():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def buffers_case(world):
    """After a boundary, running statistics are averaged across islands."""
    model = normed()
    engine = sw.Engine(model, optimizer_of("sgd", model), equal_every=2)
    means = []
    for batch in batches(4):
        engine.backward(loss_of(model, world.share(batch)))
        engine.step()
        means.append(model[1].running_mean.clone())
    engine.close()
    return means


@pytest.mark.parametrize("size", [2, 4])
def test_buffers_are_averaged_over_islands(group, size):
    first, *_, last = group(size, islands=2)(buffers_case)
    alike = [torch.equal(a, b) for a, b in zip(first, last, strict=True)]
    assert alike == [False, True, False, True]


def loaded_case(world, folder):
    """Islands start from the weights that a script writes before the first step."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), equal_every=1, outer="nesterov:0.7,0.9")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    engine.export(folder / "a.pt")
    engine.backward(loss_of(model, world.share(batches(1)[0])))
    engine.step()
    mine = flat(model)
    engine.close()
    return mine, torch.load(folder / "a.pt")["0.weight"]


def test_islands_begin_from_written_weights(group, tmp_path):
    plain_one = mlp()
    put(plain_one, flat(plain_one) * 2)
    loss_of(plain_one, batches(1)[0]).backward()
    for parameter in plain_one.parameters():
        parameter.data -= 0.7 * (1 + 0.9) * 0.2 * parameter.grad
    for mine, weight in group(2, islands=2)(loaded_case, tmp_path):
        assert torch.allclose(mine, flat(plain_one), rtol=1e-8, atol=1e-8)
        assert torch.equal(weight, mlp()[0].weight.detach() * 2)


def grows_case(world):
    """Islands continue after a parameter group is added, and all drop messages in transit."""
    model = mlp()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.2)
    model[0].requires_grad_(False)
    engine = sw.Engine(model, optimizer, equal_every=2, late=1, wire="int8")
    for number, batch in enumerate(batches(7)):
        engine.backward(loss_of(model, world.share(batch)))
        engine.step()
        if number == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
    with engine.anchor(), engine.full_parameters():
        anchor = flat(model)
    engine.close()
    return anchor


def test_adds_a_parameter_group(group):
    first, second = group(2, islands=2)(grows_case)
    assert torch.equal(first, second)
    assert not torch.equal(first, flat(mlp()))


def refused_case(world, settings, words):
    model = mlp()
    with pytest.raises(sw.errors.ConfigError, match=words):
        sw.Engine(model, optimizer_of("sgd", model), **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sync_batch_norm": True}, "--islands 2 cannot be combined with --sync-batch-norm"),
        ({"ema_decay": 0.9}, "--islands 2 cannot be combined with --ema-decay"),
        (
            {"shard_within": "host", "zero": 2},
            "--islands 2 cannot be combined with --shard-within host",
        ),
        ({"late": 3, "equal_every": 3}, "--late 3 with --equal-every 3"),
    ],
)
def test_rejects_settings_that_contradict_islands(group, settings, words):
    group(2, islands=2)(refused_case, settings, words)


def bad_case(world):
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), equal_every=1)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    engine._states.hooks.exchange.has_begun = True
    with pytest.raises(
        sw.errors.NonFiniteError, match=r"difference of 0.weight .* contains a NaN or an"
    ):
        engine._states.hooks.exchange.send(0, 1)
    engine.close()


def test_raises_before_sending_values_that_are_not_finite(group):
    group(2, islands=2)(bad_case)


def said_case(world):
    """Return the lines at the start, and the title of the table."""
    model, lines = mlp(), []
    dataset = torch.utils.data.TensorDataset(torch.zeros(32, 6, dtype=torch.float64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "print", lambda line: lines.append(line))
        rule = {"equal_every": 4, "wire": "int8", "late": 1, "quiet": False}
        engine = sw.Engine(model, optimizer_of("sgd", model), **rule)
        for (rows,) in sw.Loader(dataset, 16):
            engine.backward(loss_of(model, rows))
            engine.step()
    title = sw.engine.describe.table_of(engine._spec, engine._states, "memory").title
    engine.close()
    return lines, title


def test_start_lines_describe_the_averaging(group):
    lines, title = group(4, islands=2, quiet=True)(said_case)[0]
    assert "4 workers = 2 islands x 2 data on" in lines[0]
    rule = "parameters synchronised every 4 steps (mean), sent as int8, used 1 step later"
    assert lines[2] == (
        f"  2 islands of 2 workers, which update separately: {rule}, 1 fragment in turn: "
        "240 B sent per worker each time"
    )
    assert lines[3] == (
        "  batch: 16 = 4 workers x 1 micro-batch x 4, 2 steps per epoch; a step of an island has "
        "8 of them"
    )
    assert title == f"ZERO_0 on 4 ranks over memory, 2 islands; bytes per rank; {rule}"


def rows_case(world):
    world.share(batches(1)[0])
    with pytest.raises(sw.errors.UsageError, match="Remove --islands"):
        world.gather_rows(torch.zeros(8, 2))
    dataset = torch.utils.data.TensorDataset(torch.arange(32.0))
    assert len(sw.Loader(dataset, 8)) == 4
    optimizer = optimizer_of("sgd", mlp())
    assert sw.lr.ScaledLR(optimizer, steps_per_epoch=4).state_dict()["multiplier"] == 1
    scaled = sw.lr.ScaledLR(optimizer, steps_per_epoch=4, warmup_epochs=0)
    return scaled.multiplier


def test_rows_and_rates_of_an_island(group):
    assert group(4, islands=2)(rows_case) == [2.0] * 4


def bridge_case(world):
    with pytest.raises(
        sw.errors.UsageError, match="Accelerator cannot be combined with --islands 2: it averages"
    ):
        joining.join({}, "Accelerator")


def test_bridges_refuse_islands(group):
    group(2, islands=2)(bridge_case)
