"""Inputs of a PipelineModule: data, losses with weights, precisions, unallocated models."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.world import initialize
from tests.distributed.test_deepspeed_pipeline import (
    LENGTH,
    MICRO,
    ROWS,
    STEPS,
    WORDS,
    batches,
    close,
    json_of,
    loss_fn,
    made,
    plain,
    specs,
    weights,
)


def texts():
    draw = torch.Generator().manual_seed(7)
    text = torch.randint(WORDS, (7 * ROWS, LENGTH + 1), generator=draw)
    return TensorDataset(text[:, :-1], text[:, 1:])


def in_order():
    """Yield the batches of `texts` repeatedly."""
    dataset = texts()
    while True:
        for first in range(0, len(dataset), ROWS):
            yield dataset[first : first + ROWS]


def steps_of(engine, data=None):
    seen = []
    for _ in range(STEPS):
        seen += [engine.train_batch(data).item(), engine.get_global_grad_norm()]
    return seen


def training_data_case(world):
    """Read a dataset in order. Every step is an accumulation boundary."""
    import shardwise.deepspeed as deepspeed

    expected, _ = plain(1, 0.5, [in_order()])
    model = deepspeed.PipelineModule(specs(deepspeed.pipe), num_stages=2, loss_fn=loss_fn)
    model.load_state_dict(weights())
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        training_data=texts(),
        config=json_of(managed_gradient_accumulation=False),
    )
    assert steps_of(engine) == pytest.approx(expected[:-1], rel=1e-6)
    assert engine.global_samples == STEPS * MICRO * ROWS
    assert next(loader)[0].shape == (ROWS, LENGTH)
    close(engine, world)


def test_training_data_is_read_in_its_order(group):
    group(2, quiet=True)(training_data_case)


def loader_case(world):
    """Use a Loader created before the stages. Both workers of a pipeline get the same batches."""
    loader = sw.Loader(texts(), batch_size=ROWS)
    assert world.data_size == 2
    expected, _ = plain(1, 0.5, [in_order()])
    engine = made(world, 2, json_of())
    assert world.step_log.counts == world.is_main

    def endless():
        while True:
            yield from loader

    data = endless()
    assert steps_of(engine, data) == pytest.approx(expected[:-1], rel=1e-6)
    data.close()  # the loop over the Loader, which no other mesh may interrupt
    close(engine, world)
    assert world.step_log.counts


def test_a_loader_from_before_the_stages(group):
    group(2, quiet=True)(loader_case)


def unlike_case(world):
    engine = made(world, 2, json_of())
    with pytest.raises(UsageError, match="different batches on worker 1 than on worker 0"):
        engine.train_batch(batches(world.rank))
    close(engine, world)


def test_unlike_batches_of_one_pipeline_are_refused(group):
    group(2, quiet=True)(unlike_case)


class Scaled(nn.Module):
    """A loss that has trainable weights."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WORDS))

    def forward(self, outputs, labels):
        return loss_fn(outputs * self.scale, labels)


def scaled_case(world):
    import shardwise.deepspeed as deepspeed

    loss = Scaled()
    expected, _ = plain(1, 0.5, loss_fn=loss)
    model = deepspeed.PipelineModule(specs(deepspeed.pipe), num_stages=2, loss_fn=Scaled())
    model.load_state_dict(weights() | {"loss_fn.scale": torch.ones(WORDS)})
    engine, *_ = deepspeed.initialize(model=model, config=json_of())
    data = batches(0)
    assert [*steps_of(engine, data), engine.eval_batch(data).item()] == pytest.approx(
        expected, rel=1e-6
    )
    state = engine.module_state_dict()
    if world.is_main:  # stage 0, which does not compute the loss
        assert torch.allclose(state["loss_fn.scale"], loss.scale, atol=1e-5)
        assert not torch.equal(state["loss_fn.scale"], torch.ones(WORDS))
    close(engine, world)


def test_weights_of_the_loss_are_the_last_stages(group):
    group(2, quiet=True)(scaled_case)


