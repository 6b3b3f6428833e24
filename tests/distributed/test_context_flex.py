"""`--context` with models that call flex attention, whose functions see heads and positions.

torch has no backward pass of flex attention on a CPU. Its check of devices is patched away, because
the plain operations behind it have one.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.parallel.context import sequence_trial

WIDTH, WORDS, LONGEST = 16, 11, 256

Mod = Callable[..., Any]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, size: int) -> Tensor:
    return q - kv < size


def same_document(documents: Tensor) -> Mod:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return documents[b, q] == documents[b, kv]

    return mask_mod


class SameDocument:
    """A mask_mod that is an object."""

    def __init__(self, documents: Tensor) -> None:
        self.documents = documents

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.documents[b, q] == self.documents[b, kv]


class Attention(nn.Module):
    """Causal attention in one of several ways (`kind`), which need not all be useful."""

    def __init__(self, kind: str, heads: int, groups: int, attend: Mod) -> None:
        super().__init__()
        self.kind, self.heads, self.attend = kind, heads, attend
        features = WIDTH // heads
        self.q = nn.Linear(WIDTH, heads * features)
        self.k, self.v = (nn.Linear(WIDTH, groups * features) for _ in range(2))
        self.out = nn.Linear(heads * features, WIDTH)
        self.gate = nn.Linear(WIDTH, heads)
        self.by_distance = nn.Parameter(torch.randn(heads, LONGEST))
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, heads + 1))
        self.documents: Tensor | None = None
        self.masks: dict[int, tuple[Tensor, BlockMask]] = {}

    def mods(self, x: Tensor, documents: Tensor) -> tuple[Mod | None, Mod]:
        """Return the score_mod and the mask_mod for (rows, tokens, WIDTH)."""
        slopes, tokens = self.slopes, x.size(1)
        self.documents = documents
        match self.kind:
            case "alibi":
                return lambda score, b, h, q, kv: score + (kv - q) * slopes[h], causal
            case "module":
                return lambda score, b, h, q, kv: score + (kv - q) * self.slopes[h], causal
            case "by distance":
                table = self.by_distance
                return lambda score, b, h, q, kv: score + table[h, (q - kv).abs()], causal
            case "by token":
                gate = self.gate(x)
                return lambda score, b, h, q, kv: score + gate[b, kv, h], causal
            case "softcap":
                return lambda score, *_: torch.tanh(score / 2) * 2, causal
            case "window":
                return None, and_masks(causal, partial(window, size=3))
            case "by head":
                return None, lambda b, h, q, kv: (q >= kv) & (q - kv < 2 + h)
            case "documents":
                return None, and_masks(causal, same_document(documents))
            case "an object":
                return None, and_masks(causal, SameDocument(documents))
            case "a default":
                return None, lambda b, h, q, kv, n=documents: (q >= kv) & (n[b, q] == n[b, kv])
            case "two defaults":  # only one of them has this worker's tokens
                gate, table = self.gate(x)[..., 0], self.by_distance[:, :8]
                return (
                    lambda score, b, h, q, kv, table=table, gate=gate: (
                        score + table[h, (q - kv).clamp(-3, 3) + table.size(1) // 2] + gate[b, kv]
                    )
                ), causal
            # Those below are wrong or unsupported on parts.
            case "length":
                return None, lambda b, h, q, kv: (q >= kv) & (q - kv < tokens)
            case "attribute":
                return None, lambda b, h, q, kv: self.documents[b, q] == self.documents[b, kv]
            case "pairs":
                places = torch.arange(tokens, device=x.device)
                distances = (places[:, None] - places).double()
                return lambda score, b, h, q, kv: score - distances[q, kv], causal
            case "local numbers":
                starts = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
                return None, and_masks(causal, same_document(starts.cumsum(1)))
            case _:
                return None, causal

    def forward(self, x: Tensor, documents: Tensor, mask: BlockMask | None) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            each(x).view(rows, tokens, -1, WIDTH // self.heads).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        score_mod, mask_mod = self.mods(x, documents)
        if self.kind == "in place":
            if tokens not in self.masks:
                numbers = torch.zeros_like(documents)
                mask_mod = and_masks(causal, same_document(numbers))
                self.masks[tokens] = (
                    numbers,
                    create_block_mask(mask_mod, rows, None, tokens, tokens, device=x.device),
                )
            numbers, mask = self.masks[tokens]
            numbers.copy_(documents)
        if self.kind == "blocks":  # fewer than those of the mask_mod
            mask = create_block_mask(causal, None, None, tokens, tokens, "cpu", BLOCK_SIZE=16)
            mask = BlockMask.from_kv_blocks(
                mask.kv_num_blocks.clamp(max=1),
                mask.kv_indices,
                BLOCK_SIZE=16,
                mask_mod=causal,
                seq_lengths=(tokens, tokens),
            )
        if mask is None:
            heads = self.heads if self.kind == "by head" else None
            rows_of_mask = rows if "document" in self.kind else None
            mask = create_block_mask(mask_mod, rows_of_mask, heads, tokens, tokens, device=x.device)
        result = self.attend(q, k, v, score_mod, mask, enable_gqa=q.size(1) != k.size(1), scale=0.3)
        return self.out(result.transpose(1, 2).reshape(rows, tokens, -1))


class Model(nn.Module):
    def __init__(self, problem: "Problem") -> None:
        super().__init__()
        self.shares_mask = problem.shares_mask
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.attentions = nn.ModuleList(
            [
                Attention(problem.kind, problem.heads, problem.groups, problem.attend)
                for _ in range(2)
            ]
        )
        self.networks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(
        self, ids: Tensor, positions: Tensor, documents: Tensor, mask: BlockMask | None = None
    ) -> Tensor:
        x = self.words(ids) + self.places(positions)
        if self.shares_mask:
            _, mask_mod = self.attentions[0].mods(x, documents)
            tokens = ids.size(1)
            mask = create_block_mask(mask_mod, len(ids), None, tokens, tokens, device=x.device)
        for norm, attention, network in zip(
            self.norms, self.attentions, self.networks, strict=True
        ):
            x = x + attention(norm(x), documents, mask)
            x = x + F.gelu(network(x))
        return x @ self.words.weight.T


def with_sums(*args: Any, **options: Any) -> Tensor:
    """Multiply results by the sigmoid of the log-sum-exp of scores, as attention sinks do."""
    result, more = flex_attention(*args, **options, return_aux=AuxRequest(lse=True))
    return result * more.lse.sigmoid()[..., None]


COMPILED = torch.compile(flex_attention, backend="eager", fullgraph=True)


def compiled(*args: Any, **options: Any) -> Any:
    """Call a function that was compiled before an engine exists."""
    return COMPILED(*args, **options)


def compiled_by_default(*args: Any, **options: Any) -> Any:
    """Call a function that torch's default compiler has compiled, on a GPU."""
    return torch.compile(flex_attention)(*args, **options)


