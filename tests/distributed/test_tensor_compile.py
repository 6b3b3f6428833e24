"""Compiled units with split layers: one graph each, and the results of plain PyTorch."""

import time
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, UsageError
from shardwise.parallel.tensor import compiled_units
from shardwise.parallel.tensor.compiled_units import UnitCompiler
from tests.distributed.test_tensor import adamw, gpt, loss_of, whole

STEPS = 20
BLOCK_CLASSES = 2
"""SplittableGPT has two blocks, of which only one has a fused layer for queries, keys, values."""


def batch(step):
    """Return tokens. Each fifth batch is shorter."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(24, (6 if step % 5 == 4 else 8, 8), generator=draw)


def start_afresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Dynamo itself inspects it, for any input that is not a leaf.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    # Dynamo creates an object of this class when it traces an autograd.Function.
    warnings.filterwarnings("ignore", ".*Function'> should not be instantiated", DeprecationWarning)
    # Inductor imports a module that uses it.
    warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)


def train_plain(model, steps):
    optimizer = adamw(model)
    figures = []
    for step in range(steps):
        x = batch(step)
        loss = loss_of(model, x, (x * 5 + 1) % 24)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        figures += [loss.item(), norm.item()]
    return figures, dict(model.named_parameters())


def compiled(world, backend, settings, delay=0.0):
    """Train with compiled units. Return the figures, values, all-reduces by graph, and breaks."""
    start_afresh()
    graphs = []
    compile_graph = UnitCompiler.compile_graph

    def counted(self, graph, inputs):
        time.sleep(delay * world.rank)
        reduces = [n for n in graph.graph.nodes if "all_reduce" in str(n.target)]
        graphs.append(len(reduces))
        return compile_graph(self, graph, inputs)

    model = gpt()
    with (
        mock.patch.object(compiled_units, "BACKEND", backend),
        mock.patch.object(UnitCompiler, "compile_graph", counted),
    ):
        engine = sw.Engine(model, adamw(model), compile=True, bucket_mb=0.005, **settings)
        figures = []
        for step in range(STEPS):
            x = world.share(batch(step))
            engine.backward(loss_of(model, x, (x * 5 + 1) % 24), weight=len(x))
            stats = engine.step(max_norm=0.5)
            figures += [stats.loss, stats.grad_norm]
    values = whole(engine, model)
    engine.close()
    return figures, values, graphs, dict(torch._dynamo.utils.counters["graph_break"])


CASES = [
    ("aot_eager", 2, {"zero": 0}),
    pytest.param("aot_eager", 4, {"zero": 3}, marks=pytest.mark.full),
    ("aot_eager", 2, {"zero": 2, "activations": "recomputed"}),
    ("aot_eager", 2, {"zero": 3, "sequence_parallel": True}),
    pytest.param(
        *("aot_eager", 2, {"zero": 0, "sequence_parallel": True, "activations": "recomputed"}),
        marks=pytest.mark.full,
    ),
    pytest.param("inductor", 2, {"zero": 0, "sequence_parallel": True}, marks=pytest.mark.full),
    pytest.param("inductor", 2, {"zero": 0}, marks=pytest.mark.full),
    pytest.param("inductor", 2, {"zero": 3, "activations": "recomputed"}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("backend", "size", "settings"), CASES)
def test_compiled_equals_one_process(group, backend, size, settings):
    expected, parameters = train_plain(gpt(), STEPS)
    for figures, values, graphs, breaks in group(size, tensor=2)(
        compiled, backend, settings, limit=300
    ):
        assert figures == pytest.approx(expected, rel=1e-8)
        for name, parameter in parameters.items():
            torch.testing.assert_close(values[name], parameter.data, rtol=1e-8, atol=1e-10)
        # Each graph is a full block, with the sums of attention and of the two layers after it.
        assert set(graphs) == {2}
        assert len(graphs) <= 2 * BLOCK_CLASSES
        assert breaks == {}


def test_ranks_wait_for_a_rank_that_compiles(group):
    expected, _ = train_plain(gpt(), STEPS)
    for figures, *_ in group(2, tensor=2)(compiled, "aot_eager", {}, 1.0, limit=300):
        assert figures == pytest.approx(expected, rel=1e-8)


class Block(nn.Module):
    """Two layers, which a trial finds, with a computation between them that may change."""

    def __init__(self, between=torch.tanh):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.act = nn.Identity()
        self.down = nn.Linear(16, 8)
        self.between = between

    def forward(self, x):
        return x + self.region(x)

    def region(self, x):
        return self.down(self.between(self.act(self.up(x))))


def blocks(between=torch.tanh):
    torch.manual_seed(0)
    return nn.Sequential(Block(between), Block(between))


def refuses(world, change, text, settings):
    """Train one step, change the model, and return whether the next step raises the error."""
    start_afresh()
    model = blocks()
    with mock.patch.object(compiled_units, "BACKEND", "aot_eager"):
        engine = sw.Engine(model, adamw(model), compile=True, **settings)
        engine.backward(model(torch.ones(2, 8)).sum())
        engine.step()
        handle = change(model)
        with pytest.raises(UsageError, match=text):
            model(torch.ones(3, 8))
        if handle is not None:
            handle.remove()
    engine.close()
    return True


def computes_otherwise(model):
    """Change the model. The other functions below do so too, and may return a handle."""
    model[0].between = lambda x: x.cumsum(-1)


def breaks_graph(model):
    def tanh(x):
        torch._dynamo.graph_break()
        return x.tanh()

    model[0].between = tanh


def runs_eagerly(model):
    """Exclude the region of the first block from the graph."""
    model[0].region = torch.compiler.disable(model[0].region)


def leaves_graph(model):
    """Compute the last layer of the region outside the graph."""
    model[0].down.forward = torch.compiler.disable(model[0].down.forward)


def drops(model):
    model[0].between = lambda x: F.dropout(x, 0.5)


def hooks(model):
    return model[0].act.register_forward_hook(lambda module, args, output: None)


def drops_eagerly(model):
    drops(model)
    runs_eagerly(model)


def uses_parameter_eagerly(model):
    model[0].between = lambda x: x * model[0].up.weight.sum()
    runs_eagerly(model)


def hooks_eagerly(model):
    runs_eagerly(model)
    return hooks(model)


def compiles_no_more(model):
    computes_otherwise(model)
    limit = mock.patch.object(torch._dynamo.config, "recompile_limit", 1)
    limit.start()
    return SimpleNamespace(remove=limit.stop)


def hooks_every_module(model):
    return nn.modules.module.register_module_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (computes_otherwise, "forward computes Cumsum, which it did not compute in the trial"),
        (compiles_no_more, "forward computes Cumsum, which it did not compute in the trial"),
        (breaks_graph, "splits the graph between two split layers"),
        (leaves_graph, "splits the graph between two split layers"),
        (drops, "has drawn random numbers"),
        (drops_eagerly, "has drawn random numbers"),
        (hooks, "a forward hook on 0.act"),
        (uses_parameter_eagerly, "is used between two split layers"),
        (hooks_eagerly, "a forward hook on 0.act"),
        (hooks_every_module, "a forward hook on every module"),
    ],
)
def test_compiled_units_refuse_like_eager_regions(group, change, text):
    assert all(group(2, tensor=2)(refuses, change, text, {}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (computes_otherwise, "forward computes Cumsum, which it did not compute in the trial"),
        (breaks_graph, "needs units that torch.compile traces as one graph each"),
        pytest.param(drops, "has drawn random numbers", marks=pytest.mark.full),
        pytest.param(compiles_no_more, "has compiled a unit too often", marks=pytest.mark.full),
    ],
)
def test_units_that_are_split_by_tokens_refuse_alike(group, change, text):
    assert all(group(2, tensor=2)(refuses, change, text, {"sequence_parallel": True}))


class StoppedGate(nn.Module):
    """Two layers with the same input, of which only one records gradients."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        with torch.no_grad():
            gate = self.gate(x).sigmoid()
        return x + self.down(self.up(x) * gate)


