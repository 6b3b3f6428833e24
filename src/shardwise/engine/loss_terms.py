"""Reads from a loss's autograd graph which means and sums it consists of, and over how many items.

The walk starts at the loss and follows operations that are linear in a scalar: additions, scalings,
casts and views. Each path ends at the operation that reduced a tensor to a scalar, and yields a
term:

    cross_entropy(...) + 0.1 * hidden.square().mean()

    AddBackward0
    ├─ NllLossBackward0               a mean over _saved_total_weight labels
    └─ MulBackward0 ─ MeanBackward0   a mean over hidden.numel() elements

Penalties on parameters are the same for every part of a batch, so they are not terms. Nothing in
this module synchronises with a GPU: counts on a GPU stay there, as 0-dim tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from shardwise.engine.step_statistics import Number
from shardwise.model import checkpointed_scalars
from shardwise.model.activation_offload import Kept
from shardwise.model.unit_hooks import find_outer_unpack

Kind = Literal["mean", "sum", "unread"]


@dataclass(frozen=True)
class Term:
    """A part of a loss that depends on the batch.

    `items` is the number of items of a "mean", and 1 for a "sum". For an "unread" term it is an
    estimate. Its value per row is the same on all ranks that have the same fraction of labels.
    `source` names the operation. `has_rows` is True if the first dimension of the operation's input
    is the batch dimension.
    """

    kind: Kind
    items: Number
    source: str
    has_rows: bool = False
    counted: Number | None = None
    """Number of elements that a loss function has summed, if the sum was divided by `items`."""


@dataclass(frozen=True)
class LossTerms:
    """The terms of a loss.

    curved    names of nonlinear operations on a mean or a sum over the batch; such a loss depends
              on how the batch is split
    guessed   divisors of sums that are assumed to be a number of items, but may be constants
    is_zero   True if the loss was multiplied by 0
    """

    terms: Sequence[Term] = ()
    curved: Sequence[str] = ()
    guessed: Sequence[float] = ()
    is_zero: bool = False
    has_penalty: bool = False
    """True if the loss includes a penalty that depends on parameters only."""

    @property
    def is_sum(self) -> bool:
        """True if the loss consists only of sums over the batch."""
        return bool(self.terms) and not self.curved and all(t.kind == "sum" for t in self.terms)

    @property
    def has_sum(self) -> bool:
        return any(term.kind == "sum" for term in self.terms)

    @property
    def main(self) -> Term | None:
        """The term whose number of items is the loss's weight, or None if the loss has no mean."""
        means = [term for term in self.terms if term.kind == "mean"]
        counted = [term for term in means if not term.has_rows]
        return next(iter(counted or means), None)

    def mixes_sums(self, *, summed: bool) -> bool:
        """Return whether the loss adds terms that need different factors, such as a mean and a sum.

        `summed` is True if several workers' losses are added.
        """
        if summed:
            return self.has_penalty or any(term.kind != "sum" for term in self.terms)
        return self.has_sum

    def mix(self, weight: Number) -> Number:
        """Return a number that is equal for all micro-batches and ranks if `weight` is right."""
        terms = [term for term in self.terms if term.kind != "sum"]
        if len(terms) == 1 and terms[0].items is weight:
            return 1.0
        # Use a different factor per term, so that differences between counts cannot cancel.
        total = sum(((1 + 0.618 * i) * term.items for i, term in enumerate(terms)), 0.0)
        return total / weight if terms else -1.0

    def describe(self) -> str:
        """Return the terms in words. Synchronises if a number of items is on a GPU."""
        return " and ".join(map(_words, self.terms)) or "nothing that depends on the batch"


FURTHER = ", with a further loss,"
"""Introduces a second or later loss of the same items in messages."""

UNKNOWN = LossTerms()
"""The terms of a loss whose graph was not read."""


def _known(number: Any) -> float:
    """Return a number that autograd has saved on the CPU, as a Python number or a 0-dim tensor.

    Do not call `item` on such a tensor: an active TorchDispatchMode would then receive a number
    instead of a tensor.
    """
    value: Any = number.tolist() if isinstance(number, Tensor) else number
    return float(value)


def _words(term: Term) -> str:
    if term.kind == "sum":
        return f"a sum ({term.source})"
    count = f"{float(term.items):,.10g}"
    if term.kind == "unread":
        return f"one that cannot be read ({term.source}, of {count} elements)"
    return f"a mean over {count} items ({term.source})"


