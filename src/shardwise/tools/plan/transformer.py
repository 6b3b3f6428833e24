"""A closed-form model of a transformer: the operations of its layers, and the time of a step.

Its predictions are compared with published results for which there is no script to observe. FLOPs
follow Narayanan et al. (2021), and activation sizes follow Korthikanti et al. (2022).
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
    """The shape of a GPT-like model.

    Attributes:
        layers: Number of layers.
        hidden: Hidden size.
        heads: Number of attention heads.
        sequence: Tokens per sequence.
        vocabulary: Size of the vocabulary.
        kv_heads: Number of key and value heads in grouped-query attention (0: same as `heads`).
        ffn: Width of the feed-forward block (0: 4 * `hidden`).
        gated: Whether the feed-forward block has a third matrix (SwiGLU).
        flash: Whether attention is fused, so that its scores are not written to memory.
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
    """Whether attention computes only the lower triangle of the scores."""
    context: int = 1
    """Number of devices that share a sequence (context parallelism). As in Llama 3, each device has
    a part of the queries and gathers all keys and values, and the work is balanced."""

    @property
    def key_values(self) -> int:
        """The width of the keys, which is also the width of the values."""
        return self.hidden * (self.kv_heads or self.heads) // self.heads

    @property
    def feed_forward(self) -> int:
        """The width of the feed-forward block."""
        return self.ffn or 4 * self.hidden

    @property
    def layer_parameters(self) -> int:
        """The number of parameter elements per layer."""
        # Gated models (Llama) have no biases in their layers or norms.
        h, matrices = self.hidden, 3 if self.gated else 2
        attention = 2 * h * h + 2 * h * self.key_values
        biases = 0 if self.gated else 3 * h + 2 * self.key_values + self.feed_forward
        norms = 2 * h if self.gated else 4 * h
        return attention + matrices * h * self.feed_forward + biases + norms

    @property
    def parameters(self) -> int:
        """The number of parameter elements of the model.

        It includes the layers, the token embedding and the final norm. Gated models also have a
        separate output head. Other models have a position embedding.
        """
        # GPT learns position embeddings. Llama uses rotary embeddings, which have no parameters.
        places = 0 if self.gated else self.sequence * self.hidden
        words = self.vocabulary * self.hidden * (2 if self.gated else 1)
        last = self.hidden if self.gated else 2 * self.hidden
        return self.layers * self.layer_parameters + words + places + last

    def model_flops(self, batch: int) -> float:
        """Return the FLOPs of a forward and backward pass without recomputation.

        Each weight costs 6 FLOPs per token, and attention adds its own. For a plain GPT and `batch`
        sequences, the total is 72BLsh²(1+s/6h+V/12hL) in Korthikanti et al. (2022).
        """
        h, s = self.hidden, self.sequence
        matrices = 3 if self.gated else 2
        weights = 2 * h * h + 2 * h * self.key_values + matrices * h * self.feed_forward
        # The scores and their product with the values take s * h multiplications each per token.
        attention = 2 * s * h * (0.5 if self.causal else 1.0)
        return 6.0 * batch * s * (self.layers * (weights + attention) + self.vocabulary * h)

    def forward(self, batch: int, tensor: int, *, sequence_parallel: bool) -> list[Work]:
        """Return the operations of a layer's forward pass on one of `tensor` devices."""
        outside = self._outside_attention(batch, tensor, sequence_parallel=sequence_parallel)
        return outside + self.attention(batch, tensor)

    def backward(self, batch: int, tensor: int, *, sequence_parallel: bool) -> list[Work]:
        """Return the operations of a layer's backward pass on one of `tensor` devices.

        For each matrix product of the forward pass, the backward pass has two. Its memory traffic
        is 1.5 times the forward pass's, because most operations read two tensors instead of one.
        Fused attention recomputes its scores, so it has five products in the backward pass and two
        in the forward pass.
        """
        outside = self._outside_attention(batch, tensor, sequence_parallel=sequence_parallel)
        attention = self.attention(batch, tensor)
        if self.flash:
            return [*map(_reversed, outside), Work(2.5 * attention[0].flops, 0.0)]
        return [*map(_reversed, outside), *map(_reversed, attention)]

    def _outside_attention(self, batch: int, t: int, *, sequence_parallel: bool) -> list[Work]:
        tokens, h = batch * self.sequence / self.context, self.hidden
        whole = t if sequence_parallel else 1  # number of ranks that split norms and dropouts
        qkv = h + 2 * self.key_values
        wide = self.feed_forward * (2 if self.gated else 1)
        # Attention block: norm; QKV projection; bias or rotary embedding; output projection;
        # dropout and residual. Feed-forward block: norm; first matrix; activation; second matrix;
        # dropout and residual. Elements have 2 bytes, so traffic of 4 n bytes is one read and one
        # write of n elements.
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
        """Return the operations of attention itself on one of `t` devices.

        These are the scores, the softmax, dropout and the product with the values. Selective
        recomputation repeats them.
        """
        s, h = self.sequence, self.hidden
        # FLOPs of one of the two products, queries with keys and scores with values. They are
        # equally large.
        flops = 2.0 * batch * s * s * h / t / self.context * (0.5 if self.causal else 1.0)
        if self.flash:
            return [Work(2 * flops, 0.0)]
        # Without fused attention, the scores of shape (batch, heads, s, s) pass through memory.
        scores = batch * self.heads * s * s / t / self.context
        product = Work(flops, 2 * scores + 4 * batch * s * h / t)
        return [product, _traffic(4 * scores), _traffic(5 * scores), product]

    def head(self, batch: int, tensor: int) -> list[Work]:
        """Return the forward operations of the output head and the loss.

        The backward pass takes twice as long.
        """
        tokens, words = batch * self.sequence / self.context, self.vocabulary / tensor
        return [_product(tokens, self.hidden, words), _traffic(14 * tokens * words)]

    def activation_bytes(
        self, batch: int, tensor: int, recompute: str, *, sequence_parallel: bool
    ) -> float:
        """Return the bytes that a layer saves for the backward pass in 16-bit precision.

        See table 2 of Korthikanti et al. (2022).
        """
        # The table gives bytes per element of s * b * h. Without the scores a layer has 34, of
        # which tensor parallelism without sequence parallelism divides only 24.
        sbh, t = float(self.sequence * batch * self.hidden), tensor
        scores = 5 * self.heads * self.sequence / self.hidden
        if recompute == FULL:
            return 2 * sbh
        kept = 0.0 if recompute == SELECTIVE else scores
        if sequence_parallel:
            return sbh * (34 + kept) / t
        return sbh * (10 + 24 / t + kept / t)


