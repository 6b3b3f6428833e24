"""Renames, splits, fuses and transposes tensors by rules. Users can add their own.

    model.layers.{i}.=blocks.{i}.                       rename: a prefix, if it ends with a dot
    lm_head.weight=head.weight                          rename: a whole name
    =model.                                             add a prefix
    h.{i}.qkv.weight=h.{i}.q.weight,h.{i}.k.weight,h.{i}.v.weight        split along dim 0
    h.{i}.gate.weight,h.{i}.up.weight=h.{i}.gate_up.weight               fuse along dim 0
    h.{i}.w.weight=h.{i}.w.weight;transpose             transpose a matrix
    ...;dim=1    ...;sizes=4:1:1    ...;groups=8        options of split and fuse
    ...;stack=8                                         the fused tensor has one more dim, of size 8
    ...;rope=32  ...;unrope=32                          reorder the rows of 32 rotary heads

`{i}` stands for one part of a name, between dots. The first rule that matches a tensor is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.format import TensorSpec
from shardwise.checkpoint.formats.optimizers import OF_ELEMENTS, named_by_order
from shardwise.checkpoint.formats.saved import (
    Checkpoint,
    Leaf,
    MappedReader,
    OptimizerGroup,
    SavedOptimizer,
)
from shardwise.checkpoint.reader import TensorReader
from shardwise.errors import CheckpointError

_SLOT = re.compile(r"\{([a-z_]+)\}")
_FORM = 'Write it as "OLD=NEW", for example "model.layers.{i}.=blocks.{i}.".'
_MASTER = "master"


@dataclass(frozen=True)
class Rule:
    """A rule for renaming, splitting, fusing or transposing tensors.

    Args:
        text: The rule as the user wrote it, for messages.
        old: Patterns of the names in the source. Several if the rule fuses tensors.
        new: Patterns of the new names. Several if the rule splits a tensor.
        dim: Dim along which tensors are split or fused.
        sizes: Relative sizes of the parts, or () if they are equal.
        groups: Number of groups along `dim`. Each group contains all parts.
        stack: Size of an additional first dim of the fused tensor, or 0 if it has none.
        transpose: True to transpose the matrix.
        rope: Number of heads whose rows are reordered from pairs to halves. If it is negative, they
            are reordered from halves to pairs. If it is 0, they are not reordered.
        map: Name of the built-in map that contains the rule, or "".
    """

    text: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] = ()
    groups: int = 1
    stack: int = 0
    transpose: bool = False
    rope: int = 0
    map: str = ""

    @property
    def is_prefix(self) -> bool:
        """Whether the rule matches the beginning of names rather than whole names."""
        return len(self.old) == len(self.new) == 1 and self.old[0][-1:] in ("", ".")

    @property
    def is_concatenation(self) -> bool:
        """Whether the new tensor contains the elements of the old tensors, one after the other."""
        changes_order = self.dim or self.groups > 1 or self.transpose or self.rope
        return len(self.old) > 1 and not changes_order

    @property
    def action(self) -> str:
        """Description of the changes to values, or "" if the rule only renames tensors."""
        words = []
        if len(self.new) > 1:
            words.append("unstack" if self.stack else f"split along dim {self.dim}")
        if len(self.old) > 1:
            words.append(f"stack {self.stack}" if self.stack else f"fuse along dim {self.dim}")
        if self.transpose:
            words.append("transpose")
        if self.rope:
            words.append(f"reorder {abs(self.rope)} rotary heads")
        return ", ".join(words)

    def change(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Apply the rule to `values`, the values of the tensors named by `old`.

        Raises CheckpointError if the shapes do not fit.
        """
        try:
            return self._change(list(values))
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = ", ".join(str(list(value.shape)) for value in values)
            raise CheckpointError(
                f"The rule {self.text!r} does not fit tensors of the shape {shapes}: {error}."
            ) from error

    def _change(self, values: list[Tensor]) -> list[Tensor]:
        if self.transpose:
            values = [value.t() for value in values]
        if self.rope:
            values = [_reorder_rotary(value, self.rope) for value in values]
        if len(self.old) > 1:
            values = [self._fuse(values)]
        if len(self.new) > 1:
            values = self._split(values[0])
        return [value.contiguous() for value in values]

    def _grouped(self, value: Tensor) -> Tensor:
        """Return a view of `value` with an additional dim for the groups before `dim`."""
        size = value.shape[self.dim]
        if size % self.groups:
            raise ValueError(f"{size} is not a multiple of groups={self.groups}")
        before, after = value.shape[: self.dim], value.shape[self.dim + 1 :]
        return value.reshape(*before, self.groups, size // self.groups, *after)

    def _fuse(self, values: list[Tensor]) -> Tensor:
        grouped = torch.cat([self._grouped(value) for value in values], self.dim + 1)
        fused = grouped.flatten(self.dim, self.dim + 1)
        return fused.reshape(self.stack, -1, *fused.shape[1:]) if self.stack else fused

    def _split(self, value: Tensor) -> list[Tensor]:
        if self.stack:
            if value.shape[0] != self.stack:
                raise ValueError(f"{value.shape[0]} is not stack={self.stack}")
            value = value.flatten(0, 1)
        grouped = self._grouped(value)
        sizes = self.sizes or (1,) * len(self.new)
        whole, total = grouped.shape[self.dim + 1], sum(sizes)
        if whole % total:
            raise ValueError(f"{whole} cannot be split as {':'.join(map(str, sizes))}")
        parts = torch.split(grouped, [size * (whole // total) for size in sizes], self.dim + 1)
        return [part.flatten(self.dim, self.dim + 1) for part in parts]


def _reorder_rotary(value: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from pairs (Meta's order) to halves (Transformers' order).

    A negative `heads` reverses this. See `permute` in
    transformers/models/llama/convert_llama_weights_to_hf.py.
    """
    forward, heads = heads > 0, abs(heads)
    rows = value.shape[0]
    if rows % (2 * heads):
        raise ValueError(f"{rows} rows are not a multiple of 2 x {heads} heads")
    half = rows // heads // 2
    split = (heads, half, 2) if forward else (heads, 2, half)
    return value.reshape(*split, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def parse(text: str) -> Rule:
    names, *options = text.split(";")
    old, equals, new = names.partition("=")
    if not equals or "=" in new:
        raise CheckpointError(f"The rule {text!r} is not a rule of a map. {_FORM}")
    values: dict[str, Any] = {}
    for option in options:
        key, _, value = option.strip().partition("=")
        try:
            values |= _OPTIONS[key](value)
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"The rule {text!r} has the invalid option {option!r}. Options are dim=D, "
                "sizes=4:1:1, groups=G, stack=E, transpose, rope=HEADS and unrope=HEADS."
            ) from error
    rule = Rule(text, _listed(old), _listed(new), **values)
    _check(rule)
    return rule


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _flag(text: str) -> bool:
    if text:
        raise ValueError(text)
    return True


_OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "dim": lambda text: {"dim": _count(text) if text != "0" else 0},
    "sizes": lambda text: {"sizes": tuple(_count(part) for part in text.split(":"))},
    "groups": lambda text: {"groups": _count(text)},
    "stack": lambda text: {"stack": _count(text)},
    "transpose": lambda text: {"transpose": _flag(text)},
    "rope": lambda text: {"rope": _count(text)},
    "unrope": lambda text: {"rope": -_count(text)},
}


def _check(rule: Rule) -> None:
    """Raise CheckpointError if a rule contradicts itself."""
    fault = None
    if len(rule.old) > 1 and len(rule.new) > 1:
        fault = "has several names on both sides: split and fuse in two imports"
    elif rule.sizes and len(rule.sizes) != len(rule.new):
        fault = f"has {len(rule.sizes)} sizes for {len(rule.new)} new names"
    elif rule.stack and (rule.dim or max(len(rule.old), len(rule.new)) % rule.stack):
        fault = f"has stack={rule.stack}, which needs dim=0 and a multiple of {rule.stack} names"
    elif rule.is_prefix and rule.action:
        fault = "changes values, and so must name whole tensors, not a prefix"
    elif not rule.is_prefix and not all((*rule.old, *rule.new)):
        fault = "has an empty name"
    else:
        slots = {slot for name in rule.old for slot in _SLOT.findall(name)}
        used = {slot for name in rule.new for slot in _SLOT.findall(name)}
        if any(set(_SLOT.findall(name)) != slots for name in rule.old):
            fault = "must have the same {...} in all its old names"
        elif used - slots:
            fault = f"uses {{{min(used - slots)}}}, which its old name does not have"
    if fault is not None:
        raise CheckpointError(f"The rule {rule.text!r} {fault}. {_FORM}")


# -- built-in maps -----------------------------------------------------------------------------


def _in_layer(name: str) -> str:
    """Expand `a.{b,c}.d` to the names of tensors in a layer of Transformers' Llama."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    names = [name] if found is None else [found[1] + n + found[3] for n in found[2].split(",")]
    return ",".join(f"model.layers.{{i}}.{name}" for name in names)


_LLAMA = (
    ("tok_embeddings.weight", "model.embed_tokens.weight", ""),
    ("norm.weight", "model.norm.weight", ""),
    ("output.weight", "lm_head.weight", ""),
    ("layers.{i}.attention.wq.weight", "model.layers.{i}.self_attn.q_proj.weight", "heads"),
    ("layers.{i}.attention.wk.weight", "model.layers.{i}.self_attn.k_proj.weight", "kv_heads"),
    ("layers.{i}.attention.wv.weight", "model.layers.{i}.self_attn.v_proj.weight", ""),
    ("layers.{i}.attention.wo.weight", "model.layers.{i}.self_attn.o_proj.weight", ""),
    ("layers.{i}.feed_forward.w1.weight", "model.layers.{i}.mlp.gate_proj.weight", ""),
    ("layers.{i}.feed_forward.w2.weight", "model.layers.{i}.mlp.down_proj.weight", ""),
    ("layers.{i}.feed_forward.w3.weight", "model.layers.{i}.mlp.up_proj.weight", ""),
    ("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight", ""),
    ("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight", ""),
)
"""Llama's names in Meta's format (and torchtitan's), in Transformers, and the heads to reorder."""

_MEGATRON = (
    ("embedding.word_embeddings.weight", "model.embed_tokens.weight", ""),
    ("decoder.final_layernorm.weight", "model.norm.weight", ""),
    ("output_layer.weight", "lm_head.weight", ""),
    *(
        (f"decoder.layers.{{i}}.{old}", _in_layer(new), option)
        for old, new, option in (
            ("self_attention.linear_qkv.weight", "self_attn.{q,k,v}_proj.weight", "groups"),
            ("self_attention.linear_qkv.bias", "self_attn.{q,k,v}_proj.bias", "groups"),
            ("self_attention.linear_proj.weight", "self_attn.o_proj.weight", ""),
            ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", ""),
            ("input_layernorm.weight", "input_layernorm.weight", ""),
            ("mlp.linear_fc1.weight", "mlp.{gate,up}_proj.weight", ""),
            ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", ""),
            ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", ""),
            ("mlp.linear_fc2.weight", "mlp.down_proj.weight", ""),
        )
    ),
)
"""Llama's names in Megatron-Core, which fuses norms with the layers after them, and Transformers'.

Each group of heads has its queries, key and value one after the other.
"""

_NANOTRON = (
    (
        "model.token_position_embeddings.pp_block.token_embedding.weight",
        "model.embed_tokens.weight",
        "",
    ),
    ("model.final_layer_norm.pp_block.weight", "model.norm.weight", ""),
    ("model.lm_head.pp_block.weight", "lm_head.weight", ""),
    *(
        (f"model.decoder.{{i}}.pp_block.{old}", _in_layer(new), option)
        for old, new, option in (
            ("attn.qkv_proj.weight", "self_attn.{q,k,v}_proj.weight", "sizes"),
            ("attn.o_proj.weight", "self_attn.o_proj.weight", ""),
            ("input_layernorm.weight", "input_layernorm.weight", ""),
            ("mlp.gate_up_proj.weight", "mlp.{gate,up}_proj.weight", ""),
            ("mlp.down_proj.weight", "mlp.down_proj.weight", ""),
            ("post_attention_layernorm.weight", "post_attention_layernorm.weight", ""),
        )
    ),
)
"""Llama's names in nanotron, and Transformers'."""

_GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
"""Modules of GPT-2 whose weights Transformers stores transposed (Conv1D)."""

BUILT_IN = {
    "llama-meta-to-hf": "Llama: Meta's and torchtitan's names to Transformers'",
    "llama-hf-to-meta": "Llama: Transformers' names to Meta's and torchtitan's",
    "llama-megatron-to-hf": "Llama: Megatron-Core's names to Transformers'",
    "llama-nanotron-to-hf": "Llama: nanotron's names to Transformers'",
    "gpt2-hf-to-linear": "GPT-2: Transformers' Conv1D weights to nn.Linear weights",
    "gpt2-linear-to-hf": "GPT-2: weights of nn.Linear to Transformers' Conv1D",
    "qkv-split": "self_attn.qkv_proj to q_proj, k_proj and v_proj",
    "qkv-fuse": "self_attn.q_proj, k_proj and v_proj to qkv_proj",
    "gate-up-split": "mlp.gate_up_proj to gate_proj and up_proj",
    "gate-up-fuse": "mlp.gate_proj and up_proj to gate_up_proj",
    "experts-fuse": "Mixtures of experts: Transformers' files to the tensors of its modules",
    "experts-split": "Mixtures of experts: tensors of Transformers' modules to its files",
}
"""Names of the built-in maps, with a description of each."""


_SEPARATE = ("mlp", "gate_proj", "up_proj", "down_proj")

EXPERTS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"), _SEPARATE),
}
"""Names in Transformers' files by model_type: the block, and an expert's gate, up and down."""


def rules_of(texts: Iterable[str], checkpoint: Checkpoint) -> list[Rule]:
    """Return the rules of a user's map.

    Args:
        texts: Rules, or names of built-in maps, such as "llama-meta-to-hf:heads=32,kv_heads=8".
            Missing head counts are read from the checkpoint's config.json.
        checkpoint: The checkpoint to which the rules are applied.

    Raises:
        CheckpointError: A rule is invalid, or a head count is unknown.
    """
    found: list[Rule] = []
    for text in texts:
        name, _, arguments = text.partition(":")
        if name not in BUILT_IN:
            if "=" not in text:
                raise CheckpointError(
                    f"There is no map {text!r}. Write a rule as OLD=NEW, or one of "
                    f"{', '.join(BUILT_IN)}."
                )
            found.append(parse(text))
            continue
        if name in ("experts-fuse", "experts-split"):
            rules = _of_experts(checkpoint, splits=name == "experts-split")
            if arguments:
                raise CheckpointError(f"The map {name} takes no arguments, not {arguments!r}.")
            if not rules:
                raise CheckpointError(
                    f"The map {name} finds no experts to change. It needs a config.json whose "
                    f"model_type is {', '.join(EXPERTS)}, and experts that are not "
                    f"{'split' if name == 'experts-split' else 'fused'} yet."
                )
            found += [replace(rule, map=name) for rule in rules]
            continue
        numbers = _Numbers(name, arguments, checkpoint)
        found += [replace(rule, map=name) for rule in _built_in(name, numbers)]
    return found


def _of_experts(checkpoint: Checkpoint, *, splits: bool) -> list[Rule]:
    """Return the rules between an expert's own tensors, as in files, and tensors (E, ...).

    The list is empty if the checkpoint has no such experts, or an unknown model_type. See
    transformers/conversion_mapping.py.
    """
    kind = _config_of(checkpoint).get("model_type")
    if not isinstance(kind, str) or kind not in EXPERTS:
        return []
    block, gate, up, down = EXPERTS[kind]
    # For each layer, the number of experts.
    numbers: dict[str, int] = {}
    form = (
        r"(.*)\.mlp\.experts\.down_proj"
        if splits
        else rf"(.*)\.{block}\.experts\.(\d{{1,9}})\.{down}\.weight"
    )
    for name, spec in checkpoint.model.specs.items():
        if len(spec.shape) == 2 + splits and (matched := re.fullmatch(form, name)) is not None:
            # With a larger number in a damaged name, parts are missing, which is an error below.
            number = (
                spec.shape[0] if splits else min(int(matched[2]), len(checkpoint.model.specs)) + 1
            )
            numbers[matched[1]] = max(number, numbers.get(matched[1], 0))
    rules = []
    for layer, number in numbers.items():
        for whole, parts in (("gate_up_proj", (gate, up)), ("down_proj", (down,))):
            several = ",".join(
                f"{layer}.{block}.experts.{e}.{part}.weight"
                for e in range(number)
                for part in parts
            )
            one = f"{layer}.mlp.experts.{whole}"
            old, new = (one, several) if splits else (several, one)
            rules.append(parse(f"{old}={new};stack={number}"))
        if block != "mlp":  # the router
            old, new = ("mlp", block) if splits else (block, "mlp")
            rules.append(parse(f"{layer}.{old}.={layer}.{new}."))
    return rules


def with_fused_experts(checkpoint: Checkpoint, names: Iterable[str]) -> TensorReader:
    """Return the model of `checkpoint` with experts in tensors (E, ...) if `names` has such ones.

    Transformers stores a file's experts one by one, and its modules hold them in one tensor.
    """
    if all(name in checkpoint.model.specs or ".mlp.experts." not in name for name in names):
        return checkpoint.model
    rules = _of_experts(checkpoint, splits=False)
    return _apply(checkpoint.model, plan(list(checkpoint.model.specs), rules, optional=True))


def _config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of the checkpoint's config.json, or {} if there is none."""
    try:
        config = json.loads(checkpoint.config.get("config.json", b"{}"))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


class _Numbers:
    """A model's head counts, given by the user or read from its config.json."""

    def __init__(self, name: str, arguments: str, checkpoint: Checkpoint) -> None:
        self._name = name
        try:
            pairs = [part.split("=") for part in arguments.split(",") if part]
            self._chosen = {key: _count(value) for key, value in pairs}
            if self._chosen.keys() - {"heads", "kv_heads"}:
                raise ValueError(arguments)
        except ValueError as error:
            raise CheckpointError(
                f"The map {name} takes heads=N and kv_heads=N, not {arguments!r}."
            ) from error
        # Formats without a config.json may state the numbers otherwise.
        facts = {key: int(n) for key, n in checkpoint.facts.items() if n.isdecimal()}
        self.is_interleaved = checkpoint.facts.get("rope_interleaved") == "True"
        self._config: Mapping[str, Any] = facts | _config_of(checkpoint)

    def heads(self, kind: str) -> int:
        """Return the number of attention heads (`heads`) or key and value heads (`kv_heads`)."""
        if kind in self._chosen:
            return self._chosen[kind]
        keys = ["num_attention_heads"]
        keys = ["num_key_value_heads", *keys] if kind == "kv_heads" else keys
        for key in keys:
            if type(value := self._config.get(key)) is int and value > 0:
                return value
        raise CheckpointError(
            f"The map {self._name} needs the number of heads, and the source has no config.json "
            f"that says it. Write {self._name}:heads=32,kv_heads=8."
        )


def _built_in(name: str, numbers: _Numbers) -> list[Rule]:
    if name in ("llama-megatron-to-hf", "llama-nanotron-to-hf"):
        q, kv = (numbers.heads(kind) for kind in ("heads", "kv_heads"))
        if q % kv:
            raise CheckpointError(
                f"The map {name} has {q} heads for {kv} heads of keys and values."
            )
        options = {"groups": f";groups={kv};sizes={q // kv}:1:1", "sizes": f";sizes={q}:{kv}:{kv}"}
        if numbers.is_interleaved:
            raise CheckpointError(
                f"The map {name} does not reorder rotary heads, but this model has "
                "rope_interleaved: true. Split its qkv_proj in one import, and reorder q_proj and "
                "k_proj in a second one: OLD=NEW;rope=HEADS."
            )
        table = _MEGATRON if "megatron" in name else _NANOTRON
        return [parse(f"{old}={new}{options.get(option, '')}") for old, new, option in table]
    if name.startswith("llama"):
        to_hf = name == "llama-meta-to-hf"
        rules = []
        for meta, hf, heads in _LLAMA:
            option = f";{'' if to_hf else 'un'}rope={numbers.heads(heads)}" if heads else ""
            rules.append(parse(f"{meta}={hf}{option}" if to_hf else f"{hf}={meta}{option}"))
        return rules
    if name.startswith("gpt2"):
        # A transposed matrix has the same name in both, with or without the prefix of the body.
        return [
            parse(f"{prefix}h.{{i}}.{module}.weight={prefix}h.{{i}}.{module}.weight;transpose")
            for prefix in ("transformer.", "")
            for module in _GPT2
        ]
    found = []
    parts: tuple[str, ...]
    for last in ("weight", "bias"):
        if name.startswith("qkv"):
            stem, parts, whole = "self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj"
            q, kv = (numbers.heads(kind) for kind in ("heads", "kv_heads"))
            sizes = f";sizes={q}:{kv}:{kv}" if name == "qkv-split" else ""
        else:
            stem, parts, whole, sizes = "mlp", ("gate_proj", "up_proj"), "gate_up_proj", ""
        base = f"model.layers.{{i}}.{stem}."
        several = ",".join(f"{base}{part}.{last}" for part in parts)
        one = f"{base}{whole}.{last}"
        found.append(parse(f"{one}={several}{sizes}" if "split" in name else f"{several}={one}"))
    return found


# -- applying rules ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """The effect of a map on one tensor, or on several tensors that the map fuses.

    Args:
        rule: The rule that matches, or None.
        old: Names in the source.
        new: New names.
    """

    rule: Rule | None
    old: tuple[str, ...]
    new: tuple[str, ...]


def plan(names: Sequence[str], rules: Sequence[Rule], optional: bool = False) -> list[Change]:
    """Return the changes that `rules` make to tensors, in the order of `names`.

    Args:
        names: Names of all tensors in the source.
        rules: The rules. The first one that matches a name is used.
        optional: True to accept rules that match no tensor.

    Raises:
        CheckpointError: Two tensors would get the same name, a part of a fused tensor is missing,
            or a rule matches no tensor.
    """
    known, done, used = set(names), set[str](), set[str]()
    # A rule for whole names is found by its names, because there may be one per tensor.
    by_name: dict[str, int] = {}
    others: list[int] = []
    for number, rule in enumerate(rules):
        if rule.is_prefix or any("{" in old for old in rule.old):
            others.append(number)
            continue
        for old in rule.old:
            by_name.setdefault(old, number)
    changes: list[Change] = []
    for name in names:
        if name in done:
            continue
        change = Change(None, (name,), (name,))
        for number in sorted([*others, *([by_name[name]] if name in by_name else [])]):
            rule = rules[number]
            matched = _match(rule, name)
            if matched is None:
                continue
            change = matched
            if lost := [part for part in matched.old if part not in known]:
                raise CheckpointError(
                    f"The rule {rule.text!r} fuses {name} with {', '.join(lost)}, which the source "
                    "does not have."
                )
            used.add(rule.map or rule.text)
            break
        done |= set(change.old)
        changes.append(change)
    new = sorted(name for change in changes for name in change.new)
    if twice := [one for one, other in pairwise(new) if one == other]:
        raise CheckpointError(f"The map gives two tensors the name {twice[0]!r}. Change its rules.")
    # Of a built-in map, some rule must match: not every model has biases, for example.
    unused = [rule.map or rule.text for rule in rules if (rule.map or rule.text) not in used]
    if unused and not optional:
        raise CheckpointError(
            f"The rule {unused[0]!r} matches no tensor. The source has {', '.join(names[:3])} and "
            f"so on: `shardwise checkpoint show` lists all {len(names)}."
        )
    return changes


def _match(rule: Rule, name: str) -> Change | None:
    """Return the change that `rule` makes to the tensor `name`, or None if it does not match."""
    for pattern in rule.old:
        form = _SLOT.sub(lambda slot: f"(?P<{slot[1]}>[^.]+)", _escape(pattern))
        found = re.match(form, name) if rule.is_prefix else re.fullmatch(form, name)
        if found is None:
            continue

        def fill(text: str, slots: Mapping[str, str] = found.groupdict()) -> str:
            return _SLOT.sub(lambda slot: slots[slot[1]], text)

        if rule.is_prefix:
            return Change(rule, (name,), (fill(rule.new[0]) + name[found.end() :],))
        old, new = (tuple(map(fill, side)) for side in (rule.old, rule.new))
        return Change(rule, old, new)
    return None


def _escape(pattern: str) -> str:
    """Escape a pattern for `re`, except for its {slots}. A slot may appear only once."""
    parts = _SLOT.split(pattern)
    return "".join(
        f"{{{part}}}" if number % 2 else re.escape(part) for number, part in enumerate(parts)
    )


class ChangedReader(TensorReader):
    """Reads tensors to which rules are applied. Caches only the result of the last change."""

    def __init__(self) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self._origin: dict[str, tuple[Rule, list[Leaf], int]] = {}
        self._last: tuple[tuple[int, str], list[Tensor]] | None = None

    def add(self, rule: Rule, leaves: list[Leaf], names: Sequence[str]) -> None:
        """Add the tensors that `rule` creates from `leaves`, under their new `names`."""
        # Compute the shapes without reading the values.
        shapes = rule.change([torch.empty(leaf.shape, device="meta") for leaf in leaves])
        dtypes = {leaf.spec.dtype for leaf in leaves}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"The rule {rule.text!r} fuses tensors of the dtypes {', '.join(sorted(dtypes))}."
            )
        for place, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            self.specs[name] = TensorSpec(name, min(dtypes), tuple(shape.shape))
            self._origin[name] = rule, leaves, place

    def read(self, name: str, first: int, into: Tensor) -> None:
        rule, leaves, place = self._origin[name]
        if rule.is_concatenation:
            _read_concatenation(leaves, first, into)
            return
        key = id(leaves), leaves[0].name
        if self._last is None or self._last[0] != key:
            self._last = None  # free the last result before the next is computed
            self._last = key, rule.change([leaf.value() for leaf in leaves])
        into.copy_(self._last[1][place].view(-1)[first : first + into.numel()])


def _read_concatenation(leaves: Sequence[Leaf], first: int, into: Tensor) -> None:
    """Read elements of the concatenation of `leaves`, and only from those that hold them."""
    start, end = 0, first + into.numel()
    for leaf in leaves:
        low, high = max(first, start), min(end, start + leaf.spec.numel)
        if low < high:
            leaf.reader.read(leaf.name, low - start, into[low - first : high - first])
        start += leaf.spec.numel


@dataclass
class _Renamed:
    leaves: dict[str, Leaf] = field(default_factory=dict)
    changed: ChangedReader = field(default_factory=ChangedReader)

    def add(self, change: Change, leaves: list[Leaf], names: Sequence[str]) -> None:
        if change.rule is None or not change.rule.action:
            self.leaves[names[0]] = leaves[0]
            return
        self.changed.add(change.rule, leaves, names)
        self.leaves |= {name: Leaf(self.changed, name) for name in names}


def apply(checkpoint: Checkpoint, rules: Sequence[Rule]) -> list[Change]:
    """Apply rules to a checkpoint's model and optimizer state, and return the changes.

    Optimizer state with one value per element is changed like its parameter. Raises CheckpointError
    if a rule cannot be applied.
    """
    changes = plan(list(checkpoint.model.specs), rules)
    if not rules:
        return changes
    # Positions refer to the order of the tensors before the change.
    optimizers = [named_by_order(checkpoint, one) or one for one in checkpoint.optimizers]
    if any(c.rule is not None and c.rule.action for c in changes) and any(
        one.is_by_position for one in optimizers
    ):
        raise CheckpointError(
            f"{checkpoint.path} stores optimizer state by position, which does not determine its "
            "parameters, so rules that split, fuse or transpose cannot be applied to it. Import "
            "only the weights: --model-only."
        )
    checkpoint.model = _apply(checkpoint.model, changes)
    renamed = {c.old[0]: c.new[0] for c in changes if len(c.old) == len(c.new) == 1}
    aliases = {}
    for alias, first in checkpoint.aliases.items():
        new = renamed.get(alias)
        if new is None:
            (change,) = plan([alias], rules, optional=True)
            new = change.new[0]
        aliases[new] = renamed.get(first, first)
    checkpoint.aliases = aliases
    for name, average in checkpoint.averages.items():
        own = plan(list(average.specs), rules, optional=True)
        checkpoint.averages[name] = _apply(average, own)
    checkpoint.optimizers = [
        optimizer if optimizer.is_by_position else _apply_to_optimizer(optimizer, rules)
        for optimizer in optimizers
    ]
    return changes


def _apply(tensors: TensorReader, changes: Sequence[Change]) -> MappedReader:
    found = _Renamed()
    for change in changes:
        found.add(change, [Leaf(tensors, name) for name in change.old], change.new)
    return MappedReader(found.leaves)


def _apply_to_optimizer(optimizer: SavedOptimizer, rules: Sequence[Rule]) -> SavedOptimizer:
    keys = [key for group in optimizer.groups for key in group.keys]
    known = list(dict.fromkeys([*keys, *optimizer.state]))
    changes = plan(known, rules, optional=True)
    new_names = {old: change.new for change in changes for old in change.old}
    groups = [
        OptimizerGroup(
            # A fused tensor is in the group of its parts, once.
            list(dict.fromkeys(name for key in group.keys for name in new_names[key])),
            group.options,
        )
        for group in optimizer.groups
    ]
    state: dict[Any, dict[str, Any]] = {}
    for change in changes:
        entries = [optimizer.state.get(name, {}) for name in change.old]
        for key in entries[0]:
            values = [entry[key] for entry in entries if key in entry]
            is_per_element = key in OF_ELEMENTS or key == _MASTER
            if not is_per_element or not all(isinstance(value, Leaf) for value in values):
                # A value of the whole parameter, such as the step count.
                for name in change.new:
                    state.setdefault(name, {})[key] = values[0]
                continue
            if len(values) != len(entries):
                raise CheckpointError(
                    f"{', '.join(change.old)} do not all have the optimizer state {key}, so they "
                    "cannot be fused."
                )
            found = _Renamed()
            found.add(change, values, change.new)
            for name, leaf in found.leaves.items():
                state.setdefault(name, {})[key] = leaf
    return SavedOptimizer(groups, state, optimizer.kind)
