"""The state of an optimizer, saved and loaded as by a plain process, with an engine."""

import copy

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointMismatch, UsageError
from tests.distributed.group import RankFailed


def made():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    x = torch.randn(12, 5, dtype=torch.float64)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05), x


def trained(model, optimizer, x, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def plain_halves():
    """Return the state that a plain run saves after three steps, and its parameters after six."""
    model, optimizer, x = made()
    trained(model, optimizer, x, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] *= 0.5
    trained(model, optimizer, x, 3)
    return saved, [p.detach() for p in model.parameters()]


def goes_on(engine, model, optimizer, x, world):
    optimizer.param_groups[0]["lr"] *= 0.5
    for _ in range(3):
        engine.backward(model(world.share(x)).square().mean())
        engine.step()
    with engine.full_parameters():
        return [p.detach().clone() for p in model.parameters()]


def loaded_case(world, zero, saved, on_rank_0):
    model, optimizer, x = made()
    engine = sw.Engine(model, optimizer, zero=zero)
    engine.backward(model(world.share(x)).square().mean())
    engine.step(max_norm=1e-9)
    with engine.full_parameters(write=True):
        model.load_state_dict(saved[0])
    engine.load_optimizer_state_dict(saved[1] if world.is_main or not on_rank_0 else None)
    values = goes_on(engine, model, optimizer, x, world)
    state = engine.optimizer_state_dict()
    engine.close()
    return values, state


@pytest.mark.parametrize("zero", range(4))
def test_loads_plain_state_into_an_engine(group, zero):
    saved, expected = plain_halves()
    values, state = group(2)(loaded_case, zero, saved, zero % 2 == 0)[1]
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-13)
    assert state["param_groups"][0]["lr"] == 0.025
    assert float(state["state"][3]["step"]) == 6


def alone_case(world, saved):
    """Run the unchanged lines of a plain script on one worker."""
    model, optimizer, x = made()
    engine = sw.Engine(model, optimizer, zero=2)
    for _ in range(3):
        engine.backward(model(x).square().mean())
        engine.step()
    mine = copy.deepcopy(optimizer.state_dict())
    assert mine.keys() == saved[1].keys()
    for number, state in saved[1]["state"].items():
        torch.testing.assert_close(mine["state"][number]["exp_avg"], state["exp_avg"])
    assert mine["param_groups"] == saved[1]["param_groups"]
    engine.backward(model(x).square().mean())
    other = copy.deepcopy(mine)
    other["param_groups"][0]["lr"] = 7.0
    with pytest.raises(UsageError, match=r"between engine.backward and engine.step"):
        optimizer.load_state_dict(other)
    engine.step()
    last = copy.deepcopy(optimizer.state_dict())
    other["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(CheckpointMismatch, match=r"the shape \(3,\)"):
        optimizer.load_state_dict(other)
    assert optimizer.param_groups[0]["lr"] == 0.05
    torch.testing.assert_close(optimizer.state_dict()["state"], last["state"], rtol=0, atol=0)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(mine)
    values = goes_on(engine, model, optimizer, x, world)
    engine.close()
    assert len(optimizer.state_dict()["state"]) == 4
    return values


def test_a_plain_script_on_one_worker(group):
    saved, expected = plain_halves()
    (values,) = group(1)(alone_case, saved)
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-13)


def several_case(world):
    model, optimizer, _ = made()
    engine = sw.Engine(model, optimizer)
    with pytest.raises(UsageError, match=r"engine.optimizer_state_dict\(optimizer\), on all ranks"):
        optimizer.state_dict()
    state = engine.optimizer_state_dict()
    with pytest.raises(UsageError, match=r"Write engine.load_optimizer_state_dict\(state"):
        optimizer.load_state_dict(state)
    other = torch.optim.AdamW([nn.Parameter(torch.zeros(3))]).state_dict()
    with pytest.raises(CheckpointMismatch, match=r"groups of \[1\] parameters, but AdamW"):
        engine.load_optimizer_state_dict(other)
    with pytest.raises(UsageError, match="does not belong to this engine"):
        engine.load_optimizer_state_dict(state, torch.optim.SGD(nn.Linear(1, 1).parameters()))
    engine.close()


