"""Replacing the tensors that mods of flex attention capture, and masks in chunks."""

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask

from shardwise.errors import ModelError
from shardwise.parallel.context import flex_attention
from shardwise.parallel.context.captured_tensors import with_tensors

IDS = torch.tensor([1, 2])
"""A captured global variable."""


@dataclass(frozen=True)
class Ids:
    values: Tensor
    unused: Tensor

    def __call__(self, b: int) -> Any:
        return self.values[b]

    def of(self, b: int) -> Any:
        return self.values[b]


def nested(ids: Tensor) -> Any:
    return and_masks(lambda b, h, q, kv: ids[b] > 0, lambda b, h, q, kv: ids[b] > h + 3)


@pytest.mark.parametrize(
    ("mod", "names"),
    [
        (lambda ids: lambda b: ids[b], ["ids"]),
        (lambda ids: lambda b, n=ids: n[b], ["n"]),
        (lambda ids: functools.partial(lambda ids, b: ids[b], ids), ["partial.args[0]"]),
        (lambda ids: functools.partial(lambda b, n: n[b], n=ids), ["partial.keywords['n']"]),
        (lambda ids: Ids(ids, torch.zeros(2)), ["Ids.values"]),
        (lambda ids: Ids(ids, torch.zeros(2)).of, ["of.values"]),
        (nested, ["mask_mods[0]:ids", "mask_mods[1]:ids"]),
        (
            lambda ids: (lambda known: lambda b: known["ids"][b])({"ids": ids, "n": 3}),
            ["known['ids']"],
        ),
    ],
)
def test_replaces_captured_tensors(mod, names):
    found = []

    def change(name: str, tensor: Tensor, can_replace: bool) -> Tensor:
        assert can_replace
        found.append(name)
        return tensor + 10

    before = mod(IDS)
    after = with_tensors(before, change)
    assert found == names
    arguments = (torch.tensor(1),) * (4 if mod is nested else 1)
    assert before(*arguments) == mod(IDS)(*arguments)
    assert after(*arguments) == mod(IDS + 10)(*arguments)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", IDS)
        self.other = IDS

    def mod(self) -> Any:
        return lambda b: self.ids[b] + IDS[b]


def test_names_tensors_that_others_use_too():
    found = []

    def change(name: str, tensor: Tensor, can_replace: bool) -> Tensor:
        found.append((name, can_replace))
        return tensor

    mod = Module().mod()
    assert with_tensors(mod, change, reads_globals=True) is mod
    assert found == [("IDS", False), ("self.ids", False)]


def test_masks_in_chunks_equal_whole_masks(monkeypatch):
    monkeypatch.setattr(flex_attention, "MOST_PAIRS", 2 * 32 * 100)  # two blocks of queries
    numbers = (torch.rand(2, 100) < 0.1).cumsum(1)

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (numbers[b, q] == numbers[b, kv]) & (q - kv < 40 * (h + 1))

    like = create_block_mask(mod, 2, 3, 100, 100, device="cpu", BLOCK_SIZE=(16, 32))
    with mock.patch.object(flex_attention, "create_block_mask", wraps=create_block_mask) as calls:
        ours = flex_attention.whole_mask(mod, (2, 3, 100, 100), like, "cpu")
    assert calls.call_count > 2
    assert (ours.shape, ours.BLOCK_SIZE) == (like.shape, like.BLOCK_SIZE)
    assert torch.equal(ours.to_dense(), like.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(like, name))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_plain_operations_equal_torchs(groups):
    query, table = torch.randn(2, 4, 7, 3).double(), torch.randn(4, 7).double()
    key, value = torch.randn(2, 2, groups, 7, 3).double()
    mask = create_block_mask(lambda b, h, q, kv: q > kv, None, None, 7, 7, device="cpu")
    options = {
        "score_mod": lambda score, b, h, q, kv: score * 2 + table[h, q],
        "block_mask": mask,
        "enable_gqa": groups < 4,
    }
    ours, more = flex_attention.reference(
        query, key, value, **options, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    with mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", new=True):
        expected, sums = flex.flex_attention(
            query, key, value, **options, return_aux=AuxRequest(lse=True)
        )
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(more.lse, sums.lse, rtol=1e-12, atol=1e-12)
    assert more.max_scores.shape == (2, 4, 7)


@dataclass(slots=True)
class Slots:
    first: Tensor
    second: Tensor


def test_replaces_each_attribute_that_a_mod_reads():
    known = Slots(IDS, IDS)
    mod = and_masks(
        lambda b, h, q, kv: known.first[b] > 10, lambda b, h, q, kv: known.second[b] > 10
    )
    found = []

    def change(name: str, tensor: Tensor, can_replace: bool) -> Tensor:
        found.append(name)
        return tensor + 10

    after = with_tensors(mod, change)
    assert found == ["mask_mods[0]:known.first", "mask_mods[1]:known.second"]
    arguments = (torch.tensor(1),) * 4
    assert (bool(mod(*arguments)), bool(after(*arguments))) == (False, True)


class Run:
    """A run outside of all forward passes."""

    def check_outside(self, query: Tensor) -> None:
        pass


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (None, "which the trial before training did not see"),
        ({frozenset({1}), frozenset()}, "another layer captures a tensor of this name"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_refuse_tensors_of_unknown_dimensions(rank, known, words):
    table = torch.zeros(4, 8)  # its size is the length of one part

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + table[h, q]

    captured = {} if known is None else {("score_mod", mod.__code__, "table", 2): known}
    run = SimpleNamespace(
        lengths=[8, 7],
        group=SimpleNamespace(rank=rank),
        agree=None,
        captured=captured,
        error=ModelError,
    )
    with pytest.raises(ModelError, match=words):
        flex_attention._whole_mod(mod, run, "score_mod")


def calls(attend: Any) -> None:
    query = torch.randn(1, 2, 8, 4)
    with torch.no_grad():
        attend(query, query, query)


def test_finds_the_function_behind_a_compiled_one(monkeypatch):
    original = flex.flex_attention
    code, run = original.__code__, Run()
    monkeypatch.setattr(flex, "flex_attention", torch.compile(original, backend="eager"))
    flex_attention._torchs.cache_clear()
    flex_attention.install(run)
    assert original.__code__ is not code
    flex_attention.uninstall(run)
    assert original.__code__ is code


@pytest.mark.parametrize("name", ["set_eval_frame", "_FrameExecStrategy"])
def test_installs_nothing_if_torch_lacks_a_private_name(monkeypatch, name):
    monkeypatch.delattr(torch._C._dynamo.eval_frame, name)
    code = flex.flex_attention.__code__
    flex_attention.install(Run())
    assert flex_attention.missing() == f"torch._C._dynamo.eval_frame.{name}"
    assert flex.flex_attention.__code__ is code


def test_compiles_calls_under_a_default_device():
    torch._dynamo.reset()
    counter, run = CompileCounter(), Run()
    flex_attention.install(run)
    try:
        with torch.device("cpu"):
            calls(torch.compile(flex.flex_attention, backend=counter))
    finally:
        flex_attention.uninstall(run)
    assert counter.frame_count == 1
