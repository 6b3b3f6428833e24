"""Engine is what users call: backward, step, whole tensors, checkpoints. Its parts do the work.

    EngineState     what the parts share: the user's objects, the states, the accumulation
    BackwardRunner  weights losses, seeds autograd, collects gradients    (backward.py)
    StepRunner      reduces, exchanges, decides, updates, clears          (step.py)
    StateAccess     whole parameters, averages, plain optimizer state     (state_access.py)
    Checkpoints     saves, resumes, loads, saves when asked to end        (checkpoint/)
    RandomState     the generators of this rank                           (random_state.py)

What a step does follows from the placement's cells alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

from torch import Tensor, nn, optim
from torch.amp import GradScaler

from shardwise import config
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.engine import describe, start_lines
from shardwise.engine.backward import BackwardRunner, layer_times_of
from shardwise.engine.build import States
from shardwise.engine.engine_state import build_state, spec_of
from shardwise.engine.random_state import RandomState
from shardwise.engine.recording import recording_of
from shardwise.engine.state_access import StateAccess
from shardwise.engine.step import StepRunner
from shardwise.engine.user_objects import living
from shardwise.errors import UsageError
from shardwise.messages.other_libraries import HintsAtAttributes
from shardwise.parallel.tensor.plan import TensorPlan
from shardwise.states.step_totals import StepStats
from shardwise.world.world import current as current_world

_engines: WeakSet[Engine] = WeakSet()


class Engine(HintsAtAttributes):
    """Trains `models` with `optimizers` over all ranks, as one process would.

    `models` and `optimizers` are one each or sequences; the objects stay the user's own and are
    changed in place. `scaler` is a GradScaler to drive. `settings` are keywords of
    `shardwise.config.Settings` (zero=2, precision="bf16-mixed" ...), overridden by the TOML file,
    the environment and the flags. All ranks make their engines in the same order.

    With `--tensor` layers are split over the ranks of a replica: known shapes are found, and
    `tensor_plan` says how others are, by patterns of module names: `{"blocks.*.up": "colwise",
    "blocks.*.down": "rowwise", "head": "whole"}`; docs/parallel.md has all of it.

    With `--pipeline` each worker has some of the layers, and `forward_backward` sends a batch
    through all of them in micro-batches; docs/parallel.md.

    Attributes: `placement`, `world`, `settings`. Raises PlacementError, ModelError (nothing to
    train, an optimizer that cannot be sharded), ModelMismatch (ranks built different models).
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        optimizers: optim.Optimizer | Sequence[optim.Optimizer],
        *,
        scaler: GradScaler | None = None,
        tensor_plan: TensorPlan | None = None,
        **settings: Any,
    ) -> None:
        self.world = world = current_world()
        config.refuse_elsewhere(settings, "engine")
        self.settings = world.settle_engine(settings)
        self.placement = self.settings.placement
        number, world.engines = world.engines, world.engines + 1
        world.expect_no_engine()
        self._spec = spec_of(world, self.settings, models, optimizers, tensor_plan)
        self._state = state = build_state(world, number, self._spec, scaler, tensor_plan)
        # The order matters: the state is collective to build, the generators wait for the first
        # batch from here on, and a step needs all other parts.
        self._timing = layer_times_of(state)
        self._randoms = RandomState(state)
        self._access = StateAccess(state)
        self._checkpoints = Checkpoints(state, self._randoms.reseed, state.returns_of)
        self._backward = BackwardRunner(state, self._randoms, self._timing)
        self._recording = recording_of(state)
        saver = self._checkpoints.saver
        self._stepper = StepRunner(
            state, self._backward, self._randoms, saver, self._timing, self._recording
        )
        living.add(state.objects)
        _engines.add(self)
        start_lines.announce_engine(world, self._spec, self._states)
        start_lines.announce_activations(world, self._spec, state.objects.activations)

    @property
    def steps(self) -> int:
        """How many steps were made, those before a resume included."""
        return self._state.steps

    @property
    def has_gradients(self) -> bool:
        """Whether there was a backward since the last step."""
        return self._state.accumulation.backwards > 0

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 where the precision needs none."""
        return self._state.scale.value

    @property
    def state_bytes(self) -> int:
        """Bytes of the training states that this rank holds now, padding included."""
        return self._states.state_bytes

    @property
    def _states(self) -> States:
        return self._state.states

    # -- training ---------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        reduction: str = "mean",
        same_items: bool | None = None,
        last: bool | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradient of `loss`, a scalar that is a mean over `weight` items of this rank.

        Without `weight` it is what the autograd graph of the loss shows: the labels that
        `cross_entropy` counts, the elements of a mean, the number by which a sum is divided. Sums
        over the batch are added, as with `reduction="sum"`. Where the graph does not show it, the
        weight is the number of samples that the Loader last gave; without a Loader, 1. A device
        tensor is fine. With `reduction="sum"` the loss is a sum over items, and those
        of all workers and backwards are added. With `reduction="ddp"` losses are what
        DistributedDataParallel takes them for: those of a worker add up, whatever they are means
        over, and the sums are averaged over the workers.

        Several losses of one batch add up, as in plain PyTorch: its samples count once. With
        `weight`, `same_items` says so of a further loss of the items that an earlier backward of
        this step has counted, or that it is of others (False). `last=False` says that more
        backwards come in this step, which saves communication and never changes a result. Touches
        this engine's parameters only. Where gradients are sharded each backward is collective:
        every rank makes as many.

        Raises UsageError for a loss that is not a scalar of the graph, unless its weight is 0, and
        where the weight of the loss cannot be told. `step` raises it where no weight is right for
        all terms of the losses of all workers.
        """
        self._backward.backward(
            loss,
            weight=weight,
            reduction=reduction,
            same_items=same_items,
            last=last,
            retain_graph=retain_graph,
        )

    def forward_backward(
        self,
        loss_of: Callable[..., Tensor],
        *batch: Any,
        weight: Callable[..., float | Tensor] | None = None,
        reduction: str = "mean",
        same_items: bool | None = None,
        cut: bool = True,
    ) -> Tensor:
        """`loss = loss_of(*batch)`, then `backward(loss)`, in micro-batches; returns the mean loss,
        or with `reduction="sum"` or `"ddp"` the sum.

        `loss_of` calls the model and returns a scalar loss that is a mean over the items of what
        it is given: the rows of `batch`, a nest of tensors of one equal first dimension, are cut
        into `--microbatches` parts (default: 1, with `--pipeline P` up to 4 P). What a loss is a
        mean over, where that is not rows, `weight` tells of the same parts. With `--pipeline` this
        is what keeps all workers busy; without, it is what the two lines do. The result, 0-dim in
        fp64, is known on all ranks of the replica. With `cut=False` each of `batch` is a
        micro-batch already, a tuple of what `loss_of` takes. `same_items` and what is raised are as
        for `backward`.
        """
        return self._backward.forward_backward(
            loss_of, batch, weight=weight, reduction=reduction, same_items=same_items, cut=cut
        )

    def step(
        self, max_norm: float | None = None, *, closure: Callable[[], Any] | None = None
    ) -> StepStats:
        """Average the gradients over everything since the last step, clip, update and clear.

        `max_norm` clips by the global 2-norm, as torch.nn.utils.clip_grad_norm_ does. With a
        `closure` there is no backward before: it computes the loss and calls `engine.backward`, and
        is called as often as the optimizer wants (L-BFGS: with replicated states, `--zero 0`; the
        figures are those of its first call). Collective.

        Raises UsageError without a backward, NonFiniteError for a NaN or infinite gradient where
        there is no loss scale (`--nonfinite skip` skips the step instead); when the step is made,
        CheckpointNotWritten if a save in the background has failed since the last one.
        """
        return self._stepper.step(max_norm, closure)

    def reduce(self) -> float:
        """Sum up the gradients of this step over all workers, and return the norm of their mean.

        `engine.step()` goes on from there; no backward may come in between. Collective. Raises as
        `step` does.
        """
        return self._stepper.reduce()

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Between backward and step: inside the block `param.grad` of every trained parameter is
        the whole gradient of the mean over all items of all workers, unscaled and unclipped, or
        None where no worker had one.

        What is written into it, or put in its place (None takes the parameter out of the step), is
        what `engine.step()` updates with; rank 0's is everyone's. It is the parameter's dtype, and
        whole on every worker. Collective: every rank enters and leaves.

        Raises UsageError without a backward, and where no worker has the whole model (`--tensor`,
        `--pipeline`).
        """
        with self._stepper.full_gradients():
            yield

    def zero_grad(self) -> None:
        """Forget the gradients of this step: the next `backward` begins it anew. Called by all
        ranks; harmless where there are none."""
        self._stepper.zero_grad()

    # -- parameters and optimizer state, whole ------------------------------------------------

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, write: bool = False
    ) -> Iterator[None]:
        """Inside the block the parameters of `module` (default: all) are whole, to read or write,
        and autograd is off, as under `torch.no_grad()`.

        With `write=True` rank 0's values (of several islands that have made a step, those of the
        first rank of each, on that island) are everyone's on leaving, masters included; between
        backward and step the gradients stay what they are (SAM). Collective: every rank enters and
        leaves. Replicated parameters can also be read at any time.
        """
        with self._access.full_parameters(module, write=write):
            yield

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Inside the block ranks may run different numbers of forwards: generation whose length
        differs, evaluation on rank 0 alone.

        All ranks enter and leave; a rank that leaves serves the gathers of the others until all
        have left. Without sharded parameters it does nothing. No training inside. Raises UsageError
        with `--pipeline`, where a forward takes all workers of a replica.
        """
        with self._access.uneven():
            yield

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Inside the block the parameters hold their moving average (`ema_decay`). Collective.

        It is that of what the optimizers train; a parameter that was never trained is as it is.
        """
        with self._access.ema():
            yield

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Inside the block the parameters hold the anchor, what `--islands` last had in common, to
        evaluate it. `export`, `model_state_dict` and checkpoints are of it anyway. Collective;
        without islands it does nothing. Raises UsageError between backward and step."""
        with self._access.anchor():
            yield

    def export(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Write `model` (default: the only one) as one plain file, from rank 0: as torch.save
        does where `path` ends in .pt, .pth or .bin, else as safetensors.

        Names, shapes and dtypes are the plain model's; tied weights are written once. Inside
        `engine.ema()` the averages are written. Collective where parameters are sharded: every
        rank calls it, and rank 0 holds the whole model while it writes. With `--trial` nothing is
        written.
        """
        self._access.export(path, model)

    def model_state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """The state_dict of `model` (default: the only one) with whole tensors, on rank 0; on the
        other ranks an empty one.

        Its tensors are on the CPU and nobody else's; tied weights are one tensor. Collective where
        parameters are sharded, and then rank 0 holds the whole model while it is copied.
        """
        return self._access.model_state_dict(model)

    def optimizer_state_dict(
        self, optimizer: optim.Optimizer | None = None, *, for_resume: bool = False
    ) -> dict[str, Any]:
        """The state_dict that `optimizer` (default: the only one) would have in one process, whole
        on every rank. Beside it stand `fp32_master_weights` of 16-bit parameters, and `for_resume`
        `loss_weight_divisor`: torch's load_state_dict leaves them alone. Collective."""
        return self._access.optimizer_state_dict(optimizer, for_resume=for_resume)

    def load_optimizer_state_dict(
        self, state: Mapping[str, Any] | None, optimizer: optim.Optimizer | None = None
    ) -> None:
        """Let `optimizer` (default: the only one) go on from `state`, the state_dict of a plain
        one over the same parameters. Weights are loaded before: a master of `state` counts where it
        rounds to the weight, and without any a run goes on from the weights.

        Every rank gives it, or rank 0 alone, the others None. Collective. Raises
        CheckpointMismatch where it is another optimizer's, UsageError between backward and step
        and for a model in parts (`--tensor`, `--pipeline`).
        """
        self._access.load_optimizer_state_dict(state, optimizer)

    # -- checkpoints --------------------------------------------------------------------------

    def track(self, **objects: Any) -> None:
        """Save and load `objects` with the engine, each under its name: engine.track(
        loader=loader, scheduler=scheduler). Anything with `state_dict` and `load_state_dict`; a
        generator of torch, numpy or random; a dict, list, deque or tensor, which loading fills in
        place. Its state is alike on all ranks, and rank 0's is saved. Raises UsageError for
        anything else.
        """
        self._checkpoints.track(objects)

    def save(
        self,
        folder: str | PathLike[str],
        keep: int | None = None,
        *,
        background: bool = False,
        split_gb: float = 5.0,
    ) -> Path | None:
        """Write a checkpoint to `folder`/step-N, N being `steps`, and return that path.

        It is there whole or not at all; docs/checkpoint_format.md has its form. Of the checkpoints
        up to this one the newest `keep` stay (default: all). Files longer than `split_gb` (10^9
        bytes) are split. With `background` this returns when the state is copied (what rests on a
        disk passes through memory then); what goes wrong later is raised by the next `step`,
        `save`, `load` or `close`. Collective.

        Raises CheckpointNotWritten, on all ranks alike, where no disk takes it (with
        `--save-failure continue` that is said, and this returns None); UsageError between backward
        and step or inside `ema()`. With `--trial` nothing is written.
        """
        return self._checkpoints.save(folder, keep, background=background, split_gb=split_gb)

    def resume(self, folder: str | PathLike[str]) -> int:
        """Go on from the newest complete checkpoint in `folder`; where there is none, from here.

        At the same size, row and settings what follows has the bits of a run that was never
        interrupted: each rank draws for itself, so make models and splits of data before. One that
        was damaged later is passed over, with a line that says so. Returns
        `steps`. Collective. With `--trial` nothing is loaded.

        Raises as `load` does, FolderInUse where another job saves there, and BrokenCheckpoint
        rather than begin beside what only lacks its checkpoint.json.
        """
        return self._checkpoints.resume(Path(folder))

    def load(
        self, path: str | PathLike[str], *, strict: bool = True, model_only: bool = False
    ) -> None:
        """Load `path`: a checkpoint's folder (`folder`/step-N), whatever row and size wrote it; or
        a folder that DeepSpeed saved, stages 0 to 3; or the tensors of a model from .safetensors,
        .pt, or a folder as Hugging Face writes them.

        `model_only` leaves optimizers, steps and what is tracked as they are, as a file of another
        library does. Without `strict` names that are missing or unexpected are passed over.
        Pickles are read without running code. Collective.

        Raises CheckpointError where there is nothing to load, BrokenCheckpoint for files that are
        not whole, CheckpointMismatch for another model's.
        """
        self._checkpoints.load(Path(path), strict=strict, model_only=model_only)

    def leave_folders(self) -> None:
        """Let other jobs save where this engine has, until its next save there: for those who save
        into a folder of its own each time."""
        self._checkpoints.saver.leave()

    # -- the engine itself --------------------------------------------------------------------

    def describe(self) -> None:
        """Print, on rank 0, a table of units and buckets with the bytes per rank and tier."""
        if self.world.is_main:
            name = self.world.collectives.name
            describe.show(describe.table_of(self._spec, self._states, name))

    def close(self) -> None:
        """Give models and optimizers back as plain ones, optimizer state included; with `--islands`
        the weights are what they last had in common. Weights that were cast to 16 bit stay so, and
        what torch's optimizers keep for 16-bit weights is cast to those, as they have it by
        themselves. The engine cannot be used afterwards. Collective.
        """
        self._randoms.stop_waiting()
        try:
            self._checkpoints.close()
        finally:
            self._state.objects.end()
            if self._timing is not None:
                self._timing.close()
            if self._recording is not None:
                self._recording.close()
            living.discard(self._state.objects)
            _engines.discard(self)

    def _leave_in_child(self) -> None:
        """In a forked child: leave the models to plain PyTorch, and refuse all calls."""
        self._state.objects.leave_in_child()
        parts = ("_randoms", "_access", "_checkpoints", "_backward", "_stepper")
        vars(self).update(dict.fromkeys(parts, _RefusedInChild(self.world.rank)))


class _RefusedInChild:
    """Stands in for the parts of an engine in a forked child of rank `rank`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            f"Process {os.getpid()} was forked from rank {self._rank}, and engines work in the "
            "process that made them. The model here is a private copy, as it was at the fork: use "
            "it as in plain PyTorch. To train it further, call loss.backward() and step a new "
            "optimizer over model.parameters()."
        )


def _in_forked_child() -> None:
    for engine in list(_engines):
        engine._leave_in_child()


os.register_at_fork(after_in_child=_in_forked_child)
