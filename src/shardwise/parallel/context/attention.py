"""Runs attention on whole sequences, while the model's forward pass sees parts of them.

`torch.nn.functional.scaled_dot_product_attention` is replaced while an engine with `--context`
exists. The replacement exchanges heads inside the engine's model, and in its forward passes that
the backward pass recomputes. Code that imported the function by name keeps the original; the trial
(sequence_trial.py) finds and refuses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.errors import ModelError, UsageError
from shardwise.parallel.context.heads_exchange import gather_tokens, to_heads, to_parts
from shardwise.world.current_batch import CurrentBatch
from shardwise.world.sequence_parts import lengths_of


class _Where(Enum):
    OUTSIDE = "outside of the engine's model"
    PARTS = "in a forward pass on parts of sequences"
    WHOLE = "in a trial on whole sequences"


class ContextRun:
    """Connects an engine's model with the ranks that have parts of the same sequences.

    Args:
        group: The ranks of the context group, in the order of the parts.
        current_batch: Knows the length of the current sequences.
    """

    def __init__(self, group: Collectives, current_batch: CurrentBatch) -> None:
        self.group = group
        self.lengths: list[int] = []
        """The length of each rank's part in the last forward pass."""
        self.weight: float | Tensor = 1.0
        """Weight of the loss of the current backward pass. If it is 0, its gradients are too."""
        self._current_batch = current_batch
        self._where = _Where.OUTSIDE
        self._awaited: set[tuple[int, ...]] = set()
        """The `lengths` of training forward passes since the last backward pass."""
        self._plain: Callable[..., Tensor] | None = None
        self._had_fast_path = False

    # -- the replacement ------------------------------------------------------------------

    def install(self) -> None:
        """Replace torch's attention function. Raises UsageError if another engine has."""
        plain = F.scaled_dot_product_attention
        if getattr(plain, "__name__", "") == _NAME:
            raise UsageError(
                f"--context {self.group.size} with two engines at once is not possible yet. Close "
                "the first one: engine.close()."
            )
        self._plain = plain
        run = self

        def exchanging_attention(*args: Any, **kwargs: Any) -> Tensor:
            return run._attend(*args, **kwargs)

        F.scaled_dot_product_attention = exchanging_attention
        # torch's fused encoder layers compute attention without calling the function.
        self._had_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def uninstall(self) -> None:
        """Restore torch's function."""
        if self._plain is not None:
            F.scaled_dot_product_attention = self._plain
            torch.backends.mha.set_fastpath_enabled(self._had_fast_path)
            self._plain = None

    # -- forward passes -------------------------------------------------------------------

    @contextmanager
    def on_whole_sequences(self) -> Iterator[None]:
        """Use plain attention inside the block."""
        with self._being(_Where.WHOLE):
            yield

    @contextmanager
    def on_parts(self, lengths: list[int]) -> Iterator[None]:
        """Exchange heads inside the block, for parts of these `lengths`."""
        before, self.lengths = self.lengths, lengths
        try:
            with self._being(_Where.PARTS):
                yield
        finally:
            self.lengths = before

    @contextmanager
    def _being(self, where: _Where) -> Iterator[None]:
        before, self._where = self._where, where
        try:
            yield
        finally:
            self._where = before

    def enter(self, lengths: list[int]) -> None:
        """Begin a forward pass of the model on parts of these `lengths`."""
        self.lengths, self._where = lengths, _Where.PARTS
        if torch.is_grad_enabled():
            self._awaited.add(tuple(lengths))

    def leave(self) -> None:
        """End a forward pass of the model, also after an error."""
        self._where = _Where.OUTSIDE

    def lengths_now(self, *, training: bool) -> list[int]:
        """Return the length of each rank's part of the current batch, or [] if it is not cut."""
        batch = self._current_batch.batch_of_forward(training=training)
        if batch is None or not batch.sequence:
            return []
        return lengths_of(batch.sequence, self.group.size)

    def begin_backward(self, weight: float | Tensor) -> None:
        """Begin a backward pass of a loss with this `weight`."""
        self.weight = weight

    def end_backward(self) -> None:
        """End a backward pass."""
        self._awaited.clear()

    # -- attention ------------------------------------------------------------------------

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert self._plain is not None
        plain = self._plain
        recomputed = torch._C._current_graph_task_id() != -1  # a backward pass is running
        if self._where is _Where.WHOLE or (self._where is _Where.OUTSIDE and not recomputed):
            if self._where is _Where.OUTSIDE:
                self._check_outside(query)
            return plain(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if self._where is _Where.OUTSIDE and len(self._awaited) > 1:
            raise UsageError(
                "Several forward passes of different lengths before one backward pass, which "
                f"recomputes them: with --context {self.group.size}, call engine.backward after "
                "each, or use --activations kept."
            )
        self._check(query, key, value, dropout_p)
        size = self.group.size
        if enable_gqa and key.size(1) % size:
            # Repeat heads until every rank has its own. Autograd adds their gradients.
            key = key.repeat_interleave(query.size(1) // key.size(1), 1)
            value = value.repeat_interleave(query.size(1) // value.size(1), 1)
        mask = None if attn_mask is None else self._whole_mask(attn_mask)
        q, k, v = to_heads([query, key, value], self.lengths, self.group)
        # Heads of a group stay together: the ranks take contiguous heads of both kinds.
        out = plain(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa and q.size(1) != k.size(1),
        )
        return to_parts(out, self.lengths, self.group)

    def _whole_mask(self, mask: Tensor) -> Tensor:
        """Return the mask of whole sequences, given one of this rank's keys for all queries."""
        own = self.lengths[self.group.rank]
        queries = mask.size(-2) if mask.ndim > 1 else 1
        heads = mask.size(-3) if mask.ndim > 2 else 1
        if mask.requires_grad:
            raise self._error(f"an attention mask of shape {tuple(mask.shape)} needs a gradient")
        if queries != 1 or heads != 1 or mask.size(-1) not in (1, own):
            raise self._error(
                f"an attention mask of shape {tuple(mask.shape)} is made from this worker's "
                f"{own} of {sum(self.lengths)} tokens. Pass is_causal=True, or a mask of keys of "
                "shape (rows, 1, 1, length)"
            )
        # A part has at least two tokens, so a mask of one key is for all of them.
        return mask if mask.size(-1) == 1 else gather_tokens(mask, self.lengths, self.group)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> None:
        size, own = self.group.size, self.lengths[self.group.rank]
        if any(each.ndim != 4 for each in (query, key, value)):
            raise self._error(
                f"attention over a query of shape {tuple(query.shape)}: pass (rows, heads, length, "
                "features)"
            )
        lengths = query.size(2), key.size(2), value.size(2)
        if lengths != (own,) * 3:
            raise self._error(
                f"attention over queries, keys and values of lengths {lengths}, but this worker "
                f"has {own} of {sum(self.lengths)} tokens: cross-attention and caches of keys "
                "are not possible yet"
            )
        if query.size(1) % size:
            fits = [n for n in range(1, query.size(1) + 1) if query.size(1) % n == 0]
            raise self._error(
                f"{query.size(1)} attention heads cannot be spread evenly. Write --context with "
                f"one of {', '.join(map(str, fits))}"
            )
        if query.size(0) != key.size(0):
            raise self._error(
                f"attention over {query.size(0)} rows of queries and {key.size(0)} of keys"
            )
        if dropout > 0:
            raise self._error(f"attention with dropout {dropout} is not possible yet: set it to 0")

    def _check_outside(self, query: Tensor) -> None:
        """Raise ModelError for attention over parts of sequences, but outside of the model."""
        lengths = self.lengths_now(training=torch.is_grad_enabled())
        if lengths and query.ndim > 1 and query.size(-2) == lengths[self.group.rank]:
            raise self._error(
                f"attention over {query.size(-2)} of {sum(lengths)} tokens outside of the "
                "engine's model. Call it in the model's forward, or on whole sequences"
            )

    def _error(self, what: str) -> ModelError:
        return ModelError(f"--context {self.group.size}: {what} ({_users_line()}).")


_NAME = "exchanging_attention"


def _users_line() -> str:
    """Return FILE:LINE of the innermost frame outside of torch and this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != __name__ and name.split(".")[0] != "torch":
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


class DropsUnweighted(torch.autograd.Function):
    """The identity. Its gradient is 0 if the loss has weight 0, because it may be NaN (0 / 0)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, run: ContextRun) -> Tensor:
        ctx.run = run
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = ctx.run.weight
        if isinstance(weight, Tensor):  # on an accelerator: don't read it
            return torch.where(weight.to(grad.device) > 0, grad, 0), None
        return (grad if weight else torch.zeros_like(grad)), None
