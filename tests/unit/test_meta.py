"""Parameters without memory get the values of a plain build, one at a time."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from examples.helpers.gpt import GPT, Shape
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import shardwise
from shardwise.errors import ModelError
from shardwise.model.meta import is_deferred, make_real, materialise, materialise_by_reset

Build = Callable[[], nn.Module]


def both(build: Build, seed: int = 3) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return the plain model, the deferred one, and the generator's state after a plain build."""
    torch.manual_seed(seed)
    plain = build()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with shardwise.on_meta():
        deferred = build()
    assert torch.equal(torch.get_rng_state(), state)
    return plain, deferred, state


def check(build: Build) -> nn.Module:
    """Compare a plain build with a deferred one, made real from its last parameter to its first."""
    plain, deferred, state = both(build)
    expected = dict(plain.named_parameters(remove_duplicate=False))
    found = dict(deferred.named_parameters(remove_duplicate=False))
    assert list(found) == list(expected)
    assert ties(found) == ties(expected)
    for name in reversed(found):
        if not found[name].is_meta:  # tied to a parameter that is already real
            continue
        assert is_deferred(found[name]), name
        value = materialise(found[name])
        assert value.stride() == expected[name].stride(), name
        make_real(found[name], value)
    for name, parameter in expected.items():
        assert same_bits(found[name], parameter), name
        assert found[name].requires_grad == parameter.requires_grad, name
        assert type(found[name]) is type(parameter), name
    buffers = dict(deferred.named_buffers())
    for name, buffer in plain.named_buffers():
        assert same_bits(buffers.pop(name), buffer), name
    assert not buffers
    assert torch.equal(torch.get_rng_state(), state)
    return deferred


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def ties(named: dict[str, nn.Parameter]) -> list[int]:
    """Return for each name the index of the first name of the same parameter."""
    first: dict[int, int] = {}
    return [first.setdefault(id(p), place) for place, p in enumerate(named.values())]


MODULES: dict[str, Build] = {
    "linear": lambda: nn.Linear(5, 7),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4), nn.BatchNorm1d(4)),
    "padding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose1d(4, 2, 3)),
    "channels last": lambda: nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
    "lstm": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "copied layers": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False
    ),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "skipped init": lambda: nn.Sequential(
        nn.utils.skip_init(nn.Linear, 2, 3).apply(ones_), nn.Linear(3, 2)
    ),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "bfloat16": lambda: nn.Linear(3, 4).bfloat16(),
    "half, then more": lambda: nn.Sequential(nn.Linear(3, 4).half().apply(ones_), nn.Linear(4, 2)),
    "double": lambda: nn.Linear(3, 4, dtype=torch.float64),
    "moved": lambda: nn.Linear(3, 4).to("cpu", torch.float64),
    "to_empty": lambda: nn.Linear(3, 4, device="meta").to_empty(device="cpu").apply(ones_),
    "gpt": lambda: GPT(Shape(vocabulary=50, context=8, layers=2, width=16, heads=2)),
}


def ones_(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


@pytest.mark.parametrize("kind", MODULES)
def test_modules_have_the_values_of_a_plain_build(kind: str) -> None:
    check(MODULES[kind])


INITS: dict[str, Callable[[Tensor], Any]] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "truncated": lambda p: nn.init.trunc_normal_(p, std=0.02, a=-0.03, b=0.03),
    "constant": lambda p: nn.init.constant_(p, 0.3),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "eye": nn.init.eye_,
    "xavier uniform": nn.init.xavier_uniform_,
    "xavier normal": nn.init.xavier_normal_,
    "kaiming uniform": nn.init.kaiming_uniform_,
    "kaiming normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda p: nn.init.sparse_(p, sparsity=0.4),
    "dirac": lambda p: nn.init.dirac_(p.view(*p.shape, 1)),
    "data": lambda p: p.data.normal_(0, 0.02).clamp_(-0.01, 0.01),
    "in place": lambda p: p.detach().uniform_().mul_(2).sub_(1).erfinv_(),
    "rows": lambda p: [row.normal_() for row in p.data],
    "masked": lambda p: p.data.normal_().masked_fill_(p.data > 0.5, 0.0),
    "indexed": lambda p: p.data.__setitem__((slice(None), [1, 0]), torch.randn(p.shape[0], 2)),
    "self": lambda p: p.data[1:].copy_(p.data[:-1].clone()),
    "overlap": lambda p: p.data[2:].copy_(p.data[:1]),
    "replaced data": lambda p: setattr(p, "data", torch.randn_like(p) * 0.1),
    "transposed data": lambda p: setattr(p, "data", torch.randn(p.shape[1], p.shape[0]).t()),
    "norm": lambda p: p.data.div_(p.data.norm(dim=0, keepdim=True)),
    "branch on a value": lambda p: p.data.zero_() if p.data.abs().max() > 0.1 else None,
    "choice of elements": lambda p: p.data[p.data > 0].sum().item() and p.data.add_(1),
    "other generator": lambda p: p.data.normal_(generator=torch.Generator().manual_seed(5)),
    "one given twice": lambda p: nn.init.normal_(p, generator=GENERATOR),
    "bernoulli": lambda p: p.data.bernoulli_(0.3),
    "drawn by probability": lambda p: p.data.copy_(torch.bernoulli(p.data.abs().clamp(max=1))),
    "dropout": lambda p: p.data.copy_(nn.functional.dropout(p.data, 0.3)),
    "float64 inside": lambda p: p.data.copy_((p.data.double() * 3).cos()),
    "foreach": lambda p: torch._foreach_mul_([p.data, p.data[0]], 0.5),
    "svd": lambda p: p.data.copy_(torch.linalg.svd(p.data, full_matrices=False).U),
    "nothing": lambda p: p.data.normal_() if p.is_meta or not p.is_cpu else None,
}
GENERATOR = torch.Generator()