def graph_nodes(loss: Tensor) -> Iterator[Any]:
    """Yield each node of the loss's autograd graph once, starting at the loss.

    A node with an attribute `variable` accumulates the gradient of that tensor.
    """
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes.extend(child for child, _ in node.next_functions)


def read(loss: Tensor, rows: int | None, *, total: int = 0) -> LossTerms:
    """Read the terms of `loss` from its autograd graph.

    Saved tensors that a saved-tensor hook has replaced are not read: they may be on a disk, or
    torch.utils.checkpoint would rerun a forward pass to recompute them. The number of labels of a
    cross_entropy in a checkpoint is read if `checkpointed_scalars.keep` was called earlier.

    Args:
        loss: A scalar.
        rows: Number of rows of this rank's batch, or None without a batch.
        total: Number of rows of the global batch.
    """
    walk = _Walk(rows, total)
    if loss.grad_fn is not None:
        walk.visit(loss.grad_fn, 0, _Scale())
    # Merge equal terms: a Python sum over rows has one term per row. Compare tensors by identity,
    # because comparing values would synchronise.
    terms = {(t.kind, t.items, t.source): t for t in reversed(walk.terms)}
    is_zero = walk.is_zero and not terms
    curved = tuple(dict.fromkeys(walk.curved))
    return LossTerms(tuple(terms.values()), curved, walk.guessed, is_zero, walk.has_penalty)


def drops_last(loss: Tensor, length: int, dims: Collection[int]) -> bool:
    """Return whether `loss` leaves out the last of `length` tokens, as in `logits[:, :-1]`.

    `dims` are the dimensions that may be those of tokens.
    """
    for node in _nodes_near(loss):
        if _kind(node) == "Slice" and node._saved_dim in dims:
            shape, end = tuple(node._saved_self_sym_sizes), _signed(node._saved_end)
            tokens = shape[node._saved_dim]
            if len(shape) == 3 and tokens == length and end in (-1, length - 1):
                return True
    return False


def ends_without_label(loss: Tensor, length: int) -> bool:
    """Return whether a cross entropy ignores the last label of each row, but not all before it.

    Reads the labels, which waits for a GPU.

    Args:
        loss: A scalar.
        length: Number of labels of a row.
    """
    for node in _nodes_near(loss):
        target = _saved(node, "target") if _kind(node).startswith("NllLoss") else None
        if isinstance(target, Tensor) and target.numel() and target.numel() % length == 0:
            counts = target.reshape(-1, length) != _signed(node._saved_ignore_index)
            return bool(counts[:, -2].any() & ~counts[:, -1].any())
    return False


def _nodes_near(loss: Tensor) -> Iterator[Any]:
    """Yield the nodes of operations close to `loss`, so that no model is walked through."""
    level: list[Any] = [loss.grad_fn]
    for _ in range(DEEPEST):
        yield from (node for node in level if node is not None)
        level = [child for node in level if node is not None for child, _ in _edges(node)]
        # Dropping a part's last token in a model would fail the trial.
        level = [node for node in dict.fromkeys(level) if not _is_opaque(node)]


