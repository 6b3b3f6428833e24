"""Connects the engine with a model whose sequences are split across ranks (`--context`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from shardwise.config import Settings
from shardwise.engine.loss_terms import LossTerms, drops_last, ends_without_label
from shardwise.errors import ConfigError, ModelError, UsageError
from shardwise.messages.printable import in_bytes
from shardwise.model import module_hooks
from shardwise.model.module_hooks import Hooked
from shardwise.model.unit_hooks import untraced
from shardwise.parallel.context import flash_attention, flex_attention
from shardwise.parallel.context.attention import ContextRun, drop_unweighted
from shardwise.parallel.context.planned_attention import ContextPlan, PlannedAttention, names_of
from shardwise.parallel.context.sequence_trial import SequenceTrial
from shardwise.parallel.context.transformers_inputs import Inputs, TransformersInputs
from shardwise.parallel.expert.split_experts import find_layers
from shardwise.world.current_batch import Batch
from shardwise.world.sequence_parts import DIM, Sequences
from shardwise.world.world import World

CHECKED = 4
"""Number of losses whose labels are read. Reading them waits for a GPU."""


class ContextParallel:
    """The engine's part of `--context`: the hooks on its model, and a trial on the first batch.

    Create it before the engine changes the model, because the trial copies the model.
    """

    def __init__(
        self, world: World, model: nn.Module, planned: Sequence[str], *, quiet: bool
    ) -> None:
        self._world, self._model = world, model
        self._method = world.settings.context_method
        self.run = ContextRun(
            world.context,
            world.current_batch,
            self._method,
            in_stages=world.pipeline_size > 1,
            splits_heads=world.tensor_size > 1,
        )
        self._inputs = TransformersInputs(model)
        self._planned = {name: PlannedAttention(name, self.run) for name in planned}
        self._trial = SequenceTrial(model, self.run, self._inputs, world.device, self._planned)
        for _, layer in find_layers([self._trial.skeleton]):
            # The router losses of parts add up to those of the batch only with an engine.
            layer.router_loss_seed = 0.0
        self._handles: list[Hooked] = []
        self._is_tried = True
        self._is_told = quiet
        self._is_whole = False
        self._unlabelled = 0
        """Number of losses without labels at the end of a part. Above CHECKED, none are checked."""
        self._drops_last = False

    def _choice(self, method: str, costs: dict[str, float]) -> str:
        """Describe the `method` of an attention call, given the bytes that the methods send."""
        # Without the bytes that a rank keeps.
        kept = 1 / self.size
        sent = {name: in_bytes(round(cost * (1 - kept))) for name, cost in costs.items()}
        others = [f"{name} would send {cost}" for name, cost in sent.items() if name != method]
        why = (others or [f"{self.size} does not divide the heads of a worker"])[0]
        if self._method == "auto" and costs[method] > min(costs.values()):  # flex attention
            why += ", but does not balance causal masks"
        return (
            f"{_METHODS[method]}: {sent[method]} per worker, layer and micro-batch, forward and "
            f"backward ({why})"
        )

    @property
    def size(self) -> int:
        """Number of ranks that share each sequence."""
        return self.run.group.size

    @property
    def flash(self) -> str:
        """Name of the flash kernel of a Transformers model, or ""."""
        return self._inputs.flash

    def skip_trial(self) -> None:
        """Accept the model without a trial. Used if the other ranks do not exist."""
        self._is_tried = False

    def install(self) -> None:
        """Hook the model, and replace torch's attention function."""
        self.run.install()
        flex_attention.install(self.run)
        if self.flash:
            flash_attention.install(self.flash, self.run)
        self._handles = [
            module_hooks.attach(
                self._model.register_forward_pre_hook, self._before, with_kwargs=True
            ),
            # Always, because an error must not leave the replaced attention active.
            module_hooks.attach(self._model.register_forward_hook, self._after, always_call=True),
        ]
        for name, planned in self._planned.items():
            self._handles += planned.attach(self._model.get_submodule(name))

    def uninstall(self) -> None:
        """Undo `install`. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.run.uninstall()
        flex_attention.uninstall(self.run)
        if self.flash:
            flash_attention.uninstall(self.flash, self.run)

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Context manager in which the model runs on whole sequences, to generate text."""
        before, self._is_whole = self._is_whole, True
        try:
            yield
        finally:
            self._is_whole = before

    @untraced
    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> Inputs | None:
        is_training = torch.is_grad_enabled()
        if self._is_whole:
            self._check_whole((args, kwargs), self.run.sequences_in_use(training=is_training))
            return None
        sequences = self.run.sequences_now(training=is_training)
        if sequences is None:
            raise UsageError(
                f"--context {self.size}: a forward pass without a batch whose sequences are cut. "
                "Get the batch from sw.Loader or world.share, in one call for all its tensors. To "
                "run on whole sequences, write: with engine.full_parameters()."
            )
        lengths = self.run.lengths_of(sequences)
        own, total = lengths[self.run.group.rank], sequences.length
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor) and not sequences.is_uncut(x)]
        uncut = [x for x in tensors if sequences.dim_of(x, own) is None]
        if len(uncut) == len(tensors) or any(x.ndim > 1 and x.size(1) == total for x in uncut):
            found = ", ".join(str(tuple(x.shape)) for x in tensors if x.ndim > 1) or "none"
            raise UsageError(
                f"--context {self.size}: the model's inputs (shapes {found}) are not this worker's "
                f"part of the last batch, {own} of {total} tokens in dimension 1. Pass tensors "
                "from sw.Loader or world.share. If sequences are along dimension 0, write there "
                "sw.Loader(..., sequence_dim=0) or world.share(batch, dim=1, sequence_dim=0)."
            )
        self.run.enter(lengths)
        try:
            completed = self._inputs.complete((args, kwargs), lengths, self.run.group)
            if self._is_tried:
                self._trial.check(model, (args, kwargs), completed, sequences)
        except BaseException:
            self.run.leave()
            raise
        return completed

    def _check_whole(self, inputs: Inputs, sequences: Sequences | None) -> None:
        """Raise UsageError if `inputs` seem to be this rank's part of the current batch."""
        if sequences is None:
            return
        own = self.run.lengths_of(sequences)[self.run.group.rank]
        tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.ndim > 1]
        if any(sequences.dim_of(x, own) is not None for x in tensors):
            raise UsageError(
                f"--context {self.size}: inside engine.uneven() or engine.full_parameters() the "
                f"model takes whole sequences, but its input has {own} tokens, as this worker's "
                f"part of the current batch of {sequences.length}. Evaluate batches outside of the "
                "block. To generate text, leave the loop over the Loader first. After world.share, "
                "call engine.step() first, or pass a prompt of another length."
            )

    @untraced
    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        del args
        if self._is_whole:
            return None
        self.run.leave()
        # There is no output after an error.
        is_silent = self._trial.has_attention and not self.run.calls
        # A pipeline stage may have no attention.
        if output is not None and is_silent and not self.run.in_stages:
            raise ModelError(
                f"--context {self.size}: the forward pass of {type(model).__name__} did not call "
                "the attention that exchanges tokens. If it was compiled and run before, create "
                "the engine first."
            )
        # Without calls, the costs are those of the trial. A stage of a pipeline may have no output.
        is_first = not self._is_told and self.run.calls > 0
        if self._method == "auto" and self.run.method is not None and is_first:
            self._is_told = True
            choice = self._choice(self.run.method, self.run.costs)
            self._world.print(f"  context parallel: {choice}")
        if not torch.is_grad_enabled():
            return None

        def guard(leaf: Tensor) -> Tensor:
            is_loss = not leaf.requires_grad or leaf.ndim < 2
            return leaf if is_loss else drop_unweighted(leaf, self.run)

        return pytree.tree_map_only(Tensor, guard, output)

    def check_parts(self) -> None:
        """Raise UsageError if the model runs on whole sequences, whose losses have no weight."""
        if self._is_whole:
            raise UsageError(
                f"engine.backward inside engine.full_parameters() with --context {self.size}: the "
                "model takes whole sequences there, but the weight of a loss is that of this "
                "worker's part. Leave the block first."
            )

    def note_shift(self, loss: Tensor, batch: Batch | None) -> None:
        """Read from the graph of `loss` whether labels were shifted. `check_shift` follows."""
        if batch is None or not batch.samples or batch.sequence is None or not self.run.lengths:
            return
        own, dims = self.run.lengths[self.run.group.rank], batch.sequence.all_dims
        # The last part has no next one, whose label could be lost.
        if self._unlabelled < CHECKED and self.run.group.rank == 0 and 0 not in dims:
            is_unlabelled = not isinstance(loss, FakeTensor) and ends_without_label(loss, own)
            self._unlabelled = self._unlabelled + 1 if is_unlabelled else CHECKED + 1
        self._drops_last |= drops_last(loss, own, {0, DIM, *dims})

    def check_shift(self, *, agrees: bool) -> None:
        """Raise UsageError if a loss leaves out the last token of this rank's part.

        Args:
            agrees: True to raise on all ranks of the model if any rank has noted such a loss, which
                is collective. With `--pipeline`, only the last stage has losses.
        """
        found = [self._drops_last, self._unlabelled == CHECKED]
        for group in (self.run.group, self._world.pipeline) if agrees else ():
            found = [any(each) for each in zip(*group.gather_plain(found), strict=True)]
        self._drops_last = False
        if found[1]:
            self._unlabelled = CHECKED + 1
            self._world.say_once(
                f"in the first {CHECKED} batches, the last token of each worker's part had no "
                "label, unlike the token before it. If the script shifts labels after the "
                f"split (--context {self.size}), the first label of the next worker's part is "
                "lost. Shift the labels of whole sequences, before they are split: "
                "F.pad(labels[:, 1:], (0, 1), value=-100) in the collate_fn"
            )
        if found[0]:
            raise UsageError(
                f"--context {self.size}: this loss leaves out the last of this worker's tokens, as "
                "logits[:, :-1] does. Its label is the first one of the next worker's part, and "
                "would be lost. Shift the labels of whole sequences, before they are split: "
                "batch['shift_labels'] = F.pad(labels[:, 1:], (0, 1), value=-100) in the "
                "collate_fn, and compute the loss of all logits. A model of Transformers can shift "
                "them itself: model(**batch).loss."
            )

    def check_loss(
        self, terms: LossTerms, batch: Batch | None, reduction: str, *, is_weighted: bool
    ) -> None:
        """Raise UsageError if it is unknown how many of this rank's items a loss averages over.

        `is_weighted` is True if the user passed a weight.
        """
        self._refuse_mean_of_means(reduction)
        if is_weighted or reduction == "sum" or terms.is_sum or terms.is_zero:
            return
        advice = (
            "Pass this worker's number of tokens that count: engine.backward(loss, "
            "weight=int((labels != -100).sum()))."
        )
        if terms.main is None or any(term.kind == "unread" for term in terms.terms):
            raise UsageError(
                f"--context {self.size}: cannot read over how many items this loss is a mean. "
                f"{advice}"
            )
        if terms.main.has_rows and batch is not None and batch.samples and self.run.lengths:
            tokens = batch.samples * self.run.lengths[self.run.group.rank]
            if float(terms.main.items) % tokens:
                raise UsageError(
                    f"--context {self.size}: this loss is a mean over "
                    f"{float(terms.main.items):g} items, but this worker has {tokens} tokens, so "
                    f"it averages over tokens first. {advice}"
                )

    @contextmanager
    def backward(self, loss: Tensor | None, weight: float | Tensor) -> Iterator[float]:
        """Context manager for a backward pass of `loss`. Yields the weight of the gradients.

        `loss` is None on pipeline stages without the loss. The weight is always 1, because other
        ranks' losses depend on this rank's keys and values.
        """
        if loss is not None and loss.grad_fn is None:
            raise UsageError(
                "This loss has no graph, but the backward pass of attention needs every worker "
                "(--context): compute the loss with gradients on, also if its weight is 0."
            )
        with self.run.backward(weight):
            yield 1.0

    def check_weighted(self, reduction: str, *, is_weighted: bool) -> None:
        """Raise UsageError if `engine.forward_backward` would weight its losses by rows."""
        self._refuse_mean_of_means(reduction)
        batch = self._world.current_batch.batch
        if batch is not None and batch.sequence is not None and 0 in batch.sequence.all_dims:
            raise UsageError(
                f"engine.forward_backward with --context {self.size} takes its micro-batches from "
                "dimension 0, along which sequence_dim=0 has split sequences. Pass tensors of "
                "shape (rows, length, ...), and transpose them in the model: x.transpose(0, 1)."
            )
        if not is_weighted and reduction != "sum":
            raise UsageError(
                f"engine.forward_backward with --context {self.size} and without weight=: parts of "
                "a sequence have different numbers of labels. Pass a function that counts the "
                "labels of a micro-batch: engine.forward_backward(loss_of, *batch, weight=lambda "
                "x, labels: int((labels != -100).sum()))."
            )

    def _refuse_mean_of_means(self, reduction: str) -> None:
        if reduction == "ddp":
            raise UsageError(
                f'reduction="ddp" with --context {self.size}: a mean of means is wrong if parts '
                "have different numbers of tokens. Leave it out, or pass weight=."
            )

    def describe(self) -> str:
        """Describe how attention exchanges data, or return "" if the first batch decides."""
        return _METHODS.get("ulysses" if self.flash else self._method, "")


