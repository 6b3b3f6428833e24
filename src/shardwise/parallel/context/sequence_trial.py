"""Tests whether a model computes the same result on parts of sequences as on full sequences.

All ranks of a context group run a copy of the model in fp64, on the first tokens of a batch:

    whole    every rank, on full sequences, with torch's own attention
    parts    each rank on its part, with attention that exchanges tokens

Outputs and the gradients of all parameters must match. Weights are random, so that initial values
(norm weights of one, biases of zero) cannot hide an error. They exist only while an operation uses
them (drawn_weights.py), so a trial needs less memory than a training step. The results differ if a
model computes positions from the length of its input, averages over the sequence or looks at
neighbouring tokens.

Fixed numbers replace random ones, so dropout drops nothing. A forward pass may draw random numbers
for tokens, as dropout does. It must not draw any that belong to a full sequence (stochastic depth,
LayerDrop), because each rank would draw different ones.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice, product
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import ModelError
from shardwise.parallel.context import flex_attention
from shardwise.parallel.context.attention import ContextRun
from shardwise.parallel.context.drawn_weights import DrawnWeights
from shardwise.parallel.context.planned_attention import PlannedAttention
from shardwise.parallel.context.transformers_inputs import (
    Inputs,
    TransformersInputs,
    has_added_mask,
    of_whole_sequences,
    weight_of,
    with_cases,
)
from shardwise.parallel.tensor.without_dropout import SharedRandomness, WithoutRandomness
from shardwise.world.generator_states import GeneratorStates, preserved
from shardwise.world.sequence_parts import Sequences, lengths_of, rows_in

MOST_DIMS = 8
"""Number of combinations of sequence dimensions that a trial tries."""

ROWS, TOKENS = 2, 3
"""A trial's rows, and tokens per part. One part has an extra token, so that lengths differ."""

_FP64, _FP32 = (1e-8, 1e-10), (1e-5, 1e-6)
"""Relative and absolute tolerances of a trial. Some models compute norms or losses in fp32 in any
case, and then sums over tokens are rounded differently on parts."""

_ops = torch.ops.aten