def bf16_case(world):
    expected, _ = plain(1, 0.5)
    engine = made(world, 2, json_of(bf16={"enabled": True}, zero_optimization={"stage": 1}))
    seen = steps_of(engine, batches(0))
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    assert seen[::2] == pytest.approx(expected[:-1:2], rel=2e-2)
    close(engine, world)


def test_bf16(group):
    group(2, quiet=True)(bf16_case)


def on_meta_case(world):
    """Train a model that is built without allocating it. A stage allocates only its own layers."""
    import shardwise.deepspeed as deepspeed

    losses = []
    for enabled in (False, True):
        torch.manual_seed(3)
        with deepspeed.zero.Init(enabled=enabled):
            model = deepspeed.PipelineModule(specs(deepspeed.pipe), num_stages=2, loss_fn=loss_fn)
        assert any(p.is_meta for p in model.parameters()) == enabled
        engine, *_ = deepspeed.initialize(model=model, config=json_of())
        losses.append(steps_of(engine, batches(0)))
        close(engine, world)
    assert losses[0] == losses[1]


def test_layers_built_without_memory(group):
    group(2, quiet=True)(on_meta_case)


def topology_case(world):
    """A topology in DeepSpeed's order of axes says where workers stand here."""
    from shardwise.bridging.joining import divide
    from shardwise.deepspeed import pipe

    topology = pipe.ProcessTopology(axes=["pipe", "data"], dims=[2, 1])
    pipe.PipelineModule(specs(pipe), topology=topology, loss_fn=loss_fn)
    divide(world, "the test", pipeline=1)
    large = pipe.ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
    assert large.get_axis_names() == ["pipe", "data"]
    for rank in range(6):
        place = large.get_coord(rank)
        assert (place.data, place.pipe) == divmod(rank, 2)
        assert large.get_rank(pipe=place.pipe, data=place.data) == rank
    assert pipe.ProcessTopology(axes=["row", "column"], dims=[2, 3]).get_coord(1) == (0, 1)
    other = pipe.ProcessTopology(axes=["pipe", "expert"], dims=[2, 1])
    with pytest.raises(UsageError, match="has the axis 'expert', but the axes of a run"):
        pipe.PipelineModule(specs(pipe), topology=other)


def test_a_topology_says_where_workers_stand(group):
    group(2, quiet=True)(topology_case)


def interleaved_case(world):
    """The environment overrides num_stages, even for a second model. A worker has two stages."""
    import shardwise.deepspeed as deepspeed

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_PIPELINE", "2")
        engine = made(world, 1, json_of())
        model = deepspeed.PipelineModule(specs(deepspeed.pipe), num_stages=1, loss_fn=loss_fn)
    assert len(model.parts) == 5
    owners = [model.stage_owner(layer) for layer in range(len(model.forward_funcs))]
    assert owners == sorted(owners[: model.parts[2]]) + sorted(owners[model.parts[2] :])
    assert (model.num_stages, owners[0], owners[-1]) == (2, 0, 1)
    engine.destroy()


def test_stages_under_the_interleaved_schedule(group):
    group(2, quiet=True, pipeline=2, schedule="interleaved")(interleaved_case)


def late_case(world):
    """Keep an engine on one worker that another worker's garbage collector has removed."""
    from shardwise.bridging.joining import divide
    from shardwise.engine.user_objects import living

    class Left:
        pass

    left = Left()
    if world.rank == 1:
        living.add(left)
    try:
        with pytest.raises(UsageError, match="the test is too late: an engine already trains"):
            divide(world, "the test", pipeline=2)
    finally:
        living.discard(left)
    assert world.settings.seed == 5
    initialize.divide(world, {"pipeline": 2})
    assert (world.settings.pipeline, world.settings.seed) == (2, 5)
    divide(world, "the test", pipeline=1)


def test_all_workers_know_whether_it_is_too_late(group):
    group(2, quiet=True, seed=5)(late_case)