_METHODS = {
    "ulysses": "attention exchanges heads (Ulysses)",
    "gathered": "attention gathers keys and values",
}


def begin(
    world: World, settings: Settings, models: Sequence[nn.Module], plan: ContextPlan | None
) -> ContextParallel | None:
    """Create the context-parallel state of an engine, or return None without `--context`.

    Raises ConfigError or ModelError if the settings or models do not work with `--context`.
    """
    size = world.context_size
    # On any number of ranks, so that a typo does not first show up in the large run.
    planned = names_of(models[0], plan) if plan else []
    if size == 1:
        return None
    for flag, is_set in {
        "--elastic-islands": world.peers.has_changing_ranks,
        "--sync-batch-norm": settings.sync_batch_norm,
    }.items():
        if is_set:
            raise ConfigError(
                f"--context {size} cannot be combined with {flag} yet. Remove one of the two."
            )
    if len(models) != 1:
        raise ModelError(
            f"--context {size} takes one model per engine, not {len(models)}. Put them into one "
            "module."
        )
    context = ContextParallel(world, models[0], planned, quiet=settings.quiet)
    for flag, is_set in {
        "--context-method gathered": world.settings.context_method == "gathered",
        "--pipeline": world.pipeline_size > 1,
    }.items():
        if is_set and context.flash:
            raise ConfigError(
                f"--context {size} with attn_implementation={context.flash!r} cannot be combined "
                f'with {flag} yet. Leave the flag out, or write attn_implementation="sdpa".'
            )
    return context
