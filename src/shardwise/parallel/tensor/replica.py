"""A replica's tensor-parallel ranks, and how they enter and leave regions of split layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.model.recomputation import once
from shardwise.parallel.tensor import compiled_collectives
from shardwise.parallel.tensor.region_collectives import (
    ShardedDim,
    copy_to_region,
    gather_from_region,
    gather_from_sequence,
    is_fake,
    reduce_from_region,
    reduce_scatter_to_sequence,
)
from shardwise.parallel.tensor.replica_randomness import ReplicaRandomness
from shardwise.parallel.tensor.sequence_parallel import (
    SequenceShard,
    dtype_for_layer,
    gather_nested,
    token_sharding,
)
from shardwise.parallel.tensor.sequence_regather import RegatheredInput
from shardwise.parallel.tensor.user_hooks import HookGuard


@dataclass(frozen=True)
class RegionInput:
    """The input of a layer at the start of a region.

    For the backward pass, a rank saves either the full input or only its own tokens.
    """

    whole: Tensor
    regathered: RegatheredInput | None = None

    def run(self, layer: Callable[[Tensor], Tensor]) -> Tensor:
        # Without gradients nothing is saved, so a plain call suffices.
        if self.regathered is None or not torch.is_grad_enabled():
            return layer(self.whole)
        return self.regathered.run(layer, self.whole)


class ForwardHooks:
    """Forward hooks on a replica's models. On a copy of a model, the hooks do nothing."""

    def __init__(self, replica: Replica | None = None) -> None:
        self._replica = replica

    def begin(self, model: nn.Module, args: Any) -> None:
        """Forward pre-hook: increment the number of running forward passes."""
        del model, args
        if self._replica is not None:
            self._replica.running_forwards += 1

    def end(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: gather the model's output. Also called after a failed forward pass."""
        del model, args
        if self._replica is None:
            return None
        # Do not go below 0: if a hook fails before `begin`, torch still calls this one.
        self._replica.running_forwards = max(0, self._replica.running_forwards - 1)
        self._replica.end_forward(failed=output is None)
        return gather_nested(output) if self._replica.sequence_parallel else None

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardHooks, ()


@dataclass(eq=False)
class Replica:
    """A replica's tensor-parallel ranks (`group`), and the current region.

    A region is the part of a forward pass in which each rank computes something different. It
    starts at a split layer, and ends at the layer that sums the outputs over the ranks.
    """

    group: Collectives
    randomness: ReplicaRandomness
    sequence_parallel: bool = False
    """True if the output of a split layer stays split by tokens."""
    is_whole: bool = False
    """True while every rank has the full parameters, and modules run their unsplit `forward`."""
    hooks: HookGuard = field(default_factory=HookGuard)
    _inputs: dict[tuple[int, int, bool], tuple[Tensor, RegionInput]] = field(default_factory=dict)
    region_starts: list[Any] = field(default_factory=list)
    """The autograd nodes at the start of the open region."""
    running_forwards: int = 0
    """The number of nested model forward passes in progress."""
    number: int = -1
    """Stands for `group` in compiled collectives."""
    in_compiled_unit: bool = False
    """True inside a compiled unit, which checks hooks and random numbers itself."""
    _shared_input: tuple[Tensor, bool, Tensor] | None = None
    """In a graph, the full input of the open region, whether it records gradients, and its copy."""
    _in_region_of_unit: bool = False
    """True inside an eager region of a compiled unit, which has no random numbers of its own."""

    @property
    def in_region(self) -> bool:
        """True inside an eager region, where each rank computes something different."""
        return self._in_region_of_unit or self.randomness.in_region

    @property
    def in_graph(self) -> bool:
        """True while torch.compile traces a compiled unit.

        Regions in a graph have no state outside it. Parts of a unit may run eagerly, for example
        under torch.compiler.disable or after too many recompilations, and open eager regions.
        """
        return self.in_compiled_unit and torch.compiler.is_compiling()

    @property
    def graph_left_region_open(self) -> bool:
        """True if a graph has started the open region."""
        return self._shared_input is not None

    def enter_region(self, value: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Start a region: run `layer`, which differs between ranks, on the full `value`.

        Layers with the same input in a region (queries, keys, values) share that input, so that it
        is gathered once and its gradient is summed once. Calls with and without gradient recording
        never share an input.
        """
        if self.in_graph:
            # Layers with the same input share the copy, as below. Compare objects, because the
            # compiler can trace neither `id` nor versions.
            shared, recorded = self._shared_input, torch.is_grad_enabled()
            if shared is None or shared[0] is not value or shared[1] != recorded:
                shared = self._shared_input = value, recorded, self._copy_in_graph(value)
            return layer(shared[2])
        if is_fake(value):
            return layer(value)
        # A compiled unit allows no random numbers, and checks hooks before its forward pass.
        self._in_region_of_unit = self.in_compiled_unit
        if not self.in_compiled_unit:
            # From here until the end of the region, each rank draws its own random numbers.
            self.randomness.enter_region()
            self.hooks.open()
        recorded = torch.is_grad_enabled() and value.requires_grad
        if not recorded and not isinstance(value, SequenceShard):
            # There is neither a gradient to sum nor anything to gather, so there is nothing to
            # share.
            return self._record_start(layer(value))
        local = value.local if isinstance(value, SequenceShard) else value
        # The version is part of the key, because an in-place write changes the value. `_inputs`
        # holds a reference to the tensor, so that no other tensor can get the same id.
        key = id(local), 0 if local.is_inference() else local._version, recorded
        if key not in self._inputs:
            self._inputs[key] = local, self.region_input(value)
        return self._record_start(self._inputs[key][1].run(layer))

    def _record_start(self, part: Tensor) -> Tensor:
        """Record the autograd node of `part`, the output of a layer at the start of the region."""
        if part.grad_fn is not None:
            self.region_starts.append(part.grad_fn)
        return part

    def region_input(self, value: Tensor) -> RegionInput:
        """Prepare `value` as the input of layers that differ between ranks, outside any region."""
        if not isinstance(value, SequenceShard):
            return RegionInput(copy_to_region(self.group, value)[0])
        part = value.local
        part = part.to(dtype_for_layer(part))
        whole = gather_from_sequence(part, self.group, value.sharded)
        return RegionInput(whole, RegatheredInput(part, self.group, value.sharded))

    def leave_region(self, part: Callable[[], Tensor], *, allowed: int = -1) -> Tensor:
        """Return `part()` summed over the ranks, and end the region.

        In a graph, `allowed` is the number of the allowed operations (graph_paths.py).

        The region also ends if `part` raises, because torch uses an exception to stop a
        recomputation early.
        """
        if self.in_graph:
            self._shared_input = None
            return compiled_collectives.reduce_from_region(part(), self.number, allowed)
        sequence_parallel = self.outputs_tokens()
        try:
            return self._reduce(part(), sequence_parallel)
        finally:
            self.close_region()

    def reduce_output(self, value: Tensor) -> Tensor:
        """Return `value` summed over the ranks. Used outside regions."""
        if self.in_graph:
            return compiled_collectives.reduce_from_region(value, self.number)
        return self._reduce(value, self.outputs_tokens())

    def gather_output(
        self, value: Tensor, layer: Callable[[Tensor], Tensor], sharded: ShardedDim
    ) -> Tensor:
        """Run `layer` on the full `value`, and gather its output. Used outside regions."""
        if self.in_graph:
            part = layer(self._copy_in_graph(value))
            return compiled_collectives.gather_from_region(
                part, self.number, self.group.rank, sharded
            )
        return gather_from_region(self.region_input(value).run(layer), self.group, sharded)

    def _copy_in_graph(self, value: Tensor) -> Tensor:
        if self.sequence_parallel:
            return compiled_collectives.copies([value], self.number)[0]
        return compiled_collectives.copy_to_region(value, self.number)

    def outputs_tokens(self) -> bool:
        """Return whether a layer's output may stay split by tokens.

        This is allowed during a model's forward pass or recomputation, because the model's output
        is gathered at the end.
        """
        # Use `once`, because a recomputation must decide in the same way as its forward pass.
        return self.sequence_parallel and once(
            lambda: self.running_forwards > 0 or torch._C._current_graph_task_id() != -1
        )

    def _reduce(self, value: Tensor, sequence_parallel: bool) -> Tensor:
        """Sum `value` over the ranks. If `sequence_parallel`, return only this rank's tokens."""
        parts = token_sharding(value, self.group) if sequence_parallel else None
        if parts is None:
            return reduce_from_region(value, self.group)
        return SequenceShard(
            reduce_scatter_to_sequence(value, self.group, parts), self.group, self.randomness, parts
        )

    def end_forward(self, *, failed: bool) -> None:
        """Drop the inputs that the forward pass shared. If `failed`, close the open region."""
        self._inputs.clear()
        self._close_hooks()
        if failed:
            self.randomness.leave_region()

    def _close_hooks(self) -> None:
        self.hooks.close()
        self.region_starts.clear()

    def close_region(self) -> None:
        self._shared_input, self._in_region_of_unit = None, False
        self._inputs.clear()
        self._close_hooks()
        self.randomness.leave_region()

    def end_compiled_unit(self) -> None:
        """Leave a compiled unit. Also called after a failed forward pass, inside a region."""
        self.in_compiled_unit = self._in_region_of_unit = False
        self._shared_input = None

    def reset(self) -> None:
        """Close any open region at the end of a step."""
        self._inputs.clear()
        self._close_hooks()
        self.randomness.reset()
