"""Adds inputs that a Transformers model would otherwise compute from full sequences.

Such a model computes positions, masks and shifted labels from the length of its input. To run on a
part of the sequences, the model receives them as keyword arguments of its `forward`:

    position_ids     each token's position in its sequence
    attention_mask   padding, packed documents and sliding windows, for this rank's queries and all
                     keys. It is added only if the sequences need it, because a causal model without
                     a mask uses faster kernels. Flex attention always gets one for all queries.
    shift_labels     for each token the label of the next token, which may be on the next rank
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from shardwise.comm import Collectives
from shardwise.errors import ModelError
from shardwise.parallel.context.flex_attention import whole_mask
from shardwise.parallel.context.token_exchange import gather

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of a forward pass."""

IGNORED = -100
"""The label that losses ignore."""

CHECKED = 16
"""Number of masks that are read before flash attention, which waits for a GPU. A later mask with
padding stops the GPU's kernels with an assertion instead."""


class TransformersInputs:
    """Adds the arguments that a model needs to run on parts, if it is a Transformers model.

    Args:
        model: The model, which may be wrapped in an adapter such as PEFT's.
    """

    def __init__(self, model: nn.Module) -> None:
        # Attributes that every PreTrainedModel has, also through PEFT, so nothing is imported.
        is_one = hasattr(model, "loss_type") and hasattr(model, "config")
        config: Any = model.config if is_one else None
        if callable(of_text := getattr(config, "get_text_config", None)):
            config = of_text()  # of a model that also takes images
        self._model, self._config = model, config
        self._is_one = is_one
        self._parameters = list(_parameters(model)) if is_one else []
        kernel = getattr(config, "_attn_implementation", None) or ""
        self.flash: str = kernel if "flash" in kernel else ""
        """Name of the flash kernel that the model uses, or ""."""
        self._is_flex = "flex" in kernel
        if "eager" in kernel:
            raise ModelError(
                f"--context cannot be combined with attn_implementation={kernel!r}, which computes "
                'attention on this worker\'s tokens only. Write attn_implementation="sdpa".'
            )
        self._checked = 0
        """Number of masks whose values were read, and for which the device had to finish."""
        self._is_causal = any(getattr(each, "is_causal", False) for each in model.modules())
        self._shifts = takes_shifted_labels(model)
        self._window: int | None = getattr(config, "sliding_window", None)
        self._chunk: int | None = getattr(config, "attention_chunk_size", None)
        self._layers: set[str] = set(getattr(config, "layer_types", None) or ())

    def complete(self, inputs: Inputs, lengths: Sequence[int], group: Collectives) -> Inputs:
        """Add the arguments that a forward pass on parts needs. Return all arguments.

        Collective for Transformers models.

        Args:
            inputs: The positional and keyword arguments, with this rank's parts.
            lengths: The length of each rank's part.
            group: The ranks, in the order of the parts.

        Raises:
            ModelError: The model needs a mask that cannot be computed from its keyword arguments.
        """
        args, given = inputs
        kwargs = {**dict(zip(self._parameters, args, strict=False)), **given}
        ids = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        if not self._is_one or not isinstance(ids, Tensor):
            return inputs
        self._check_frequencies(sum(lengths))
        positions = kwargs.get("position_ids")
        if "position_ids" in self._parameters and positions is None:
            first, own = sum(lengths[: group.rank]), lengths[group.rank]
            places = torch.arange(first, first + own, device=ids.device)
            kwargs["position_ids"] = places.expand(ids.size(0), own)
        mask = kwargs.get("attention_mask")
        if self.flash:
            self._check_no_padding(mask, lengths, group)
            kwargs["attention_mask"] = None
        elif mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
            # A model that receives None creates no mask, unless its own tokens need one.
            kwargs["attention_mask"] = self._mask(kwargs, ids, positions, lengths, group)
        labels = kwargs.get("labels")
        if self._shifts and isinstance(labels, Tensor) and kwargs.get("shift_labels") is None:
            first_labels = gather(labels[:, :1], 1, [1] * group.size, group)  # (rows, ranks)
            end = torch.full_like(first_labels[:, :1], IGNORED)
            next_label = torch.cat([first_labels, end], 1)[:, group.rank + 1, None]
            kwargs["shift_labels"] = torch.cat([labels[:, 1:], next_label], 1)
        return (), kwargs

    def _check_no_padding(self, mask: Any, lengths: Sequence[int], group: Collectives) -> None:
        """Raise ModelError if any of the sequences has padding, which `mask` shows. Collective."""
        if mask is None:
            return
        problem = (
            f"--context {group.size} with attn_implementation={self.flash!r} takes no padding. "
            'Write attn_implementation="sdpa", or pack the documents of a batch '
            "(DataCollatorWithFlattening, or sw.Packing)."
        )
        if not _is_free_to_read(mask):
            if self._checked >= CHECKED:
                torch._assert_async(mask.all(), problem)
                return
            self._checked += 1
        if not bool(gather(mask, 1, lengths, group).all()):
            raise ModelError(problem)

    def _mask(
        self,
        kwargs: dict[str, Any],
        ids: Tensor,
        positions: Any,
        lengths: Sequence[int],
        group: Collectives,
    ) -> Any:
        """Return the mask for this rank's queries and all keys, or None if none is needed.

        For flex attention, return a BlockMask for all queries.

        `positions` are those that the script has passed, or None.
        """
        total, padding = sum(lengths), kwargs.get("attention_mask")
        if isinstance(positions, Tensor) and positions.ndim == 3:
            # Of the text, then of three axes of images. Without the first, models ignore documents.
            positions = positions[0] if positions.size(0) == 4 else None
        tokens = numbers = None  # (rows, total)
        if padding is not None:
            whole = gather(padding, 1, lengths, group).bool()
            # Every rank reads the whole sequences, so all of them decide the same.
            tokens = None if bool(whole.all()) else whole
        elif positions is not None and self._is_causal and not self._has_cache(kwargs):
            # Transformers starts a new document where positions do not follow each other, unless
            # it keeps keys and values in a cache.
            whole = gather(positions.expand(ids.size(0), -1), 1, lengths, group)
            starts = whole.diff(dim=1, prepend=whole[:, :1] - 1).ne(1)
            numbers = starts.cumsum(1) if bool(starts.any()) else None
        kind = self._local_kind(total)
        first = sum(lengths[: group.rank])
        queries = slice(first, first + lengths[group.rank])

        def mask(window: int | None) -> Any:
            masks = _Masks(tokens, numbers, window, is_causal=self._is_causal)
            if self._is_flex:
                return masks.of_blocks(ids, total)
            return masks.of_queries(ids, total, queries)

        if kind is not None and self._layers - {kind}:
            # Models with two kinds of layers take a mask for each.
            return {"full_attention": mask(None), kind: mask(self._window)}
        return mask(None if kind is None else self._window)

    def _has_cache(self, kwargs: dict[str, Any]) -> bool:
        """Return whether the model will create a key-value cache."""
        use_cache = kwargs.get("use_cache")
        if not (getattr(self._config, "use_cache", False) if use_cache is None else use_cache):
            return False
        checkpoints = any(
            getattr(m, "gradient_checkpointing", False) for m in self._model.modules()
        )
        return not (checkpoints and self._model.training and torch.is_grad_enabled())

    def _check_frequencies(self, total: int) -> None:
        """Raise ModelError if the model's rotary frequencies depend on the length of its input."""
        config = self._config
        known = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        for each in [known, *known.values()] if isinstance(known, dict) else []:
            kind = each.get("rope_type", each.get("type")) if isinstance(each, dict) else None
            if kind not in ("dynamic", "longrope"):
                continue
            longest = getattr(config, "max_position_embeddings", 0)
            if kind == "longrope":
                name = "original_max_position_embeddings"
                longest = each.get(name) or getattr(config, name, None) or longest
            if total > longest:
                raise ModelError(
                    f"rotary positions of the type {kind!r} change their frequencies for sequences "
                    f"of more than {longest} tokens, and these have {total}. Each worker would "
                    "choose them by the last position of its part. Use shorter sequences, or "
                    'another type such as "yarn" or "linear".'
                )

    def _local_kind(self, total: int) -> str | None:
        """Return the layer type whose attention window is shorter than `total` tokens, or None."""
        if self._chunk is not None and total > self._chunk:
            raise ModelError(
                f"attention in chunks of {self._chunk} tokens cannot be combined with sequences of "
                f"{total} tokens. Use shorter sequences, or a model without attention_chunk_size."
            )
        if self._window is None or total < self._window:
            return None
        if not self._layers <= {"full_attention", "sliding_attention"} or not self._is_causal:
            raise ModelError(
                f"this model has a window of {self._window} tokens, and sequences have {total}. "
                "Pass an attention_mask of shape (rows, 1, length, length) in the batch."
            )
        return "sliding_attention" if self._layers != {"full_attention"} else None