@dataclass(frozen=True)
class Problem:
    """A training of three steps."""

    kind: str = "causal"
    heads: int = 4
    groups: int = 4
    length: int = 9
    lengths: tuple[int, ...] = ()
    """The lengths of the batches of steps, or () for `length`."""
    rows: int = 3
    attend: Mod = flex_attention
    shares_mask: bool = False
    """True for one mask of all layers, made in the model's forward."""
    outside: bool = False
    """True for masks of whole sequences, made before the batch is split."""
    settings: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return Model(self).double()

    def batch(self, step: int) -> tuple[Tensor, ...]:
        torch.manual_seed(100 + step)
        length = self.lengths[step] if self.lengths else self.length
        shape = self.rows, length
        ids, labels = torch.randint(WORDS, shape), torch.randint(WORDS, shape)
        positions = torch.arange(length).expand(shape)
        documents = (torch.rand(shape) < 0.4).long().cumsum(1)
        labels[torch.rand(shape) < 0.3] = -100
        return ids, positions, documents, labels

    def mask(self, documents: Tensor) -> BlockMask | None:
        if not self.outside:
            return None
        mod = causal if self.kind == "causal" else and_masks(causal, same_document(documents))
        rows = None if self.kind == "causal" else len(documents)
        return create_block_mask(mod, rows, None, self.length, self.length, device=documents.device)


