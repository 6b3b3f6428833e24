"""Tests in fp64 whether packing changes the results of a model.

A copy of the model runs on the CPU, with fixed random parameters and without dropout, on a few
short documents. It runs once with the documents packed, and once per document without masks and
position ids, unless its forward requires them. Its outputs and the gradients of all parameters must
be equal. Models fail this test if, for example, they attend to other documents, do not restart
positions, use sliding windows that the mask replaces, carry state along the sequence, or contain
BatchNorm or pooling.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.data.packing.collate import PackedCollate
from shardwise.errors import DataError
from shardwise.model.varlen_attention import on_reference, uses_flash
from shardwise.world.generator_states import preserved

MOST_PARAMETERS = 50_000_000
"""Size of the largest model that is tested. In fp64, its copy and two sets of gradients take
1.2 GB."""
ROWS = ((5, 2, 7), (6, 4))
"""Lengths of the documents in each row."""
ROW = 14
WINDOW = 3
"""Sliding windows of the copy, which must be shorter than the documents to have an effect."""
# Some models compute norms or a softmax in fp32 in any case, and sums over rows of different
# lengths then differ by some 1e-7. A leak between documents is larger by orders of magnitude.
RTOL = 1e-5

Call = Callable[[Any, Mapping[str, Any]], Any]
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_model(model: nn.Module, attention: str, call: Call | None) -> None:
    """Raise DataError if packing changes the results of `model`, or if it cannot be tested."""
    kind = type(model).__name__
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        raise DataError(
            f"{kind} has {count:,} parameters, and the test whether packing changes its results "
            f"copies at most {MOST_PARAMETERS:,}: pass Packing a smaller model of the same classes "
            "(fewer layers and features), or model=False if you have tested it."
        )
    if call is None:
        _check_kernel(model, attention)
    with ExitStack() as stack:
        stack.enter_context(preserved())
        clone = _copy(model)
        if attention == "flash" and uses_flash(clone):
            stack.enter_context(on_reference(clone))
        documents = _documents(clone)
        packed = PackedCollate(ROW, attention)
        batch = packed([[(text, len(text)) for text in row] for row in documents])
        together = _run(clone, batch, call or _call, kind)
        ends = [text for row in documents for text in row]
        # By default the reference gets neither a mask nor positions, so that it is right even if
        # the model misreads both. If forward requires one, it gets that of one document.
        accepted = inspect.signature(clone.forward).parameters.values()
        required = {p.name for p in accepted if p.default is inspect.Parameter.empty}
        singles = []
        for text in ends:
            alone = PackedCollate(len(text), attention)([[(text, len(text))]])
            batch = alone
            if call is None:
                batch = {k: v for k, v in alone.items() if k in {"input_ids", *required}}
            singles.append(_run(clone, batch, call or _call, kind))
    _compare(kind, attention, clone, together, singles, documents)


def _check_kernel(model: nn.Module, attention: str) -> None:
    """Raise DataError if a Transformers model's attention kernel ignores the batch's fields."""
    kind = type(model).__name__
    if uses_flash(model) and attention != "flash":
        # With several rows, it ignores the positions and takes each row for one document.
        raise DataError(
            f"{kind} uses flash attention, which finds documents neither in a mask nor, with "
            f'several rows, in position_ids: write Packing(..., attention="flash") instead of '
            f'"{attention}".'
        )
    if attention == "flash" and not uses_flash(model):
        raise DataError(
            f'attention="flash" passes cu_seq_lens_q, which only flash attention reads, but {kind} '
            'does not use it: load it with attn_implementation="flash_attention_2", or leave '
            "attention out."
        )


@dataclass(frozen=True)
class _Run:
    """The model's scores, and the first input and output of every call, by module name."""

    inputs: dict[str, list[Tensor]]
    outputs: dict[str, list[Tensor]]
    scores: Tensor