@dataclass(frozen=True)
class _Scale:
    """The scaling applied to a scalar between its term and the loss.

    `factor` is the product of the known numbers that multiply the scalar. `count` is the number
    that divides it: None if there is no division, NaN if a hook has replaced the number.
    """

    factor: float = 1.0
    count: Number | None = None
    siblings: int = 0
    """Number of scalars that are added before the division by `count`; 0 if none are."""
    is_multiplied: bool = False
    is_bent: bool = False
    """True if an operation between the scalar and the loss is nonlinear."""

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for equal scales. Counts on a GPU are compared by identity."""
        count = id(self.count) if isinstance(self.count, Tensor) else self.count
        return self.factor, count, self.siblings, self.is_multiplied, self.is_bent


_BENT = _Scale(is_bent=True)


_LINEAR = frozenset(
    [
        "Add",
        "Sub",
        "Rsub",
        "Neg",
        "ToCopy",
        "Clone",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Squeeze",
        "Unsqueeze",
        "Alias",
        "Expand",
        "Permute",
        "Transpose",
        "T",
        "NanToNum",
        "Where",
        "CopySlices",
        "Contiguous",
        "Lift",
        "MaskedFill",
        "Stack",
        "Cat",
    ]
)
"""Operations that pass a scalar through, or add it to others."""

_SUMS = ("Sum", "Nansum", "Dot", "Vdot")
_PRODUCTS = ("Mm", "Bmm", "Mv")
"""Products that reduce to a scalar, and so count as sums."""

_LOSSES = {
    "NllLoss": "cross_entropy",
    "NllLoss2D": "cross_entropy",
    "MseLoss": "mse_loss",
    "HuberLoss": "huber_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "SoftMarginLoss": "soft_margin_loss",
    "BinaryCrossEntropy": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogits": "binary_cross_entropy_with_logits",
    "MultiMarginLoss": "multi_margin_loss",
    "MultilabelMarginLoss": "multilabel_margin_loss",
}
"""Maps the graph name of a torch loss that is a single operation to its function name."""

_BY_ROWS = ("MultiMarginLoss", "MultilabelMarginLoss")
"""Losses that average over rows instead of elements."""

_MEAN, _SUM = 1, 2
"""torch's internal codes for reduction="mean" and "sum"."""

_WITH_DATA = frozenset(
    [
        "Embedding",
        "EmbeddingBag",
        "Index",
        "IndexSelect",
        "Gather",
        "NllLoss",
        "NllLoss2D",
        "CtcLoss",
        "NativeDropout",
        "Take",
        "GridSampler2D",
        "GridSampler3D",
    ]
)
"""Operations whose data inputs are not edges in the graph."""

_ELEMENTWISE = ("Mul", "Div", "Add", "Sub", "Rsub", "Where", "MaskedFill", "Pow", "Maximum")

_OF_WEIGHTS = ("_GatherParameterBackward", "_TakeParameterShardBackward")
"""This package's operations that return full parameters, or parts of them."""

DEEPEST = 16
"""Maximum number of operations between a penalty and its parameters."""

SMALL = 0.05
"""A factor up to this size may be a division by a number of items."""


