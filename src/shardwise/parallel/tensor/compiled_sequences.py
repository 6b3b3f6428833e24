"""Compiles units whose activations are split by tokens (`--sequence-parallel`).

The code of a unit may read shapes, so torch.compile traces it on full-sized tensors that stand for
the inputs. The resulting graph is traced again on this rank's tokens. Operations on SequenceShards
follow the same rules as in eager code, and their collectives are operators:

    unit ─ torch.compile ─▷ graph of full tensors ─ make_fx ─▷ graph of parts ─▷ backend

In contrast to eager code, the graph keeps the gathered inputs of split layers for the backward
pass. With `--activations recomputed`, it keeps neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from shardwise.comm import Collectives
from shardwise.parallel.tensor.region_collectives import (
    ShardedDim,
    TracedGroup,
    gather_from_sequence,
    reduce_scatter_to_sequence,
    scatter_to_region,
)
from shardwise.parallel.tensor.replica import Replica
from shardwise.parallel.tensor.replica_randomness import ReplicaRandomness
from shardwise.parallel.tensor.sequence_parallel import (
    SequenceShard,
    cast_for_layer,
    token_sharding,
)


class StandIns:
    """Maps full-sized tensors without data to the SequenceShards that they stand for."""

    def __init__(self) -> None:
        self._shards: dict[int, tuple[Tensor, SequenceShard]] = {}

    def replace(self, nest: Any) -> Any:
        """Return the pytree `nest` with a tensor in place of each SequenceShard."""
        return pytree.tree_map_only(SequenceShard, self._stand_in, nest)

    def _stand_in(self, shard: SequenceShard) -> Tensor:
        for stand_in, known in self._shards.values():
            if known is shard:
                return stand_in
        local = shard.local
        stand_in = local.new_empty(shard.sharded.whole_shape(local.shape))
        stand_in.requires_grad_(local.requires_grad)
        self._shards[id(stand_in)] = stand_in, shard
        return stand_in

    def shard(self, value: Any) -> SequenceShard | None:
        """Return the SequenceShard that `value` stands for, or None."""
        return self._shards[id(value)][1] if id(value) in self._shards else None

    def restore(self, nest: Any) -> Any:
        """Return the pytree `nest`, in which a unit may have returned its inputs, with shards."""
        return pytree.tree_map_only(Tensor, lambda value: self.shard(value) or value, nest)


def shard_first(nest: Any, replica: Replica) -> Any:
    """Split the first floating-point tensor of a unit's inputs by tokens, if it is not split.

    The first of several blocks may get a full tensor, such as an embedding. Blocks of a class share
    their graphs, so all of them would otherwise gather their inputs. No data is sent.
    """
    leaves, spec = pytree.tree_flatten(nest)
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            continue
        sharded = token_sharding(leaf, replica.group)
        if sharded is not None and not isinstance(leaf, SequenceShard):
            part = scatter_to_region(leaf, replica.group, sharded)
            leaves[place] = SequenceShard(part, replica.group, replica.randomness, sharded)
        break
    return pytree.tree_unflatten(leaves, spec)


class GraphOfParts:
    """The graph of a unit, of which some inputs and outputs are split by tokens.

    Args:
        graph: The graph of full tensors.
        fakes: The fake inputs with which torch has traced it.
        shards: The SequenceShard that each input stands for, or None.
        replica: The ranks that share the unit.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        fakes: Sequence[Any],
        shards: Sequence[SequenceShard | None],
        replica: Replica,
    ) -> None:
        self._replica = replica
        self._inputs = [None if shard is None else shard.sharded for shard in shards]
        self._outputs: list[ShardedDim | None] = []
        self._graph, self._fakes = self._trace(graph, fakes)
        self._run: Callable[..., Any] = self._graph

    def _trace(self, graph: fx.GraphModule, fakes: Sequence[Any]) -> tuple[fx.GraphModule, Any]:
        """Return the graph of parts, and its fake inputs."""
        from torch.fx.experimental.proxy_tensor import make_fx  # torch.compile has imported it

        group = TracedGroup(
            self._replica.number, self._replica.group.rank, self._replica.group.size
        )
        region = _TracedRegion()

        def shard_of(local: Tensor, sharded: ShardedDim) -> SequenceShard:
            as_group, randomness = cast(Collectives, group), cast(ReplicaRandomness, region)
            return SequenceShard(local, as_group, randomness, sharded)

        def run(*locals_: Any) -> list[Any]:
            values = [
                local if sharded is None else shard_of(local, sharded)
                for local, sharded in zip(locals_, self._inputs, strict=True)
            ]
            outputs = _Run(graph, group, region, shard_of).run(*values)
            self._outputs = [
                each.sharded if isinstance(each, SequenceShard) else None for each in outputs
            ]
            return [each.local if isinstance(each, SequenceShard) else each for each in outputs]

        parts = [
            fake if sharded is None else _part_of(fake, sharded, group.rank)
            for fake, sharded in zip(fakes, self._inputs, strict=True)
        ]
        return make_fx(run)(*parts), parts

    def compile(self, backend: Callable[..., Callable[..., Any]]) -> None:
        """Compile the graph of parts with the compiler's `backend`."""
        self._run = backend(self._graph, self._fakes)

    def run(self, stand_ins: StandIns, values: Sequence[Any]) -> list[Any]:
        """Run the graph on this rank's tokens. `values` are full tensors or stand-ins."""
        replica = self._replica
        parts = []
        for value, sharded in zip(values, self._inputs, strict=True):
            # torch.compile cannot tell a tensor from a stand-in, so either may be an input.
            shard = stand_ins.shard(value)
            if sharded is None:
                parts.append(value if shard is None else shard.full())
            elif shard is None:
                parts.append(scatter_to_region(value, replica.group, sharded))
            else:
                parts.append(shard.local)
        return [
            output
            if sharded is None
            else SequenceShard(output, replica.group, replica.randomness, sharded)
            for output, sharded in zip(self._run(*parts), self._outputs, strict=True)
        ]