class Drawn(nn.Module):
    """Parameters that `draw` fills, with unrelated random numbers before and after."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        GENERATOR.manual_seed(11)
        self.first = nn.Linear(6, 6)
        self.register_buffer("noise", torch.randn(4))
        with torch.no_grad():
            draw(self.first.weight)
        self.second = nn.Linear(6, 6)
        with torch.no_grad():
            draw(self.second.weight)
        self.register_buffer("more", torch.rand(7) + self.noise.sum())
        self.third = nn.Parameter(torch.randn(3))


@pytest.mark.parametrize("kind", INITS)
def test_every_way_to_fill_a_parameter(kind: str) -> None:
    check(lambda: Drawn(INITS[kind]))


class FromOutside(nn.Module):
    """Parameters and buffers from numpy, Python and torch, some computed from each other."""

    def __init__(self) -> None:
        super().__init__()
        numbers = np.arange(12, dtype=np.float32)
        self.copied = nn.Parameter(torch.empty(12))
        self.copied.data.copy_(torch.from_numpy(numbers))
        numbers *= 2  # the copy must not change
        self.shared = nn.Parameter(torch.from_numpy(numbers).view(3, 4))
        self.listed = nn.Parameter(torch.tensor([1.0, 2.5]), requires_grad=False)
        self.drawn = nn.Parameter(torch.randn(5, 3) * 0.02)
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.ones = nn.Parameter(torch.ones(4))
        self.single = nn.Parameter(torch.tensor(0.5))
        whole = torch.randn(10)
        self.left, self.right = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
        written = torch.zeros(3)
        written.numpy()[1] = random.Random(1).random()
        self.written = nn.Parameter(written)
        self.empty = nn.Parameter(torch.empty(0))
        self.list = nn.ParameterList([nn.Parameter(torch.rand(2)) for _ in range(3)])
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.rand(2)), "b": torch.rand(3)})
        self.tied = self.drawn
        self.register_buffer("of_parameter", self.drawn.detach() * 2)
        self.register_buffer("like_parameter", torch.arange(3, device=self.drawn.device))
        self.register_buffer("filled", torch.zeros(5))
        self.filled.copy_(self.drawn.detach().sum(1))
        self.register_buffer("as_data", torch.zeros(5, 3))
        self.as_data.data = self.drawn.data
        self.through_numpy = nn.Parameter(torch.from_numpy(np.sin(self.drawn.detach().numpy())))
        self.listed_out = nn.Parameter(torch.tensor(self.left.tolist()))


def test_values_from_outside_are_kept() -> None:
    check(FromOutside)


class Unusual(nn.Module):
    """Buffers and parameters computed through complex and sparse tensors, views, and `out=`."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(4, dtype=torch.complex64)
        self.register_buffer("conjugate", drawn.conj().resolve_conj())
        self.register_buffer("dense", torch.eye(3).to_sparse().to_dense())
        written = torch.zeros(4, dtype=torch.complex64)
        written.copy_(drawn.conj())
        self.imaginary = nn.Parameter(written.imag.clone())
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("total", torch.zeros(4))
        torch.sum(self.weight.detach(), 0, out=self.total)
        self.total[0] = self.weight.detach().max()
        with torch.no_grad():
            self.weight[[0, 2]] = 3.0
            self.weight[np.array([1])] += 1
            self.weight[self.total > 0, 1] = torch.rand(())
            self.weight.copy_(torch.where(self.weight > 1, self.weight, 0.5))
        self.extent = self.weight.detach().std().item()


def test_unusual_tensors_take_part() -> None:
    model = check(Unusual)
    torch.manual_seed(3)
    plain = Unusual()
    assert model.extent == plain.extent


