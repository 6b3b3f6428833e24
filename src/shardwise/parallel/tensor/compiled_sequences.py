"""Splits the graphs of compiled units by tokens (`--sequence-parallel`).

The code of a unit may read shapes, so torch.compile traces it on full-sized tensors without data
that stand for the inputs. A pass over the nodes of the graph then decides which values are split.
The rules are those of eager code (sequence_parallel.py):

    sum at the end of a region         reduce-scatter: the value is split
    token-wise function                runs on parts: the value is split
    start of a region                  all-gather, whose backward pass is a reduce-scatter
    any other use of a split value     all-gather, whose backward pass takes this rank's part

Inside a region, values differ between ranks and have all tokens. The pass follows them through the
graph, because a region may stay open past other layers. A function of such a value runs on full
tensors, and the gradients of split tensors that it gathers are summed over the ranks.

The compiler's backend traces the changed graph on this rank's tokens. Other nodes, such as those
that switch gradients or autocast, keep their places.
"""

from __future__ import annotations

import gc
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from shardwise.errors import UsageError
from shardwise.parallel.tensor.compiled_collectives import copy_to_region, part_of
from shardwise.parallel.tensor.region_collectives import scatter_to_region
from shardwise.parallel.tensor.replica import Replica
from shardwise.parallel.tensor.sequence_parallel import (
    TOKEN_DIM,
    SequenceShard,
    can_be_split,
    dtype_for_layer,
    has_same_tokens,
    is_replicated,
    is_token_wise,
    split_tokens,
)
from shardwise.parallel.tensor.torch_functions import (
    CASTS,
    CASTS_LIKE,
    MEMORY,
    UNTRACKED_WRITES,
)

Count = int | fx.Node
"""The number of tokens of a split value, or the graph's input with this number."""


