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
from shardwise.parallel.expert.dispatch import Exchange, TokenCopies, count_rows
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
        self._run: RoutingRun | None = None
        self.step_counts = StepCounts(self.number)
        self._spans: list[Span] = [(0, self.number)]
        self._holds_all = True
        self._plain: Any = None
        # Without self and the tokens.
        self._names = tuple(inspect.signature(type(module).forward).parameters)[2:]

    @property
    def holds_all(self) -> bool:
        """True if this rank currently holds all experts, so a forward pass needs no other rank."""
        return self._holds_all

    @holds_all.setter
    def holds_all(self, value: bool) -> None:
        self._holds_all = value
        first, end = self._spans[0 if self._run is None else self._run.group.rank]
        # The module's own forward reads the number of experts that its tensors hold.
        self.module.num_experts = self.number if value else end - first  # type: ignore[assignment]

    def connect(self, run: RoutingRun) -> None:
        """Replace the module's `forward`."""
        self._run, self._plain = run, self.module.forward
        if run.is_exact:
            # A kernel for all experts reads an expert's rows where they are in a larger tensor, so
            # rounding would depend on the other experts. The definition copies them.
            self._plain = partial(inspect.unwrap(type(self.module).forward), self.module)
        module_hooks.replace(self.module, "forward", self)

    def disconnect(self) -> None:
        """Restore the module's own `forward`."""
        if self._run is not None:
            self._run = None
            module_hooks.give_back(self.module, "forward", self)

    @untraced
    def __call__(self, hidden_states: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the experts' weighted outputs (T, D) for the rows of `hidden_states` (T, D).

        The other arguments are the module's own: the experts (T, k) and the gates (T, k).
        """
        index, gates = (*args, *(kwargs[name] for name in self._names[len(args) :]))
        run = self._run
        if run is None or (self._holds_all and not run.is_exact):
            outputs: Tensor = self._plain(hidden_states, index, gates)
            return outputs
        if isinstance(hidden_states, FakeTensor):  # another pipeline stage runs the experts
            return self._local(hidden_states, [0])
        group = ALONE if self._holds_all else run.group
        if group.size > 1:
            run.feed.check_even("A forward pass of experts with --expert")
        chosen = index.reshape(len(hidden_states), -1)
        if once(run.is_stand_in):
            # An index above the last expert's sends a row nowhere.
            chosen = torch.full_like(chosen, self.number)
        # With --tensor, this rank dispatches only its share: t of the T tokens.
        share = TokenShare(run.lanes, len(hidden_states))
        copies = TokenCopies(share.view_of(chosen))  # (t k,)
        counts = count_rows(copies.experts, self.number)
        table = once(partial(run.gather_counts, counts, group)).tolist()
        own = table[group.rank]
        spans = [(0, self.number)] if self._holds_all else self._spans
        exchange = Exchange(table, spans, group)
        received = exchange.to_experts(copies.rows(share.of(hidden_states), sum(own)), None)
        if run.is_exact:
            sizes = exchange.sizes_by_source
            with without_draws(received.device):
                outputs = run_each(
                    [self.module],
                    torch.split(received, [sum(each) for each in sizes]),
                    lambda shard, part: fresh(self._local(fresh(part), sizes[shard])),
                    run.summed,
                )
            rows = exchange.back_by_source(outputs)
        else:
            with run.own_randomness():
                outputs = self._local(exchange.by_expert(received), exchange.sizes)
            rows = exchange.back(outputs)
        total = copies.combined(rows, share.of(gates.reshape(chosen.shape)))
        total = share.joined(total.to(hidden_states.dtype))
        if not torch.is_grad_enabled():
            return total
        # Without a loss: the backward pass counts, and drops gradients of weight 0.
        done = self.step_counts.counter(own, training=self.module.training)
        return attach(total, total.new_zeros(()), run, 0.0, done)

    # -- as a RoutedLayer -----------------------------------------------------------------------

    has_losses = False
    """Transformers adds the router losses to the model's loss itself."""

    def update_bias(self, counts: Sequence[int]) -> None:
        """No-op: the selection bias belongs to the router, not to this module."""

    def _local(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """Run this rank's experts on `rows`, sorted by expert. `sizes` holds their row counts."""
        if sum(sizes):
            return _each_once(self._plain, rows, sizes)
        # The module would return zeros without a graph, but the backward pass is collective. Empty
        # slices connect the graph, and give each parameter a gradient of zero.
        nothing = sum(p.reshape(-1)[:0].sum() for p in self.module.parameters())
        return rows + nothing
