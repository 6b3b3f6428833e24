"""Finds splits for known attention and feed-forward modules, and tests splits of other modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.tensor import split_rules
from shardwise.parallel.tensor.attention import Attention, split_attention
from shardwise.parallel.tensor.graph_paths import AllowedOperations
from shardwise.parallel.tensor.multihead_attention import split_multihead
from shardwise.parallel.tensor.parallel_layers import RowwiseParallel
from shardwise.parallel.tensor.split_rules import SplitGroup
from shardwise.parallel.tensor.split_trial import TrialResult, try_split

ATTENTION = {
    "GPT2Attention": Attention(
        qkv="c_attn", out="c_proj", heads="num_heads", widths=("split_size", "embed_dim")
    ),
    "LlamaAttention": Attention(
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        heads="config.num_attention_heads",
        kv_heads="config.num_key_value_heads",
    ),
    "T5Attention": Attention(
        qkv=("q", "k", "v"),
        out="o",
        heads="n_heads",
        widths=("inner_dim",),
        per_head=("relative_attention_bias",),
    ),
}
"""Attention modules of the transformers package, by class name."""

PAIRS = {
    "GPT2MLP": (("c_fc",), "c_proj"),
    "LlamaMLP": (("gate_proj", "up_proj"), "down_proj"),
    "T5DenseActDense": (("wi",), "wo"),
    "T5DenseGatedActDense": (("wi_0", "wi_1"), "wo"),
    "TransformerEncoderLayer": (("linear1",), "linear2"),
    "TransformerDecoderLayer": (("linear1",), "linear2"),
}
"""Feed-forward modules by class name: the widening layers and the narrowing layer."""

QUERIES = ("q", "q_proj", "query", "wq", "to_q", "q_lin")
KEYS = ("k", "k_proj", "key", "wk", "to_k", "k_lin")
VALUES = ("v", "v_proj", "value", "wv", "to_v", "v_lin")
FUSED = ("qkv", "qkv_proj", "c_attn", "in_proj", "to_qkv", "Wqkv", "mix", "query_key_value")
OUT = ("out", "o", "out_proj", "o_proj", "proj", "c_proj", "to_out", "wo", "dense", "merge")
HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")
"""Common names for the parts of attention in other modules. A trial decides whether they fit."""


NOT_BY_HEADS = (
    "it looks like attention, but its forward computed something else with some of the heads (it "
    "may derive the width of a head from its input: write -1 for that in view; docs/parallel.md)"
)

TrialResults = dict[tuple[str, tuple[str, ...]], TrialResult]
"""Results of trials, by module name and the children that are split together."""


class SplitTrials:
    """Tests splits, once per module signature.

    If `reported` is given, it holds another rank's results, and no tests run.
    """

    def __init__(self, reported: TrialResults | None = None) -> None:
        self.results: TrialResults = {} if reported is None else reported
        self._reported = reported is not None
        self._by_signature: dict[object, TrialResult] = {}

    def accepts(
        self, name: str, module: nn.Module, children: tuple[str, ...], group: SplitGroup, parts: int
    ) -> bool:
        """Return whether `module` gives the same result when split as described by `group`.

        `children` holds the names of the split layers. `parts` is the number of parts.
        """
        # One rank runs the trials, and the other ranks use its results. All ranks therefore split
        # in the same way, even if a trial's result depends on the machine.
        if not self._reported:
            tested = module
            if type(module).forward is nn.Sequential.forward:
                # Test only the sequence from the first to the last of `children`. The rest of an
                # nn.Sequential does not matter for the split.
                names = list(module._modules)
                run = names[names.index(children[0]) : names.index(children[-1]) + 1]
                tested = nn.Sequential(*(module.get_submodule(name) for name in run))
            key = (signature(tested), children)
            if key not in self._by_signature:
                self._by_signature[key] = try_split(tested, group, parts)
            reported = self._by_signature[key]
            if group.kind == "attention" and not reported and reported.why is None:
                reported = replace(reported, why=NOT_BY_HEADS)
            self.results[name, children] = reported
        result = self.results.get((name, children))
        if not result:
            return False
        allowed = AllowedOperations(result.operations)
        group.splits[:] = [
            replace(cut, allowed=allowed) if cut.style is RowwiseParallel else cut
            for cut in group.splits
        ]
        return True

    def reasons_unsplit(self) -> dict[str, str]:
        """Map unsplit modules' names to reasons, omitting reasons that are not worth reporting."""
        split_names = {name for (name, _), result in self.results.items() if result}
        return {
            name: result.why
            for (name, _), result in self.results.items()
            if result.why and name not in split_names
        }


