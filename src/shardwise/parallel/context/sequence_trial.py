"""Tests whether a model gives the same result on parts of sequences as on whole ones.

All ranks of a context group run a copy of the model in fp64, on the first tokens of their parts:

    whole    every rank, on all parts joined, with plain attention
    parts    each rank on its part, with exchanged heads

Outputs, and the gradients of all parameters, must match. Weights are random, so that initial values
(norm weights of one, biases of zero) cannot hide an error. A model that computes positions from the
length of its input, averages over the sequence or looks at neighbouring tokens differs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.errors import ModelError
from shardwise.parallel.context.attention import ContextRun
from shardwise.world.randomness import preserved
from shardwise.world.sequence_parts import lengths_of

ROWS, TOKENS = 2, 3
"""Rows, and tokens per part, of a trial. One part has one more token, so that parts differ."""


class SequenceTrial:
    """Runs trials of one model.

    Args:
        model: The model, before the engine changes it. Buffers are copied, parameters are not.
        run: The engine's context run.
        device: The device to run on.

    Attributes:
        skeleton: A copy of the model, whose parameters have shapes only.
    """

    def __init__(self, model: nn.Module, run: ContextRun, device: torch.device) -> None:
        self._run, self._device = run, device
        self._name = type(model).__name__
        self._passed: set[Any] = set()
        # Parameters without storage, because only their shapes are needed.
        shapes = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        if any(buffer.is_meta for buffer in model.buffers()):
            raise ModelError(
                f"--context {run.group.size} tests {self._name} before training, but its buffers "
                "are on the meta device. Build it on the CPU."
            )
        try:
            self.skeleton = copy.deepcopy(model, dict(shapes))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"--context {run.group.size} tests a copy of {self._name}, which cannot be copied: "
                f"{error}"
            ) from error

    def check(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Raise ModelError on all ranks of the group if `model` differs on parts. Collective.

        Does nothing for inputs of a form that has passed.

        Args:
            model: The engine's model, whose training flags are copied.
            args: Positional arguments of the forward pass, with parts of sequences.
            kwargs: Keyword arguments of the forward pass.
        """
        leaves, nest = pytree.tree_flatten((args, kwargs))
        key = str(nest), tuple(map(_form, leaves)), model.training
        if key in self._passed:
            return
        why = self._difference(model, leaves, nest)
        reasons = [each for each in self._run.group.gather_plain(why) if each is not None]
        if reasons:
            raise ModelError(
                f"--context {self._run.group.size}: {self._name} cannot be trained on parts of "
                f"sequences: {reasons[0]}"
            )
        self._passed.add(key)

    def _difference(self, model: nn.Module, leaves: list[Any], nest: Any) -> str | None:
        """Return how the results differ, in words, or None. Collective."""
        group, lengths = self._run.group, self._run.lengths
        # The first tokens of the sequences, without gaps: some models read from the positions
        # where a packed document begins.
        total = min(sum(lengths), TOKENS * group.size + 1)
        kept = lengths_of(total, group.size)
        start, own = sum(kept[: group.rank]), lengths[group.rank]
        is_part = [isinstance(x, Tensor) and x.ndim > 1 and x.size(1) == own for x in leaves]
        first = next(x for x, is_cut in zip(leaves, is_part, strict=True) if is_cut)
        short = [_first_rows(x, first.size(0)) if isinstance(x, Tensor) else x for x in leaves]
        cut = [x[:, :total].cpu() for x, is_cut in zip(short, is_part, strict=True) if is_cut]
        gathered = group.gather_objects(cut)
        joined = iter([torch.cat(parts, 1)[:, :total] for parts in zip(*gathered, strict=True)])
        whole = [next(joined) if is_cut else x for x, is_cut in zip(short, is_part, strict=True)]
        mine = [
            x.narrow(1, start, kept[group.rank]) if is_cut else x
            for x, is_cut in zip(whole, is_part, strict=True)
        ]
        with ExitStack() as stack:
            # A trial must not advance the generators, nor run in inference mode or autocast.
            stack.enter_context(preserved())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(self._device.type, enabled=False))
            with self._run.on_whole_sequences():
                expected = self._try(model, whole, nest)
            if isinstance(expected, str):
                return f"the trial on whole sequences failed: {expected}"
            with self._run.on_parts(kept):
                actual = self._try(model, mine, nest)
            if isinstance(actual, str):
                return actual
        place = _Place(total, start, kept[group.rank], min(ROWS, len(first)))
        return self._compare(expected, actual, place)

    def _try(self, model: nn.Module, leaves: list[Any], nest: Any) -> _Results | str:
        """Run a copy of the model. Return its results, or the error in words."""
        clone = self._filled(model)
        results = _Results()
        for name, module in clone.named_modules():
            module.register_forward_hook(results.recorder(name, module))
        args, kwargs = pytree.tree_unflatten([self._widened(leaf) for leaf in leaves], nest)
        try:
            output = clone(*args, **kwargs)
        except ModelError as error:  # attention that cannot run on parts says why
            return str(error).removeprefix(f"--context {self._run.group.size}: ")
        except Exception as error:  # any error in the user's forward; it goes into the message
            return f"{type(error).__name__}: {error}"
        results.outputs = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        # Sum squares, so that the gradient depends on the values of the outputs.
        terms = [x.square().sum() for x in results.outputs if x.requires_grad]
        named = dict(clone.named_parameters())
        if terms:
            total = torch.stack(terms).sum()
            grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
            results.grads = {
                name: torch.zeros_like(p) if grad is None else grad
                for (name, p), grad in zip(named.items(), grads, strict=True)
            }
        return results

    def _filled(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model with random fp64 parameters, the same on all ranks."""
        clone = copy.deepcopy(self.skeleton)
        draw = torch.Generator().manual_seed(0)
        known: dict[nn.Parameter, nn.Parameter] = {}
        for module, live in zip(clone.modules(), model.modules(), strict=True):
            module.training = live.training
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in known:
                    values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                    # About the scale of usual initial values, so that deep models stay finite.
                    scale = 0.1 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
                    shift = float(parameter.ndim < 2 and name.endswith("weight"))
                    known[parameter] = nn.Parameter((values * scale + shift).to(self._device))
                module._parameters[name] = known[parameter]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._widened(buffer)
        return clone

    def _widened(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wide = value.double() if value.is_floating_point() else value
        return wide.to(self._device).clone()

    def _compare(self, expected: _Results, actual: _Results, place: _Place) -> str | None:
        if any(x.ndim == 0 and x.requires_grad for x in actual.outputs):
            return (
                "its forward returns a loss, which would be a mean over this worker's tokens, and "
                "a shift of labels would lose one at each cut. Return the logits, shift labels in "
                "the dataset, and compute the loss in the script."
            )
        same = len(expected.outputs) == len(actual.outputs) and all(
            place.agrees(*pair) for pair in zip(expected.outputs, actual.outputs, strict=True)
        )
        wrong = None if same else self._first_different(expected, actual, place)
        # Gather this before the sums below, so that all ranks stop together.
        if any(self._run.group.gather_plain(wrong is not None)):
            return wrong
        if not expected.grads:
            return None
        flat = torch.cat([grad.reshape(-1) for grad in actual.grads.values()])
        self._run.group.all_reduce(flat).wait()
        sizes = [grad.numel() for grad in actual.grads.values()]
        for (name, whole), total in zip(
            expected.grads.items(), torch.split(flat, sizes), strict=True
        ):
            if not _are_close(whole.reshape(-1), total):
                return f"the gradient of {name} differs from that on whole sequences."
        return None

    def _first_different(self, expected: _Results, actual: _Results, place: _Place) -> str:
        for (name, kind, whole), (other, _, part) in zip(
            expected.modules, actual.modules, strict=False
        ):
            if name != other:
                break
            if not all(place.agrees(*pair) for pair in zip(whole, part, strict=False)):
                return (
                    f"{name or 'its forward'} ({kind}) gives a different result than on whole "
                    f"sequences. {_ADVICE}"
                )
        return f"its output differs from that on whole sequences. {_ADVICE}"


_ADVICE = (
    "Everything except torch.nn.functional.scaled_dot_product_attention must treat each token "
    "alone: pass positions of shape (rows, length) in the batch instead of computing them from the "
    "length, and do not average over, or shift along, the sequence."
)


@dataclass
class _Results:
    """Outputs, the gradients of parameters by name, and the outputs of modules in their order."""

    outputs: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    modules: list[tuple[str, str, list[Tensor]]] = field(default_factory=list)

    def recorder(self, name: str, module: nn.Module) -> Any:
        """Return a forward hook that records the outputs of `module`."""

        def record(_: nn.Module, __: Any, output: Any) -> None:
            found = [x.detach() for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
            self.modules.append((name, type(module).__name__, found))

        return record


@dataclass(frozen=True)
class _Place:
    """The place of this rank's tokens in the sequences of a trial."""

    total: int
    first: int
    own: int
    rows: int

    def agrees(self, whole: Tensor, part: Tensor) -> bool:
        """Return whether `part` is this rank's part of `whole`, or equal to it."""
        expected = self._part_of(whole, part)
        return expected is not None and _are_close(expected, part)

    def _part_of(self, whole: Tensor, part: Tensor) -> Tensor | None:
        if whole.shape == part.shape:
            return whole
        if whole.ndim != part.ndim:
            return None
        dims = [d for d in range(whole.ndim) if whole.size(d) != part.size(d)]
        if len(dims) != 1:
            return None
        (dim,) = dims
        sizes = whole.size(dim), part.size(dim)
        if sizes == (self.total, self.own):
            return whole.narrow(dim, self.first, self.own)
        # Rows and tokens in one dimension, as before a loss.
        if sizes == (self.rows * self.total, self.rows * self.own):
            before, after = whole.shape[:dim], whole.shape[dim + 1 :]
            tokens = whole.reshape(*before, self.rows, self.total, *after)
            return tokens.narrow(dim + 1, self.first, self.own).flatten(dim, dim + 1)
        return None


def _form(leaf: Any) -> Any:
    """Return what may decide which code a forward pass runs."""
    if isinstance(leaf, Tensor):
        return leaf.ndim, leaf.dtype
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf).__name__


def _first_rows(leaf: Tensor, rows: int) -> Tensor:
    """Return the first rows of a tensor with this number of `rows`, and other tensors unchanged."""
    detached = leaf.detach()
    return detached[:ROWS] if leaf.ndim and leaf.size(0) == rows else detached


def _are_close(expected: Tensor, actual: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(expected, actual)
    # The trial uses fp64, so rounding cannot explain a difference. Sums may cancel, so the
    # tolerance scales with the largest value.
    scale = expected.abs().max().item() if expected.numel() else 0.0
    return torch.allclose(expected, actual, rtol=1e-8, atol=1e-10 * (1.0 + scale), equal_nan=True)


def names_with_dropout(model: nn.Module) -> Sequence[str]:
    """Return the names of the model's dropout layers with a probability above 0."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    ]
