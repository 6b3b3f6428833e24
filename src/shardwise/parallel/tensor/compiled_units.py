"""Compiles units that contain split layers.

Regions in a graph have no state outside the graph (`Replica.in_graph`). The checks of an eager
region run elsewhere:

    operations between split layers    on each new graph (in eager code, at each row-wise layer)
    hooks of the user                  before each forward pass (user_hooks.py)
    random numbers                     before and after each forward pass
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.errors import ConfigError, UsageError
from shardwise.parallel.tensor import compiled_collectives, graph_paths
from shardwise.parallel.tensor.compiled_sequences import GraphOfParts
from shardwise.parallel.tensor.compiled_stand_ins import StandIns, sizes_of_its_own
from shardwise.parallel.tensor.parallel_layers import TensorParallelModule, on_local_tensors
from shardwise.parallel.tensor.replica import Replica
from shardwise.parallel.tensor.sequence_parallel import SequenceShard, gather_nested

BACKEND = "inductor"
"""The compiler's backend, as in torch.compile."""


class UnitCompiler:
    """Compiles the `forward` of units whose layers are split over `replica`."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._error: UsageError | None = None
        self._stand_ins = StandIns(self._replica)
        # Blocks of the same class share graphs only if they have the same backend object.
        self._backend = self.compile_graph
        replica.number = compiled_collectives.number_of(replica.group)

    def __call__(self, unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled form of `forward`, the bound method of `unit`."""
        inside = _modules_inside(unit)
        compiled = torch.compile(forward, backend=self._backend)
        # Code between two graphs would get stand-ins, which have no data.
        compiled_by_tokens = torch.compile(forward, backend=self._backend, fullgraph=True)

        def run(*args: Any, **kwargs: Any) -> Any:
            replica = self._replica
            # With full parameters, modules run their own `forward`, which is the same on all ranks.
            if replica.is_whole or replica.in_compiled_unit:
                return compiled(*args, **kwargs)
            replica.hooks.check_global()
            for module in inside:
                replica.hooks.check(module)
            before = replica.randomness.state()
            # In the backward pass, the region of the model's last layer may still be open.
            is_backward = torch._C._current_graph_task_id() != -1
            if replica.sequence_parallel and replica.in_region and not is_backward:
                raise UsageError(
                    "A compiled unit (--compile with --sequence-parallel) runs between two split "
                    "layers of other code. Call the second layer first, or start without one of "
                    "the two flags."
                )
            replica.in_compiled_unit = True
            try:
                if replica.sequence_parallel:
                    output = self._run_by_tokens(compiled_by_tokens, args, kwargs)
                else:
                    output = compiled(*args, **kwargs)
            except Exception:
                # The compiler wraps errors of its backend in its own classes.
                if self._error is not None:
                    raise self._error from None
                raise
            finally:
                replica.end_compiled_unit()
                self._error = None
            if not torch.equal(before, replica.randomness.state()):
                raise UsageError(
                    "A compiled unit with split layers (--compile with --tensor) has drawn random "
                    "numbers, such as those of dropout. Workers would draw the same numbers for "
                    "different features. Set the probability to 0, or start without --compile."
                )
            return output

        return run

    def _run_by_tokens(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outputs_tokens = self._replica.outputs_tokens()
        stand_ins = self._stand_ins = StandIns(self._replica)
        arguments = stand_ins.insert((args, kwargs), replace_first=outputs_tokens)
        try:
            output = stand_ins.remove(compiled(*arguments[0], **arguments[1]))
        except Exception as error:
            # The import takes seconds, and torch.compile has done it by now.
            from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

            if self._error is None and isinstance(error, FailOnRecompileLimitHit):
                raise UsageError(
                    "torch.compile has compiled a unit too often (--compile with "
                    "--sequence-parallel). TORCH_LOGS=recompiles shows why. Pass inputs with fewer "
                    "kinds of shapes, increase torch._dynamo.config.recompile_limit, or start "
                    "without one of the two flags."
                ) from error
            if self._error is None and isinstance(error, Unsupported):
                raise UsageError(
                    "--compile with --sequence-parallel needs units that torch.compile traces as "
                    f"one graph each, but: {str(error).strip().splitlines()[0]}. Change this code, "
                    "or start without one of the two flags."
                ) from error
            raise
        finally:
            stand_ins.remove(arguments)
            self._stand_ins = StandIns(self._replica)
        # A region that the unit leaves open holds its input.
        self._replica.end_compiled_unit()
        del arguments
        stand_ins.check()
        return output if outputs_tokens else gather_nested(output)

    def compile_graph(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Check the operations of a new graph, and compile it. torch.compile calls it."""
        try:
            # The hooks of a checkpoint or of sharded parameters would count these tensors.
            with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                _GraphCheck(graph).run_on_fakes()
                parts = self._split_by_tokens(graph, inputs)
        except UsageError as error:
            self._error = error
            raise
        # The import takes seconds, and torch.compile has done it by now.
        from torch._dynamo import lookup_backend

        backend = lookup_backend(BACKEND)
        if parts is None:
            run = backend(graph, inputs)
            return lambda *values: run(*map(_without_class, values))
        run = parts.compile(backend, inputs)
        return lambda *values: parts.run(run, self._stand_ins, [*map(_without_class, values)])

    def _split_by_tokens(self, graph: fx.GraphModule, inputs: list[Any]) -> GraphOfParts | None:
        """Change `graph` so that it computes this rank's tokens."""
        if not (self._replica.sequence_parallel and self._replica.in_compiled_unit):
            return None
        if any(isinstance(each, SequenceShard) for each in inputs):
            raise UsageError(
                "A compiled unit (--compile with --sequence-parallel) reads a tensor that is "
                "split by tokens from an attribute of a module or of another object. Pass it as "
                "an argument, or start without one of the two flags."
            )
        return GraphOfParts(
            graph, inputs, [self._stand_ins.shard_of(each) for each in inputs], self._replica
        )


def _without_class(value: Any) -> Any:
    """Return a view of a split parameter, whose class would intercept the graph's operations."""
    if not getattr(type(value), "is_split", False):
        return value
    with on_local_tensors():
        return value.view_as(value)


class _GraphCheck(fx.Interpreter):
    """Runs a graph on fake tensors, and checks the operations before each row-wise layer."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._nodes = graph.graph.nodes
        self._copies: set[fx.Node] = set()
        self._starts: list[Any] = []

    def run_on_fakes(self) -> None:
        """Run the graph on the fake tensors of torch's trace."""
        # The inputs of the backend are real: collectives would run while other ranks compile
        # nothing.
        values = [n.meta["example_value"] for n in self._nodes if n.op == "placeholder"]
        mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        with sizes_of_its_own(mode), mode:
            self.run(*values)

    def run_node(self, n: fx.Node) -> Any:
        if n.target is torch.ops.shardwise.all_reduce and n.args[2] >= 0:  # type: ignore[operator]
            if not self._copies:
                # Only eager regions can be followed through several graphs.
                raise graph_paths.split_graph_error()
            product = n.args[0]
            assert isinstance(product, fx.Node)
            value = self.env[product.all_input_nodes[0]]
            graph_paths.by_number(int(n.args[2])).check(value, self._starts)  # type: ignore[arg-type]
        result = super().run_node(n)
        if self._copies.intersection(n.all_input_nodes):
            if n.target is operator.getitem:
                self._copies.add(n)
            elif isinstance(result, Tensor) and result.grad_fn is not None:
                self._starts.append(result.grad_fn)
        if n.target is torch.ops.shardwise.all_reduce:  # the end of a region
            self._starts.clear()
            self._copies.clear()
        if _is_copy(n):
            self._copies.add(n)
        return result


def _is_copy(node: fx.Node) -> bool:
    """Return whether `node` copies a value at the start of a region."""
    # torch traces an autograd.Function as one node with its own graph, or as its operations if
    # nothing requires a gradient.
    if getattr(node.target, "__name__", "") == "autograd_function_apply":
        body = node.args[0]
        assert isinstance(body, fx.Node)
        inner = getattr(node.graph.owning_module, str(body.target))
        return any(map(_is_copy, inner.graph.nodes))
    return node.target in (torch.ops.aten.alias.default, torch.ops.shardwise.copies)


def refuse_dropout(
    units: Iterable[tuple[str, nn.Module]], differing: Collection[nn.Module]
) -> None:
    """Raise ConfigError if a unit contains dropout, and a module in `differing`.

    `differing` holds the modules with different values on each rank: split layers and experts.
    """
    for name, unit in units:
        if not any(each in differing for each in unit.modules()):
            continue
        for inner, module in unit.named_modules(prefix=name):
            if _dropout_of(module) > 0:
                raise ConfigError(
                    f"--compile cannot be combined with --tensor and the dropout in {inner}: "
                    "workers need different random numbers between split layers and in experts, "
                    "which a graph cannot draw. Set its probability to 0, or start without "
                    "--compile."
                )


def _dropout_of(module: nn.Module) -> float:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.MultiheadAttention) else 0.0


def _modules_inside(unit: nn.Module) -> list[nn.Module]:
    """Return the modules of `unit` that may run between split layers."""

    def holds_regions(module: nn.Module) -> bool:
        return any(isinstance(e, TensorParallelModule) for e in module.modules() if e is not module)

    if not holds_regions(unit):
        return []
    return [each for each in unit.modules() if each is not unit and not holds_regions(each)]