def _part_of(fake: Tensor, sharded: ShardedDim, rank: int) -> Tensor:
    # Reading a symbolic size makes torch compile another graph for other sizes.
    assert int(fake.shape[sharded.dim]) == sharded.size
    with torch.no_grad():
        part = sharded.shard(fake, rank).clone(memory_format=torch.contiguous_format)
    return part.requires_grad_(fake.requires_grad)


class _TracedRegion:
    """Says whether a trace is inside a region. Takes the place of a ReplicaRandomness."""

    in_region = False

    def region(self) -> AbstractContextManager[None]:
        # A compiled unit with split layers draws no random numbers.
        return nullcontext()


class _Run(fx.Interpreter):
    """Runs a graph of full tensors on SequenceShards."""

    def __init__(
        self,
        graph: fx.GraphModule,
        group: TracedGroup,
        region: _TracedRegion,
        shard_of: Callable[[Tensor, ShardedDim], SequenceShard],
    ) -> None:
        super().__init__(graph)
        self._group, self._region, self._shard_of = cast(Collectives, group), region, shard_of

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operators = torch.ops.shardwise
        if target is operators.copy:
            self._region.in_region = True
            if isinstance(args[0], SequenceShard):
                part = cast_for_layer(args[0].local)
                return gather_from_sequence(part, self._group, args[0].sharded)
        elif target is operators.all_gather:
            self._region.in_region = False
        elif target is operators.all_reduce:
            self._region.in_region = False
            sharded = token_sharding(args[0], self._group)
            if sharded is not None:
                part = reduce_scatter_to_sequence(args[0], self._group, sharded)
                return self._shard_of(part, sharded)
        return super().call_function(target, args, kwargs)
