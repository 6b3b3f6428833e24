"""Implements `sw.MoE`, a mixture-of-experts layer for one process and for many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm import Handle
from shardwise.errors import ModelError, UsageError
from shardwise.layout.bucket_layout import Span, even_cuts
from shardwise.model.recomputation import once
from shardwise.model.unit_hooks import untraced
from shardwise.parallel.expert import compiled_experts
from shardwise.parallel.expert.dispatch import (
    Exchange,
    Tally,
    TokenCopies,
    count_rows,
    weighted_sum,
)
from shardwise.parallel.expert.exact_experts import fresh, own_stream, run_each
from shardwise.parallel.expert.expert_counts import StepCounts
from shardwise.parallel.expert.router_losses import attach, loss_factors, router_loss
from shardwise.parallel.expert.routing import SCORES, Routing, route, router_logits
from shardwise.parallel.expert.routing_run import RoutingRun
from shardwise.parallel.expert.token_share import ALONE, TokenShare
from shardwise.tiers.copy_stream import to_device


class MoE(nn.Module):
    """A layer that sends each token to `top_k` of its experts, and adds their weighted outputs.

    No token is dropped. The layer computes the same result on one process and on many: with
    `--expert E`, E ranks hold different experts and exchange tokens. Every expert runs in every
    forward pass, so an expert without tokens has a gradient of zero.

    Routing uses fp32 (fp64 if the model does), even with 16-bit parameters. If two experts have
    equal scores, the one with the lower index wins.

    In `engine.backward`, the engine adds the gradients of the router losses with the same weight as
    in one process. Do not add these losses to your own. Without an engine, `loss.backward()` adds
    the gradients, multiplied by `router_loss_seed` (1.0 by default; set it to the factor by which
    you scale the loss).

    Args:
        router: Maps tokens (T, D) to logits (T, E), such as `nn.Linear(D, E, bias=False)`.
        experts: The E experts. Each maps rows (n, D) to (n, D_out), for any n including 0.
        top_k: Number of experts per token.
        scores: `"softmax"` (default), or `"sigmoid"` as in DeepSeek-V3.
        normalize: Divide each token's gates by their sum. Default: True.
        scale: Factor of the gates. Default: 1.0.
        shared: A module that processes every token. Its output is added. Default: none.
        balance: Factor of the load-balancing loss over the whole batch (arXiv:2101.03961,
            arXiv:2501.11873), in training. Default: 0.0.
        z_loss: Factor of the router's z-loss (arXiv:2202.08906), in training. Default: 0.0.
        bias_rate: Step size of the selection bias, which balances experts without a loss
            (arXiv:2408.15664). After each step, the bias increases by this value for experts with
            fewer tokens than the mean, and decreases for those with more. The engine updates it.
            Without an engine, call `update_bias` after `optimizer.step()`. Default: 0.0, no bias.

    Attributes:
        selection_bias: (E,) buffer in fp32 or wider, or None if `bias_rate` is 0.
        router_loss_seed: Gradient of the router losses without an engine.
        counts: (E,) int64 on the CPU: the number of token copies per expert in the last forward
            pass. It includes all ranks in training with `balance` or `z_loss`, otherwise only the
            ranks that exchange tokens. `engine.step().experts` has the counts of a step.

    Raises:
        ModelError: The numbers of experts do not match, or an argument has the wrong type.

    Example:
        >>> import torch, shardwise as sw
        >>> experts = [torch.nn.Linear(8, 8) for _ in range(4)]
        >>> moe = sw.MoE(torch.nn.Linear(8, 4, bias=False), torch.nn.ModuleList(experts), top_k=2)
        >>> moe(torch.zeros(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    is_one_unit = True
    """Makes the layer a single unit, so that all ranks gather its parameters together."""
    buffers_stay_wide = True
    """`--precision` must not round the selection bias, whose steps are small."""

    selection_bias: Tensor | None

    def __init__(
        self,
        router: nn.Module,
        experts: nn.ModuleList,
        *,
        top_k: int = 2,
        scores: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        shared: nn.Module | None = None,
        balance: float = 0.0,
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if not isinstance(experts, nn.ModuleList):
            raise ModelError(
                f"sw.MoE takes its experts as an nn.ModuleList, not {type(experts).__name__}: "
                "sw.MoE(router, nn.ModuleList([Expert() for _ in range(8)]), top_k=2)."
            )
        if not 1 <= top_k <= len(experts):
            raise ModelError(
                f"sw.MoE with {len(experts)} expert(s) cannot send a token to top_k={top_k}: "
                f"choose 1 to {len(experts)}."
            )
        if scores not in SCORES:
            raise ModelError(f"sw.MoE: scores is one of {', '.join(SCORES)}, not {scores!r}.")
        for name, value in {"balance": balance, "z_loss": z_loss, "bias_rate": bias_rate}.items():
            if not value >= 0:
                raise ModelError(f"sw.MoE: {name} takes a number of 0 or more, not {value}.")
        self.router = router
        self.experts = experts
        self.shared = shared
        self.top_k, self.scores, self.normalize, self.scale = top_k, scores, normalize, scale
        self.balance, self.z_loss, self.bias_rate = balance, z_loss, bias_rate
        self.router_loss_seed = 1.0
        bias = torch.zeros(len(experts)) if bias_rate else None
        self.register_buffer("selection_bias", bias)
        self.counts = torch.zeros(len(experts), dtype=torch.int64)
        self.step_counts = StepCounts(len(experts))
        self.run: RoutingRun | None = None
        """The state that the layers of an engine share, or None without an engine."""
        self.spans: list[Span] = [(0, len(experts))]
        """For each rank of the run's group, the experts [first, end) that it holds."""
        self.in_graph: compiled_experts.InGraph | None = None
        """What represents the layer in the graph of a compiled unit."""
        self.holds_all = True
        """True if this rank holds all experts now, and needs no other rank for a forward pass."""

    @property
    def has_losses(self) -> bool:
        """True if the layer has router losses in training."""
        return bool(self.balance or self.z_loss)

    @property
    def held(self) -> Span:
        """The experts [first, end) that this rank holds now."""
        if self.holds_all or self.run is None:
            return 0, len(self.experts)
        return self.spans[self.run.group.rank]

    @property
    def ranks(self) -> RoutingRun | None:
        """The engine's RoutingRun if this forward pass needs other ranks, otherwise None."""
        # Inside `full_parameters` a single rank may run the model.
        run = self.run
        return None if run is None or (run.is_split and self.holds_all) else run

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the layer's output for the tokens `x`.

        Args:
            x: (..., D) tokens.
            mask: (...) bool, False for padding. Padding is sent to no expert, and is ignored in
                statistics and losses. Its output is that of the shared expert, or 0. Default: no
                padding.

        Returns:
            (..., D_out), in the dtype of the experts' outputs.

        Raises:
            UsageError: The mask has the wrong shape, the router has the wrong width, or other ranks
                skip this batch.
        """
        if mask is not None and mask.shape != x.shape[:-1]:
            raise UsageError(
                f"sw.MoE: a mask of shape {tuple(mask.shape)} does not fit tokens of shape "
                f"{tuple(x.shape)}: pass one of shape {tuple(x.shape[:-1])}."
            )
        tokens = x.reshape(-1, x.shape[-1])  # (T, D)
        valid = None if mask is None else mask.reshape(-1).to(torch.bool)
        if self.in_graph is not None and torch.compiler.is_compiling():
            result = self._run_in_graph(self.in_graph, tokens, valid)
        else:
            result = self._run_eagerly(tokens, valid)
        return result.view(*x.shape[:-1], result.shape[-1])

    @untraced  # the numbers of rows are only known here
    def _run_eagerly(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output (T, D_out) for `tokens` (T, D). `mask` is (T,)."""
        if isinstance(tokens, FakeTensor) and self.run is not None and self.run.in_stages:
            return self._fake_output(tokens)
        routing = self.route(tokens)
        tally = self.tally(routing.experts, mask, recording=torch.is_grad_enabled())
        share = self._share(tokens.shape[0])
        rows = tally.copies.rows(share.of(tokens))[: sum(tally.own)]  # by expert, without padding
        outputs, shared = self._through_experts(rows, tally, tokens)
        combined = tally.copies.combined(outputs, share.of(routing.gates)).to(outputs.dtype)
        result = self._with_losses(share.joined(combined), routing, tally)
        return result if shared is None else result + shared

    def _run_in_graph(
        self, graph: compiled_experts.InGraph, tokens: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Return the same as `_run_eagerly`, in the trace of a compiled unit."""
        recording, operators = torch.is_grad_enabled(), torch.ops.shardwise
        ranks, lanes = (1, (0, 0, 1)) if self.holds_all else (graph.ranks, graph.lanes)
        share = compiled_experts.TracedShare(tokens.shape[0], lanes)
        routing = self.route(tokens)
        order, inverse, valid, factors, table, own = operators.tally_experts(
            routing.experts,
            mask,
            graph.number,
            share.number,
            [ranks, len(self.experts)],
            routing.logits.dtype,
            recording,
        )
        copies = TokenCopies(order, inverse, self.top_k)
        rows = copies.rows(share.of(tokens))
        received, unknown = rows, compiled_experts.UNKNOWN
        if ranks > 1:
            received = operators.send_to_experts(rows, table, graph.number, unknown)
        shared = None if self.shared is None else self.shared(tokens)
        first, end = self.held
        sizes = [unknown] * (end - first)
        parts = self.run_experts(operators.rows_by_expert(received, table, graph.number, sizes))
        outputs = operators.rows_by_source(parts, table, graph.number, received.shape[0])
        if ranks > 1:
            outputs = operators.send_back(outputs, table, graph.number, rows.shape[0])
        combined = copies.combined(outputs, share.of(routing.gates)).to(outputs.dtype)
        result = share.joined(combined)
        if recording:
            loss = result.new_zeros(())
            if self.counts_losses(recording=True):
                loss = self.router_loss(routing, factors, valid)
            result = compiled_experts.attach(result, loss, own, graph)
        return result if shared is None else result + shared

    def _fake_output(self, tokens: Tensor) -> Tensor:
        """Return a fake output for fake `tokens`: another pipeline stage runs this layer."""
        assert self.run is not None
        first, _ = self.spans[0 if self.holds_all else self.run.group.rank]
        outputs = self.experts[first](tokens)  # others may have no elements on this rank
        copies = outputs.unsqueeze(1).expand(-1, self.top_k, -1)
        result = weighted_sum(copies, self.route(tokens).gates).to(outputs.dtype)
        return result if self.shared is None else result + self.shared(tokens)

    def _share(self, tokens: int) -> TokenShare:
        """Return which of `tokens` tokens this rank dispatches: with `--tensor`, not all."""
        return TokenShare(ALONE if self.ranks is None else self.ranks.lanes, tokens)

    def route(self, tokens: Tensor) -> Routing:
        """Return the experts for `tokens` (T, D)."""
        logits = router_logits(self.router, tokens)
        if logits.shape[-1] != len(self.experts):
            raise UsageError(
                f"sw.MoE: the router returns {logits.shape[-1]} logits per token, but there are "
                f"{len(self.experts)} experts."
            )
        return route(
            logits,
            self.top_k,
            scores=self.scores,
            normalize=self.normalize,
            scale=self.scale,
            bias=self.selection_bias,
        )

    def counts_losses(self, *, recording: bool) -> bool:
        """Return whether this forward pass needs the counts of all ranks.

        `recording` is True if autograd is recording. The result is the same on every rank.
        """
        return self.training and recording and self.has_losses

    def tally(self, experts: Tensor, mask: Tensor | None, *, recording: bool) -> Tally:
        """Count the rows per expert. Collective if there are other ranks.

        Only here does the host wait for the device.

        Args:
            experts: (T, k) int64, the experts of each token.
            mask: (T,) bool, False for padding, or None if there is none.
            recording: True if autograd is recording.
        """
        run, number = self.ranks, len(self.experts)
        valid, counts_losses = mask, self.counts_losses(recording=recording)
        if run is not None:
            # Decide once: the current batch has advanced when a recomputation runs.
            is_stand_in = once(partial(run.is_stand_in, recording=recording))
            if counts_losses and not is_stand_in and experts.numel():
                once(run.note_tokens)
            if is_stand_in:
                valid = torch.zeros(experts.shape[0], dtype=torch.bool, device=experts.device)
        share = self._share(experts.shape[0])
        own = share.view_of(experts)  # (t, k): with --tensor, t of the T tokens
        counted = experts.new_full((1,), own.shape[0])  # unlike `tensor`, never waits
        if valid is not None:
            is_valid = share.view_of(valid.unsqueeze(-1))
            own, counted = own.masked_fill(~is_valid, number), is_valid.sum().reshape(1)
        copies = TokenCopies.sorted(own)
        if isinstance(experts, FakeTensor):
            # `shardwise plan` runs without values: assume that all experts get equal numbers.
            cuts = even_cuts(own.numel(), number)
            each = [end - first for first, end in pairwise(cuts)]
            return Tally(copies, [each], each, valid, [*each, own.shape[0]])
        row = torch.cat([count_rows(own.reshape(-1), number), counted])
        draws = self._is_exact and self.training
        if draws:
            # A recomputation repeats this draw, because its generators start from the same state.
            drawn = torch.randint(2**31, (1,), generator=torch.default_generator)
            row = torch.cat([row, to_device(drawn, row.device)])
        if run is None:
            rows = group_rows = once(row.cpu).view(1, -1)
        else:
            if run.is_split:
                run.feed.check_even("A forward pass of sw.MoE with --expert")
            # A recomputation must not communicate: its counts are the same.
            group = run.everyone if counts_losses and not run.is_exact else run.group
            rows = once(partial(run.gather_counts, row, group))
            group_rows = run.of_group(rows)
            if run.is_exact:
                # The losses of a micro-shard must not depend on those that run at the same time.
                rows = group_rows[run.group.rank].view(1, -1)
        self.counts = rows[:, :number].sum(0)
        table = group_rows[:, :number].tolist()
        return Tally(
            copies,
            table,
            table[0 if run is None else run.group.rank],
            valid,
            rows[:, : number + 1].sum(0).tolist(),
            group_rows[:, -1].tolist() if draws else None,
        )

    def exchange(self, table: list[list[int]]) -> Exchange:
        """Return the exchange of a forward pass, if other ranks hold experts. See `Tally`."""
        if self.holds_all or self.run is None:
            return Exchange(table, [(0, len(self.experts))], ALONE)
        return Exchange(table, self.spans, self.run.group)

    @property
    def _is_exact(self) -> bool:
        """True if results must not depend on the number of ranks (`--exact`)."""
        return self.run is not None and self.run.is_exact

    def _through_experts(
        self, rows: Tensor, tally: Tally, tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the experts' outputs for `rows`, and the shared expert's output for `tokens`."""
        run = self.ranks
        if run is None or not run.is_split:
            shared = None if self.shared is None else self.shared(tokens)
            if self._is_exact:
                return self._run_exactly(rows, 0, tally.table, tally.seeds), shared
            return torch.cat(self.run_experts(torch.split(rows, tally.own))), shared
        exchange = self.exchange(tally.table)
        pending: list[Handle] = []
        received = exchange.to_experts(rows, pending)
        # The shared expert needs no other rank, so it computes while the rows are sent.
        shared = None if self.shared is None else self.shared(tokens)
        for handle in pending:
            handle.wait()
        if run.is_exact:
            outputs = self._run_exactly(
                received, self.held[0], exchange.sizes_by_source, tally.seeds
            )
            return exchange.back(outputs), shared
        with run.own_randomness():
            parts = [torch.cat(blocks) for blocks in exchange.by_expert(received)]
            outputs = exchange.by_source(self.run_experts(parts))
        return exchange.back(outputs), shared

    def run_experts(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of this rank's experts for the rows of each expert."""
        # Also without rows: every rank then has the same graph, whose backward pass is collective.
        first, _ = self.held
        return [self.experts[first + i](part) for i, part in enumerate(parts)]

    def _run_exactly(
        self, rows: Tensor, first: int, sizes: list[list[int]], seeds: list[int] | None
    ) -> Tensor:
        """Run experts on `rows` (n, D), sorted by micro-shard, and then by expert.

        `sizes[s][i]` rows of micro-shard s are those of expert `first + i`.
        """
        assert self.run is not None

        def compute(shard: int, part: Tensor) -> Tensor:
            outputs = []
            for index, block in enumerate(torch.split(part, sizes[shard]), start=first):
                seeded = (
                    nullcontext() if seeds is None else own_stream(rows.device, seeds[shard], index)
                )
                with seeded:
                    outputs.append(fresh(self.experts[index](fresh(block))))
            return torch.cat(outputs)

        own = [self.experts[first + i] for i in range(len(sizes[0]))]
        parts = torch.split(rows, [sum(each) for each in sizes])
        return run_each(own, parts, compute, self.run.summed)

    def _with_losses(self, result: Tensor, routing: Routing, tally: Tally) -> Tensor:
        """Return `result`. Its backward pass also adds router losses and counts own tokens."""
        done = self.step_counts.counter(tally.own, training=self.training)
        if self.counts_losses(recording=torch.is_grad_enabled()):
            dtype, device = routing.logits.dtype, routing.logits.device
            factors = to_device(loss_factors(tally.everyone, self.top_k, dtype), device)
            loss = self.router_loss(routing, factors, tally.valid)
            return attach(result, loss, self.run, self.router_loss_seed, done)
        if self.ranks is not None and self.ranks.is_split and torch.is_grad_enabled():
            # Without losses, the backward pass still drops gradients of weight 0. A layer may be
            # fine-tuned in evaluation mode.
            return attach(result, result.new_zeros(()), self.run, 0.0, done)
        if result.requires_grad:
            result.register_hook(lambda _: done())  # type: ignore[no-untyped-call]
        return result

    def router_loss(self, routing: Routing, factors: Tensor, valid: Tensor | None) -> Tensor:
        """Return this rank's part of the router losses. See `router_losses.router_loss`."""
        return router_loss(routing, factors, valid, balance=self.balance, z_loss=self.z_loss)

    @torch.no_grad()
    def update_bias(self, counts: Sequence[int] | None = None) -> None:
        """Update the selection bias, and clear the step's counts.

        Engines call it in each step. Without an engine, call it after `optimizer.step()`.

        Args:
            counts: Number of token copies per expert in the step. Default: this process's counts.
        """
        if self.selection_bias is not None:
            copies = torch.tensor(self.step_counts.values if counts is None else counts).double()
            change = self.bias_rate * torch.sign(copies.mean() - copies)
            self.selection_bias += to_device(
                change.to(self.selection_bias.dtype), self.selection_bias.device
            )
        self.step_counts.clear()

    def join_run(self, run: RoutingRun | None) -> None:
        """Connect the layer to an engine's run, or disconnect it (None). Engines call it."""
        self.run = run
        self.in_graph = None
        if run is not None and run.in_graphs:
            self.in_graph = compiled_experts.in_graph(self, run)

    def extra_repr(self) -> str:
        """Return the settings that `repr` shows."""
        return f"top_k={self.top_k}, scores={self.scores}, balance={self.balance}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no engine.
        state: dict[str, Any] = dict(self.__dict__)
        state["run"] = state["in_graph"] = None
        state["spans"], state["holds_all"] = [(0, len(self.experts))], True
        return state