def _product(rows: float, inner: float, columns: float) -> Work:
    """Return the work of a 16-bit matrix product (rows, inner) x (inner, columns)."""
    return Work(2 * rows * inner * columns, 2 * (rows * inner + inner * columns + rows * columns))


def _traffic(count: float) -> Work:
    return Work(0.0, count)


def _reversed(work: Work) -> Work:
    """Return the work of an operation's backward pass."""
    # A matrix product has two gradients, which are products of the same size.
    return Work(work.flops, 1.5 * work.bytes, count=2 if work.flops else 1)


@dataclass(frozen=True)
class Software:
    """The overhead of a training framework.

    `host` is the time in seconds that the host needs to launch a layer's forward pass (the backward
    pass needs twice as long). `collective_host` is the time that it needs to launch a
    tensor-parallel collective. `size` contains the bytes moved per element.
    """

    host: float = 0.0
    collective_host: float = 0.0
    size: Bytes = field(default_factory=Bytes)


def transformer_times(
    model: Transformer, run: Parallelism, cluster: Cluster, software: Software
) -> list[RankTime]:
    """Return the time of a step on each pipeline rank, in seconds by kind."""
    stages = run.pipeline * run.stages_per_rank
    layer = _layer(model, run, cluster, software)
    units = [[layer] * count for count in _layers_of(model.layers, stages)]
    # The first stage also contains the embedding, and the last one the output head.
    units[0].insert(0, _embedding(model, run, cluster))
    units[-1].append(_head(model, run, cluster))
    sbh = 2.0 * run.micro_batch * model.sequence / model.context * model.hidden
    # Each tensor rank sends its part to the next stage, which gathers the parts within its host.
    boundary = sbh / run.tensor
    return step_times(units, boundary, run, cluster, software.size)


def _layers_of(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage.

    The embedding and the head each count as a layer if the layers then divide evenly, as in
    Llama 3.
    """
    if stages > 1 and (layers + 2) % stages == 0:
        counts = [(layers + 2) // stages] * stages
        return [counts[0] - 1, *counts[1:-1], counts[-1] - 1]
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def step_seconds(times: list[RankTime]) -> float:
    """Return the step time in seconds. All ranks finish a step at the same time."""
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
    # A layer has two tensor-parallel collectives per pass: after attention and after the
    # feed-forward block.
    host = software.host + (2 * software.collective_host if t > 1 else 0.0)
    passes = 2  # the backward pass launches twice as many operations as the forward pass
    if run.recompute == FULL:
        backward, passes = backward + forward, passes + 1
    elif run.recompute == SELECTIVE:
        backward += busy(model.attention(b, t), device)
    # Full recomputation repeats the forward pass's two collectives in the backward pass.
    spent = (4 if run.recompute == FULL else 2) * each
    return UnitWork(
        _hosted(forward, host, 2 * each),
        _hosted(backward, passes * host, spent),
        model.layer_parameters / t,
        2 * each + context,
        spent + 2 * context,  # keys and values are gathered again, and their gradients scattered
    )


def _hosted(work: Busy, host: float, beside: float) -> Busy:
    """Return `work` with the launch time of a host that needs `host` seconds to launch it.

    Launches also overlap with the `beside` seconds that the device spends on collectives.
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