class SequenceTrial:
    """Runs trials of one model.

    Args:
        model: The model, before the engine changes it. Buffers are copied, parameters are not.
        run: The engine's context run.
        inputs: Adds the inputs that the model needs to run on parts.
        device: The device to run on.
        planned: The modules that compute attention themselves, by their names.

    Attributes:
        skeleton: A copy of the model whose parameters have shapes but no storage.
        has_attention: True if a forward pass on the last checked inputs calls attention.
    """

    def __init__(
        self,
        model: nn.Module,
        run: ContextRun,
        inputs: TransformersInputs,
        device: torch.device,
        planned: Mapping[str, PlannedAttention],
    ) -> None:
        self._run, self._inputs, self._device, self._planned = run, inputs, device, planned
        self._name = type(model).__name__
        self._passed: dict[Any, tuple[bool, float]] = {}
        """Maps the forms of inputs that passed a trial to `has_attention`, and to the length of the
        longest sequences that the trial covers."""
        self.has_attention = False
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
        choose: Any = getattr(self.skeleton, "set_experts_implementation", None)
        if choose is not None:
            choose("eager")  # the grouped products of Transformers do not support fp64

    def check(
        self, model: nn.Module, given: Inputs, completed: Inputs, sequences: Sequences
    ) -> None:
        """Raise ModelError on all ranks of the group if `model` differs on parts. Collective.

        Does nothing if inputs of the same form have already passed, unless the sequences are longer
        than those that the trial covers.

        Args:
            model: The engine's model. The trial copies its training flags.
            given: The inputs of the forward pass, with parts of sequences.
            completed: `given` plus the inputs that were added for parts (transformers_inputs.py).
            sequences: The full sequences of the batch.
        """
        leaves, nest = pytree.tree_flatten(given)
        own = self._run.lengths[self._run.group.rank]
        forms = tuple(
            tuple(_form(x, own) for x in pytree.tree_leaves(y)) for y in (given, completed)
        )
        # The same on all ranks. The dimensions are unclear if a part is as long as there are rows.
        lengths = self._run.lengths
        known = [] if sequences.rows in lengths else [x for x in leaves if isinstance(x, Tensor)]
        dims_now = tuple(tuple(sequences.dims_by_shape(x, lengths)) for x in known)
        key = str(nest), forms, dims_now, model.training
        has_attention, longest = self._passed.get(key, (False, -1))
        if sequences.length <= longest:
            self.has_attention = has_attention
            return
        masked = has_added_mask(given[1], completed[1])
        reasons: list[str] = []
        earlier = self._run.captured
        likely = self._possible_dims(leaves, sequences)
        # (rows, length, length) may be features of tokens, or a mask over pairs of tokens.
        pairs = [False, True] if _has_features_like_tokens(leaves, sequences.length) else [True]
        for number, (dims, cuts_keys) in enumerate(product(likely, pairs)):
            # Features may be as many as a trial's tokens. Both numbers of tokens are unlikely.
            for tokens in (TOKENS, TOKENS + 1):
                is_repeated = True
                while is_repeated:
                    had_compiler, self._run.captured = _has_compiler(), {}
                    why, reaches = self._difference(
                        model, leaves, nest, dims, tokens, masked=masked, cuts_keys=cuts_keys
                    )
                    # The copy and its graph refer to themselves, so only a collection frees them.
                    gc.collect()
                    # Importing the compiler takes seconds. If the model's forward has imported it,
                    # its operations may have run compiled: repeat the trial without compiling.
                    fresh = _has_compiler() and not had_compiler
                    outcomes = self._run.group.gather_plain([why, reaches, fresh])
                    is_repeated = any(each for _, _, each in outcomes)
                states = [each[:2] for each in outcomes]
                if not any(reach < sequences.length for _, reach in states):
                    break
            found = [each for each, _ in states if each is not None]
            # Without attention, a model that mixes tokens passes a trial that cuts its rows.
            if not found and (number == 0 or self.has_attention):
                self._passed[key] = self.has_attention, min(reach for _, reach in states)
                seen = self._run.captured
                both = earlier.keys() | seen.keys()
                self._run.captured = {x: earlier.get(x, set()) | seen.get(x, set()) for x in both}
                return
            reasons += found
        # A model may fail because the dimensions are wrong.
        others = [each for each in reasons if not each.startswith(_FAILED)]
        raise ModelError(
            f"--context {self._run.group.size}: {self._name} cannot be trained on parts of "
            f"sequences: {(others or reasons)[0]}"
        )

    def _possible_dims(
        self, leaves: list[Any], sequences: Sequences
    ) -> list[tuple[int | None, ...]]:
        """Return the possible sequence dimensions of all `leaves`, the likeliest first. Collective.

        There are several if a part is as long as there are rows.
        """
        own = self._run.lengths[self._run.group.rank]
        mine = [sequences.dims_of(x, own) if isinstance(x, Tensor) else [] for x in leaves]
        # Parts of other lengths may rule out a dimension.
        everyone = self._run.group.gather_plain(mine)
        common = [
            [dim for dim in first if all(dim in each for each in others)] or [None]
            for first, *others in zip(*everyone, strict=True)
        ]
        return list(islice(product(*common), MOST_DIMS))

    def _difference(
        self,
        model: nn.Module,
        leaves: list[Any],
        nest: Any,
        dims: Sequence[int | None],
        tokens: int,
        *,
        masked: bool,
        cuts_keys: bool,
    ) -> tuple[str | None, float]:
        """Return a message saying how the results differ, or None. Collective.

        Also returns the least distance of tokens that are too far apart for the trial, and that the
        model mixes. It is infinite if there are none.

        `tokens` is the number of tokens per part. If `masked` is true, the trial's sequences have
        padding or several documents. If `cuts_keys` is true, inputs (rows, length, length) are
        masks.
        """
        group, lengths = self._run.group, self._run.lengths
        full = sum(lengths)
        # The first tokens of the sequences, without gaps: some models read from the positions
        # where a packed document begins.
        total = min(full, tokens * group.size + 1)
        kept = lengths_of(total, group.size)
        start = sum(kept[: group.rank])
        parted = [(x, dim) for x, dim in zip(leaves, dims, strict=True) if dim is not None]
        rows = rows_in(parted)
        # In (3, rows, length), as positions of images, it is unclear which dimension has the rows.
        kept_rows = rows if any((x.ndim, dim) == (3, 2) for x, dim in parted) else min(ROWS, rows)
        short = [
            _first_rows(x, rows, kept_rows, dim) if isinstance(x, Tensor) else x
            for x, dim in zip(leaves, dims, strict=True)
        ]
        cut = [
            _short(x, dim, total, full, cuts_keys=cuts_keys).cpu()
            for x, dim in zip(short, dims, strict=True)
            if dim is not None
        ]
        gathered = list(zip(*group.gather_objects(cut), strict=True))
        for pieces, (_, dim) in zip(gathered, parted, strict=True):
            if len({(*x.shape[:dim], *x.shape[dim + 1 :]) for x in pieces}) > 1:
                found = " and ".join(str(tuple(x.shape)) for x in pieces)
                return (
                    f"inputs of shapes {found} are not parts of one tensor. If they are masks made "
                    "from this worker's tokens, make them in the model's forward instead."
                ), inf
        joined = iter(gathered)
        whole = [
            x if dim is None else torch.cat(next(joined), dim).narrow(dim, 0, total)
            for x, dim in zip(short, dims, strict=True)
        ]
        # Without offsets of documents, `offsets` is empty.
        offsets = [n for n, x in enumerate(leaves) if _are_offsets(x, rows * full)]
        for n in offsets:
            whole[n], longest = _short_offsets(leaves[n], full, total, kept_rows)
            before = int(leaves[n].diff().max())
            whole = [longest if type(x) is int and x == before else x for x in whole]
        args, kwargs = pytree.tree_unflatten(whole, nest)
        kwargs = with_cases(kwargs, total, masked=masked)
        if "num_items_in_batch" in kwargs:
            # It may be the number of labels of each rank's part. Without it, losses are means.
            kwargs["num_items_in_batch"] = None
        parts = [
            x if dim is None else x.narrow(dim, start, kept[group.rank])
            for x, dim in zip(pytree.tree_leaves((args, kwargs)), dims, strict=True)
        ]
        completed = self._inputs.complete(pytree.tree_unflatten(parts, nest), kept, group)
        # A loss is a mean over the labels that count, unless the model divides by their number.
        weight = weight_of(completed[1])
        weights = [each for each in group.gather_plain(weight) if each is not None]
        with ExitStack() as stack:
            # A trial must not advance the generators, nor run in inference mode or autocast.
            stack.enter_context(preserved())
            devices = [] if self._device.type == "cpu" else [self._device]
            stack.enter_context(torch.random.fork_rng(devices, device_type=self._device.type))
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(self._device.type, enabled=False))
            if _has_compiler():
                # Modes that observe operations do not see compiled ones.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            fixed = WithoutRandomness()
            with self._run.on_whole_sequences(), _Operations(total) as operations:
                expected = self._try(model, (args, of_whole_sequences(kwargs)), sum(weights), fixed)
            problem = operations.far if operations.reach < full else None
            if expected.problem is not None:
                problem = _FAILED + expected.problem
            failed = [each for each in group.gather_plain(problem) if each is not None]
            if failed:
                return str(failed[0]), operations.reach
            with self._run.on_parts(kept):
                self._run.agree = self._agree
                # Random numbers of the same shape as for full sequences raise SharedRandomness.
                fixed = WithoutRandomness(fixed.shapes, lambda: True)
                try:
                    actual = self._try(model, completed, weight or 0.0, fixed)
                finally:
                    self._run.agree = None
            # The model's own forward pass, which follows, is counted from 0.
            self.has_attention, self._run.calls = self._run.calls > 0, 0
            if actual.problem is not None:
                return actual.problem + (_OFFSETS if offsets else ""), operations.reach
        tolerances = _FP32 if operations.has_fp32 else _FP64
        place = _Place(total, start, kept[group.rank], kept_rows, tolerances)
        wrong = self._compare(expected, actual, place, has_labels=bool(weights))
        return wrong, operations.reach

    def _agree(self, place: str, problem: str | None) -> None:
        """Raise _StoppedError on all ranks if any has a problem or a different `place`. Collective.

        Otherwise an error on one rank would leave the other ranks waiting for its tokens.
        """
        states = self._run.group.gather_plain([place, problem])
        problems = [each for _, each in states if each is not None]
        if problems:
            raise _StoppedError(problems[0])
        if len({each for each, _ in states}) > 1:
            raise _StoppedError("its forward calls attention more often on some workers.")

    def _try(
        self, model: nn.Module, inputs: Inputs, weight: float, fixed: WithoutRandomness
    ) -> _Results:
        """Run a copy of the model. Any losses among its outputs are multiplied by `weight`."""
        weights = DrawnWeights(self._device)
        clone = self._filled(model, weights)
        for name, planned in self._planned.items():
            list(planned.attach(clone.get_submodule(name)))
        results = _Results()
        for name, module in clone.named_modules():
            module.register_forward_hook(results.recorder(name, module, weights))
        args, kwargs = pytree.tree_map(self._widened, inputs)
        generators = GeneratorStates.now()
        try:
            with weights, fixed:
                output = clone(*args, **kwargs)
            # `fixed` sees only torch's draws.
            now = GeneratorStates.now()
            if (now.python, now.numpy) != (generators.python, generators.numpy):
                raise SharedRandomness
            generators.restore()
            if self._run.agree is not None:
                self._run.agree("end", None)
        except _StoppedError as error:
            results.problem = str(error)
        except Exception as error:  # any error in the user's forward; it goes into the message
            results.problem = self._describe(error)
            if self._run.agree is not None:
                with suppress(_StoppedError):
                    self._run.agree("end", results.problem)
        if results.problem is not None:
            return results
        found = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        # A mean over no labels is NaN, and counts nothing.
        results.losses = [x.nan_to_num() * weight for x in found if _is_loss(x)]
        results.outputs = [x for x in found if not _is_loss(x)]
        # Sum squares, so that the gradient depends on the values of the outputs.
        terms = [x.square().sum() for x in results.outputs if x.requires_grad]
        named = dict(clone.named_parameters())
        if terms or results.losses:
            total = torch.stack([*terms, *results.losses]).sum()
            if total.requires_grad:
                with weights, fixed:  # fixed, because recomputation draws again
                    torch.autograd.backward(total, inputs=list(named.values()))
            results.grads = {name: weights.sketch_of(p) for name, p in named.items()}
        # Free the graph, which the other run does not need.
        results.losses = [x.detach() for x in results.losses]
        results.outputs = [x.detach() for x in results.outputs]
        return results

    def _describe(self, error: Exception) -> str:
        """Describe an error that a forward pass of the trial has raised."""
        if isinstance(error, SharedRandomness):
            return (
                "its forward draws random numbers that do not belong to single tokens, such as "
                "stochastic depth or LayerDrop, and each worker would draw its own for the same "
                "sequence. Turn this off, or draw them in the dataset and pass them in the batch."
            )
        if isinstance(error, ModelError):  # attention that cannot run on parts says why
            return str(error).removeprefix(f"--context {self._run.group.size}: ")
        frame = error.__traceback__
        # Its branches run below the modes that draw weights and observe operations.
        is_opaque = isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error)
        while frame is not None:
            module = str(frame.tb_frame.f_globals.get("__name__", ""))
            if kernel := next((each for each in _KERNELS if each in module), None):
                return (
                    f"its forward calls {kernel}, which computes attention on this worker's tokens "
                    "only. Call torch.nn.functional.scaled_dot_product_attention, which also has "
                    "flash kernels."
                )
            if module == flex.__name__ and (missing := flex_attention.missing()) is not None:
                return (
                    f"its forward calls flex_attention, which --context does not support with "
                    f"torch {torch.__version__} here: {missing} is missing. Call "
                    "torch.nn.functional.scaled_dot_product_attention."
                )
            frame = frame.tb_next
        if is_opaque:
            return (
                "its forward calls a higher-order operator such as torch.cond, and the trial does "
                "not see the operations inside. Compute both results and choose with torch.where."
            )
        return f"{type(error).__name__}: {error}"

    def _filled(self, model: nn.Module, weights: DrawnWeights) -> nn.Module:
        """Return a copy of the model whose parameters are `weights`, identical on all ranks."""
        clone = copy.deepcopy(self.skeleton)
        known: dict[nn.Parameter, nn.Parameter] = {}
        for module, live in zip(clone.modules(), model.modules(), strict=True):
            module.training = live.training
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in known:
                    # The weights of norms are about one.
                    centre = float(parameter.ndim < 2 and name.endswith("weight"))
                    known[parameter] = weights.parameter_like(parameter, centre=centre)
                module._parameters[name] = known[parameter]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._widened(buffer)
        return clone

    def _widened(self, value: Any) -> Any:
        if isinstance(value, BlockMask):
            return flex_attention.moved(value, self._device)
        if not isinstance(value, Tensor):
            return value
        wide = value.double() if value.is_floating_point() else value
        return wide.to(self._device).clone()

    def _compare(
        self, expected: _Results, actual: _Results, place: _Place, *, has_labels: bool
    ) -> str | None:
        """Return a message saying how this rank's results differ, or None. Collective."""
        if expected.losses and not has_labels:
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
        sums = torch.tensor([x.item() for x in actual.losses], dtype=torch.float64)
        totals = torch.tensor(self._run.group.gather_plain(sums.tolist()), dtype=torch.float64)
        wanted = torch.tensor([x.item() for x in expected.losses], dtype=torch.float64)
        # Models of Transformers compute losses in fp32.
        if wanted.shape != sums.shape or not torch.allclose(totals.sum(0), wanted, rtol=1e-5):
            return (
                "its loss is not a mean over the labels that count, as losses of routers "
                "(output_router_logits) are not. Return the logits, and compute the loss in the "
                "script."
            )
        if not expected.grads:
            return None
        flat = torch.cat([grad.reshape(-1) for grad in actual.grads.values()])
        self._run.group.all_reduce(flat).wait()
        sizes = [grad.numel() for grad in actual.grads.values()]
        for (name, whole), total in zip(
            expected.grads.items(), torch.split(flat, sizes), strict=True
        ):
            if not place.are_close(whole.reshape(-1), total):
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
    "Everything except torch.nn.functional.scaled_dot_product_attention, flex_attention, and "
    "modules named in sw.Engine(..., context_plan=...), must treat each token alone: pass "
    "positions of shape (rows, length) in the batch instead of computing them from the length, and "
    "do not average over, or shift along, the sequence. A score_mod or mask_mod must not use the "
    "length of the model's input."
)


