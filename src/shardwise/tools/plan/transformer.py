"""A transformer by formula: the operations of its layers, and the time of a step.

It is for published configurations. FLOPs follow Narayanan et al. (2021), bytes of activations
Korthikanti et al. (2022).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardwise.tools.plan.cluster import Cluster
from shardwise.tools.plan.collectives import all_gather_seconds, all_reduce_seconds, group_of
from shardwise.tools.plan.operations import Busy, Work, busy
from shardwise.tools.plan.parallelism import Parallelism
from shardwise.tools.plan.stages import Bytes, RankTime, UnitWork, step_times

NONE, SELECTIVE, FULL = "none", "selective", "full"
RECOMPUTATIONS = (NONE, SELECTIVE, FULL)


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A GPT-like model.

    `kv_heads` is for grouped attention, `ffn` for another width of the feed-forward. `gated` adds a
    third matrix to the feed-forward (SwiGLU). `flash` does not write attention scores to memory.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    flash: bool = False
    causal: bool = False
    """Whether attention computes only the half below the diagonal."""
    context: int = 1
    """The number of devices that share a sequence (context parallelism). Each has its own queries
    and gathers all keys and values, with equal work per device, as in Llama 3."""

    @property
    def key_values(self) -> int:
        """The width of the keys, and of the values."""
        return self.hidden * (self.kv_heads or self.heads) // self.heads

    @property
    def feed_forward(self) -> int:
        """The width of the feed-forward."""
        return self.ffn or 4 * self.hidden

    @property
    def layer_parameters(self) -> int:
        """The number of elements of one layer."""
        # Gated models (Llama) have neither biases nor a shift in their norms.
        h, matrices = self.hidden, 3 if self.gated else 2
        attention = 2 * h * h + 2 * h * self.key_values
        biases = 0 if self.gated else 3 * h + 2 * self.key_values + self.feed_forward
        norms = 2 * h if self.gated else 4 * h
        return attention + matrices * h * self.feed_forward + biases + norms

    @property
    def parameters(self) -> int:
        """The number of elements of the model.

        It counts layers, word embeddings, the last norm, and position embeddings unless `gated`.
        Gated models have a separate output head.
        """
        # GPT learns an embedding of positions. Llama rotates queries and keys instead.
        places = 0 if self.gated else self.sequence * self.hidden
        words = self.vocabulary * self.hidden * (2 if self.gated else 1)
        last = self.hidden if self.gated else 2 * self.hidden
        return self.layers * self.layer_parameters + words + places + last

    def model_flops(self, batch: int) -> float:
        """Return the FLOPs of forward and backward of `batch` sequences, without recomputation.

        That is 6 per weight and token, plus attention: Korthikanti's 72BLsh²(1+s/6h+V/12hL) for a
        plain GPT.
        """
        h, s = self.hidden, self.sequence
        matrices = 3 if self.gated else 2
        weights = 2 * h * h + 2 * h * self.key_values + matrices * h * self.feed_forward
        # Scores and their product with the values: s * h multiplications each per token.
        attention = 2 * s * h * (0.5 if self.causal else 1.0)
        return 6.0 * batch * s * (self.layers * (weights + attention) + self.vocabulary * h)

    def forward(self, batch: int, tensor: int, *, sequence_parallel: bool) -> list[Work]:
        """Return the operations of a layer's forward on one of `tensor` devices."""
        outside = self._outside_attention(batch, tensor, sequence_parallel=sequence_parallel)
        return outside + self.attention(batch, tensor)

    def backward(self, batch: int, tensor: int, *, sequence_parallel: bool) -> list[Work]:
        """Return the operations of a layer's backward on one of `tensor` devices.

        Each product of forward becomes two. Traffic grows by half, because most operations read two
        tensors where forward reads one. Fused attention recomputes its scores, so it has five
        products where forward has two.
        """
        outside = self._outside_attention(batch, tensor, sequence_parallel=sequence_parallel)
        attention = self.attention(batch, tensor)
        if self.flash:
            return [*map(_reversed, outside), Work(2.5 * attention[0].flops, 0.0)]
        return [*map(_reversed, outside), *map(_reversed, attention)]

    def _outside_attention(self, batch: int, t: int, *, sequence_parallel: bool) -> list[Work]:
        tokens, h = batch * self.sequence / self.context, self.hidden
        whole = t if sequence_parallel else 1  # norms and dropouts are split, or whole on each rank
        qkv = h + 2 * self.key_values
        wide = self.feed_forward * (2 if self.gated else 1)
        # In order: norm, queries with keys and values, their bias or rotation, projection, dropout
        # with residual; norm, feed-forward in, activation, out, dropout with residual. Elements
        # have 2 bytes, so the traffic 4 n is one read and one write of n elements.
        return [
            _traffic(4 * tokens * h / whole),
            _product(tokens, h, qkv / t),
            _traffic(4 * tokens * qkv / t),
            _product(tokens, h / t, h),
            _traffic(7 * tokens * h / whole),
            _traffic(4 * tokens * h / whole),
            _product(tokens, h, wide / t),
            _traffic(2 * tokens * (wide + self.feed_forward) / t),
            _product(tokens, self.feed_forward / t, h),
            _traffic(7 * tokens * h / whole),
        ]

    def attention(self, batch: int, t: int) -> list[Work]:
        """Return scores, softmax, dropout and the product with the values, on one of `t` devices.

        Selective recomputation repeats these operations.
        """
        s, h = self.sequence, self.hidden
        # Queries with keys, or scores with values: both products are equally large.
        flops = 2.0 * batch * s * s * h / t / self.context * (0.5 if self.causal else 1.0)
        if self.flash:
            return [Work(2 * flops, 0.0)]
        # Without flash attention the scores, shape (batch, heads, s, s), pass through memory.
        scores = batch * self.heads * s * s / t / self.context
        product = Work(flops, 2 * scores + 4 * batch * s * h / t)
        return [product, _traffic(4 * scores), _traffic(5 * scores), product]

    def head(self, batch: int, tensor: int) -> list[Work]:
        """Return the forward operations of output head and loss. Backward has twice as many."""
        tokens, words = batch * self.sequence / self.context, self.vocabulary / tensor
        return [_product(tokens, self.hidden, words), _traffic(14 * tokens * words)]

    def activation_bytes(
        self, batch: int, tensor: int, recompute: str, *, sequence_parallel: bool
    ) -> float:
        """Return the 16-bit bytes that a layer keeps for backward: Korthikanti et al., table 2."""
        # Bytes per element of s * b * h, by the table: 34 in a layer outside of the scores, of
        # which tensor parallelism alone divides 24.
        sbh, t = float(self.sequence * batch * self.hidden), tensor
        scores = 5 * self.heads * self.sequence / self.hidden
        if recompute == FULL:
            return 2 * sbh
        kept = 0.0 if recompute == SELECTIVE else scores
        if sequence_parallel:
            return sbh * (34 + kept) / t
        return sbh * (10 + 24 / t + kept / t)