@dataclass(frozen=True)
class _Masks:
    """Which keys a query of whole sequences may attend to.

    tokens    (rows, length), False for padding, or None
    numbers   (rows, length), the documents, or None
    window    the number of keys up to a query's own, or None for all
    """

    tokens: Tensor | None
    numbers: Tensor | None
    window: int | None
    is_causal: bool

    def of_queries(self, ids: Tensor, total: int, queries: slice) -> Tensor | None:
        """Return a mask (rows, 1, queries, total), a shape that broadcasts to it, or None."""
        keys = torch.arange(total, device=ids.device)
        places = keys[queries, None]
        allowed = None if self.tokens is None else self.tokens[:, None, None, :]
        if self.numbers is not None:
            allowed = (self.numbers[:, queries, None] == self.numbers[:, None, :])[:, None]
        if not self.is_causal or (allowed is None and self.window is None):
            return allowed
        causal = keys <= places
        if self.window is not None:
            causal = causal & (keys > places - self.window)
        causal = causal if allowed is None else allowed & causal
        return causal.expand(ids.size(0), 1, *causal.shape[-2:])

    def of_blocks(self, ids: Tensor, total: int) -> BlockMask:
        """Return the mask of all queries."""

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            allowed = kv <= q if self.is_causal else kv >= 0
            if self.tokens is not None:
                allowed = allowed & self.tokens[b, kv]
            if self.numbers is not None:
                allowed = allowed & (self.numbers[b, q] == self.numbers[b, kv])
            return allowed if self.window is None else allowed & (kv > q - self.window)

        return whole_mask(mask_mod, (len(ids), 1, total, total), None, ids.device)