class StandIns:
    """Full-sized tensors without data that take the place of split tensors in a call's arguments.

    Besides SequenceShards, a stand-in replaces the first floating-point tensor (`replace_first`).
    The first of several blocks may get a full tensor, such as an embedding. Blocks of a class share
    their graphs, so all of them would otherwise gather their inputs.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._entries: dict[int, tuple[Tensor, SequenceShard, Tensor]] = {}
        """Maps the id of a stand-in to the stand-in, its SequenceShard, and the original."""

    def shard_of(self, value: Any) -> SequenceShard | None:
        """Return the SequenceShard that `value` stands for, or None."""
        return self._entries[id(value)][1] if id(value) in self._entries else None

    def insert(self, nest: Any, *, replace_first: bool) -> Any:
        """Return `nest` with stand-ins. Changes lists, dicts and dataclasses in place.

        In place, because the unit may write to its caller's containers.
        """
        tensors: list[Tensor] = []
        _exchanged(nest, lambda value: tensors.append(value) or value)  # type: ignore[func-returns-value]
        first = next((each for each in tensors if each.is_floating_point()), None)
        # A part does not see writes to another argument that shares memory with the full tensor.
        memories = {
            memory_of(each)
            for each in tensors
            if each is not first and type(each) is Tensor and each.layout is torch.strided
        }
        for each in tensors:
            full = each._full if isinstance(each, SequenceShard) else None
            if full is not None and memory_of(full) in memories:
                raise _error("gets a split tensor and a view of it", "Pass one of them")
        if (
            replace_first
            and first is not None
            and not isinstance(first, SequenceShard)
            and memory_of(first) not in memories
        ):
            self._replace_full(first)
        return _exchanged(nest, self._stand_in)

    def remove(self, nest: Any) -> Any:
        """Undo `insert`."""
        return _exchanged(
            nest, lambda value: self._entries[id(value)][2] if id(value) in self._entries else value
        )

    def _replace_full(self, value: Tensor) -> None:
        replica = self._replica
        if can_be_split(value, replica.group.size):
            sharded = split_tokens(value.shape[TOKEN_DIM], replica.group.size)
            part = scatter_to_region(value, replica.group, sharded)  # sends no data
            shard = SequenceShard(part, replica.group, replica.randomness, sharded)
            self._add(shard, value)

    def _stand_in(self, value: Tensor) -> Tensor:
        for stand_in, _, original in self._entries.values():
            if original is value:
                return stand_in
        return self._add(value, value) if isinstance(value, SequenceShard) else value

    def _add(self, shard: SequenceShard, original: Tensor) -> Tensor:
        local = shard.local
        with torch.enable_grad():
            # NaN, so that a stand-in that is used by mistake does not go unnoticed.
            data = local.new_full((), float("nan") if local.is_floating_point() else 0)
            data.requires_grad_(local.requires_grad)
            # Not a view of a leaf, whose writes torch refuses without naming this mode.
            stand_in = data.clone().expand(shard.sharded.whole_shape(local.shape))
        self._entries[id(stand_in)] = stand_in, shard, original
        return stand_in

    def check(self) -> None:
        """Raise UsageError if the unit has changed a stand-in, or has stored one for later."""
        for stand_in, shard, _ in self._entries.values():
            if (
                stand_in._backward_hooks
                or stand_in.retains_grad
                or stand_in.__dict__
                or stand_in.requires_grad != shard.local.requires_grad
            ):
                raise _error(
                    "registers a hook on its input, or changes an attribute of its input",
                    "Apply this change to a new tensor, such as x * 1",
                )
        left = [ref(stand_in) for stand_in, _, _ in self._entries.values()]
        self._entries.clear()
        stand_in = None  # type: ignore[assignment]
        if any(each() is not None for each in left):
            gc.collect()  # the compiler's own references are cyclic
        if any(each() is not None for each in left):
            raise _error("stores its input for later use", "Store a new tensor, such as x * 1")


def _exchanged(value: Any, exchange: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return exchange(value)
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            other = _exchanged(item, exchange)
            if other is not item:
                value[key] = other
    elif isinstance(value, tuple):
        items = [_exchanged(item, exchange) for item in value]
        if any(one is not other for one, other in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif is_dataclass(value) and not isinstance(value, type | nn.Module):
        for field in fields(value):
            item = getattr(value, field.name, None)
            other = _exchanged(item, exchange)
            if other is not item:
                object.__setattr__(value, field.name, other)
    return value


class _FakeRun(fx.Interpreter):
    """Runs the graph of full tensors on fake tensors, and records facts about each node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.records_grad: dict[fx.Node, bool] = {}
        self.dtypes: dict[fx.Node, torch.dtype] = {}
        """The dtype in which a region gathers its input."""
        self.written: dict[fx.Node, set[int]] = {}
        """The memories that a node writes to."""

    def run_node(self, n: fx.Node) -> Any:
        operands = [tensor for node in n.all_input_nodes for tensor in _tensors_of(self.env[node])]
        if any(tensor.is_inference() for tensor in operands):
            # Its tensors have no version counters, so that writes would not be found.
            raise _error("uses torch.inference_mode", "Use torch.no_grad", n)
        versions = [tensor._version for tensor in operands]
        self.records_grad[n] = torch.is_grad_enabled()
        if n.target is torch.ops.shardwise.copies:
            self.dtypes[n] = dtype_for_layer(self.env[n.args[0][0]])  # type: ignore[index]
        result = super().run_node(n)
        # A kernel that a script has written in Triton changes no version.
        writes_all = _name_of(n) == "triton_kernel_wrapper_mutation"
        self.written[n] = {
            memory_of(tensor)
            for tensor, version in zip(operands, versions, strict=True)
            if writes_all or tensor._version != version
        }
        return result


def memory_of(tensor: Tensor) -> int:
    """Return a number that identifies the memory of `tensor`, which must be alive."""
    return int(tensor.untyped_storage()._cdata)