def stopped_gates():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), StoppedGate(), StoppedGate())


def train_stopped_gates(world):
    start_afresh()
    model = stopped_gates().double()
    plan = {"*.gate": "colwise", "*.up": "colwise", "*.down": "rowwise"}
    with mock.patch.object(compiled_units, "BACKEND", "aot_eager"):
        engine = sw.Engine(model, adamw(model), compile=True, tensor_plan=plan)
        loss = trained(model, lambda model: (engine.backward, engine.step))
    engine.close()
    return loss


def test_layers_without_gradients_share_no_input_with_others(group):
    expected = trained(stopped_gates().double(), plain)
    for loss in group(2, tensor=2)(train_stopped_gates):
        assert loss == pytest.approx(expected, rel=1e-8)


class SharedExpert(nn.Module):
    """A mixture of experts, which no graph contains, and its shared expert, which is split."""

    def __init__(self):
        super().__init__()
        experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.moe = sw.MoE(nn.Linear(8, 2, bias=False), experts, shared=Block())

    def forward(self, x):
        return self.moe(x)


def experts():
    torch.manual_seed(0)
    return nn.Sequential(SharedExpert(), SharedExpert())


def trained(model, start):
    """Train three steps. `start` returns the functions for the backward pass and the step."""
    backward, step = start(model)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        loss = model(torch.randn(4, 8, dtype=torch.float64, generator=draw)).square().mean()
        backward(loss)
        step()
    return loss.item()