def test_error_on_several_workers_names_the_line_to_write(group):
    group(2)(several_case)


def shapes_case(world, name):
    """Load a state that fits only one rank, which must fail on all ranks."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, zero=0)
    engine.backward(model(torch.ones(2, 4)).mean())
    engine.step()
    state = copy.deepcopy(engine.optimizer_state_dict())
    engine.load_optimizer_state_dict(copy.deepcopy(state))
    if world.rank == 1:
        key = next(k for k, v in state["state"][1].items() if v.ndim)
        state["state"][1][key] = torch.zeros(5, 7)
    with pytest.raises(CheckpointMismatch, match=r"Rank 1: .* of a parameter of shape \(3, 8\)"):
        engine.load_optimizer_state_dict(state)
    engine.backward(model(torch.ones(2, 4)).mean())
    engine.step()
    engine.close()


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_state_of_another_shape_is_refused_on_all_ranks(group, name):
    group(2)(shapes_case, name)


def wide_case(world):
    """16-bit gradients stay in fp32 under another layout."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=1.0)
    engine = sw.Engine(model, optimizer, precision="bf16", zero=0)
    x = torch.tensor([[256.0], [1.0], [1.0], [1.0]]).expand(4, 4).bfloat16()
    found = []
    for _ in range(3):
        for row in x:
            engine.backward(model(row[None]).mean())
        engine.step()
        state = engine.optimizer_state_dict()
        found.append(state["state"][0]["momentum_buffer"][0, 0].item())
        state["state"].clear()
        engine.load_optimizer_state_dict(state)
    engine.close()
    return found


def test_wide_gradients_stay_wide(group):
    """In 16 bits 256 + 1 + 1 + 1 is 256, which the first step gives because it cannot know yet."""
    assert group(1)(wide_case) == [[64.0, 64.75, 64.75]]


def split_case(world):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    engine = sw.Engine(
        model, torch.optim.SGD(model.parameters()), tensor_plan={"0": "colwise", "2": "rowwise"}
    )
    try:
        engine.load_optimizer_state_dict({})
    finally:
        engine.close()


def test_refuses_parts_by_name(group):
    with pytest.raises(RankFailed, match="with --tensor, --pipeline or --expert, which"):
        group(2, tensor=2)(split_case)


# -- masters ----------------------------------------------------------------------------------


def narrow(zero, make=torch.optim.AdamW, frozen=False):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).bfloat16()
    model[0].requires_grad_(not frozen)
    optimizer = make(model.parameters(), lr=0.05)
    return model, optimizer, sw.Engine(model, optimizer, zero=zero)


def narrow_steps(world, model, engine, count=3, backwards=1):
    """Return batches, which have 12, 8, 10, 12 ... rows in one call."""
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(3)).bfloat16()
    losses = []
    for _ in range(count):
        for _ in range(backwards):
            rows = (12, 8, 10)[len(losses) % 3]
            loss = model(world.share(x[:rows])).float().square().mean()
            engine.backward(loss)
            losses.append(loss.item())
        engine.step()
    return losses


def put(engine, model, weights):
    with engine.full_parameters(write=True):
        model.load_state_dict(weights)


def weights_of(engine, model):
    with engine.full_parameters():
        return copy.deepcopy(model.state_dict())


def resumed_case(world, zero, backwards):
    """Return losses, weights and state of the last steps.

    Once without a break, and once resumed from plain state_dicts.
    """
    model, _, engine = narrow(zero)
    narrow_steps(world, model, engine, backwards=backwards)
    weights, state = (
        weights_of(engine, model),
        copy.deepcopy(engine.optimizer_state_dict(for_resume=True)),
    )
    found = []
    for _ in range(2):
        losses = narrow_steps(world, model, engine, backwards=backwards)
        found.append(
            (losses, weights_of(engine, model), engine.optimizer_state_dict(for_resume=True))
        )
        engine.close()
        model, _, engine = narrow(zero)
        put(engine, model, weights)
        engine.load_optimizer_state_dict(state if world.is_main else None)
    engine.close()
    return found


