"""Splits the graphs of compiled units by tokens (`--sequence-parallel`).

The code of a unit may read shapes, so torch.compile traces it on full-sized tensors without data
(compiled_stand_ins.py). A pass over the nodes of the graph then decides which values are split. It
applies the same rules as eager code (sequence_parallel.py):

    sum at the end of a region         reduce-scatter: the value is split
    token-wise function                runs on parts: the value is split
    start of a region                  all-gather, whose backward pass is a reduce-scatter
    any other use of a split value     all-gather, whose backward pass takes this rank's part

For example, if x is split:

    traced graph                       changed graph

    c = copies([x])                    c = gather_tokens(x, sums=True)
    h = tanh(linear(c, up))            h = tanh(linear(c, up))
    y = all_reduce(linear(h, down))    y = reduce_scatter_tokens(linear(h, down))
    z = x + y                          z = x + y
    s = cumsum(z, 1)                   s = cumsum(gather_tokens(z), 1)

Inside a region, values differ between ranks and have all tokens. The pass follows them through the
graph, because a region may stay open past other layers. A function of such a value runs on full
tensors, and the gradients of split tensors that it gathers are summed over the ranks.

The compiler's backend traces the changed graph on this rank's tokens. Other nodes, such as nodes
that switch gradients or autocast, keep their places.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from shardwise.parallel.tensor.compiled_collectives import copy_to_region, part_of
from shardwise.parallel.tensor.compiled_stand_ins import (
    StandIns,
    memory_of,
    sizes_of_its_own,
    split,
    unit_error,
)
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


class GraphOfParts:
    """A graph of full tensors, changed so that it computes this rank's tokens.

    Args:
        graph: The graph. It is changed in place.
        inputs: The graph's inputs. Stand-ins take the place of split tensors.
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
        self._place = [replica.number, replica.group.rank, replica.group.size]
        self._placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._are_split = [shard is not None for shard in shards]
        self._facts = self._run_on_fakes()
        # Nodes that the pass inserts have no facts.
        self._functions = {n: _torch_function_of(n, self._is_tensor) for n in graph.graph.nodes}
        self._nodes_by_memory: dict[int, list[fx.Node]] = defaultdict(list)
        for node, value in self._facts.env.items():
            for tensor in _tensors_of(value):
                self._nodes_by_memory[memory_of(tensor)].append(node)
        self._sizes = {
            str(n.meta["example_value"]): n
            for n in self._placeholders
            if isinstance(n.meta["example_value"], torch.SymInt)
        }
        self._counts: dict[fx.Node, Count] = {}
        """Maps each node whose value is split to its number of tokens."""
        self._inside: set[fx.Node] = set()
        """The nodes whose values differ between ranks, because they are inside a region."""
        self._activations: set[fx.Node] = set()
        """The nodes whose gradients flow to arguments or to other layers."""
        self._gathers: dict[tuple[Any, ...], fx.Node] = {}
        self._writes = 0
        """The number of nodes so far that write to memory."""
        self._unused: list[fx.Node] = []
        self._output_counts: list[Count | None] = []
        self._find_inputs(inputs)
        self._split_nodes()
        self._check_writes()
        self._check_outputs()
        for node in self._unused:
            graph.graph.erase_node(node)
        graph.graph.lint()
        graph.recompile()

    def compile(self, backend: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph with the compiler's `backend`. `inputs` are the original ones."""
        facts = zip(self._placeholders, inputs, self._are_split, strict=True)
        examples = [
            node.meta["example_value"] if is_split else value for node, value, is_split in facts
        ]
        return backend(self._graph, examples)  # type: ignore[no-any-return]

    def run(self, compiled: Callable[..., Any], stand_ins: StandIns, values: Sequence[Any]) -> Any:
        """Run the compiled graph on inputs that may contain stand-ins."""
        replica, inputs = self._replica, []
        for value, is_split in zip(values, self._are_split, strict=True):
            shard = stand_ins.shard_of(value)
            if is_split:
                # torch.compile cannot tell a full tensor from a stand-in.
                inputs.append((split(value, replica) if shard is None else shard).local)
            else:
                inputs.append(value if shard is None else shard.full())
        outputs = []
        for output, count in zip(compiled(*inputs), self._output_counts, strict=True):
            if count is None:
                outputs.append(output)
                continue
            # A symbolic number of tokens is an input of the graph.
            if isinstance(count, fx.Node):
                count = int(values[self._placeholders.index(count)])
            sharded = split_tokens(count, replica.group.size)
            outputs.append(SequenceShard(output, replica.group, replica.randomness, sharded))
        return outputs

    def _run_on_fakes(self) -> _FakeRun:
        fakes = [n.meta["example_value"] for n in self._placeholders]
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
        grad = torch.set_grad_enabled(torch.is_grad_enabled())
        with sizes_of_its_own(mode), torch.inference_mode(False), grad, mode:
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

    def _split_nodes(self) -> None:
        """Split the values of the nodes in order, and insert gathers and scatters."""
        operators = torch.ops.shardwise
        for node, is_split in zip(self._placeholders, self._are_split, strict=True):
            if is_split:
                # Reading the number of tokens makes torch compile another graph for fewer tokens.
                assert can_be_split(self._value(node), self._replica.group.size)
                self._mark_split(node, self._count_of(node))
        for node in list(self._graph.graph.nodes):
            if node.op == "output":
                self._output_counts = [self._counts.get(each) for each in node.args[0]]
                for each in self._inside.intersection(node.all_input_nodes):
                    does = "returns or stores a value from between two split layers"
                    raise unit_error(does, node=each)
            elif node.target is operators.copies:
                self._gather_for_region(node)
            elif node.target is operators.all_reduce:
                self._run_on_full(node, is_inside=True)
                if can_be_split(self._value(node), self._replica.group.size):
                    node.target = operators.reduce_scatter_tokens
                    node.args = node.args[0], self._place
                    self._mark_split(node, self._count_of(node))
            elif node.target is not operators.all_gather:
                self._split_node(node)
            self._writes += bool(self._facts.written[node])

    def _gather_for_region(self, node: fx.Node) -> None:
        """Replace `node`, which copies the input of a region, with an all-gather if it is split."""
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

    def _split_node(self, node: fx.Node) -> None:
        """Make `node` compute its value on this rank's tokens, or else on full tensors."""
        func, args = self._functions[node]
        sources = args[:1] if func in CASTS_LIKE else node.all_input_nodes
        is_inside = not self._inside.isdisjoint(sources)
        if any(each in self._counts for each in node.all_input_nodes):
            for each in self._inside.intersection(node.all_input_nodes):
                if each.op == "placeholder":
                    # Split parameters take values of this rank's features, which are never split.
                    does = "passes a tensor that is split by tokens to part of a layer"
                    raise unit_error(does, node=node)
            if is_inside or not self._run_on_tokens(node):
                self._run_on_full(node, is_inside)
        if is_inside:
            self._follow_region(node)

    def _run_on_tokens(self, node: fx.Node) -> bool:
        """Make `node` compute its value on this rank's tokens. Return False if it cannot."""
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
        self._mark_split(node, self._counts[tokens])
        return True

    def _run_on_full(self, node: fx.Node, is_inside: bool) -> None:
        """Make `node` compute its value on full tensors. Gather its split inputs."""
        func, args = self._functions[node]
        if func in CASTS_LIKE and args[0] not in self._counts:
            return  # x.type_as(tokens) uses only the dtype and device of its argument
        if func in MEMORY or func in UNTRACKED_WRITES:
            does = f"calls {_name_of(node)} on a tensor that is split by tokens"
            raise unit_error(does, node=node)
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

    def _follow_region(self, node: fx.Node) -> None:
        """Record that the value of `node` and the memory that it writes to differ between ranks."""
        for each in self._activations.intersection(node.all_input_nodes) - self._inside:
            if (
                each not in self._counts
                and self._facts.records_grad[node]
                and any(tensor.requires_grad for tensor in _tensors_of(self._value(each)))
            ):
                # Each rank computes a different gradient.
                raise unit_error(
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
                does = f"writes a value from between two split layers in place ({_name_of(node)})"
                raise unit_error(f"{does} to a tensor from outside", node=node)
            self._inside.update(members)

    def _check_writes(self) -> None:
        """Raise UsageError if the part of a split tensor, or a view of it, would miss a write."""
        for node, memories in self._facts.written.items():
            for memory in memories:
                members = self._nodes_by_memory[memory]
                if all(each not in self._counts for each in members):
                    continue
                # A part can be written if it is new memory, and if there is no view of the full
                # tensor yet. Views that are taken later see the new values.
                first, *others = sorted(each for each in members if each < node)
                func, _ = self._functions[first]
                if (
                    node not in self._counts
                    or first.op == "placeholder"
                    or first not in self._counts
                    or func in CASTS
                    or func in CASTS_LIKE
                    or any(e not in self._counts or not self._facts.written[e] for e in others)
                ):
                    raise unit_error(
                        f"writes in place ({_name_of(node)}) to a tensor that is split by tokens",
                        "Create a new tensor",
                        node,
                    )

    def _check_outputs(self) -> None:
        """Raise UsageError if the caller could write to a view whose parts would not change."""
        (output,) = (n for n in self._graph.graph.nodes if n.op == "output")
        for node in output.all_input_nodes:
            value = self._facts.env.get(node)
            if not isinstance(value, Tensor):
                continue
            others = self._nodes_by_memory[memory_of(value)]
            if node in self._counts:
                # A part of the caller's tensor is a copy.
                others = [each for each in others if each.op == "placeholder" and each is not node]
            if any(each in self._counts for each in others):
                raise unit_error(
                    f"returns a view ({_name_of(node)}) of a tensor that is split by tokens",
                    "Return a copy of the view (.clone())",
                    node,
                )

    def _mark_split(self, node: fx.Node, count: Count) -> None:
        """Record that the value of `node` is split."""
        self._counts[node] = count
        full = self._value(node)
        with full.fake_mode:
            node.meta["example_value"] = part_of(full, self._place).requires_grad_(
                full.requires_grad and full.is_floating_point()
            )

    def _gather(self, part: fx.Node, count: Count, *, sums: bool) -> fx.Node:
        """Insert an all-gather of `part`, which has `count` tokens on all ranks together.

        If `sums` is true, the backward pass sums the ranks' gradients.
        """
        return self._graph.graph.call_function(
            torch.ops.shardwise.gather_tokens, (part, count, self._place, sums)
        )

    def _count_of(self, node: fx.Node) -> Count:
        """Return the number of tokens of the full value of `node`."""
        count = self._value(node).shape[TOKEN_DIM]
        # Reading a symbolic size that is no input makes torch compile another graph for others.
        return self._sizes.get(str(count)) or int(count)

    def _value(self, node: fx.Node) -> Any:
        return self._facts.env[node]

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and isinstance(self._value(value), Tensor)

    def _is_split(self, value: Any, *, write: bool = False) -> bool:
        del write  # `_check_writes` checks writes
        return value in self._counts


class _FakeRun(fx.Interpreter):
    """Runs the graph of full tensors on fake tensors, and records facts about each node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.records_grad: dict[fx.Node, bool] = {}
        self.dtypes: dict[fx.Node, torch.dtype] = {}
        """The dtype of the gathered input of a region."""
        self.written: dict[fx.Node, set[int]] = {}
        """The memories that a node writes to."""

    def run_node(self, n: fx.Node) -> Any:
        operands = [tensor for node in n.all_input_nodes for tensor in _tensors_of(self.env[node])]
        if any(tensor.is_inference() for tensor in operands):
            # Its tensors have no version counters, so that writes would not be found.
            raise unit_error("uses torch.inference_mode", "Use torch.no_grad", n)
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