def find(
    models: Sequence[nn.Module],
    prefixes: Sequence[str],
    parts: int,
    skip: set[nn.Module],
    trials: SplitTrials | None = None,
) -> list[SplitGroup]:
    """Return the splits to apply to `models`, each into `parts` parts.

    Modules in `skip` are ignored. The modules to be split are added to `skip`.
    """
    groups_found: list[SplitGroup] = []
    trials = trials or SplitTrials()
    for model, prefix in zip(models, prefixes, strict=True):
        # A transformers model may have its own tp_plan that splits attention by heads.
        plan: Any = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
        styles = plan.items()
        has_own_plan = any(
            name.endswith(".q_proj") and "colwise" in style for name, style in styles
        ) and any(name.endswith(".o_proj") and style == "rowwise" for name, style in styles)
        for path, module in model.named_modules():
            # torch.compile adds `_orig_mod` to module names.
            name = ".".join(part for part in (prefix, path) if part).replace("_orig_mod.", "")
            if has_own_plan and module not in skip and _is_as_llama(module):
                groups = _known_attention(name, module, ATTENTION["LlamaAttention"], parts, skip)
            else:
                groups = _groups_of(name, module, parts, skip, trials)
            for group in groups:
                skip |= {cut.module for cut in group.splits}
                groups_found.append(group)
    return groups_found


def _is_as_llama(module: nn.Module) -> bool:
    """Return whether the attention module has exactly Llama's four linear layers."""
    # A parameter between the layers, such as a query norm, would receive only part of its gradient.
    from_transformers = type(module).__module__.startswith("transformers.")
    trained = {name.split(".")[0] for name, _ in module.named_parameters()}
    four = {"q_proj", "k_proj", "v_proj", "o_proj"}
    return from_transformers and type(module).__name__.endswith("Attention") and trained == four


def _groups_of(
    name: str, module: nn.Module, parts: int, skip: set[nn.Module], trials: SplitTrials
) -> Iterator[SplitGroup]:
    if module in skip:
        return
        # Match names only for classes of torch and transformers, because a user's class may reuse a
        # name.
    is_library_class = type(module).__module__.split(".")[0] in ("torch", "transformers")
    kind = type(module).__name__ if is_library_class else ""
    if type(module).forward is nn.MultiheadAttention.forward:
        if not skip & set(module.children()):
            yield split_multihead(name, module, parts)  # type: ignore[arg-type]
        return
    if kind in ATTENTION and not getattr(module, "is_cross_attention", False):
        yield from _known_attention(name, module, ATTENTION[kind], parts, skip)
        return
    if kind in PAIRS:
        into, out = PAIRS[kind]
        children = (*into, out)
        is_free = not {module._modules[child] for child in children} & skip
        if is_free and _are_linear(module, children):
            yield _pair(name, module, into, out, parts)
        return
    free = [
        child
        for child, each in module.named_children()
        if split_rules.is_linear(each) and each not in skip
    ]
    # Test attention before pairs, so that no pair claims one of its layers.
    used: set[str] = set()
    for group, children in _candidates(name, module, free, parts):
        # A child can be in several candidates. The first accepted candidate claims it.
        if used & set(children):
            continue
        if trials.accepts(name, module, children, group, parts):
            used |= set(children)
            yield group


def _known_attention(
    name: str, module: nn.Module, how: Attention, parts: int, skip: set[nn.Module]
) -> Iterator[SplitGroup]:
    """Yield the split of an attention module whose class is known.

    Yields nothing if the plan names one of the module's layers (`skip`), or if a layer was
    replaced, for example with an adapter.
    """
    if not skip & set(module.children()) and _are_linear(module, how.maps):
        yield split_attention(name, module, how, parts)


def _are_linear(module: nn.Module, children: Sequence[str]) -> bool:
    maps = [module._modules.get(child) for child in children]
    return all(each is not None and split_rules.is_linear(each) for each in maps)