@pytest.mark.parametrize(("zero", "backwards"), [(1, 1), (3, 2)])
def test_run_in_16_bits_resumes_with_the_same_bits(group, zero, backwards):
    """The next step may have more rows than the last one before the save."""
    for whole, resumed in group(2)(resumed_case, zero, backwards):
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
        masters = whole[2]["fp32_master_weights"]
        weights = list(whole[1].values())
        assert all(masters[i].bfloat16().equal(weight) for i, weight in enumerate(weights))
        assert any(not master.equal(master.bfloat16()) for master in masters.values())
        assert whole[2]["fp32_gradients"] == (backwards > 1)
        # Counted by seeds: the two backwards together count as two whole batches.
        assert whole[2]["loss_weight_divisor"] == {1: 10, 2: (8 + 10) / 2}[backwards]


def frozen_case(world, zero):
    """A layer is frozen during training and trained again: in the same run, and after a resume."""
    model, _, engine = narrow(zero)
    narrow_steps(world, model, engine)
    model[0].requires_grad_(False)
    narrow_steps(world, model, engine, 1)
    weights, state = (
        weights_of(engine, model),
        copy.deepcopy(engine.optimizer_state_dict(for_resume=True)),
    )
    found = []
    for _ in range(2):
        narrow_steps(world, model, engine, 1)
        again = copy.deepcopy(engine.optimizer_state_dict(for_resume=True))
        model[0].requires_grad_(True)
        losses = narrow_steps(world, model, engine, 2)
        found.append((losses, engine.optimizer_state_dict(for_resume=True), again))
        engine.close()
        model, _, engine = narrow(zero, frozen=True)
        put(engine, model, weights)
        engine.load_optimizer_state_dict(state)
    engine.close()
    return found


@pytest.mark.parametrize("zero", [0, 3])
def test_masters_of_frozen_layers_continue_when_trained_again(group, zero):
    for whole, resumed in group(2)(frozen_case, zero):
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def differing_case(world):
    """Rank 0's state decides for all, because ranks with different decisions would deadlock."""
    model, _, engine = narrow(1)
    narrow_steps(world, model, engine, 1)
    state = copy.deepcopy(engine.optimizer_state_dict(for_resume=True))
    if world.is_main:
        state |= {"fp32_gradients": True, "loss_weight_divisor": 7.0}
    engine.load_optimizer_state_dict(state)
    found = engine.optimizer_state_dict(for_resume=True)
    for key, bad in (("loss_weight_divisor", 0), ("fp32_master_weights", {1: None})):
        odd = state | ({key: bad} if world.rank == 1 else {})
        with pytest.raises(CheckpointMismatch, match=f"Rank 1: {key} (is 0|has a NoneType) in"):
            engine.load_optimizer_state_dict(odd)
    engine.close()
    return found["fp32_gradients"], found["loss_weight_divisor"]


def test_ranks_continue_equally_from_different_states(group):
    assert group(2)(differing_case) == [(True, 7.0)] * 2


def written_case(world):
    """Masters follow weights that user code has written since the step."""
    model, _, engine = narrow(0)
    narrow_steps(world, model, engine, 1)
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
    masters = engine.optimizer_state_dict()["fp32_master_weights"]
    found = masters[0], model[0].weight.detach().clone()
    engine.close()
    return found


def test_masters_follow_written_weights(group):
    for master, weight in group(2)(written_case):
        assert master.equal(weight.float())


def other_weights_case(world):
    """Load masters that round to the current weights, which must not change."""
    model, _, engine = narrow(1)
    narrow_steps(world, model, engine)
    state = copy.deepcopy(engine.optimizer_state_dict())
    weights = weights_of(engine, model)
    weights["0.weight"][3:] += 1
    put(engine, model, weights)
    engine.load_optimizer_state_dict(state)
    found = engine.optimizer_state_dict()["fp32_master_weights"]
    after = weights_of(engine, model)
    state["fp32_master_weights"][1] = torch.zeros(3)
    with pytest.raises(CheckpointMismatch, match=r"fp32_master_weights has .* shape \(3,\)"):
        engine.load_optimizer_state_dict(state)
    engine.close()
    return weights, after, state["fp32_master_weights"], found