@dataclass
class _Walk:
    """Finds a loss's terms in its autograd graph."""

    rows: int | None
    total: int
    terms: list[Term] = field(default_factory=list)
    curved: list[str] = field(default_factory=list)
    guessed: list[float] = field(default_factory=list)
    is_zero: bool = False
    has_penalty: bool = False

    def visit(self, node: Any, output: int, scale: _Scale) -> None:
        """Add the terms below `node`, whose scalar `output` enters the loss with `scale`."""
        # Use a stack instead of recursion: a loss may be a Python sum of thousands of terms. The
        # same node with the same scale gives the same terms. Without `seen`, a recurrence such as s
        # = s + f(s) would be walked once for each of its exponentially many paths.
        opened, seen = [(node, output, scale)], set[Any]()
        while opened:
            node, output, scale = opened.pop()
            if (place := (node, output, scale.key)) in seen:
                continue
            seen.add(place)
            name = _kind(node)
            if name in _LINEAR:
                opened.extend((child, number, scale) for child, number in _edges(node))
            elif _is_times_zero(node):
                opened.extend(self._scaled(node, name, scale))
            elif _of_parameters(node):
                # A worker without items often returns its parameters times 0, which is not a
                # penalty.
                self.is_zero |= scale.factor == 0
                self.has_penalty |= scale.factor != 0
            elif name in ("Mul", "Div"):
                opened.extend(self._scaled(node, name, scale))
            elif name == "Mean" or name in _SUMS or name in _PRODUCTS:
                opened.extend(self._reduced(node, name, scale))
            elif name in _LOSSES:
                self._loss(node, name, scale)
            elif name == "_ChunkedCrossEntropy":
                items = _number(node.items)
                if node.is_mean:
                    self._mean(items, "cross_entropy", scale)
                else:
                    self._sum(items, node.tokens, "cross_entropy", scale, has_rows=True)
            elif name in ("Select", "Unbind", "Split", "Slice", "Index", "Gather"):
                self._sum(1, 1, name, scale)
            else:
                # A nonlinear operation. If its input is a scalar computed from the batch, continue
                # below it.
                of_batch = [edge for edge in _edges(node) if not _of_parameters(edge[0])]
                if _is_opaque(node) or not of_batch or _numel(*of_batch[0]) != 1:
                    self._unread(node)
                else:
                    self.curved.append(name.lower())
                    opened.append((*of_batch[0], _BENT))

    # -- scalars of scalars -----------------------------------------------------------------

    def _scaled(self, node: Any, name: str, scale: _Scale) -> Iterator[tuple[Any, int, _Scale]]:
        """Yield the scalar that `node` multiplies or divides, as (node, output, new scale)."""
        edges: Sequence[Any] = (*node.next_functions, (None, 0))
        first, second = edges[0], edges[1]
        both = first[0] is not None and second[0] is not None
        # Both inputs have a gradient. The loss is only linear if one does not depend on data.
        if both and _of_parameters(first[0]):  # a learned factor
            yield (*second, scale)
        elif both:
            is_curved = not _of_parameters(second[0])
            if is_curved:
                self.curved.append(f"{name.lower()} of two terms")
            yield (*first, _BENT if is_curved else scale)
        else:
            edge = second if first[0] is None else first
            number = _saved(node, "self" if first[0] is None else "other")
            if name == "Div" and first[0] is None:
                self.curved.append("reciprocal")
                yield (*edge, _BENT)
            elif name == "Div":
                yield (*edge, self._divided(scale, number, edge[0]))
            elif number is None or (isinstance(number, Tensor) and number.device.type != "cpu"):
                yield (*edge, scale)
            else:
                factor = scale.factor * _known(number)
                yield (*edge, replace(scale, factor=factor, is_multiplied=True))

    def _divided(self, scale: _Scale, number: Any, child: Any) -> _Scale:
        number = math.nan if number is None else number
        if isinstance(number, Tensor) and number.device.type == "cpu":
            number = _known(number)
        # Merge two divisions, such as by tokens and by rows, into one by their product.
        count = number if scale.count is None else scale.count * number
        # In (a + b) / 2, the 2 is the number of means, not a number of items.
        added = _added(child) if _kind(child) in ("Add", "Sum") else []
        return replace(scale, count=count, siblings=len(added))

    # -- scalars of tensors -----------------------------------------------------------------

    def _reduced(self, node: Any, name: str, scale: _Scale) -> Iterator[tuple[Any, int, _Scale]]:
        """Add the term for a mean or sum over a tensor. If it stacks scalars, yield them."""
        child, output = _edges(node)[0]
        sizes = _sizes(child, output)
        numel = math.prod(sizes)
        # With one loss per row, torch.stack(losses).mean() averages over rows, not over terms.
        stacked = _stacked(child)
        if stacked and not (name == "Mean" and self.rows == len(stacked)):
            yield from ((inner, number, scale) for inner, number in stacked)
            return
        # A product's inputs may have the batch dimension anywhere, such as (1, rows) @ (rows, 1).
        has_rows = self.rows in (sizes if name in _PRODUCTS else sizes[:1])
        inner = _kind(child)
        if inner in ("Mean", "Sum") and (across := _rows_reduced(child)):
            # An inner operation has already reduced the rows, as in x.mean(0).sum().
            has_rows = across == self.rows
            numel = across if inner == "Mean" else numel
            name = inner
        elif statistic := _statistic_under(child):
            self.curved.append(statistic)
            return
        if name == "Mean":
            self._mean(float(numel), "mean", scale, has_rows=has_rows)
        elif scale.count is None and _is_zeros(child):
            self.is_zero = True
        else:
            counted = self._counted(child) if scale.count is not None else numel
            self._sum(numel if counted is None else counted, numel, name, scale, has_rows=has_rows)

    def _loss(self, node: Any, name: str, scale: _Scale) -> None:
        """Add the term for one of torch's loss functions."""
        source, is_sum = _LOSSES[name], node._saved_reduction == _SUM
        total = _total_weight(node) if name.startswith("NllLoss") else None
        if total is not None and not is_sum:
            self._mean(_number(total), source, scale)
            return
        sizes = _sizes(*_edges(node)[0])
        numel = math.prod(sizes)
        has_rows = sizes[:1] == (self.rows,)
        if is_sum:
            counted = numel if total is None else _number(total)
            before = len(self.terms)
            self._sum(counted, numel, source, scale, has_rows=True)
            self.terms[before:] = [replace(term, counted=counted) for term in self.terms[before:]]
        elif name.startswith("NllLoss"):
            labels = numel // (sizes[1] if len(sizes) > 1 else sizes[0])
            self.terms.append(Term("unread", float(labels), f"{source} in a checkpoint"))
        else:
            items = (sizes[0] if len(sizes) > 1 else 1) if name in _BY_ROWS else numel
            self._mean(float(items), source, scale, has_rows=has_rows)

    def _mean(self, items: Number, source: str, scale: _Scale, *, has_rows: bool = False) -> None:
        if scale.siblings and scale.siblings == self.rows == scale.count:
            # The script averages per-row losses, and this is the loss of one row.
            items, has_rows = float(self.rows), True
        self.terms.append(Term("mean", items, source, has_rows))

    def _sum(
        self, counted: Number, numel: int, source: str, scale: _Scale, *, has_rows: bool = False
    ) -> None:
        """Add the term for a sum over `numel` elements, `counted` of which are unmasked.

        The term counts as a mean if the sum is then divided by a number of items.
        """
        source, count, factor = source.lower(), scale.count, abs(scale.factor)
        if isinstance(count, float) and math.isnan(count):
            self.terms.append(Term("unread", float(numel), source))
            return
        known = {self.rows, numel} | ({scale.siblings} if numel == 1 else set())
        if isinstance(count, Tensor) or (count is not None and isinstance(counted, Tensor)):
            # If everything is masked, the divisor is often 1 from clamp(min=1), although the count
            # is 0.
            device = count.device if isinstance(count, Tensor) else counted.device  # type: ignore[union-attr]
            count = torch.as_tensor(count, dtype=torch.float64, device=device).detach()
            some = torch.as_tensor(counted, device=device) != 0
            self.terms.append(Term("mean", torch.where(some, count, 0.0), source))
        elif count is not None:
            is_known = count in known or math.isclose(count, counted, rel_tol=1e-5)
            divided = float(count) if counted else 0.0
            # Real counts, such as rows or rows x tokens, usually divide the number of elements;
            # constants rarely do.
            is_multiple = divided and numel % count == 0 and count % (self.rows or 1) == 0
            if divided and not is_known and (not is_multiple or count == self.total):
                self.guessed.append(float(count))
            self.terms.append(Term("mean", divided, source, count == self.rows))
        elif factor == 0:
            self.is_zero = True
        elif scale.is_multiplied and (items := _whole_inverse(factor)) and items in known:
            if factor > SMALL:
                self.guessed.append(float(items))
            self.terms.append(Term("mean", float(items), source, items == self.rows))
        elif has_rows and not scale.is_bent:
            kind: Kind = "sum" if factor > SMALL else "unread"
            self.terms.append(Term(kind, 1.0 if kind == "sum" else float(numel), source))

    def _counted(self, node: Any) -> Any:
        """Return the number of unmasked elements in the output of `node`, or None if unknown."""
        while node is not None:
            name = _kind(node)
            if name in ("NllLoss", "NllLoss2D"):
                target = _saved(node, "target")
                ignored = _signed(node._saved_ignore_index)
                return None if target is None else _number((target != ignored).sum())
            if name == "MaskedFill":
                mask = _saved(node, "mask")
                return None if mask is None else _number((~mask).sum())
            edges = _edges(node)
            # The branch with an edge has the gradient, so the mask selects its elements.
            first = node.next_functions[0][0] is not None if node.next_functions else False
            if name == "Where" and len(edges) == 1:
                mask = _saved(node, "condition")
                return None if mask is None else _number((mask == first).sum())
            if name == "Mul" and len(edges) == 1:
                mask = _saved(node, "other" if first else "self")
                if isinstance(mask, Tensor) and mask.numel() > 1:
                    # Use absolute values, because signed factors (advantages) may sum to 0.
                    return _number(mask.double().abs().sum() * (_numel(node, 0) // mask.numel()))
            passes = name in ("Mul", "Neg", "View", "UnsafeView", "ReshapeAlias", "ToCopy")
            node = edges[0][0] if passes and len(edges) == 1 else None
        return None

    def _unread(self, node: Any) -> None:
        """Add a term of unknown kind, whose number of items is estimated from its inputs' sizes."""
        sizes = [_sizes(*edge) for edge in _edges(node) if not _of_parameters(edge[0])]
        items: Number = float(self._largest(sizes))
        if _is_opaque(node):
            saved = [kept for raw in node._raw_saved_tensors if (kept := _kept(raw)) is not None]
            labels = [t for t in saved if t.dtype == torch.int64 and self._largest([t.shape])]
            items += float(self._largest([t.shape for t in labels]))
            # Means usually ignore negative labels.
            for each in labels:
                items = items - _number((each < 0).sum())
        self.terms.append(Term("unread", items, node.name().removesuffix("Backward")))

    def _largest(self, shapes: Iterable[Sequence[int]]) -> int:
        """Return the number of elements in the largest shape that may have the batch dimension.

        Shapes of tables and positions do not depend on the number of rows, and are usually smaller.
        """
        of_rows = (shape for shape in shapes if shape and shape[0] % (self.rows or 1) == 0)
        return max(map(math.prod, of_rows), default=0)


def _kind(node: Any) -> str:
    return _operation(node.name())


@cache  # a graph has many nodes with few distinct names, and is read in each step
def _operation(name: str) -> str:
    """Return the operation in an autograd node's name, such as "Mul" for `MulBackward0`."""
    return re.sub(r"Backward\d*$", "", name.rpartition("::")[2])


def _whole_inverse(factor: float) -> int | None:
    """Return 1 / `factor` if it is an integer, otherwise None."""
    if not math.isfinite(factor) or not math.isfinite(1 / factor):
        return None
    inverse = round(1 / factor)
    return inverse if math.isclose(inverse * factor, 1, rel_tol=1e-6) else None


def _edges(node: Any) -> list[tuple[Any, int]]:
    return [(child, number) for child, number in node.next_functions if child is not None]


def _sizes(node: Any, output: int) -> tuple[int, ...]:
    if hasattr(node, "variable"):
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[output].shape)


def _is_times_zero(node: Any) -> bool:
    """Return whether `node` multiplies by the number 0. Numbers on a GPU are not read."""
    if _kind(node) != "Mul" or len(_edges(node)) != 1:
        return False
    number = _saved(node, "other" if node.next_functions[0][0] is not None else "self")
    if isinstance(number, Tensor) and (number.numel() != 1 or number.device.type != "cpu"):
        return False
    return number is not None and _known(number) == 0


def _saved(node: Any, name: str) -> Any:
    """Return the value that `node` has saved as `name`, or None if a hook has replaced it."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return getattr(node, f"_saved_{name}") if raw is None else _kept(raw)


def _total_weight(node: Any) -> Tensor | None:
    """Return the number or total weight of cross_entropy's labels, or None if it is not known."""
    # Other numbers from a checkpoint are of no use. A divisor, for example, may be a count that was
    # clamped to 1, which only shows in the mask.
    scalar = checkpointed_scalars.kept_in(node._raw_saved_total_weight.data)
    return _saved(node, "total_weight") if scalar is None else scalar


def _kept(raw: Any) -> Tensor | None:
    """Return the tensor in autograd's saved variable `raw`, or None if a hook has replaced it."""
    kept: Any = raw.data
    if isinstance(kept, Kept):  # our own hooks leave the tensor unchanged
        return kept.tensor
    is_hooked = find_outer_unpack(raw.unpack_hook) is not None
    return kept if isinstance(kept, Tensor) and not is_hooked else None


def _is_zeros(node: Any) -> bool:
    """Return whether `node` is a product with the number 0, possibly scaled or reshaped later."""
    while node is not None and not _is_times_zero(node):
        edges = _edges(node)
        passes = _kind(node) in ("Mul", "Neg", "View", "UnsafeView", "ReshapeAlias", "ToCopy")
        node = edges[0][0] if passes and len(edges) == 1 else None
    return node is not None


def _numel(node: Any, output: int) -> int:
    return math.prod(_sizes(node, output))


def _number(value: Tensor) -> Any:
    """Return `value` as a Python number if it is on the CPU, otherwise as an fp64 tensor."""
    # Don't read a value on a GPU, which would synchronise. Use fp64, because with 16-bit logits the
    # total weight has 16 bits too, and would overflow in later arithmetic.
    return value.item() if value.device.type == "cpu" else value.detach().double()


def _signed(index: int) -> int:
    """Return the signed value of an integer that autograd has saved as unsigned 64-bit."""
    return index - 2**64 if index >= 2**63 else index


def _is_opaque(node: Any) -> bool:
    """Return whether `node` is a Python autograd.Function, such as a compiled graph."""
    return isinstance(node, BackwardCFunction)


def _stacked(node: Any) -> list[tuple[Any, int]]:
    """Return the graph edges of the scalars that `node` stacks, or [] if it does not stack any."""
    if _kind(node) not in ("Stack", "Cat"):
        return []
    edges = _edges(node)
    return edges if all(_numel(*edge) == 1 for edge in edges) else []


def _added(node: Any) -> list[Any]:
    """Return the nodes of the scalars that `node` adds, by `+` or by summing a stacked tensor."""
    opened, scalars = [node], []
    while opened:
        one = opened.pop()
        if _kind(one) == "Add":
            opened.extend(child for child, _ in _edges(one))
        elif _kind(one) == "Sum" and (stacked := _stacked(_edges(one)[0][0])):
            opened.extend(child for child, _ in stacked)
        else:
            scalars.append(one)
    return scalars


def _rows_reduced(node: Any) -> int:
    """Return the size of the first dimension if `node` reduces only that dimension, otherwise 0."""
    dims: Any = getattr(node, "_saved_dim", None)
    sizes: Any = getattr(node, "_saved_self_sym_sizes", ())
    if not isinstance(dims, tuple) or len(dims) != 1 or len(sizes) < 2:
        return 0
    return int(sizes[0]) if _signed(dims[0]) % len(sizes) == 0 else 0


_BY_ELEMENT = frozenset(
    [
        "Mul",
        "Div",
        "Add",
        "Sub",
        "Rsub",
        "Pow",
        "Neg",
        "Abs",
        "Exp",
        "Log",
        "Sqrt",
        "Rsqrt",
        "Relu",
        "Clamp",
        "ClampMin",
        "ClampMax",
        "Threshold",
        "Where",
        "MaskedFill",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "T",
        "Transpose",
        "Permute",
        "Squeeze",
        "Unsqueeze",
        "Expand",
        "Diagonal",
        "Select",
        "Slice",
        "ToCopy",
        "Clone",
        "Softplus",
        "Sigmoid",
        "Tanh",
    ]
)
"""Operations below which a batch statistic may be hidden."""


def _statistic_under(node: Any) -> str:
    """Return the name of a batch statistic below `node`, such as a variance over rows, or "".

    A batch statistic reduces the rows, so a sum or mean over its result counts features rather than
    items.
    """
    opened, seen = [node], set[Any]()
    while opened and len(seen) < 50:
        one = opened.pop()
        if one in seen:
            continue
        seen.add(one)
        name = _kind(one)
        if name in ("Mean", "Sum") and _rows_reduced(one):
            return f"{name.lower()} over rows"
        edges = _edges(one)
        if name in ("Var", "Std", "VarMean", "StdMean"):
            # `_saved_dim` is None for a statistic over all dimensions, which includes the rows.
            ndim = len(_sizes(*edges[0]))
            if any(_signed(dim) % ndim == 0 for dim in one._saved_dim or (0,)):
                return f"{name.lower()} over rows"
        is_product = name in ("Mm", "Bmm") and len(edges) == 2
        if is_product and not any(_of_parameters(child) for child, _ in edges):
            return "product of outputs"
        if name in _BY_ELEMENT:
            opened.extend(child for child, _ in edges)
    return ""


def _of_parameters(node: Any) -> bool:
    """Return whether the output of `node` depends only on parameters, and not on the batch.

    Data has no edge in the graph, so an operation on data has fewer edges than inputs. An
    element-wise operation may still have a constant input of the parameter's shape, such as the
    values towards which a penalty pulls the weights.
    """
    # Penalties are shallow. Without a depth limit, this would walk the whole model in each step.
    opened, seen = [(node, 0)], set[Any]()
    while opened:
        one, depth = opened.pop()
        if one in seen or hasattr(one, "variable") or one.name() in _OF_WEIGHTS:
            continue
        seen.add(one)
        name = _kind(one)
        if name in _WITH_DATA or _is_opaque(one) or depth == DEEPEST:
            return False
        edges = _edges(one)
        if len(edges) < len(one.next_functions) and (
            name not in _ELEMENTWISE or _numel(one, 0) != _numel(*edges[0])
        ):
            return False
        opened.extend((child, depth + 1) for child, _ in edges)
    return True
