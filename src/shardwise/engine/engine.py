"""The `Engine` that users call. It delegates the work to its parts:

    EngineState     shared by the parts: the user's objects, the states, the accumulation
    BackwardRunner  weights losses, seeds autograd, collects gradients    (backward.py)
    StepRunner      reduces, exchanges, decides, updates, clears          (step.py)
    StateAccess     whole parameters, averages, plain optimizer state     (state_access.py)
    Checkpoints     saves, resumes, loads, saves on preemption            (checkpoint/)
    RandomState     the random generators of this rank                    (random_state.py)

The cells of the placement alone decide what a step does.
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
    """Trains models with optimizers over all ranks, with the result of a single process.

    Creating an engine is collective: all ranks create their engines in the same order.

    Args:
        models: One module or a sequence of modules. The engine changes them in place.
        optimizers: One torch optimizer or a sequence. They remain the user's objects, so
            learning-rate schedulers and edits of `param_groups` keep working.
        scaler: The GradScaler that `step` calls (fp16). Default: none.
        tensor_plan: With `--tensor`, how to split layers that the engine does not recognise, by
            patterns of module names: `{"blocks.*.up": "colwise", "blocks.*.down": "rowwise",
            "head": "whole"}`. See docs/parallel.md.
        **settings: Keywords of `shardwise.config.Settings`, such as `zero=2` or
            `precision="bf16-mixed"`. The TOML file, the environment and the flags override them.

    Attributes:
        placement: Where each state is (`Placement`).
        world: The `World` of this process.
        settings: The resolved `Settings`.

    Raises:
        PlacementError: The placement is not possible with these settings.
        ModelError: There is nothing to train, or an optimizer cannot be sharded.
        ModelMismatch: Ranks built different models.

    Example:
        >>> import torch, shardwise as sw
        >>> world = sw.init(seed=0)
        >>> model = torch.nn.Linear(4, 1).to(world.device)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> engine = sw.Engine(model, optimizer, zero=0)
        >>> engine.backward(model(torch.ones(8, 4, device=world.device)).square().mean())
        >>> engine.step().weight
        8.0
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
        # The number is part of seeds and of records, so all ranks create engines in the same order.
        number, world.engines = world.engines, world.engines + 1
        world.expect_no_engine()
        self._spec = spec_of(world, self.settings, models, optimizers, tensor_plan)
        self._state = state = build_state(world, number, self._spec, scaler, tensor_plan)
        # The order matters. Building the state is collective. RandomState reseeds at the first
        # batch after its creation. A step needs all other parts.
        self._timing = layer_times_of(state)
        self._randoms = RandomState(state)
        self._access = StateAccess(state)
        self._checkpoints = Checkpoints(state, self._randoms.reseed, state.returns_of)
        self._backward = BackwardRunner(state, self._randoms, self._timing)
        self._recording = recording_of(state)
        # The stepper reports a failed background save in the exchange.
        saver = self._checkpoints.saver
        self._stepper = StepRunner(
            state, self._backward, self._randoms, saver, self._timing, self._recording
        )
        # Only now: a constructor that raises must not leave an engine behind that others see.
        living.add(state.objects)
        _engines.add(self)
        start_lines.announce_engine(world, self._spec, self._states)
        start_lines.announce_activations(world, self._spec, state.objects.activations)

    @property
    def steps(self) -> int:
        """Number of completed steps, including those before a resume."""
        return self._state.steps

    @property
    def has_gradients(self) -> bool:
        """True if there was a backward since the last step."""
        return self._state.accumulation.backwards > 0

    @property
    def loss_scale(self) -> float:
        """Current loss scale; 1.0 if the precision needs no scaling."""
        return self._state.scale.value

    @property
    def state_bytes(self) -> int:
        """Bytes of training state that this rank holds now, including padding."""
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
        """Run backward from `loss` and accumulate its gradients for the next step.

        Only this engine's parameters get gradients. If gradients are sharded, each backward is
        collective: every rank calls it equally often.

        Several losses of one batch add up, as in plain PyTorch: the samples count once.

        Args:
            loss: Scalar floating-point tensor, shape () or one element, a mean over `weight` items
                of this rank.
            weight: Number of items that the loss is a mean over (a number, or a 0-dim tensor on
                any device). By default it is read from the autograd graph: the labels that
                `cross_entropy` counts, the elements of a mean, or the divisor of a sum. Losses
                that are sums over the batch are added, as with `reduction="sum"`. If the graph
                does not show a weight, it is the number of samples in the Loader's last batch, or
                1 without a Loader.
            reduction: How losses combine. `"mean"` (default): a weighted mean over all items.
                `"sum"`: each loss is a sum over items, and the losses of all workers and backwards
                are added. `"ddp"`: as in DistributedDataParallel, the losses of one worker are
                added, and these sums are averaged over the workers.
            same_items: With `weight`, whether the items of this loss were already counted by an
                earlier backward of this step. Default: detected from the batch.
            last: False if more backwards follow in this step. This saves communication and does
                not change the result.
            retain_graph: Keep the autograd graph, as in `torch.Tensor.backward`. Default: False.

        Raises:
            UsageError: The loss is not a scalar with a graph (unless its weight is 0), or its
                weight cannot be determined. If no single weight fits all terms of all workers'
                losses, `step` raises it.

        Example:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step(max_norm=1.0)
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
        """Compute `loss_of(*batch)` and run its backward, one micro-batch after the other.

        With `--pipeline` this is the way to train: the micro-batches keep all stages busy. Without
        it, the result equals `engine.backward(loss_of(*batch))`.

        Args:
            loss_of: Calls the model on a micro-batch and returns a scalar loss, a mean over its
                items.
            *batch: Tensors, or nested containers of tensors, with the same first dimension. Their
                rows are cut into `--microbatches` parts (default: 1; with `--pipeline P` up to
                4 P).
            weight: Called with a micro-batch; returns the number of items that its loss is a mean
                over, if these are not rows.
            reduction: As for `backward`.
            same_items: As for `backward`.
            cut: If False, each element of `batch` is already one micro-batch: a tuple of the
                arguments of `loss_of`. Default: True.

        Returns:
            The mean loss (with `reduction="sum"` or `"ddp"` the sum), a 0-dim fp64 tensor that is
            the same on all ranks of the replica.

        Raises:
            UsageError: As for `backward`.

        Example:
            def loss_of(x, y):
                return torch.nn.functional.cross_entropy(model(x), y)

            loss = engine.forward_backward(loss_of, x, y)
        """
        return self._backward.forward_backward(
            loss_of, batch, weight=weight, reduction=reduction, same_items=same_items, cut=cut
        )

    def step(
        self, max_norm: float | None = None, *, closure: Callable[[], Any] | None = None
    ) -> StepStats:
        """Average the accumulated gradients over all ranks, clip them, update, and clear them.

        Collective.

        Args:
            max_norm: Clip to this global 2-norm, as `torch.nn.utils.clip_grad_norm_` does.
                Default: no clipping.
            closure: Computes the loss and calls `engine.backward`, in place of backwards before
                the step. The optimizer may call it several times (L-BFGS, which needs replicated
                states: `--zero 0`). The returned statistics describe its first call.

        Returns:
            `StepStats`: the mean loss, the gradient norm before clipping, the number of items, and
            whether the step was skipped.

        Raises:
            UsageError: There was no backward.
            NonFiniteError: A gradient is NaN or infinite, and no loss scale is in use. With
                `--nonfinite skip` the step is skipped instead.
            CheckpointNotWritten: A background save has failed since the last step. The step itself
                is complete.

        Example:
            stats = engine.step(max_norm=1.0)
            world.print(f"step {engine.steps}: loss {stats.loss:.4f}")
        """
        return self._stepper.step(max_norm, closure)

    def reduce(self) -> float:
        """Reduce the gradients of this step over all workers, before `step` is called.

        `engine.step()` then uses these sums. No backward may be called in between. Collective.

        Returns:
            The global 2-norm of the mean gradient.

        Raises:
            UsageError: There was no backward.
            NonFiniteError: As for `step`.
        """
        return self._stepper.reduce()

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Make `param.grad` the whole averaged gradient inside the block, to read or change.

        Use it between backward and step. Every trained parameter gets the gradient of the mean
        over all items of all workers, unscaled and unclipped, with the parameter's shape and
        dtype, or None if no worker had one. `engine.step()` updates with the gradients that rank 0
        leaves there. Setting one to None excludes its parameter from the step. Collective: every
        rank enters and leaves.

        Raises:
            UsageError: There was no backward, or no worker has the whole model (`--tensor`,
                `--pipeline`).

        Example:
            engine.backward(loss)
            with engine.full_gradients():
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            engine.step()
        """
        with self._stepper.full_gradients():
            yield

    def zero_grad(self) -> None:
        """Discard the gradients accumulated since the last step.

        Every rank calls it. Without gradients it does nothing. `step` already clears them, so a
        training loop needs no call.
        """
        self._stepper.zero_grad()

    # -- parameters and optimizer state, whole ------------------------------------------------

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, write: bool = False
    ) -> Iterator[None]:
        """Make parameters whole inside the block, to read or write, with autograd off.

        Collective: every rank enters and leaves. Replicated parameters can also be read at any
        time without it.

        Args:
            module: Whose parameters to gather. Default: all models.
            write: If True, all ranks get rank 0's values on leaving, including fp32 masters. With
                islands that have taken a step, each island gets the values of its first rank.
                Gradients that were accumulated before are kept, so it also works between backward
                and step (as SAM needs). Default: False.

        Example:
            with engine.full_parameters(write=True):
                model.embedding.weight.clamp_(-1, 1)
        """
        with self._access.full_parameters(module, write=write):
            yield

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Allow ranks to run different numbers of forwards inside the block, without training.

        Use it for generation of different lengths, or for evaluation on rank 0 alone. All ranks
        enter and leave. A rank that has left keeps serving the gathers of the others until all
        have left. If parameters are not sharded it does nothing.

        Raises:
            UsageError: With `--pipeline`, because a forward needs all workers of a replica.

        Example:
            with engine.uneven(), torch.no_grad():
                if world.is_main:
                    print(generate(model, prompt))
        """
        with self._access.uneven():
            yield

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Swap in the exponential moving average of the parameters (`ema_decay`) inside the block.

        Only parameters that an optimizer trains have an average; the others keep their value.
        Collective.

        Example:
            with engine.ema(), torch.no_grad():
                evaluate(model)
        """
        with self._access.ema():
            yield

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Swap in the anchor inside the block: the parameters at the last averaging of islands.

        Use it to evaluate them. `export`, `model_state_dict` and checkpoints always use the
        anchor. Collective. Without `--islands` it does nothing.

        Raises:
            UsageError: Gradients are accumulated for a step.
        """
        with self._access.anchor():
            yield

    def export(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Write the weights of a model into one file that plain PyTorch reads.

        Names, shapes and dtypes are as in the plain model. Tied weights are written once.
        Inside `engine.ema()` the averages are written. With `--trial` nothing is written. Every
        rank calls it: if parameters are sharded it is collective. Rank 0 writes, and holds the
        whole model while it does.

        Args:
            path: File to write, in the format of `torch.save` if it ends in .pt, .pth or .bin,
                else as safetensors.
            model: Which model. Default: the only one.

        Example:
            engine.export("model.safetensors")
        """
        self._access.export(path, model)

    def model_state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return the state_dict of a model with whole tensors on rank 0, and {} on other ranks.

        The tensors are copies on the CPU. Tied weights share one tensor. If parameters are
        sharded it is collective, and rank 0 holds the whole model while it copies.

        Args:
            model: Which model. Default: the only one.
        """
        return self._access.model_state_dict(model)

    def optimizer_state_dict(
        self, optimizer: optim.Optimizer | None = None, *, for_resume: bool = False
    ) -> dict[str, Any]:
        """Return the state_dict that the optimizer would have in one process, on every rank.

        Collective. For 16-bit parameters it has the additional key `fp32_master_weights`, which
        torch's `load_state_dict` ignores.

        Args:
            optimizer: Which optimizer. Default: the only one.
            for_resume: Add the key `loss_weight_divisor`, which is needed to continue training
                from the state_dict. torch's `load_state_dict` ignores it too. Default: False.
        """
        return self._access.optimizer_state_dict(optimizer, for_resume=for_resume)

    def load_optimizer_state_dict(
        self, state: Mapping[str, Any] | None, optimizer: optim.Optimizer | None = None
    ) -> None:
        """Load the state_dict of a plain optimizer over the same parameters.

        Load the weights first. An fp32 master in `state` is used only if it rounds to the loaded
        weight; otherwise the weight itself becomes the master. Collective.

        Args:
            state: The state_dict, on every rank or on rank 0 alone (None on the others).
            optimizer: Which optimizer. Default: the only one.

        Raises:
            CheckpointMismatch: The state_dict belongs to another optimizer.
            UsageError: Gradients are accumulated for a step, or the model is split (`--tensor`,
                `--pipeline`).
        """
        self._access.load_optimizer_state_dict(state, optimizer)

    # -- checkpoints --------------------------------------------------------------------------

    def track(self, **objects: Any) -> None:
        """Save and load further objects with the engine's checkpoints.

        Rank 0's state is saved, and loaded on every rank.

        Args:
            **objects: Objects by the name they get in the checkpoint: anything with `state_dict`
                and `load_state_dict`; a generator of torch, numpy or random; a dict, list, deque
                or tensor, which loading fills in place.

        Raises:
            UsageError: An object has another type.

        Example:
            engine.track(loader=loader, scheduler=scheduler)
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
        """Write a checkpoint to `folder`/step-N, where N is `steps`.

        A checkpoint appears under its name only when it is complete (format:
        docs/checkpoint_format.md). With `--trial` nothing is written. Collective.

        Args:
            folder: Folder of the run's checkpoints.
            keep: Keep only the newest `keep` checkpoints up to this one. Default: all.
            background: Return as soon as the state is copied into memory, and write it in a
                thread. A later failure is raised by the next `step`, `save`, `load` or `close`.
                Default: False.
            split_gb: Split files longer than this many GB (10^9 bytes). Default: 5.

        Returns:
            The path of the checkpoint; None if it failed and `--save-failure continue` is set.

        Raises:
            CheckpointNotWritten: No disk accepts the checkpoint. Raised on all ranks.
            UsageError: Gradients are accumulated for a step, or this is inside `ema()`.

        Example:
            if engine.steps % 1000 == 0:
                engine.save("checkpoints", keep=3, background=True)
        """
        return self._checkpoints.save(folder, keep, background=background, split_gb=split_gb)

    def resume(self, folder: str | PathLike[str]) -> int:
        """Load the newest complete checkpoint in `folder`, if there is one.

        With the same world size, row and settings, training then continues with the bits of a run
        that was never interrupted. Build models and split data before calling it, because it sets
        the random generators of each rank. A damaged checkpoint is skipped with a warning. With
        `--trial` nothing is loaded. Collective.

        Returns:
            `steps`, the number of completed steps.

        Raises:
            CheckpointMismatch: The newest checkpoint belongs to another model.
            FolderInUse: Another job saves into this folder.
            BrokenCheckpoint: A checkpoint lacks only its checkpoint.json. Starting over next to
                its data would probably be a mistake.

        Example:
            engine.track(loader=loader)
            for step in range(engine.resume("checkpoints"), 10_000):
                ...
        """
        return self._checkpoints.resume(Path(folder))

    def load(
        self, path: str | PathLike[str], *, strict: bool = True, model_only: bool = False
    ) -> None:
        """Load a checkpoint, or the weights of a model from another library.

        Collective. Pickle files are read without running code from them.

        Args:
            path: A checkpoint of ours (`folder`/step-N) from any row and world size; a DeepSpeed
                checkpoint (stages 0 to 3); or model weights as .safetensors, .pt, or a Hugging
                Face folder.
            strict: If False, ignore missing and unexpected names. Default: True.
            model_only: Load the weights only; keep optimizers, steps and tracked objects. Weights
                of other libraries are always loaded that way. Default: False.

        Raises:
            CheckpointError: There is nothing to load.
            BrokenCheckpoint: Files are incomplete or damaged.
            CheckpointMismatch: The checkpoint belongs to another model.

        Example:
            engine.load("checkpoints/step-1000", model_only=True)
        """
        self._checkpoints.load(Path(path), strict=strict, model_only=model_only)

    def leave_folders(self) -> None:
        """Release the folders this engine has saved into, so that other jobs can save there.

        The next save into a folder takes it again. For callers that use a new folder for each
        save.
        """
        self._checkpoints.saver.leave()

    # -- the engine itself --------------------------------------------------------------------

    def describe(self) -> None:
        """Print a table of units and buckets, with bytes per rank and tier, on rank 0."""
        if self.world.is_main:
            name = self.world.collectives.name
            describe.show(describe.table_of(self._spec, self._states, name))

    def close(self) -> None:
        """Turn models and optimizers back into plain ones, including the optimizer state.

        The engine cannot be used afterwards. With `--islands` the weights are as after the last
        averaging. Weights that were cast to 16 bits keep that dtype, and optimizer state gets the
        dtype that torch's optimizers use for such weights. Collective.
        """
        self._randoms.stop_waiting()
        try:
            self._checkpoints.close()
        finally:
            # In `finally`, because a failed background save must not keep the models in pieces.
            self._state.objects.end()
            if self._timing is not None:
                self._timing.close()
            if self._recording is not None:
                self._recording.close()
            living.discard(self._state.objects)
            _engines.discard(self)

    def _leave_in_child(self) -> None:
        """Leave the models to plain PyTorch in a forked child, and refuse all further calls."""
        self._state.objects.leave_in_child()
        parts = ("_randoms", "_access", "_checkpoints", "_backward", "_stepper")
        # Every method goes through one of these parts, so every call raises.
        vars(self).update(dict.fromkeys(parts, _RefusedInChild(self.world.rank)))


class _RefusedInChild:
    """Stands in for the parts of an engine in a forked child of rank `rank`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            f"Process {os.getpid()} was forked from rank {self._rank}, and an engine works only in "
            "the process that created it. The model here is a private copy from the moment of the "
            "fork: use it as in plain PyTorch. To train it further, call loss.backward() and step "
            "a new optimizer over model.parameters()."
        )


def _in_forked_child() -> None:
    for engine in list(_engines):
        engine._leave_in_child()


os.register_at_fork(after_in_child=_in_forked_child)