class GraphOfParts:
    """A graph of full tensors that is changed so that it computes this rank's tokens.

    Args:
        graph: The graph. It is changed in place.
        inputs: The inputs, some of which may be stand-ins.
        shards: The SequenceShard that each input stands for, or None.
        replica: The ranks that share the unit.

    Raises:
        UsageError: If the graph writes to a split tensor in a way that no part can represent.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        shards: Sequence[SequenceShard | None],
        replica: Replica,
    ) -> None:
        self._graph, self._replica = graph, replica
        group = replica.group
        self._place = [replica.number, group.rank, group.size]
        self._counts: dict[fx.Node, Count] = {}
        """Maps each node whose value is split to its number of tokens."""
        self._inside: set[fx.Node] = set()
        """The nodes whose values lie inside a region."""
        self._activations: set[fx.Node] = set()
        """The nodes whose gradients flow to arguments or to other layers."""
        self._gathers: dict[tuple[Any, ...], fx.Node] = {}
        self._unused: list[fx.Node] = []
        self._writes = 0
        self._placeholders = placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._output_counts: list[Count | None] = []
        self._sizes = {
            str(n.meta["example_value"]): n
            for n in placeholders
            if isinstance(n.meta["example_value"], torch.SymInt)
        }
        self._are_split = [shard is not None for shard in shards]
        self._facts = self._run_on_fakes(placeholders)
        # Nodes that the rewrite inserts have no facts.
        self._functions = {n: _torch_function_of(n, self._is_tensor) for n in graph.graph.nodes}
        self._nodes_by_memory: dict[int, list[fx.Node]] = defaultdict(list)
        for node, value in self._facts.env.items():
            for tensor in _tensors_of(value):
                self._nodes_by_memory[memory_of(tensor)].append(node)
        self._find_inputs(inputs)
        self._rewrite(placeholders)
        self._check_memory()
        for node in self._unused:
            graph.graph.erase_node(node)
        graph.graph.lint()
        graph.recompile()

    def _run_on_fakes(self, placeholders: Sequence[fx.Node]) -> _FakeRun:
        fakes = [n.meta["example_value"] for n in placeholders]
        for place, is_split in enumerate(self._are_split):
            if is_split:
                # A stand-in has other strides than a split tensor. Clone, as a leaf of the autograd
                # graph refuses writes with an error that does not name this mode.
                with torch.enable_grad():
                    fake = fakes[place]
                    empty = fake.new_empty(fake.shape).requires_grad_(fake.requires_grad)
                    fakes[place] = empty.clone()
            elif isinstance(fakes[place], Tensor) and fakes[place].is_inference():
                with torch.inference_mode(False):
                    fakes[place] = fakes[place].clone()
        facts = _FakeRun(self._graph)
        mode = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
        with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()), mode:
            facts.run(*fakes)
        return facts

    def _find_inputs(self, inputs: Sequence[Any]) -> None:
        """Find the parameters of split layers, and the values that depend on arguments."""
        sums = torch.ops.shardwise.all_reduce, torch.ops.shardwise.all_gather
        for node, value, is_split in zip(self._placeholders, inputs, self._are_split, strict=True):
            if getattr(type(value), "is_split", False):
                self._inside.add(node)
            elif is_split or (
                isinstance(value, Tensor)
                and value.requires_grad
                and not isinstance(value, nn.Parameter)
            ):
                self._activations.add(node)
        for node in self._graph.graph.nodes:
            if node.target in sums or not self._activations.isdisjoint(node.all_input_nodes):
                self._activations.add(node)
                for memory in self._facts.written[node]:
                    self._activations.update(self._nodes_by_memory[memory])

    def _rewrite(self, placeholders: Sequence[fx.Node]) -> None:
        operators = torch.ops.shardwise
        for node, is_split in zip(placeholders, self._are_split, strict=True):
            if is_split:
                # Reading the number of tokens makes torch compile another graph for fewer tokens.
                assert can_be_split(self._value(node), self._replica.group.size)
                self._mark(node, self._count_of(node))
        for node in list(self._graph.graph.nodes):
            if node.op == "output":
                self._output_counts = [self._counts.get(each) for each in node.args[0]]
                for each in self._inside.intersection(node.all_input_nodes):
                    does = "returns or stores a value from between two split layers"
                    raise _error(does, "", each)
            elif node.target is operators.copies:
                self._gather_for_region(node)
            elif node.target is operators.all_reduce:
                self._scatter_sum(node)
            elif node.target is not operators.all_gather:
                self._follow(node)
            self._writes += bool(self._facts.written[node])

    def _follow(self, node: fx.Node) -> None:
        """Let `node` compute its value on this rank's tokens or on full tensors."""
        func, args = self._functions[node]
        sources = args[:1] if func in CASTS_LIKE else node.all_input_nodes
        is_inside = not self._inside.isdisjoint(sources)
        if self._takes_tokens(node) and any(
            each.op == "placeholder" and each in self._inside for each in node.all_input_nodes
        ):
            # Split parameters take values of this rank's features, which are never split.
            raise _error("passes a tensor that is split by tokens to part of a layer", "", node)
        if self._takes_tokens(node) and (is_inside or not self._run_on_tokens(node)):
            self._run_on_full(node, is_inside)
        if not is_inside:
            return
        for each in self._activations.intersection(node.all_input_nodes) - self._inside:
            if (
                each not in self._counts
                and self._facts.records_grad[node]
                and any(tensor.requires_grad for tensor in _tensors_of(self._value(each)))
            ):
                # Each rank computes a different gradient.
                raise _error(
                    f"uses a value from outside ({_name_of(each)}) that needs a gradient between "
                    "two split layers",
                    "Detach this value",
                    node,
                )
        if _tensors_of(self._value(node)):
            self._inside.add(node)
        for memory in self._facts.written[node]:
            members = self._nodes_by_memory[memory]
            if any(each.op == "placeholder" for each in members):
                raise _error(
                    f"writes a value from between two split layers in place ({_name_of(node)}) to "
                    "a tensor from outside",
                    "",
                    node,
                )
            self._inside.update(members)

    def _takes_tokens(self, node: fx.Node) -> bool:
        return any(each in self._counts for each in node.all_input_nodes)

    def _value(self, node: fx.Node) -> Any:
        return self._facts.env[node]

    def _mark(self, node: fx.Node, count: Count) -> None:
        """Record that the value of `node` is split."""
        self._counts[node] = count
        full = self._value(node)
        with full.fake_mode:
            node.meta["example_value"] = part_of(full, self._place).requires_grad_(
                full.requires_grad and full.is_floating_point()
            )

    def _count_of(self, node: fx.Node) -> Count:
        """Return the number of tokens of the full value of `node`."""
        count = self._value(node).shape[TOKEN_DIM]
        # Reading a symbolic size that is no input makes torch compile another graph for others.
        return self._sizes.get(str(count)) or int(count)

    def _gather(self, part: fx.Node, count: Count, *, sums: bool = False) -> fx.Node:
        """Insert an all-gather of `part`, which has `count` tokens on all ranks together."""
        return self._graph.graph.call_function(
            torch.ops.shardwise.gather_tokens, (part, count, self._place, sums)
        )

    def _gather_for_region(self, node: fx.Node) -> None:
        (part,) = node.all_input_nodes
        graph, count = self._graph.graph, self._counts.get(part)
        with graph.inserting_before(node):
            if count is None:  # a view sees later writes to the full tensor
                whole = graph.call_function(copy_to_region, (part, self._replica.number))
            else:
                if self._facts.dtypes[node] != self._value(part).dtype:
                    part = graph.call_method("to", (part, self._facts.dtypes[node]))
                whole = self._gather(part, count, sums=True)
        self._inside.add(whole)
        for copy in list(node.users):
            assert copy.target is operator.getitem
            copy.replace_all_uses_with(whole)
            self._unused.append(copy)
        self._unused.append(node)

    def _scatter_sum(self, node: fx.Node) -> None:
        value, *_ = node.args
        assert isinstance(value, fx.Node)
        self._run_on_full(node, is_inside=True)
        if not can_be_split(self._value(node), self._replica.group.size):
            return
        node.target = torch.ops.shardwise.reduce_scatter_tokens
        node.args = node.args[0], self._place
        self._mark(node, self._count_of(node))

    def _run_on_tokens(self, node: fx.Node) -> bool:
        """Let `node` compute its value on this rank's tokens. Return False if it cannot."""
        func, args = self._functions[node]
        tokens = next(each for each in node.all_input_nodes if each in self._counts)
        if not (
            is_token_wise(func, args, node.kwargs, self._is_tensor, self._is_split)
            and has_same_tokens(self._value(node), self._value(tokens))
        ):
            return False
        count = self._value(tokens).shape[TOKEN_DIM]
        scattered, replicated = [], []
        for each in node.all_input_nodes:
            if each in self._counts:
                if self._value(each).shape[TOKEN_DIM] != count:
                    return False
            elif self._is_tensor(each) and func not in CASTS_LIKE:
                value = self._value(each)
                if is_replicated(value):
                    if value.requires_grad and self._facts.records_grad[node]:
                        replicated.append(each)
                elif value.shape[TOKEN_DIM] == count:
                    scattered.append(each)
                else:
                    return False
        graph = self._graph.graph
        with graph.inserting_before(node):
            for each in scattered:
                part = graph.call_function(torch.ops.shardwise.scatter_tokens, (each, self._place))
                node.replace_input_with(each, part)
            # A single all-reduce sums the gradients of all replicated tensors.
            if replicated:
                copies = graph.call_function(
                    torch.ops.shardwise.copies, (replicated, self._replica.number)
                )
                for place, each in enumerate(replicated):
                    copy = graph.call_function(operator.getitem, (copies, place))
                    node.replace_input_with(each, copy)
        self._mark(node, self._counts[tokens])
        return True

    def _run_on_full(self, node: fx.Node, is_inside: bool) -> None:
        """Let `node` compute its value on full tensors."""
        func, args = self._functions[node]
        if func in CASTS_LIKE and args[0] not in self._counts:
            return  # x.type_as(tokens) uses only the dtype and device of its argument
        if func in MEMORY or func in UNTRACKED_WRITES:
            raise _error(f"calls {_name_of(node)} on a tensor that is split by tokens", "", node)
        for each in node.all_input_nodes:
            if each not in self._counts:
                continue
            # A gather under no_grad has no gradient, and one before a write has the old values.
            # Inside a region, each rank computes a different gradient.
            key = each, self._facts.records_grad[node], self._writes, is_inside
            if key not in self._gathers:
                with self._graph.graph.inserting_before(node):
                    self._gathers[key] = self._gather(each, self._counts[each], sums=is_inside)
            node.replace_input_with(each, self._gathers[key])

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and isinstance(self._value(value), Tensor)

    def _is_split(self, value: Any, *, write: bool = False) -> bool:
        del write  # `_check_memory` checks writes
        return value in self._counts

    def _check_memory(self) -> None:
        """Raise UsageError if the parts of a split tensor, or its views, would miss a write."""
        for node, memories in self._facts.written.items():
            for memory in memories:
                members = self._nodes_by_memory[memory]
                if any(each in self._counts for each in members):
                    self._check_write(node, members)
        (output,) = (n for n in self._graph.graph.nodes if n.op == "output")
        self._check_outputs(output)

    def _check_write(self, node: fx.Node, members: Sequence[fx.Node]) -> None:
        # A part can be written if it is new memory, and if there is no view of the full tensor yet.
        # Views that are taken later see the new values.
        first, *others = sorted(each for each in members if each < node)
        func, _ = self._functions[first]
        if (
            node not in self._counts
            or first.op == "placeholder"
            or first not in self._counts
            or func in CASTS
            or func in CASTS_LIKE
            or any(each not in self._counts or not self._facts.written[each] for each in others)
        ):
            raise _error(
                f"writes in place ({_name_of(node)}) to a tensor that is split by tokens",
                "Create a new tensor",
                node,
            )

    def _check_outputs(self, output: fx.Node) -> None:
        # The caller may write to a view, and the parts would not change.
        for node in output.all_input_nodes:
            value = self._facts.env.get(node)
            if not isinstance(value, Tensor):
                continue
            others = self._nodes_by_memory[memory_of(value)]
            if node in self._counts:
                # A part of the caller's tensor is a copy.
                others = [each for each in others if each.op == "placeholder" and each is not node]
            if any(each in self._counts for each in others):
                raise _error(
                    f"returns a view ({_name_of(node)}) of a tensor that is split by tokens",
                    "Return a copy of the view (.clone())",
                    node,
                )

    def compile(self, backend: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph with the compiler's `backend`. `inputs` are the original ones."""
        facts = zip(self._placeholders, inputs, self._are_split, strict=True)
        examples = [
            node.meta["example_value"] if is_split else value for node, value, is_split in facts
        ]
        return backend(self._graph, examples)  # type: ignore[no-any-return]

    def run(self, compiled: Callable[..., Any], stand_ins: StandIns, values: Sequence[Any]) -> Any:
        """Run the compiled graph. `values` are the inputs, some of which may be stand-ins."""
        replica = self._replica
        parts = []
        for value, is_split in zip(values, self._are_split, strict=True):
            shard = stand_ins.shard_of(value)
            if is_split:
                # torch.compile cannot tell a full tensor from a stand-in.
                parts.append(self._part(value) if shard is None else shard.local)
            else:
                parts.append(value if shard is None else shard.full())
        outputs = []
        for output, count in zip(compiled(*parts), self._output_counts, strict=True):
            if count is None:
                outputs.append(output)
                continue
            # A symbolic number of tokens is an input of the graph.
            if isinstance(count, fx.Node):
                count = int(values[self._placeholders.index(count)])
            sharded = split_tokens(count, replica.group.size)
            outputs.append(SequenceShard(output, replica.group, replica.randomness, sharded))
        return outputs

    def _part(self, value: Tensor) -> Tensor:
        group = self._replica.group
        return scatter_to_region(value, group, split_tokens(value.shape[TOKEN_DIM], group.size))


_OPERATORS = {"truediv": "div"}


def _torch_function_of(
    node: fx.Node, is_tensor: Callable[[Any], bool]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and the arguments that `__torch_function__` would get for `node`."""
    target: Any = node.target
    if node.op == "call_method":
        return getattr(Tensor, target, target), node.args
    if getattr(target, "__module__", None) != "_operator" or not node.args:
        return target, node.args
    name = target.__name__
    if hasattr(Tensor, f"__{name}__") and name.startswith("i") and name != "invert":
        return getattr(Tensor, f"__{name}__"), node.args
    if not is_tensor(node.args[0]):
        return getattr(Tensor, f"__r{name}__", target), node.args[::-1]
    return getattr(Tensor, _OPERATORS.get(name, name), target), node.args


def _tensors_of(value: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]


def _name_of(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _error(does: str, advice: str, node: fx.Node | None = None) -> UsageError:
    trace = (node.stack_trace or "") if node is not None else ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    place = f" at {lines[-1]}" if lines else ""
    return UsageError(
        f"A compiled unit (--compile with --sequence-parallel) {does}{place}. "
        f"{advice + ', or start' if advice else 'Start'} without one of the two flags."
    )
