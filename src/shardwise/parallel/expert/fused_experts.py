"""Splits modules that hold all their experts in tensors (E, ...) across ranks.

Transformers' mixtures of experts have such modules: Mixtral, Qwen-MoE, OLMoE, DeepSeek and others.
The router runs first, so the module's `forward` receives the selected experts and gates:

    forward(hidden_states (T, D), top_k_index (T, k), top_k_weights (T, k)) -> (T, D)

The module keeps its class and its names. Its `forward` is replaced with one that sends each row to
the rank that holds the row's expert. That rank runs the module's own `forward`, with one expert per
row.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.layout.bucket_layout import Span
from shardwise.model import module_hooks
from shardwise.model.recomputation import once
from shardwise.model.unit_hooks import untraced
from shardwise.parallel.expert import compiled_experts
from shardwise.parallel.expert.dispatch import Exchange, Tally, TokenCopies, count_rows
from shardwise.parallel.expert.exact_experts import fresh, run_each, without_draws
from shardwise.parallel.expert.expert_counts import StepCounts
from shardwise.parallel.expert.router_losses import attach
from shardwise.parallel.expert.routing_run import RoutingRun
from shardwise.parallel.expert.token_share import ALONE, TokenShare
from shardwise.tiers.copy_stream import to_device

ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
"""Arguments of `forward` in Transformers: tokens, chosen experts, and gates."""

TOLERANCE = 1e-9
"""Largest relative difference in a trial that passes, in fp64."""


def is_fused(module: nn.Module) -> bool:
    """Return whether `module` appears to hold experts in tensors (E, ...)."""
    number = getattr(module, "num_experts", None)
    own = [p for p in module._parameters.values() if p is not None]
    if not isinstance(number, int) or not own:
        return False
    if tuple(inspect.signature(type(module).forward).parameters)[1:] not in ARGUMENTS:
        return False
    return all(p.ndim > 1 and p.shape[0] == number for p in own) and len(own) == len(
        list(module.parameters())
    )


def why_not(module: nn.Module) -> str | None:
    """Return why the experts of `module` cannot be split, or None if a trial has succeeded.

    The trial runs two experts with random weights in fp64: first together, then separately, as the
    ranks that hold them would. Outputs and all gradients must be equal.
    """
    if any(True for _ in module.buffers()):
        return "it has buffers"
    if "forward" in vars(module):  # the trial runs the class's, and so does exact mode
        return "its forward has been replaced"
    generator = torch.Generator().manual_seed(0)
    weights = {
        key: torch.randn(2, *p.shape[1:], generator=generator, dtype=torch.float64) / p.shape[-1]
        for key, p in module._parameters.items()
        if p is not None
    }
    width = _width(module)
    if width is None:
        return "its attribute hidden_dim or hidden_size is missing"
    rows = torch.randn(6, width, generator=generator, dtype=torch.float64)
    gates = torch.rand(6, 2, generator=generator, dtype=torch.float64)
    chosen = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [1, 0], [0, 1]])
    try:
        whole = _gradients(
            weights, rows, gates, lambda w, x, g: _forward_with(module, w)(x, chosen, g)
        )
        parts = _gradients(
            weights, rows, gates, lambda w, x, g: _one_by_one(module, w, x, chosen, g)
        )
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return f"its trial failed ({type(error).__name__}: {error})"
    for ours, theirs in zip(parts, whole, strict=True):
        if not torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE):
            return "two of its experts compute something else together than one by one"
    return None


def _width(module: nn.Module) -> int | None:
    names = ("hidden_dim", "hidden_size")
    return next((w for n in names if isinstance(w := getattr(module, n, None), int)), None)


def _forward_with(module: nn.Module, weights: dict[str, Tensor]) -> Any:
    """Return a function that runs the module's `forward` with `weights` as its parameters."""
    twin = copy.copy(module)
    # A module does not accept tensors with a graph as parameters, but its attributes may be any.
    twin.__dict__ = {**module.__dict__, "_parameters": {}, **weights}
    twin.__dict__["num_experts"] = next(iter(weights.values())).shape[0]
    # Transformers wraps `forward` to choose a kernel, and some kernels do not support fp64. The
    # function inside is the definition that all kernels implement.
    return partial(inspect.unwrap(type(module).forward), twin)


def _one_by_one(
    module: nn.Module, weights: dict[str, Tensor], rows: Tensor, chosen: Tensor, gates: Tensor
) -> Tensor:
    total = torch.zeros_like(rows)
    for index in range(2):
        own = {key: value[index : index + 1] for key, value in weights.items()}
        outputs = _each_once(_forward_with(module, own), rows, [len(rows)])
        gate = (gates * (chosen == index)).sum(1, keepdim=True)
        total = total + outputs * gate
    return total