class Aliases(nn.Module):
    """A tensor that is used after a parameter was created from it."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(6)
        self.parameter = nn.Parameter(memory)
        memory[0] = 1
        with torch.no_grad():
            self.parameter[1] = 2
        memory[2] = memory[1] + 1
        self.register_buffer("seen", memory.clone())


def test_aliases_see_one_memory() -> None:
    check(Aliases)


class Crossed(nn.Module):
    """Parameters that others read, and that change afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.no_grad():
            self.two.weight.copy_(self.one.weight)
            self.one.weight.mul_(3)
            self.two.weight.add_(self.one.weight)
            self.one.weight.copy_(self.two.weight @ self.one.weight)
            self.two.weight.mul_(self.two.weight)
        self.three = copy.deepcopy(self.one)
        self.three.load_state_dict(self.two.state_dict())
        nn.init.normal_(self.one.bias)


def test_parameters_read_by_others_have_the_values_of_that_moment() -> None:
    check(Crossed)


def test_the_default_dtype_of_the_block_is_kept() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        _, deferred, _ = both(lambda: nn.ParameterList([torch.randn(4), torch.rand(4)]))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(3)
    assert torch.equal(materialise(deferred[0]), torch.randn(4, dtype=torch.float64))
    assert torch.get_default_dtype() == torch.float32


def test_parameters_can_be_materialised_in_any_order_and_repeatedly() -> None:
    plain, deferred, _ = both(lambda: nn.Linear(20, 20))
    torch.manual_seed(77)
    state = torch.get_rng_state()
    first = materialise(deferred.bias)
    first.zero_()
    for _ in range(2):
        assert torch.equal(materialise(deferred.bias), plain.bias)
        assert torch.equal(materialise(deferred.weight), plain.weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_overwritten_values_are_not_replayed() -> None:
    _, deferred, _ = both(lambda: nn.Linear(4, 4).apply(ones_))
    done = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            done.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        materialise(deferred.weight)
    assert "aten.fill_.Scalar" in done
    assert "aten.uniform_.default" not in done


def test_the_model_trains_after_it_was_made_real() -> None:
    plain, deferred, _ = both(lambda: nn.LSTM(3, 4))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, deferred)]
    deferred.weight_ih_l0.note = "mine"
    seen = []
    deferred.weight_ih_l0.register_hook(lambda gradient: seen.append("gradient"))
    deferred.weight_ih_l0.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    for parameter in deferred.parameters():
        make_real(parameter, materialise(parameter))
    x = torch.ones(2, 3)
    for model, optimizer in zip((plain, deferred), optimizers, strict=True):
        model(x)[0].sum().backward()
        optimizer.step()
    for one, other in zip(plain.parameters(), deferred.parameters(), strict=True):
        assert torch.equal(one, other)
    assert seen[0] == "gradient"
    assert seen[1] is deferred.weight_ih_l0
    assert deferred.weight_ih_l0.note == "mine"


def test_an_old_graph_refuses_backward() -> None:
    deferred = both(lambda: nn.Linear(2, 2))[1]
    graph = (deferred.weight * 2).sum()
    make_real(deferred.weight, materialise(deferred.weight))
    with pytest.raises(ModelError, match="built before the parameters were allocated"):
        graph.backward()
    deferred.weight.sum().backward()
    assert torch.equal(deferred.weight.grad, torch.ones(2, 2))


def test_a_parameter_with_a_view_is_not_made_real() -> None:
    _, deferred, _ = both(lambda: nn.Linear(2, 2))
    view = deferred.weight[0]
    with pytest.raises(ModelError, match=r"a view of it, or a graph .* is alive"):
        make_real(deferred.weight, torch.zeros(2, 2))
    del view
    make_real(deferred.weight, torch.zeros(2, 2))
    assert not deferred.weight.is_meta


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_the_old_weight_norm_is_refused_and_the_new_one_named() -> None:
    plain, deferred, _ = both(lambda: nn.utils.weight_norm(nn.Linear(3, 4)))
    assert torch.equal(materialise(deferred.weight_v), plain.weight_v)
    with pytest.raises(ModelError, match=r"weight norm with torch.nn.utils.parametrizations"):
        make_real(deferred.weight_v, materialise(deferred.weight_v))


def test_copies_and_pickles_stay_on_meta() -> None:
    _, deferred, _ = both(lambda: nn.Linear(2, 2))
    for twin in (copy.deepcopy(deferred), pickle.loads(pickle.dumps(deferred))):
        assert twin.weight.is_meta
        assert not is_deferred(twin.weight)
        with pytest.raises(ModelError, match=r"Build the model, and copy or cast it, inside"):
            materialise(twin.weight)
    assert is_deferred(deferred.weight)