def _product(rows: float, inner: float, columns: float) -> Work:
    """Return a 16-bit matrix product."""
    return Work(2 * rows * inner * columns, 2 * (rows * inner + inner * columns + rows * columns))


def _traffic(count: float) -> Work:
    return Work(0.0, count)


def _reversed(work: Work) -> Work:
    """Return the backward of an operation."""
    # The gradient of a product's inputs is two products of the same size.
    return Work(work.flops, 1.5 * work.bytes, count=2 if work.flops else 1)


@dataclass(frozen=True)
class Software:
    """The overhead of a training system.

    `host` is seconds of the host for a layer's forward (backward takes twice that),
    `collective_host` for each tensor-parallel collective. `size` is bytes per element as stored,
    reduced and updated.
    """

    host: float = 0.0
    collective_host: float = 0.0
    size: Bytes = field(default_factory=Bytes)


def transformer_times(
    model: Transformer, run: Parallelism, cluster: Cluster, software: Software
) -> list[RankTime]:
    """Return the time of a step on each rank of the pipeline, by kind, in seconds."""
    stages = run.pipeline * run.stages_per_rank
    layer = _layer(model, run, cluster, software)
    units = [[layer] * count for count in _layers_of(model.layers, stages)]
    # The first stage also has the embedding, and the last one the output head.
    units[0].insert(0, _embedding(model, run, cluster))
    units[-1].append(_head(model, run, cluster))
    sbh = 2.0 * run.micro_batch * model.sequence / model.context * model.hidden
    boundary = sbh / run.tensor  # each tensor rank sends its part, and gathers inside its host
    return step_times(units, boundary, run, cluster, software.size)


