"""Computes attention over full sequences, while the model's forward pass sees only parts of them.

While an engine with `--context` exists, `torch.nn.functional.scaled_dot_product_attention` is
replaced. The replacement takes effect inside the engine's model, and also when the backward pass
recomputes the model's forward passes. Other calls go to torch's own function, except that attention
over parts of sequences outside the model raises an error. Code that imported the function by name
still calls the original. The trial in sequence_trial.py detects and rejects such code.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.comm import Collectives
from shardwise.errors import ModelError, UsageError
from shardwise.model.compilation import Compiler
from shardwise.model.unit_hooks import untraced
from shardwise.parallel.context.compiled_exchange import TracedGroup, traced_group
from shardwise.parallel.context.methods import AttentionCall, CausalBiases, attend, costs
from shardwise.world.current_batch import CurrentBatch
from shardwise.world.sequence_parts import Sequences, lengths_of

_NUMBERS = count(1)
"""Numbers of forward passes, also of other runs."""


class _Where(Enum):
    OUTSIDE = "outside of the engine's model"
    PARTS = "in a forward pass on parts of sequences"
    WHOLE = "in a trial on whole sequences"
    HEADS = "in a module that runs on whole sequences for some heads"


class ContextRun:
    """Connects an engine's model to the ranks that hold parts of the same sequences.

    Args:
        group: The ranks of the context group, in the order of the parts.
        current_batch: Provides the length of the current sequences.
        method: "auto", "ulysses" or "gathered".
        in_stages: True if the model's layers are on several ranks (`--pipeline`), which run layers
            of other ranks on fake tensors to learn their shapes.
        splits_heads: True if a rank may have some of the model's heads (`--tensor`).
    """

    def __init__(
        self,
        group: Collectives,
        current_batch: CurrentBatch,
        method: str,
        *,
        in_stages: bool = False,
        splits_heads: bool = False,
    ) -> None:
        self.group, self.in_stages, self.splits_heads = group, in_stages, splits_heads
        self.method: str | None = None
        """The method of the last attention call: "ulysses" or "gathered"."""
        self.costs: dict[str, float] = {}
        """The bytes that a rank sends for the last attention call, by possible method."""
        self.agree: Callable[[str, str | None], None] | None = None
        """In a trial: shares a call's place and problem, so that all ranks stop together."""
        self.lengths: list[int] = []
        """The length of each rank's part in the running forward pass. Between forward passes, its
        length in the last training pass, which the backward pass may recompute."""
        self._training_lengths: list[int] = []
        self.total = 0
        """Number of tokens of the current sequences, also while a trial runs on the first ones."""
        self.captured: dict[Any, set[frozenset[int]]] = {}
        """The sequence dimensions of tensors that the mods of flex attention capture, by the kind
        and code of a mod, and the name and number of dimensions of a tensor. A set has several
        members if layers differ."""
        self.checked_masks = 0
        """Number of masks of flex attention whose blocks were checked."""
        self.number = 0
        """The number of the running or last forward pass, unique in this process."""
        self.calls = 0
        """Number of attention calls in the last forward pass, or in a trial's."""
        self.weight: float | Tensor = 1.0
        """Weight of the loss of the current backward pass. With weight 0, gradients are 0."""
        self._current_batch = current_batch
        self._where = _Where.OUTSIDE
        self._awaited: set[tuple[int, ...]] = set()
        """The `lengths` of training forward passes since the last backward pass."""
        self._method = method
        self._biases = CausalBiases()
        self.traced_group: TracedGroup | None = None
        """Stands for `group` while a compiled unit is traced."""

    def install(self) -> None:
        """Replace torch's attention function, unless another run has already replaced it."""
        _REPLACEMENT.add(self)

    def uninstall(self) -> None:
        """Restore torch's attention function, unless another run still needs the replacement."""
        self._biases.clear()
        _REPLACEMENT.remove(self)

    # -- forward passes -------------------------------------------------------------------

    @property
    def is_on_whole_sequences(self) -> bool:
        """True while a trial runs a forward pass on full sequences."""
        return self._where is _Where.WHOLE

    @contextmanager
    def on_whole_sequences(self) -> Iterator[None]:
        """Context manager: the model runs on full sequences, with torch's own attention."""
        with self._being(_Where.WHOLE):
            yield

    @property
    def is_on_parts(self) -> bool:
        """True if attention exchanges tokens between ranks."""
        return not (self.is_on_whole_sequences or self.is_inside_heads) and self.agree is None

    @property
    def is_inside_heads(self) -> bool:
        """True inside a block of `inside_heads`."""
        return self._where is _Where.HEADS

    @contextmanager
    def inside_heads(self) -> Iterator[None]:
        """Context manager: attention computes on the tensors that it gets."""
        # A compiled unit enters it between two graphs. The graph that follows exchanges nothing.
        before, _REPLACEMENT.compiled = _REPLACEMENT.compiled, None
        try:
            with self._being(_Where.HEADS):
                yield
        finally:
            _REPLACEMENT.compiled = before

    @contextmanager
    def on_parts(self, lengths: list[int]) -> Iterator[None]:
        """Context manager: attention exchanges tokens between ranks.

        `lengths` holds the length of each rank's part.
        """
        before, self.lengths, self.calls = self.lengths, lengths, 0
        self.number = next(_NUMBERS)
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
        """Begin a forward pass of the model. `lengths` holds the length of each rank's part."""
        self.lengths, self._where, self.calls = lengths, _Where.PARTS, 0
        self.number = next(_NUMBERS)
        self.total = sum(lengths)
        _REPLACEMENT.entered.append(self)
        if torch.is_grad_enabled():
            self._awaited.add(tuple(lengths))
            self._training_lengths = lengths

    def leave(self) -> None:
        """End the model's forward pass. Also called if it raised an error."""
        self._where, self.lengths = _Where.OUTSIDE, self._training_lengths
        if self in _REPLACEMENT.entered:
            _REPLACEMENT.entered.remove(self)

    def sequences_now(self, *, training: bool) -> Sequences | None:
        """Return the full sequences of the current batch, or None if it is not split."""
        batch = self._current_batch.batch_of_forward(training=training)
        return None if batch is None else batch.sequence

    def sequences_in_use(self, *, training: bool) -> Sequences | None:
        """As `sequences_now`, but return None if the script has probably finished with them."""
        batch = self._current_batch.batch_of_forward(training=training)
        # A loop over a Loader ends. A batch of world.share stays current until the next one.
        is_used = batch is not None and self._current_batch.is_used(batch)
        return None if is_used else self.sequences_now(training=training)

    def lengths_of(self, sequences: Sequences) -> list[int]:
        """Return the length of each rank's part of `sequences`."""
        return lengths_of(sequences.length, self.group.size)

    @contextmanager
    def backward(self, weight: float | Tensor) -> Iterator[None]:
        """Context manager for the backward pass of a loss with weight `weight`."""
        self.weight = weight
        _REPLACEMENT.backward = self
        try:
            yield
        finally:
            self._awaited.clear()
            _REPLACEMENT.backward = None

    # -- attention ------------------------------------------------------------------------

    def attend(self, call: AttentionCall) -> Any:
        """Compute attention for this rank's tokens. Collective. Raises ModelError if impossible.

        Returns what `call.compute` returns, for all heads and this rank's queries.
        """
        has_heads = call.query.ndim > 3
        if not has_heads and call.query.ndim == 3:
            call = call.with_heads()
        if self.agree is not None:
            call = replace(call, dropout=0.0)
        is_traced = torch.compiler.is_compiling()
        if is_traced:
            # A graph that counted calls would be compiled again for each number.
            self.calls = 1
        else:
            self.note_call("attention", self._problem(call))
        call = call.with_wide_mask()
        self.costs = costs(call, self.lengths)
        # Bytes decide rather than a measured time, so that a resumed run computes the same bits.
        by_heads = self.costs.get("ulysses", math.inf)
        prefers = by_heads < math.inf and call.prefers_heads
        cheapest = "ulysses" if prefers or by_heads <= self.costs["gathered"] else "gathered"
        self.method = cheapest if self._method == "auto" else self._method
        group = self.traced_group if is_traced else self.group
        assert group is not None
        result = attend(call, self.lengths, group, self.method, self._biases)
        return result if has_heads else result.squeeze(1)

    def can_trace(self, call: AttentionCall) -> bool:
        """Return whether `call`, which a compiled unit makes, can be a part of its graph."""
        # Eager code raises the error for a problem.
        return call.query.ndim == 4 and self._problem(call) is None

    def note_call(self, place: str, problem: str | None) -> None:
        """Count an attention call. Raises ModelError if `problem` says why it is impossible.

        In a trial, all ranks compare their `place` in the model, and stop together.
        """
        if self.agree is not None:
            self.agree(place, problem)
        elif problem is not None:
            raise self.error(problem)
        self.calls += 1

    def _problem(self, call: AttentionCall) -> str | None:
        """Return a message saying why `call` cannot run on parts, or None if it can."""
        query, key, value, mask = call.query, call.key, call.value, call.mask
        own, total = self.lengths[self.group.rank], sum(self.lengths)
        if any(each.ndim != 4 for each in (query, key, value)):
            return (
                f"attention over a query of shape {tuple(query.shape)}: pass (rows, heads, length, "
                "features)"
            )
        lengths = query.size(2), key.size(2), value.size(2)
        if lengths != (own,) * 3:
            return (
                f"attention over queries, keys and values of lengths {lengths}, but this worker "
                f"has {own} of {total} tokens. Cross-attention and caches of keys are not possible "
                "yet: train without --context. If the batch's sequences are not along dimension 1, "
                "pass their dimension: sw.Loader(..., sequence_dim=0) or world.share(batch, dim=1, "
                "sequence_dim=0)"
            )
        heads, groups = query.size(1), key.size(1)
        if self._method == "ulysses" and heads % self.group.size:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            return (
                f"{heads} attention heads cannot be spread evenly. Write --context-method "
                f"gathered, or --context with one of {', '.join(map(str, fits))}"
            )
        if heads % groups or value.size(1) != groups:
            return f"attention over {heads} heads of queries and {groups} of keys"
        if query.size(0) != key.size(0) or query.size(0) != value.size(0):
            return f"attention over {query.size(0)} rows of queries and {key.size(0)} of keys"
        if mask is None:
            return call.problem()
        if call.is_causal:
            return "attention with attn_mask and is_causal=True: put both into the mask"
        sizes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if sizes[1] not in (1, heads):
            return (
                f"an attention mask of {sizes[1]} heads for queries of {heads}. Pass a mask of one "
                "head, or start without --tensor"
            )
        # A part has at least two tokens, so one query or one key means all of them.
        possible = [(1, 1), (1, own), (1, total), (own, 1), (own, total), (total, 1)]
        if sizes[2:] not in [*possible, (total, total)]:
            return (
                f"an attention mask of shape {tuple(mask.shape)} is made from this worker's {own} "
                f"of {total} tokens. Pass is_causal=True, or a mask in the batch: of keys with "
                "shape (rows, 1, 1, length), or of pairs (also for ALiBi and other biases) with "
                "shape (rows, 1 or heads, length, length)"
            )
        return None

    def check_recomputed(self) -> None:
        """Raise UsageError if it is unclear which of several forward passes is recomputed."""
        if len(self._awaited) > 1:
            raise UsageError(
                "Several forward passes of different lengths before one backward pass, which "
                f"recomputes them: with --context {self.group.size}, call engine.backward after "
                "each, or use --activations kept."
            )

    def check_outside(self, query: Tensor) -> None:
        """Raise ModelError if `query`, of a call outside the model, has a part's length."""
        sequences = self.sequences_in_use(training=torch.is_grad_enabled())
        own = 0 if sequences is None else self.lengths_of(sequences)[self.group.rank]
        if sequences is not None and query.ndim > 1 and query.size(-2) == own:
            raise self.error(
                f"attention over {own} of {sequences.length} tokens outside of the "
                "engine's model. Call it in the model's forward, or on whole sequences"
            )

    def error(self, what: str) -> ModelError:
        """Return an error with the message `what` about the running call of attention."""
        return ModelError(f"--context {self.group.size}: {what} ({_users_line()}).")