def signature(module: nn.Module) -> object:
    """Return a value that is equal for modules that perform the same computation.

    It contains the classes, shapes and attributes of all submodules. Attributes that cannot be
    compared by value (a function, a buffer) are compared by identity.
    """
    return tuple(
        (path, type(each), each.extra_repr(), *map(_value, _attributes_of(each)))
        for path, each in module.named_modules()
    )


def _attributes_of(module: nn.Module) -> Iterator[object]:
    for name, value in vars(module).items():
        if name == "_parameters":
            yield {key: None if p is None else tuple(p.shape) for key, p in value.items()}
        elif name != "_modules":
            yield name, value


def _value(value: object) -> object:
    if isinstance(value, int | float | str | type(None)):
        return type(value), value
    if isinstance(value, dict):
        return type(value), tuple((_value(key), _value(item)) for key, item in value.items())
    if isinstance(value, tuple | list | set):
        return type(value), tuple(map(_value, value))
    return type(value), id(value)


def _candidates(
    name: str, module: nn.Module, free: Sequence[str], parts: int
) -> Iterator[tuple[SplitGroup, tuple[str, ...]]]:
    """Yield possible splits, based on the names and widths of linear layers."""
    if (how := _attention(module, free)) is not None:
        children = how.maps
        try:
            yield split_attention(name, module, how, parts), children
        except ModelError:
            return  # the widths do not fit attention
    for first, second in pairwise(free):
        up, down = (getattr(module, child) for child in (first, second))
        if split_rules.widths(up)[1] == split_rules.widths(down)[0] >= parts:
            # The output is as wide as the next layer's input: a widening and a narrowing layer.
            yield _pair(name, module, (first,), second, parts), (first, second)
    for first, gate, second in zip(free, free[1:], free[2:], strict=False):
        maps = [getattr(module, child) for child in (first, gate, second)]
        # Two layers of the same shape before the narrowing layer: a gated feed-forward module.
        if len({split_rules.widths(maps[0]), split_rules.widths(maps[1])}) == 1:
            width = split_rules.widths(maps[0])[1]
            if width == split_rules.widths(maps[2])[0] >= parts:
                yield _pair(name, module, (first, gate), second, parts), (first, gate, second)


def _attention(module: nn.Module, free: Sequence[str]) -> Attention | None:
    def first(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in free), None)

    heads = next((name for name in HEADS if isinstance(getattr(module, name, None), int)), None)
    out, fused = first(OUT), first(FUSED)
    q, k, v = first(QUERIES), first(KEYS), first(VALUES)
    if heads is None or out is None:
        return None
    if q is not None and k is not None and v is not None:
        return Attention(qkv=(q, k, v), out=out, heads=heads)
    return None if fused is None else Attention(qkv=fused, out=out, heads=heads)


def _pair(name: str, module: nn.Module, into: Sequence[str], out: str, parts: int) -> SplitGroup:
    """Return the split of a feed-forward module.

    The widening layers `into` are split by output features, and the narrowing layer `out` by input
    features.
    """
    last = module._modules[out]
    assert last is not None
    width = split_rules.widths(last)[0]
    ranges = split_rules.even_split(
        f"{name or type(module).__name__} of width {width}", width, parts
    )
    group = SplitGroup("feed-forward", name)
    for child in into:
        linear = module._modules[child]
        assert linear is not None
        group.splits.append(split_rules.colwise(_child_name(name, child), linear, ranges))
    group.splits.append(split_rules.rowwise(_child_name(name, out), last, ranges))
    return group


def disable_fused_inference(
    models: Sequence[nn.Module], prefixes: Sequence[str], parts: int, groups: Sequence[SplitGroup]
) -> None:
    """Disable torch's fused inference in encoder layers that contain split modules.

    The fused kernel reads the weights directly, and would mistake this rank's parts for full
    weights.
    """
    group_of = {cut.module: group for group in groups for cut in group.splits}
    for model, prefix in zip(models, prefixes, strict=True):
        for path, module in model.named_modules():
            inside = [group_of[each] for each in module.modules() if each in group_of]
            if inside and hasattr(module, "activation_relu_or_gelu"):
                name = ".".join(part for part in (prefix, path) if part)
                # If this is 0, torch's encoder layer takes its regular path.
                plain = [{"activation_relu_or_gelu": 0}] * parts
                inside[0].splits.append(split_rules.local_module(name, module, {}, plain))


def _child_name(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