def _layers_of(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage.

    If the numbers work out, embedding and head count as one layer each, as in Llama 3.
    """
    if stages > 1 and (layers + 2) % stages == 0:
        counts = [(layers + 2) // stages] * stages
        return [counts[0] - 1, *counts[1:-1], counts[-1] - 1]
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def step_seconds(times: list[RankTime]) -> float:
    """Return the time of the step. All ranks end it together."""
    return max(sum(each.by_kind.values()) for each in times)


def _layer(model: Transformer, run: Parallelism, cluster: Cluster, software: Software) -> UnitWork:
    device, b, t = cluster.device, run.micro_batch, run.tensor
    sequence_parallel = run.sequence_parallel
    forward = busy(model.forward(b, t, sequence_parallel=sequence_parallel), device)
    backward = busy(model.backward(b, t, sequence_parallel=sequence_parallel), device)
    tokens = b * model.sequence / model.context
    whole, group = 2.0 * tokens * model.hidden, run.tensor_group(cluster)
    if sequence_parallel:
        each = 2 * all_gather_seconds(whole, group)  # an all-gather and a reduce-scatter
    else:
        each = all_reduce_seconds(whole, group)
    keys = 4.0 * b * model.sequence * model.key_values / t  # keys and values, 2 bytes each
    context = all_gather_seconds(keys, group_of(cluster, model.context, t))
    # A layer has two tensor-parallel collectives per pass: after attention and after feed-forward.
    host = software.host + (2 * software.collective_host if t > 1 else 0.0)
    passes = 2  # backward launches twice as many operations as forward
    if run.recompute == FULL:
        backward, passes = backward + forward, passes + 1
    elif run.recompute == SELECTIVE:
        backward += busy(model.attention(b, t), device)
    # Full recomputation repeats the two collectives of forward inside backward.
    spent = (4 if run.recompute == FULL else 2) * each
    return UnitWork(
        _hosted(forward, host, 2 * each),
        _hosted(backward, passes * host, spent),
        model.layer_parameters / t,
        2 * each + context,
        spent + 2 * context,  # keys and values are gathered again, and their gradients scattered
    )


def _hosted(work: Busy, host: float, beside: float) -> Busy:
    """Return a sequence of operations that the host needs at least `host` seconds to launch.

    The device also spends `beside` seconds on collectives in between.
    """
    return replace(work, launch=max(work.launch, host - work.matmul - work.memory - beside))


def _embedding(model: Transformer, run: Parallelism, cluster: Cluster) -> UnitWork:
    tokens = run.micro_batch * model.sequence / model.context
    forward = Busy(memory=6.0 * tokens * model.hidden / cluster.device.bandwidth)
    return UnitWork(forward, forward.times(2), model.vocabulary * model.hidden / run.tensor)


def _head(model: Transformer, run: Parallelism, cluster: Cluster) -> UnitWork:
    work = busy(model.head(run.micro_batch, run.tensor), cluster.device)
    held = model.gated or run.pipeline > 1  # otherwise it shares the embedding's matrix
    parameters = model.vocabulary * model.hidden / run.tensor if held else 0.0
    return UnitWork(work, work.times(2), parameters)