def _users_line() -> str:
    """Return FILE:LINE of the innermost frame that is neither in torch nor in this package."""
    frame, package = sys._getframe(1), __name__.rpartition(".")[0]
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(package) and name.split(".")[0] != "torch":
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


class _Replacement:
    """Replaces torch's attention function while any run exists, and finds the run for each call."""

    def __init__(self) -> None:
        self.runs: list[ContextRun] = []
        """The runs of all engines of this process, the oldest first."""
        self.entered: list[ContextRun] = []
        """The runs whose models are in a forward pass, the innermost last."""
        self.backward: ContextRun | None = None
        """The run whose backward pass is running, and may recompute forward passes."""
        self.compiled: ContextRun | None = None
        """In a compiled unit, the run whose attention becomes a part of the unit's graph."""
        self.plain: Callable[..., Tensor] = F.scaled_dot_product_attention
        # A bound method is a new object each time, and torch's namespace must have one of them.
        self._function = self._attend
        self._had_fast_path = False

    def add(self, run: ContextRun) -> None:
        if not self.runs:
            self.plain, F.scaled_dot_product_attention = (
                F.scaled_dot_product_attention,
                self._function,
            )
            # torch's fused encoder layers compute attention without calling the function.
            self._had_fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        self.runs.append(run)

    def remove(self, run: ContextRun) -> None:
        if run not in self.runs:
            return
        self.runs.remove(run)
        if not self.runs:
            torch.backends.mha.set_fastpath_enabled(self._had_fast_path)
            # If other code has replaced the function since, it still calls this replacement, which
            # then passes all calls on.
            if F.scaled_dot_product_attention is self._function:
                F.scaled_dot_product_attention = self.plain

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
        run = self.compiled
        if run is not None and torch.compiler.is_compiling():
            call = AttentionCall(
                query, key, value, attn_mask, dropout_p, is_causal, scale, self.plain
            )
            if run.can_trace(call):
                traced: Tensor = run.attend(call)
                return traced
        result: Tensor = self._attend_eagerly(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        return result

    # torch.compile calls it between two graphs.
    @untraced
    def _attend_eagerly(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        if has_torch_function((query, key, value)):
            # Attention outside all layers of a pipeline takes stage tensors, and runs on one stage.
            result: Tensor = handle_torch_function(
                self._function,
                (query, key, value),
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            return result
        run = active_run()
        if run is None and self.runs:
            self.runs[-1].check_outside(query)
        if run is not None and run.in_stages and isinstance(query, FakeTensor):
            # The layer runs on another stage, whose ranks exchange the tokens.
            return self.plain(query, key, value, scale=scale, enable_gqa=enable_gqa)
        if run is None or run.is_on_whole_sequences or run.is_inside_heads:
            draws = run is None or (run.agree is None and not run.is_on_whole_sequences)
            return self.plain(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p if draws else 0.0,  # a trial draws no numbers
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, self.plain)
        attended: Tensor = run.attend(call)
        return attended


_REPLACEMENT = _Replacement()


def active_run() -> ContextRun | None:
    """Return the run whose model is in a forward pass, or whose backward pass recomputes one."""
    if _REPLACEMENT.entered:
        return _REPLACEMENT.entered[-1]
    if torch._C._current_graph_task_id() == -1:  # no backward pass is running
        return None
    run = _REPLACEMENT.backward
    if run is not None:
        run.check_recomputed()
    return run


def compiler_of(compiler: Compiler, run: ContextRun) -> Compiler:
    """Return a compiler of units that includes the attention of `run` in their graphs."""
    run.traced_group = traced_group(run.group)

    def compile_unit(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled = compiler(unit, forward)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # the script compiles the model as a whole
                return compiled(*args, **kwargs)
            before, active = _REPLACEMENT.compiled, active_run()
            _REPLACEMENT.compiled = active if active is run and run.is_on_parts else None
            try:
                return compiled(*args, **kwargs)
            finally:
                _REPLACEMENT.compiled = before

        return call

    return compile_unit


def drop_unweighted(output: Tensor, run: ContextRun) -> Tensor:
    """Return `output`, whose gradient is 0 rather than NaN (0 / 0) if the loss has weight 0."""
    if has_torch_function((output,)):
        result: Tensor = handle_torch_function(drop_unweighted, (output,), output, run)
        return result
    return _DropsUnweighted.apply(output, run)  # type: ignore[no-any-return, no-untyped-call]


class _DropsUnweighted(torch.autograd.Function):
    """The function of `drop_unweighted`."""

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