def _is_free_to_read(tensor: Tensor) -> bool:
    """Return whether reading a value of `tensor` waits for no other operations."""
    return tensor.is_cpu


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the signature parameters of the model's `forward`, looking through any adapters."""
    base: Any = getattr(model, "get_base_model", None)
    forward = base().forward if callable(base) else model.forward
    return inspect.signature(forward).parameters


def _takes_any(model: nn.Module) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in _parameters(model).values())


def takes_shifted_labels(model: nn.Module) -> bool:
    """Return whether `model` shifts labels, and also accepts shifted ones."""
    # Without **kwargs, shifted labels would not reach the loss, and the trial says so.
    causal = None, "ForCausalLM", "ForConditionalGeneration"
    is_causal = getattr(model, "loss_type", "") in causal
    return is_causal and hasattr(model, "config") and _takes_any(model)


def weight_of(kwargs: dict[str, Any]) -> float | None:
    """Return the number of labels that count in the loss, or None if there are no labels."""
    labels = kwargs.get("shift_labels")
    labels = kwargs.get("labels") if labels is None else labels
    return float(labels.ne(IGNORED).sum()) if isinstance(labels, Tensor) else None


def has_added_mask(given: dict[str, Any], completed: dict[str, Any]) -> bool:
    """Return whether `completed` has an attention mask that `given` did not have."""
    mask = completed.get("attention_mask")
    return mask is not None and mask is not given.get("attention_mask")


def of_whole_sequences(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a trial's keyword arguments for whole sequences."""
    labels = kwargs.get("labels")
    if not kwargs.get("fused_lm_head") or not isinstance(labels, Tensor):
        return kwargs
    # TRL's head returns a value for each token only if it gets shifted labels.
    return {**kwargs, "shift_labels": F.pad(labels[:, 1:], (0, 1), value=IGNORED)}


def with_cases(kwargs: dict[str, Any], total: int, *, masked: bool) -> dict[str, Any]:
    """Return a copy of a trial's keyword arguments that covers what later batches may contain.

    Some labels are added, because the first tokens of a batch may be without labels.

    Args:
        kwargs: The keyword arguments with full sequences.
        total: The length of these sequences.
        masked: True to also add a padding token to `attention_mask`, or to split `position_ids`
            into two documents.
    """
    changed = dict(kwargs)
    labels = kwargs.get("labels")
    if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim == 2:
        changed["labels"] = labels.clone()
        every_second = changed["labels"][:, ::2]
        every_second[every_second == IGNORED] = 0
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if masked and isinstance(mask, Tensor):
        changed["attention_mask"] = mask.clone()
        changed["attention_mask"][-1, -1] = 0
    elif masked and isinstance(positions, Tensor):
        places, half = torch.arange(total, device=positions.device), total // 2
        documents = torch.where(places < half, places, places - half)
        changed["position_ids"] = documents.expand_as(positions).contiguous()
    return changed
