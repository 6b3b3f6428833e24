"""The preset fp64: everything in a model is fp64, for any input."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.model.precision import PRESETS, ForwardPrecision, cast_models, is_cast, widen_states
from shardwise.parallel.context.drawn_weights import DrawnWeights, _KeepsRead
from shardwise.tools.verify.script import PromoteToFp64
from shardwise.world.world import World


class Casts(nn.Module):
    """Makes fp32 tensors in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        start = torch.zeros(1, len(x), 3)  # without a dtype
        out, _ = self.head((self.norm(x.float()) * scale).float().unsqueeze(1), start)
        return out


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made = Casts()
    preset = PRESETS["fp64"]
    assert preset.cast is not None
    cast_models([made], preset.cast)
    ForwardPrecision(preset, "cpu").attach(made)
    return made


def test_parameters_and_buffers_are_fp64_and_keep_their_values(model: nn.Module) -> None:
    torch.manual_seed(0)
    plain = Casts()
    for one, two in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert one.dtype == (torch.float64 if two.is_floating_point() else two.dtype)
        assert torch.equal(one, two.to(one.dtype))
    assert is_cast([(plain.norm, "weight")], torch.float64)
    assert not is_cast([(plain.norm, "weight")], torch.bfloat16)


def test_forward_with_casts_stays_in_fp64(model: nn.Module) -> None:
    before = torch.get_default_dtype()
    out = model(torch.randn(5, 4), scale=torch.ones(4))
    assert out.dtype == torch.float64
    assert torch.get_default_dtype() == before
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())
    assert copy.deepcopy(model)(torch.randn(5, 4), scale=torch.ones(4)).dtype == torch.float64


def test_default_dtype_is_restored_after_an_error(model: nn.Module) -> None:
    with pytest.raises(RuntimeError):
        model(torch.randn(5, 3), scale=torch.ones(4))
    assert torch.get_default_dtype() == torch.float32


class Block(nn.Module):
    """Creates fp32 values in its forward, unless the default dtype is fp64."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints, self.wide = checkpoints, nn.Linear(4, 4)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return (self.wide(x) * torch.linspace(0, 1, 4).sqrt()).exp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpoints:
            return self.scaled(x)
        result: torch.Tensor = checkpoint(self.scaled, x, use_reentrant=False)
        return result


def losses(*, checkpoints: bool = False, **settings: object) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(checkpoints=checkpoints) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, quiet=True, precision="fp64", **settings)
    found = []
    for (x,) in sw.Loader(torch.utils.data.TensorDataset(torch.randn(6, 4)), batch_size=2):
        engine.backward(model(x).mean())
        found.append(engine.step().loss)
    engine.close()
    return found


@pytest.mark.parametrize(
    "settings",
    [{"activations": "recomputed"}, {"checkpoints": True}],
    ids=["units", "torch.utils.checkpoint"],
)
def test_recomputation_stays_in_fp64(solo: World, settings: dict[str, object]) -> None:
    expected = losses()
    assert losses(**settings) == pytest.approx(expected, rel=1e-12)
    assert torch.get_default_dtype() == torch.float32


def test_integers_are_not_cast() -> None:
    embedding = nn.Embedding(4, 2)
    cast_models([embedding], torch.float64)
    ForwardPrecision(PRESETS["fp64"], "cpu").attach(embedding)
    assert embedding(torch.tensor([1, 2])).dtype == torch.float64


def test_script_with_casts_stays_in_fp64() -> None:
    wide, narrow = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 2)
    with PromoteToFp64():
        assert wide.float() is wide
        assert wide.to(torch.float32).dtype == torch.float64
        assert wide.to("cpu", dtype=torch.bfloat16).dtype == torch.float64
        assert (wide @ narrow).dtype == torch.float64
        assert F.binary_cross_entropy(wide.sigmoid(), torch.ones(3, 4)).dtype == torch.float64
        assert narrow.to(torch.float16).dtype == torch.float16
        assert wide.long().dtype == torch.int64
        kept = narrow.clone()
        kept.index_copy_(0, torch.tensor([1]), wide[:1, :2])
        assert kept.dtype == torch.float32
        with pytest.raises(RuntimeError, match="shape"):
            wide @ wide
    torch.testing.assert_close(kept[1], wide[0, :2].float())


def test_script_that_creates_narrow_tensors_stays_in_fp64() -> None:
    wide = torch.randn(3, 4, dtype=torch.float64)
    with PromoteToFp64(creates=True):
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float64
        assert wide.sum(0, dtype=torch.float32).dtype == torch.float64
        assert F.softmax(wide, dim=-1, dtype=torch.float32).dtype == torch.float64
        assert torch.zeros(2, dtype=torch.int32).dtype == torch.int32
        assert torch.tensor([1, 2]).float().dtype == torch.float64
        assert torch.tensor([True]).to(torch.float32).dtype == torch.float64
        assert torch.tensor([1, 2]).int().dtype == torch.int32
    with PromoteToFp64():
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float32


def test_casts_of_a_script_below_other_modes_are_left_out() -> None:
    wide = torch.ones(2, dtype=torch.float64)
    # The trial of --context runs the model below its own mode.
    with PromoteToFp64(), _KeepsRead(DrawnWeights(torch.device("cpu"))):
        assert wide.to(torch.float32).dtype == torch.float64


def test_initial_optimizer_state_is_cast() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(layer.parameters(), initial_accumulator_value=0.1)
    cast_models([layer], torch.float64)
    widen_states([optimizer], torch.float64)
    layer(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    assert (state["sum"].dtype, state["step"].dtype) == (torch.float64, torch.float32)