def no_check(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Do nothing. The compiler, which cannot trace a mock, traces this function."""


@contextmanager
def on_cpus(*, checks: bool = False) -> Iterator[None]:
    """Allow flex attention with gradients on a CPU, unless `checks` is true."""
    torch._dynamo.reset()
    check = flex._validate_device if checks else no_check
    without_kernels = partial(torch.compile, backend="eager")  # which have no gradients
    with (
        mock.patch.object(flex, "_validate_device", check),
        mock.patch.object(torch, "compile", without_kernels),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", "<class 'torch.autograd.function.Function'> should not")
        yield


def trained(
    world: sw.World | None, problem: Problem, device: str = "cpu", dtype: Any = torch.float64
) -> dict[str, Any]:
    """Train with an engine, or without a world in plain PyTorch."""
    code = flex_attention.__code__
    with on_cpus() if device == "cpu" else nullcontext():
        model = problem.model().to(device, dtype)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
        engine = None
        if world is not None:
            engine = sw.Engine(model, optimizer, quiet=True, **problem.settings)
        for step in range(3):
            ids, positions, documents, labels = (x.to(device) for x in problem.batch(step))
            mask = problem.mask(documents)
            if world is not None:
                ids, positions, documents, labels = world.share((ids, positions, documents, labels))
            logits = model(ids, positions, documents, mask)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            if engine is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            else:
                engine.backward(loss)
                losses.append(engine.step().loss)
        if engine is not None:
            with engine.full_parameters():
                values = {name: p.detach().clone() for name, p in model.named_parameters()}
            engine.close()
        else:
            values = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert flex_attention.__code__ is code
    return {"losses": losses, "values": values}


PLAN = {f"attentions.*.{name}": "colwise" for name in "qkv"} | {"attentions.*.out": "rowwise"}

CASES = {
    # ranks, method, training, and other axes of the mesh
    "causal": (2, "auto", Problem()),
    "alibi": (2, "auto", Problem("alibi", settings={"zero": 1})),
    "slopes of a module": (2, "auto", Problem("module", groups=2)),
    "parameters by distance": (2, "auto", Problem("by distance", settings={"zero": 2})),
    "gradients of captured parts": (4, "auto", Problem("by token", length=14)),
    "softcap": (2, "auto", Problem("softcap", groups=1)),
    "window": (2, "auto", Problem("window", shares_mask=True)),
    "masks by head": (4, "auto", Problem("by head", heads=8, length=11)),
    "documents": (4, "auto", Problem("documents", length=15, settings={"zero": 3})),
    "documents of an object": (2, "auto", Problem("an object")),
    "documents as a default": (2, "auto", Problem("a default", rows=4, length=8)),
    "fewer groups than parts": (4, "auto", Problem("alibi", heads=8, groups=2, length=11)),
    "one head": (4, "auto", Problem("documents", heads=1, groups=1, length=13)),
    "gathered": (2, "gathered", Problem("alibi", groups=2)),
    "gathered documents": (4, "gathered", Problem("documents", groups=2, shares_mask=True)),
    "gathered, captured parts": (2, "gathered", Problem("by token")),
    "gathered, masks by head": (2, "gathered", Problem("by head")),
    "two defaults": (2, "auto", Problem("two defaults", lengths=(20, 16, 16))),
    "masks changed in place": (2, "auto", Problem("in place", length=12, attend=compiled)),
    "whole masks": (2, "auto", Problem(outside=True)),
    "whole masks of documents": (4, "auto", Problem("documents", outside=True, length=11)),
    "whole masks, gathered": (2, "gathered", Problem("documents", outside=True)),
    "sums of scores": (2, "auto", Problem("alibi", attend=with_sums)),
    "sums of scores, gathered": (2, "gathered", Problem(attend=with_sums)),
    "compiled": (2, "auto", Problem("documents", attend=compiled, settings={"zero": 1})),
    "recomputed": (
        2,
        "auto",
        Problem("documents", shares_mask=True, settings={"zero": 3, "activations": "recomputed"}),
    ),
    "recomputed masks": (
        2,
        "auto",
        Problem("documents", settings={"zero": 3, "activations": "recomputed"}),
    ),
    "compiled blocks": (2, "auto", Problem("documents", settings={"compile": True})),
    "split heads": (4, "auto", Problem("documents", settings={"tensor_plan": PLAN})),
}

FAST = {"two defaults", "masks changed in place"}


def check(group: Any, size: int, method: str, problem: Problem, **axes: int) -> None:
    expected = trained(None, problem)
    context = size // axes.get("tensor", 1)
    for ours in group(size, context=context, context_method=method, **axes)(trained, problem):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.full) for n in CASES]
)
def test_equals_one_process(group, name):
    check(group, *CASES[name], **({"tensor": 2} if name == "split heads" else {}))


REFUSED = {
    "length": "gives a different result than on whole sequences",
    "attribute": "reads self.documents, which has this worker's tokens, from a module",
    "pairs": "captures distances, whose dimensions 0 and 1 have this worker's tokens",
    "local numbers": "gives a different result than on whole sequences",
    "local masks": "a BlockMask for 4 keys that was not made in the model's forward",
    "a CPU": "no backward pass on devices of type cpu",
    "blocks": "a BlockMask whose blocks are not those of its mask_mod",
    "later masks": "a BlockMask for 4 keys that was not made in the model's forward",
}


def errors(world: sw.World) -> dict[str, str]:
    """Return the errors of the first forward passes."""
    said = {}
    for kind in REFUSED:
        problem = Problem(kind, length=80 if kind == "blocks" else 8)
        with on_cpus(checks=kind == "a CPU"):
            model = problem.model()
            engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
            ids, positions, documents, _ = world.share(problem.batch(0))
            masks = []
            if kind == "later masks":
                whole = create_block_mask(causal, None, None, 8, 8, device="cpu")
                engine.backward(model(ids, positions, documents, whole).sum(), weight=1)
                engine.step()
                ids, positions, documents, _ = world.share(problem.batch(1))
            if kind in ("local masks", "later masks"):
                masks = [create_block_mask(causal, None, None, 4, 4, device="cpu")]
            try:
                model(ids, positions, documents, *masks)
            except ModelError as error:
                said[kind] = str(error)
            engine.close()
    return said


def trials_of_an_importing_model(world: sw.World) -> list[bool]:
    """Return whether the compiler was disabled in each forward pass of a model that imports it."""
    imported, disabled, found = [], [], []

    class Importing(Model):
        def forward(self, *args: Any) -> Tensor:
            found.append(bool(disabled))
            imported.append(1)
            return super().forward(*args)

    def has_compiler() -> bool:
        return bool(imported)

    def disable(stance: str) -> Any:
        disabled.append(stance)
        return nullcontext()

    problem = Problem(length=8)
    with (
        on_cpus(),
        mock.patch.object(sequence_trial, "_has_compiler", has_compiler),
        mock.patch.object(torch.compiler, "set_stance", disable),
    ):
        torch.manual_seed(3)
        model = Importing(problem).double()
        engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
        ids, positions, documents, _ = world.share(problem.batch(0))
        model(ids, positions, documents)
        engine.close()
    return found


@pytest.mark.full
def test_repeats_a_trial_that_imports_the_compiler(group):
    for found in group(2, context=2)(trials_of_an_importing_model):
        # Twice on whole sequences and on parts, and then the forward pass itself.
        assert found == [False, False, True, True, True]


def refused_heads(world: sw.World) -> list[str]:
    """Return the errors of mods that may use numbers of heads."""
    said = []
    for kind in ("alibi", "by head"):
        problem = Problem(kind, length=8)
        with on_cpus():
            model = problem.model()
            optimizer = torch.optim.SGD(model.parameters())
            engine = sw.Engine(model, optimizer, quiet=True, tensor_plan=PLAN)
            ids, positions, documents, _ = world.share(problem.batch(0))
            with pytest.raises(ModelError) as error:
                model(ids, positions, documents)
            said.append(str(error.value))
            engine.close()
    return said


@pytest.mark.full  # it needs four ranks
def test_refuses_numbers_of_split_heads(group):
    for said in group(4, context=2, tensor=2)(refused_heads):
        assert all("whose heads --tensor splits" in each for each in said)


def test_refuses_by_name(group):
    for said in group(2, context=2)(errors):
        for kind, expected in REFUSED.items():
            assert expected in said[kind], kind


def error_in_stages(world: sw.World) -> str:
    """Return the error of a model whose layers are on several ranks."""
    problem = Problem(length=8)
    with on_cpus():
        model = problem.model()
        try:
            engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
            with closing(engine):
                model(*world.share(problem.batch(0))[:3])
        except ModelError as error:
            return str(error)
    return "no error"


@pytest.mark.full
def test_refuses_stages(group):
    for said in group(4, context=2, pipeline=2)(error_in_stages):
        assert "flex_attention with --context and --pipeline is not supported" in said