def _call(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    given = {key: value for key, value in batch.items() if key != "labels"}
    accepted = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    missing = [key for key in given if key not in accepted and not takes_any]
    if missing:
        add = ("the argument", "it has another name")
        if len(missing) > 1:
            add = ("the arguments", "they have other names")
        raise DataError(
            f"{type(model).__name__}.forward does not accept {' and '.join(missing)}, so it cannot "
            f"tell packed documents apart. Add {add[0]}, or pass Packing "
            f"call=lambda model, batch: model(...) if {add[1]}."
        )
    return model(**given)


def _run(model: nn.Module, batch: Mapping[str, Any], call: Call, kind: str) -> _Run:
    inputs: dict[str, list[Tensor]] = {}
    outputs: dict[str, list[Tensor]] = {}
    shape = batch["input_ids"].shape

    def record(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for calls, values in ((inputs, args), (outputs, output)):
                found = (leaf for leaf in pytree.tree_leaves(values) if _is_float(leaf))
                calls.setdefault(name, []).append(next(found, torch.empty(0)).detach())

        return hook

    handles = [each.register_forward_hook(record(name)) for name, each in model.named_modules()]
    try:
        output = call(model, batch)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{kind} failed in the test whether packing changes its results, on the CPU in fp64, "
            f"with input_ids of shape {tuple(shape)}: {type(error).__name__}: {error}. Pass "
            "Packing call=lambda model, batch: model(...), which returns the scores of a batch."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    leaves = [getattr(output, "logits", None), *pytree.tree_leaves(output)]
    for leaf in leaves:
        if _is_float(leaf) and leaf.shape[:2] == shape:
            return _Run(inputs, outputs, leaf)
    raise DataError(
        f"{kind} returns no scores per token (of shape (rows, tokens, ...)), so documents in one "
        "row would share an output: train it without pack."
    )


def _compare(
    kind: str,
    attention: str,
    model: nn.Module,
    together: _Run,
    singles: Sequence[_Run],
    documents: Sequence[Sequence[Tensor]],
) -> None:
    """Raise DataError if outputs or gradients differ between packed and single documents."""
    ours = list(_cut(together.scores, documents))
    theirs = [run.scores[0] for run in singles]
    hint = _HINTS[attention]
    if not all(map(_is_close, ours, theirs)):
        name = _first_difference(together, singles, documents)
        where = f"{name} ({type(model.get_submodule(name)).__name__})" if name else "it"
        raise DataError(
            f"Packing changes the result of {kind}: in fp64, {where} has other outputs than for "
            f"the documents one by one. {hint}"
        )
    parameters = {
        name: each for name, each in model.named_parameters() if each.dtype == torch.float64
    }
    draw = torch.Generator().manual_seed(2)
    factors = [torch.randn(each.shape, generator=draw, dtype=torch.float64) for each in theirs]
    gradients = []
    for outputs in (ours, theirs):
        total = sum((each * factor).sum() for each, factor in zip(outputs, factors, strict=True))
        if not isinstance(total, Tensor) or not total.requires_grad:
            raise DataError(f"The scores of {kind} have no gradient, so packing cannot be tested.")
        gradients.append(torch.autograd.grad(total, list(parameters.values()), allow_unused=True))
    for name, mine, other in zip(parameters, *gradients, strict=True):
        if (mine is None) != (other is None) or (
            mine is not None and other is not None and not _is_close(mine, other)
        ):
            raise DataError(
                f"Packing changes the gradient of {name} of {kind} in fp64, although its outputs "
                f"are the same. {hint}"
            )


_HINTS = {
    "mask": "It must use position_ids, and attention_mask in its attention. For a model of "
    'Transformers, load it with attn_implementation="sdpa", or write attention="positions". '
    "Otherwise train it without pack.",
    "positions": "It must find documents in position_ids. For a model of Transformers, set "
    'model.config.use_cache = False, or write attention="mask". Otherwise train it without pack.',
    "flash": "It must use position_ids, and pass cu_seq_lens_q to its attention. Otherwise train "
    "it without pack.",
    "cu_seqlens": "It must use position_ids, and cu_seqlens in its attention. Otherwise train it "
    "without pack.",
}


def _first_difference(
    together: _Run, singles: Sequence[_Run], documents: Sequence[Sequence[Tensor]]
) -> str:
    """Return the name of the module that causes the difference, or "" if it is the model itself."""

    def differs(name: str, what: str) -> bool:
        for number, value in enumerate(getattr(together, what)[name]):
            if value.shape[:2] != (len(documents), ROW):
                continue  # not one value per token
            for run, part in zip(singles, _cut(value, documents), strict=True):
                calls = getattr(run, what).get(name, [])
                if number >= len(calls) or not calls[number].dim() or len(calls[number]) != 1:
                    return True
                if not _is_close(part, calls[number][0]):
                    return True
        return False

    # The modules are sorted by the time at which they return.
    for name in together.outputs:
        if name and differs(name, "outputs"):
            # If the inputs differ too, code of the enclosing module has computed them.
            return name.rpartition(".")[0] if differs(name, "inputs") else name
    return ""


def _cut(scores: Tensor, documents: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Yield each document's part of `scores`, which has shape (rows, tokens, ...)."""
    for row, texts in zip(scores, documents, strict=True):
        yield from row[: sum(map(len, texts))].split([len(text) for text in texts])


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_close(value: Tensor, reference: Tensor) -> bool:
    if value.shape != reference.shape:
        return False
    scale = reference.detach().abs().max().item() if reference.numel() else 0.0
    return torch.allclose(value, reference, rtol=RTOL, atol=RTOL * scale)


def _documents(model: nn.Module) -> list[list[Tensor]]:
    """Return the documents in each row, with tokens valid for every embedding of `model`."""
    sizes = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    draw = torch.Generator().manual_seed(0)
    most = min([50, *sizes])
    return [[torch.randint(0, most, (size,), generator=draw) for size in row] for row in ROWS]


def _copy(model: nn.Module) -> nn.Module:
    """Return an fp64 copy on the CPU: fixed random parameters, short windows and no dropout."""
    draw = torch.Generator().manual_seed(1)
    memo: dict[int, Any] = {}
    # Draw values instead of copying them, because an engine may have sharded the parameters, and
    # because initial values can hide errors: weights of zero give outputs of zero.
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        scale = 1.0 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
        memo[id(parameter)] = nn.Parameter(values * scale)
    try:
        with _without_hooks(model):
            clone = copy.deepcopy(model, memo).cpu().double().train()
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), so "
            "packing cannot be tested: pass Packing a smaller model of the same classes, or "
            "model=False."
        ) from error
    for module in clone.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if is_number and "dropout" in name:
                    setattr(holder, name, 0.0)
                elif is_number and "sliding_window" in name and value > WINDOW:
                    setattr(holder, name, WINDOW)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return clone


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Remove all hooks inside the block, because an engine's hooks must not be copied."""
    kept = []
    for module in model.modules():
        for name in _HOOKS:
            hooks = module.__dict__[name]
            kept.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, content in kept:
            hooks.update(content)