def _gradients(weights: dict[str, Tensor], rows: Tensor, gates: Tensor, run: Any) -> list[Tensor]:
    """Call `run` on copies of the other arguments. Return the output and the copies' gradients."""
    fresh = {key: value.clone().requires_grad_() for key, value in weights.items()}
    inputs = [rows.clone().requires_grad_(), gates.clone().requires_grad_(), *fresh.values()]
    with torch.enable_grad():
        output = run(fresh, inputs[0], inputs[1])
        slope = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype)
        return [output.detach(), *torch.autograd.grad(output, inputs, slope.view_as(output))]


def _each_once(forward: Any, rows: Tensor, sizes: list[int]) -> Tensor:
    """Run `forward` on rows sorted by expert, with gates of 1. Expert i has `sizes[i]` rows."""
    experts = torch.arange(len(sizes), device=rows.device)
    repeats = to_device(torch.tensor(sizes), rows.device)
    index = torch.repeat_interleave(experts, repeats, output_size=len(rows))
    ones = rows.new_ones(len(rows), 1)
    outputs: Tensor = forward(rows, index.unsqueeze(1), ones)
    return outputs


class FusedExperts:
    """Replacement for the `forward` of a module that holds experts in tensors (E, ...)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.number: int = module.num_experts  # type: ignore[assignment]
        self.run: RoutingRun | None = None
        self.step_counts = StepCounts(self.number)
        self.spans: list[Span] = [(0, self.number)]
        self._holds_all = True
        self.plain: Any = None
        """The `forward` that this object replaces."""
        self.in_graph: compiled_experts.InGraph | None = None
        """What represents the experts in the graph of a compiled unit."""
        # Without self and the tokens.
        self._names = tuple(inspect.signature(type(module).forward).parameters)[2:]

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        return self.module.training

    @property
    def holds_all(self) -> bool:
        """True if this rank currently holds all experts, so a forward pass needs no other rank."""
        return self._holds_all

    @holds_all.setter
    def holds_all(self, value: bool) -> None:
        self._holds_all = value
        first, end = self.spans[0 if self.run is None else self.run.group.rank]
        # The module's own forward reads the number of experts that its tensors hold.
        self.module.num_experts = self.number if value else end - first  # type: ignore[assignment]

    def connect(self, run: RoutingRun) -> None:
        """Replace the module's `forward`."""
        self.run, self.plain = run, self.module.forward
        if run.in_graphs:
            self.in_graph = compiled_experts.in_graph(self, run)
        if run.is_exact:
            # A kernel for all experts reads an expert's rows where they are in a larger tensor, so
            # rounding would depend on the other experts. The definition copies them.
            self.plain = partial(inspect.unwrap(type(self.module).forward), self.module)
        module_hooks.replace(self.module, "forward", self)

    def disconnect(self) -> None:
        """Restore the module's own `forward`."""
        if self.run is not None:
            self.run = self.in_graph = None
            module_hooks.give_back(self.module, "forward", self)

    def __call__(self, hidden_states: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the experts' weighted outputs (T, D) for the rows of `hidden_states` (T, D).

        The other arguments are the module's own: the experts (T, k) and the gates (T, k).
        """
        index, gates = (*args, *(kwargs[name] for name in self._names[len(args) :]))
        run = self.run
        if run is None or (self._holds_all and not run.is_exact):
            outputs: Tensor = self.plain(hidden_states, index, gates)
            return outputs
        chosen = index.reshape(len(hidden_states), -1)
        gates = gates.reshape(chosen.shape)
        if self.in_graph is not None and torch.compiler.is_compiling():
            return self._run_in_graph(self.in_graph, hidden_states, chosen, gates)
        return self._run_eagerly(run, hidden_states, chosen, gates)  # type: ignore[no-any-return]

    @untraced  # the numbers of rows are only known here
    def _run_eagerly(
        self, run: RoutingRun, tokens: Tensor, chosen: Tensor, gates: Tensor
    ) -> Tensor:
        if isinstance(tokens, FakeTensor):  # another pipeline stage runs the experts
            return self._local(tokens, [0])
        tally = self.tally(chosen, None, recording=torch.is_grad_enabled())
        exchange = self.exchange(tally.table)
        share = TokenShare(run.lanes, len(tokens))
        rows = tally.copies.rows(share.of(tokens))[: sum(tally.own)]
        received = exchange.to_experts(rows, None)
        if run.is_exact:
            sizes = exchange.sizes_by_source
            with without_draws(received.device):
                outputs = run_each(
                    [self.module],
                    torch.split(received, [sum(each) for each in sizes]),
                    lambda shard, part: fresh(self._local(fresh(part), sizes[shard])),
                    run.summed,
                )
        else:
            blocks = [block for each in exchange.by_expert(received) for block in each]
            with run.own_randomness():
                by_expert = self._local(torch.cat(blocks), exchange.sizes)
            outputs = exchange.by_source(torch.split(by_expert, exchange.sizes))
        total = tally.copies.combined(exchange.back(outputs), share.of(gates))
        total = share.joined(total.to(tokens.dtype))
        if not torch.is_grad_enabled():
            return total
        # Without a loss: the backward pass counts, and drops gradients of weight 0.
        done = self.step_counts.counter(tally.own, training=self.training)
        return attach(total, total.new_zeros(()), run, 0.0, done)

    def _run_in_graph(
        self, graph: compiled_experts.InGraph, tokens: Tensor, chosen: Tensor, gates: Tensor
    ) -> Tensor:
        """Return the same as `_run_eagerly`, in the trace of a compiled unit."""
        recording, operators = torch.is_grad_enabled(), torch.ops.shardwise
        share = compiled_experts.TracedShare(tokens.shape[0], graph.lanes)
        sizes, dtype = [graph.ranks, self.number], tokens.dtype
        order, inverse, _, _, table, own = operators.tally_experts(
            chosen, None, graph.number, share.number, sizes, dtype, recording
        )
        copies = TokenCopies(order, inverse, chosen.shape[1])
        rows = copies.rows(share.of(tokens))
        unknown = compiled_experts.UNKNOWN
        received = operators.send_to_experts(rows, table, graph.number, unknown)
        (part,) = operators.rows_by_expert(received, table, graph.number, [unknown])
        expert_of_row = operators.expert_of_row(part, table, graph.number)
        ones = part.new_ones(part.shape[0], 1)
        outputs = operators.rows_by_source(
            [self.plain(part, expert_of_row, ones)], table, graph.number, received.shape[0]
        )
        outputs = operators.send_back(outputs, table, graph.number, rows.shape[0])
        result: Tensor = share.joined(copies.combined(outputs, share.of(gates)).to(tokens.dtype))
        if recording:
            # Without a loss: the backward pass counts, and drops gradients of weight 0.
            zero = result.new_zeros(())
            result = compiled_experts.attach(result, zero, own, graph)
        return result

    def tally(self, experts: Tensor, mask: Tensor | None, *, recording: bool) -> Tally:
        """Count the rows per expert, as `MoE.tally`. `mask` is None."""
        del mask
        run = self.run
        assert run is not None
        group = ALONE if self._holds_all else run.group
        if group.size > 1:
            run.feed.check_even("A forward pass of experts with --expert")
        if once(partial(run.is_stand_in, recording=recording)):
            # An index above the last expert's sends a row nowhere.
            experts = torch.full_like(experts, self.number)
        # With --tensor, this rank dispatches only its share: t of the T tokens.
        copies = TokenShare(run.lanes, len(experts)).view_of(experts)  # (t, k)
        counts = count_rows(copies.reshape(-1), self.number)
        table = once(partial(run.gather_counts, counts, group)).tolist()
        return Tally(TokenCopies.sorted(copies), table, table[group.rank])

    def exchange(self, table: list[list[int]]) -> Exchange:
        """Return the exchange of a forward pass, as `MoE.exchange`."""
        assert self.run is not None
        if self._holds_all:
            return Exchange(table, [(0, self.number)], ALONE)
        return Exchange(table, self.spans, self.run.group)

    # -- as a RoutedLayer -----------------------------------------------------------------------

    has_losses = False
    """Transformers adds the router losses to the model's loss itself."""

    def update_bias(self, counts: Sequence[int]) -> None:
        """No-op: the selection bias belongs to the router, not to this module."""

    def _local(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """Run this rank's experts on `rows`, sorted by expert. `sizes` holds their row counts."""
        if sum(sizes):
            return _each_once(self.plain, rows, sizes)
        # The module would return zeros without a graph, but the backward pass is collective. Empty
        # slices connect the graph, and give each parameter a gradient of zero.
        nothing = sum(p.reshape(-1)[:0].sum() for p in self.module.parameters())
        return rows + nothing