def test_a_write_after_the_block_is_refused() -> None:
    _, deferred, _ = both(lambda: nn.Linear(2, 2))
    nn.init.zeros_(deferred.weight)
    with pytest.raises(ModelError, match=r"weight of shape \(2, 2\) was written after the block"):
        materialise(deferred.weight, "weight")


def test_a_second_block_casts_what_the_first_has_built() -> None:
    plain, deferred, _ = both(lambda: nn.Linear(2, 2))
    with shardwise.on_meta():
        deferred.to(torch.bfloat16).to("cpu")
    assert torch.equal(materialise(deferred.weight), plain.weight.bfloat16())
    nn.init.zeros_(deferred.weight)
    with pytest.raises(ModelError, match="was written after the block"):
        materialise(deferred.weight)


def test_a_write_between_two_blocks_is_refused_by_the_second() -> None:
    _, deferred, _ = both(lambda: nn.Linear(2, 2))
    nn.init.zeros_(deferred.weight)
    with pytest.raises(ModelError, match="was written after the block"), shardwise.on_meta():
        deferred.to("cpu")


def test_a_parameter_filled_from_nothing_is_refused() -> None:
    with (
        pytest.raises(ModelError, match=r"copy_.* sparse, lazily conjugated or without values"),
        shardwise.on_meta(),
        torch.no_grad(),
    ):
        nn.Linear(2, 2).weight.copy_(torch.empty(2, 2, device="meta"))


def test_other_memory_for_a_parameter_is_refused() -> None:
    with (
        pytest.raises(ModelError, match=r"resize_.* replaced the storage of a parameter"),
        shardwise.on_meta(),
    ):
        nn.Linear(2, 2).weight.data.resize_(9, 9)


def test_nothing_is_left_behind_by_the_block() -> None:
    before = nn.Parameter.__new__
    with pytest.raises(ZeroDivisionError), shardwise.on_meta(), shardwise.on_meta():
        raise ZeroDivisionError
    assert nn.Parameter.__new__ is before
    layer = nn.Linear(2, 2)
    assert not layer.weight.is_meta
    with shardwise.on_meta():
        outside = layer.weight
        layer.weight.data.zero_()
    assert not outside.is_meta
    assert not is_deferred(outside)


def test_parameters_built_on_the_meta_device_are_reset_on_request() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(ModelError, match="has no recorded values"):
        materialise(model[0].weight)
    assert materialise_by_reset(model[0]) == ["weight", "bias"]
    assert materialise_by_reset(model[0]) == []
    assert "running_var" in materialise_by_reset(model[1])
    assert torch.equal(model[1].running_var, torch.ones(4))
    assert model[0].weight.abs().sum() > 0


class Unreset(nn.Module):
    """A module whose reset_parameters forgets a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def reset_parameters(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Unreset, r"Unreset.reset_parameters leaves scale unset"),
        (lambda: nn.ParameterList([torch.ones(2)]), r"0 of ParameterList .* no reset_parameters"),
    ],
)
def test_a_module_that_cannot_be_reset_is_refused(build: Build, message: str) -> None:
    with torch.device("meta"):
        module = build()
    with pytest.raises(ModelError, match=message):
        materialise_by_reset(module)


BIG = """
import torch, shardwise
from torch import nn
from shardwise.model.meta import materialise
with shardwise.on_meta():
    nn.Linear(8, 8)
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024
before = peak()
with shardwise.on_meta():
    model = nn.Sequential(
        *(nn.Linear(2048, 2048) for _ in range(24)), nn.Embedding(32768, 512, padding_idx=0)
    )
    for index in range(16):
        model.register_parameter(f"own{index}", nn.Parameter(torch.randn(2**21) * 0.02))
total = sum(p.numel() * p.element_size() for p in model.parameters()) // 2**20
built = peak()
for parameter in model.parameters():
    materialise(parameter)
print(total, built - before, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_the_resident_set_stays_a_few_parameters() -> None:
    found = subprocess.run(
        [sys.executable, "-c", BIG], capture_output=True, text=True, check=True, timeout=300
    )
    total, building, making = map(int, found.stdout.split())
    assert total > 550
    assert building < 250, f"{building} MB more while building {total} MB"
    assert making < 350, f"{making} MB more while materialising {total} MB"


def transformers_models() -> dict[str, Build]:
    """Small models of the transformers package, with random weights."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    llama = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    t5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    gpt2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    t = transformers
    return {
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**llama)),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**t5)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**llama, num_local_experts=4)),
        "llama in bf16": lambda: t.AutoModelForCausalLM.from_config(
            t.LlamaConfig(**llama), dtype=torch.bfloat16
        ),
    }


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "mixtral", "llama in bf16"])
def test_models_of_transformers(kind: str) -> None:
    check(transformers_models()[kind])