_OFFSETS = (
    " An input has the offsets of documents (cu_seqlens) in whole sequences: compute attention "
    "with it in a module of its own, whose forward takes queries, keys, values and the offsets, "
    'and name the module in sw.Engine(..., context_plan=["blocks.*.attention"]).'
)


def _has_compiler() -> bool:
    """Return whether this process has imported torch's compiler."""
    return "torch._dynamo" in sys.modules


_FAILED = "the trial on whole sequences failed: "


_PADS = {_ops.constant_pad_nd, _ops.replication_pad1d, _ops.replication_pad2d}
"""Operations that add values at the ends of dimensions. Others add at most the size itself."""


_KERNELS = ("flash_attn", "xformers")
"""Modules whose attention computes on this rank's tokens only."""


@dataclass
class _Results:
    """The results of one run: outputs, gradients by parameter name, and each module's outputs."""

    problem: str | None = None
    """Why there are no results, or None."""
    outputs: list[Tensor] = field(default_factory=list)
    """All outputs except losses."""
    losses: list[Tensor] = field(default_factory=list)
    """Losses, multiplied by the number of labels that count."""
    grads: dict[str, Tensor] = field(default_factory=dict)
    modules: list[tuple[str, str, list[Tensor]]] = field(default_factory=list)

    def recorder(self, name: str, module: nn.Module, weights: DrawnWeights) -> Any:
        """Return a forward hook that records the outputs of `module` under `name`."""

        def record(_: nn.Module, __: Any, output: Any) -> None:
            found = [x.detach() for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
            for each in found:
                weights.keep(each)  # a module may return a part of its weight
            self.modules.append((name, type(module).__name__, found))

        return record


@dataclass(frozen=True)
class _Place:
    """The position of this rank's tokens in a trial's sequences, and how results are compared."""

    total: int
    first: int
    own: int
    rows: int
    tolerances: tuple[float, float]

    def are_close(self, expected: Tensor, actual: Tensor) -> bool:
        """Return whether `actual` is equal to `expected` up to rounding."""
        if not expected.is_floating_point():
            return torch.equal(expected, actual)
        rtol, atol = self.tolerances
        # Sums may cancel, so the tolerance scales with the largest value.
        scale = expected.abs().max().item() if expected.numel() else 0.0
        return torch.allclose(expected, actual, rtol, atol * (1.0 + scale), equal_nan=True)

    def agrees(self, whole: Tensor, part: Tensor) -> bool:
        """Return whether `part` is close to `whole`, or to this rank's part of it."""
        return any(self.are_close(expected, part) for expected in self._parts_of(whole, part))

    def _parts_of(self, whole: Tensor, part: Tensor) -> Iterator[Tensor]:
        """Yield what `part` may be: `whole`, or a part of it."""
        if whole.shape == part.shape:
            yield whole
        if whole.ndim != part.ndim:
            return
        # A model may compute positions once for all rows, or take them from the batch.
        sizes = zip(whole.shape, part.shape, strict=True)
        whole = whole.expand([of_part if size == 1 else size for size, of_part in sizes])
        dims = [d for d in range(whole.ndim) if whole.size(d) != part.size(d)]
        if len(dims) != 1:
            return
        (dim,) = dims
        lengths = whole.size(dim), part.size(dim)
        if lengths == (self.total, self.own):
            yield whole.narrow(dim, self.first, self.own)
        # Rows and tokens in one dimension, as before a loss. In (length, rows, ...), tokens are
        # first.
        if lengths == (self.rows * self.total, self.rows * self.own):
            before, after = whole.shape[:dim], whole.shape[dim + 1 :]
            tokens = whole.reshape(*before, self.rows, self.total, *after)
            yield tokens.narrow(dim + 1, self.first, self.own).flatten(dim, dim + 1)
            yield whole.narrow(dim, self.first * self.rows, self.own * self.rows)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that observes the operations of a trial on whole sequences.

    Args:
        total: The number of tokens of the trial's sequences.

    Attributes:
        has_fp32: True if an operation has computed in less than fp64.
        reach: The least distance of tokens that an operation mixes, of those that are too far apart
            for the trial. Infinite if there are none.
        far: Describes the operation with this distance.
    """

    def __init__(self, total: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._total = total
        self.has_fp32 = False
        self.reach = inf
        self.far: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.has_fp32 |= result.dtype != torch.float64
            reach = self._reach(func.overloadpacket, result, args)
            if self._total <= reach < self.reach:
                self.reach = reach
                self.far = (
                    f"{func.overloadpacket.__name__} moves or mixes values of tokens that are "
                    f"{reach} places apart, and the trial has only {self._total} tokens. {_ADVICE}"
                )
        return result

    def _reach(self, packet: Any, result: Tensor, args: tuple[Any, ...]) -> int:
        """Return the distance of tokens that a convolution mixes, or a shift moves apart."""
        if packet is _ops.convolution:
            inputs, weight, dilation = args[0], args[1], args[5]
            # A convolution that pads itself may have more outputs than inputs.
            spans = zip(inputs.shape[2:], result.shape[2:], weight.shape[2:], dilation, strict=True)
            return max((d * (k - 1) for *sizes, k, d in spans if self._total in sizes), default=0)
        if packet is _ops.cat:
            dim = args[1] if len(args) > 1 else 0
            sizes = [each.size(dim) for each in args[0] if each.ndim == result.ndim]
            return result.size(dim) - self._total if self._total in sizes else 0
        if packet in _PADS:
            grown = zip(args[0].shape, result.shape, strict=True)
            return max((to - size for size, to in grown if size == self._total), default=0)
        if packet is _ops.slice:
            _, dim, first, last = (*args, *(0, None, None)[len(args) - 1 :])[:4]
            # The slices of a shift have no tokens if the sequences are shorter than the shift.
            ends = (first or 0, -(last or 0))
            return max(ends) if args[0].size(dim) == self._total else 0
        return 0


class _StoppedError(Exception):
    """Stops a trial on all ranks, because one of them has a problem."""


def _is_loss(output: Tensor) -> bool:
    return output.ndim == 0 and output.requires_grad


def _has_features_like_tokens(leaves: list[Any], full: int) -> bool:
    """Return whether an input may be a mask over `full` keys, or have as many features."""
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.ndim == 3]
    return any(x.is_floating_point() and x.size(2) == full for x in tensors)


def _short(leaf: Tensor, dim: int, total: int, full: int, *, cuts_keys: bool) -> Tensor:
    """Return this rank's part of `leaf`, cut to its first `total` tokens.

    If `leaf` is a mask over all `full` keys, the keys are cut too.
    """
    is_mask = leaf.ndim == 4 or cuts_keys or not leaf.is_floating_point()
    if is_mask and leaf.ndim > 2 and dim != leaf.ndim - 1 and leaf.size(-1) == full:
        leaf = leaf.narrow(-1, 0, total)
    return leaf.narrow(dim, 0, min(total, leaf.size(dim)))


def _are_offsets(leaf: Any, tokens: int) -> bool:
    """Return whether `leaf` has the offsets of documents, as cu_seqlens, in `tokens` tokens."""
    if not isinstance(leaf, Tensor) or leaf.ndim != 1 or len(leaf) < 2:
        return False
    if leaf.dtype not in (torch.int32, torch.int64):
        return False
    ends = int(leaf[0]), int(leaf[-1])
    return ends == (0, tokens) and bool((leaf.diff() >= 0).all())


def _short_offsets(offsets: Tensor, full: int, total: int, rows: int) -> tuple[Tensor, int]:
    """Return `offsets` in the first `total` tokens of `rows` rows, and the longest document.

    A document begins in the middle of each row, because the first tokens may have only one.
    """
    starts = offsets[:-1]
    kept = starts[(starts % full < total) & (starts < rows * full)]
    places = kept // full * total + kept % full
    ends = torch.arange(rows + 1, device=offsets.device) * total
    found = torch.unique(torch.cat([places, ends, ends[:-1] + total // 2]))
    return found.to(offsets.dtype), int(found.diff().max())


def _form(leaf: Any, own: int) -> Any:
    """Return the properties of `leaf` that may decide which code a forward pass runs.

    `own` is the number of this rank's tokens.
    """
    if isinstance(leaf, Tensor):
        return leaf.ndim, leaf.dtype
    if isinstance(leaf, BlockMask):
        return "BlockMask", leaf.shape[-1] == own
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf).__name__


def _first_rows(leaf: Tensor, rows: int, kept: int, dim: int | None) -> Tensor:
    """Return the first `kept` rows of `leaf` if it has `rows` rows, otherwise all of `leaf`.

    `dim` is the sequence dimension, or None.
    """
    detached, rows_dim = leaf.detach(), 1 if dim == 0 else 0
    if leaf.ndim <= rows_dim or leaf.size(rows_dim) != rows:
        return detached
    return detached.narrow(rows_dim, 0, kept)