def plain(model):
    optimizer = adamw(model)
    return torch.Tensor.backward, lambda: (optimizer.step(), optimizer.zero_grad())


def compiled_eager_regions(world, make):
    """Train, then change an operation. Return the last loss, and whether the change is refused."""
    start_afresh()
    model = make().double()
    with mock.patch.object(compiled_units, "BACKEND", "aot_eager"):
        engine = sw.Engine(model, adamw(model), compile=True)
        if make is blocks:
            runs_eagerly(model)
        loss = trained(model, lambda model: (engine.backward, engine.step))
        block = next(each for each in model.modules() if isinstance(each, Block))
        block.between = lambda x: x.cumsum(-1)
        try:
            model(torch.ones(3, 8, dtype=torch.float64))
        except UsageError as error:
            return loss, "forward computes Cumsum" in str(error)
        finally:
            engine.close()
    return loss, False


@pytest.mark.parametrize("make", [blocks, experts])
def test_eager_regions_in_compiled_units_are_exact_and_checked(group, make):
    expected = trained(make().double(), plain)
    for loss, refused in group(2, tensor=2)(compiled_eager_regions, make):
        assert loss == pytest.approx(expected, rel=1e-8)
        assert refused


def gathering():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.Tanh()))


def gathers(world):
    """Train, and return the last loss and the ranks among the arguments of all-gathers."""
    start_afresh()
    ranks = []
    compile_graph = UnitCompiler.compile_graph

    def recorded(self, graph, inputs):
        gather = torch.ops.shardwise.all_gather
        ranks.extend(n.args[-1] for n in graph.graph.nodes if n.target is gather)
        return compile_graph(self, graph, inputs)

    model = gathering().double()
    with (
        mock.patch.object(compiled_units, "BACKEND", "aot_eager"),
        mock.patch.object(UnitCompiler, "compile_graph", recorded),
    ):
        engine = sw.Engine(model, adamw(model), compile=True, tensor_plan={"0.0": "colwise_rep"})
        loss = trained(model, lambda model: (engine.backward, engine.step))
    engine.close()
    return loss, ranks


def test_ranks_with_different_backward_have_different_graphs(group):
    # torch's cache on disk compares graphs. The traced backward pass takes the part of one rank.
    expected = trained(gathering().double(), plain)
    for rank, (loss, ranks) in enumerate(group(2, tensor=2)(gathers)):
        assert loss == pytest.approx(expected, rel=1e-8)
        assert set(ranks) == {rank}


def refused_setting(world, make, settings, text):
    model = make()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=text):
        sw.Engine(model, adamw(model), compile=True, **settings)
    assert [type(module) for module in model.modules()] == kinds
    return True


def with_dropout():
    return blocks(nn.Dropout(0.1))


def experts_with_dropout():
    """A unit whose layers are split, and one with experts, which run other tokens on each rank."""
    experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(2)])
    return nn.Sequential(blocks(), sw.MoE(nn.Linear(8, 2, bias=False), experts))


@pytest.mark.parametrize(
    ("make", "expert", "units", "inside"),
    [
        (with_dropout, 1, None, "0.between"),
        (experts_with_dropout, 2, ("0.*", "1"), "1.experts.0.1"),
    ],
)
def test_refuses_dropout_before_the_model_is_split(group, make, expert, units, inside):
    text = f"--compile cannot be combined with --tensor and the dropout in {inside}: "
    assert all(group(2, tensor=2, expert=expert)(refused_setting, make, {"units": units}, text))