def test_masters_change_no_weights(group):
    weights, after, saved, found = group(2)(other_weights_case)[1]
    torch.testing.assert_close(after, weights, rtol=0, atol=0)
    assert found[0][:3].equal(saved[0][:3])
    assert found[0][3:].equal(weights["0.weight"][3:].float())
    assert found[2].equal(saved[2])


def plain_narrow_case(world, name):
    """A plain optimizer keeps 16-bit state of 16-bit weights: before the engine, and in a load."""
    make = getattr(torch.optim, name)
    model, optimizer, engine = narrow(0, make)
    engine.close()
    model(torch.ones(2, 5).bfloat16()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    found = []
    for zero in (0, 3):
        engine = sw.Engine(model, optimizer, zero=zero)
        for _ in range(2):
            narrow_steps(world, model, engine, 1)
            found.append(copy.deepcopy(engine.optimizer_state_dict()["state"][0]))
            engine.load_optimizer_state_dict(saved)
        engine.close()
        model(torch.ones(2, 5).bfloat16()).sum().backward()
        optimizer.step()  # without the engine again
        optimizer.zero_grad()
        optimizer.load_state_dict(saved)
    return saved["state"][0], found


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_16_bit_state_continues_in_fp32(group, name):
    saved, found = group(2)(plain_narrow_case, name)[1]
    for state in found:
        assert state.keys() == saved.keys()
        assert float(state["step"]) == 2
        assert {value.dtype for value in state.values()} == {torch.float32}


def whole_masters_case(world):
    """Distributed layers, and split tensors."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"0": "colwise", "2": "rowwise"} if world.settings.tensor > 1 else None
    engine = sw.Engine(model, optimizer, precision="bf16", tensor_plan=plan)
    engine.forward_backward(lambda x: model(x).square().mean(), torch.ones(4, 4))
    engine.step()
    masters = engine.optimizer_state_dict()["fp32_master_weights"]
    with engine.full_parameters():
        weights = [p.detach().clone() for p in model.parameters()]
    engine.close()
    return weights, masters


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"pipeline": 2}])
def test_masters_are_whole_in_every_mesh(group, mesh):
    for weights, masters in group(2, **mesh)(whole_masters_case):
        assert list(masters) == list(range(len(weights)))
        for weight, master in zip(weights, masters.values(), strict=True):
            assert master.dtype == torch.float32
            assert master.bfloat16().equal(weight)


def lone_matrix(zero):
    torch.manual_seed(4)
    model = nn.Linear(5, 4, bias=False).bfloat16()
    return model, sw.Engine(model, torch.optim.Muon(model.parameters(), lr=0.02), zero=zero)


def saves_lone_matrix(world, folder, zero):
    model, engine = lone_matrix(zero)
    narrow_steps(world, model, engine)
    path = engine.save(folder)
    state = copy.deepcopy(engine.optimizer_state_dict())
    narrow_steps(world, model, engine)
    weights = weights_of(engine, model)
    engine.close()
    return path, state, weights


def loads_lone_matrix(world, path, zero):
    model, engine = lone_matrix(zero)
    engine.load(path)
    state = copy.deepcopy(engine.optimizer_state_dict())
    narrow_steps(world, model, engine)
    weights = weights_of(engine, model)
    engine.close()
    return state, weights


@pytest.mark.parametrize("zero", [1, 3])
def test_saves_masters_if_a_rank_owns_no_tensor(group, tmp_path, zero):
    path, state, weights = group(2)(saves_lone_matrix, tmp_path, zero)[0]
    for loaded, again in group(2)(loads_lone_matrix, path, zero):
        torch.testing.assert_close(loaded, state, rtol=0, atol=0)
        torch.testing.assert_close(again, weights, rtol=0, atol=0)
