"""Defines `Engine`, which users call. It delegates the work to these objects:

    EngineState     shared by the others: the user's objects, the states, the accumulation
    BackwardRunner  weights losses, runs autograd, collects gradients     (backward.py)
    StepRunner      reduces, exchanges, decides, updates, clears          (step.py)
    StateAccess     full parameters, averages, plain optimizer state      (state_access.py)
    Checkpoints     saves, resumes, loads, saves on preemption            (checkpoint/)
    RandomState     this rank's random generators                         (random_state.py)

Only the placement's entries determine what a step does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn, optim
from torch.amp import GradScaler

from shardwise import config
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.publishing import PublishedPart
from shardwise.engine import describe, start_lines, usage_checks
from shardwise.engine.backward import BackwardRunner, layer_times_of
from shardwise.engine.build import States
from shardwise.engine.engine_state import build_state, spec_of
from shardwise.engine.random_state import RandomState
from shardwise.engine.recording import recording_of
from shardwise.engine.repeated_steps import RepeatableBackward, RepeatableSteps
from shardwise.engine.spares import SpareReturns
from shardwise.engine.state_access import StateAccess
from shardwise.engine.step import StepRunner
from shardwise.engine.user_objects import living
from shardwise.errors import UsageError
from shardwise.messages.other_libraries import HintsAtAttributes
from shardwise.model import checkpointed_scalars, compilation
from shardwise.parallel.context.planned_attention import ContextPlan
from shardwise.parallel.expert.planned_blocks import ExpertPlan
from shardwise.parallel.tensor.plan import TensorPlan
from shardwise.states.step_hooks import Returns
from shardwise.states.step_totals import StepStats
from shardwise.world.world import current as current_world

_engines: WeakSet[Engine] = WeakSet()


class Engine(HintsAtAttributes):
    """Trains models with optimizers on all ranks, with the result of a single process.

    Creating an engine is collective: all ranks must create their engines in the same order.

    Args:
        models: One module or a sequence of modules. The engine changes them in place.
        optimizers: One torch optimizer or a sequence. Learning-rate schedulers and edits of
            `param_groups` keep working.
        scaler: The GradScaler that `step` uses (fp16). Default: none.
        tensor_plan: With `--tensor`, how to split layers that the engine does not recognise. Keys
            are patterns of module names: `{"blocks.*.up": "colwise", "blocks.*.down": "rowwise",
            "head": "whole"}`. See docs/parallel.md.
        expert_plan: With `--expert`, the blocks of experts that are not an `sw.MoE`. Maps patterns
            of module names to the options of an `sw.MoE` that computes the same result:
            `{"blocks.*.moe": {"router": "gate", "experts": "experts", "top_k": 2}}`. See
            docs/experts.md.
        context_plan: With `--context`, patterns of the names of modules that compute attention
            themselves: `["blocks.*.attend"]`. Their `forward` takes queries, keys and values of
            shape (rows, heads, length, features). See docs/context.md.
        **settings: Keywords of `shardwise.config.Settings`, such as `zero=2` or
            `precision="bf16-mixed"`. The TOML file, the environment and the flags override them.

    Attributes:
        placement: Where each state is stored (`Placement`).
        world: The `World` of this process.
        settings: The resolved `Settings`.

    Raises:
        PlacementError: The placement is not possible with these settings.
        ModelError: There is nothing to train, or an optimizer cannot be sharded.
        ModelMismatch: Ranks built different models.

    Example:
        >>> import torch, shardwise as sw
        >>> world = sw.init(seed=0, quiet=True)
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
        expert_plan: ExpertPlan | None = None,
        context_plan: ContextPlan | None = None,
        **settings: Any,
    ) -> None:
        self.world = world = current_world()
        config.refuse_elsewhere(settings, "engine")
        self.settings = world.settle_engine(settings)
        config.check_contradictions(self.settings)
        self.placement = self.settings.placement
        backward_kind: type[BackwardRunner] = BackwardRunner
        step_kind: type[StepRunner] = StepRunner
        guarded: Any = None
        if self.settings.guard is not None:
            # Imported here, so that a run without a guard does not load it.
            guarded = import_module("shardwise.engine.guarded")
            guarded.check(self.settings)
            backward_kind, step_kind = guarded.GuardedBackward, guarded.GuardedSteps
        if self.settings.compile:
            compilation.check_cpp_compiler(world.device)
        # The number is part of seeds and records, which is why all ranks must create engines in the
        # same order.
        number, world.engines = world.engines, world.engines + 1
        world.expect_no_engine()
        if world.survival is not None:
            backward_kind, step_kind = RepeatableBackward, RepeatableSteps
            usage_checks.refuse_another_engine(number)
        checkpointed_scalars.keep()
        self._spec = spec_of(
            world, self.settings, models, optimizers, tensor_plan, expert_plan, context_plan
        )
        self._state = state = build_state(world, number, self._spec, scaler, tensor_plan)
        # The order matters. Building the state is collective. RandomState reseeds at the first
        # batch after it is created. StepRunner needs all other parts.
        self._timing = layer_times_of(state)
        self._randoms = RandomState(state)
        self._access = StateAccess(state)
        returns_of: Callable[[Checkpoints], Returns | None] = state.returns_of
        if world.survival is not None:
            returns_of = partial(SpareReturns, state, world.survival)
        self._checkpoints = Checkpoints(state, self._randoms.reseed, returns_of)
        self._backward = backward_kind(state, self._randoms, self._timing)
        self._recording = recording_of(state)
        self._stepper = step_kind(
            state, self._backward, self._randoms, self._checkpoints, self._timing, self._recording
        )
        line = None
        if guarded is not None:
            line = guarded.attach(state, self._backward, self._stepper, self._checkpoints)
        # Register the engine last: other engines must not see one whose constructor raised.
        living.add(state.objects)
        _engines.add(self)
        start_lines.announce_engine(world, self._spec, self._states)
        start_lines.announce_activations(world, self._spec, state.objects.activations)
        if line is not None and not self.settings.quiet:
            world.print(f"  {line}")

    @property
    def steps(self) -> int:
        """Number of completed steps, including those before a resume."""
        return self._state.steps

    @property
    def has_gradients(self) -> bool:
        """True if there was a backward pass since the last step."""
        return self._state.accumulation.backwards > 0

    @property
    def loss_scale(self) -> float:
        """Current loss scale, or 1.0 if the precision needs no scaling."""
        return self._state.scale.value

    @property
    def state_bytes(self) -> int:
        """Current size in bytes of this rank's training state, including padding."""
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
        """Run the backward pass of `loss` and accumulate its gradients for the next step.

        Only this engine's parameters get gradients. If gradients are sharded, every call is
        collective, so every rank must make the same number of calls.

        Losses of the same batch are added, as in plain PyTorch, and their samples are counted once.

        Args:
            loss: Scalar floating-point tensor, of shape () or with one element. It is a mean over
                `weight` items of this rank.
            weight: Number of items that the loss is a mean over (a number, or a 0-dim tensor on any
                device). By default it is read from the autograd graph: the number of labels that
                `cross_entropy` counts, the number of elements of a mean, or the divisor of a sum.
                Losses that are sums over the batch are added, as with `reduction="sum"`. If the
                graph shows no weight, it is the number of samples in the Loader's last batch, or 1
                without a Loader.
            reduction: How losses are combined. `"mean"` (default): a weighted mean over all items.
                `"sum"`: each loss is a sum over items, and the losses of all workers and backward
                passes are added. `"ddp"`: as in DistributedDataParallel, each worker's losses are
                added, and these sums are averaged across workers.
            same_items: With `weight`, whether an earlier backward pass of this step has already
                counted this loss's items. Default: detected from the batch.
            last: False if more backward passes follow in this step. This saves communication and
                does not change the result.
            retain_graph: Keep the autograd graph, as in `torch.Tensor.backward`. Default: False.

        Raises:
            UsageError: The loss is not a scalar with a graph (unless its weight is 0), or its
                weight cannot be determined. If the terms of the workers' losses need different
                weights, `step` raises the error instead.

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
        """Compute `loss_of(*batch)` and run its backward pass, one micro-batch at a time.

        Use it to train with `--pipeline`, where several micro-batches keep all stages busy. Without
        `--pipeline`, the result is the same as that of `engine.backward(loss_of(*batch))`.

        Args:
            loss_of: Calls the model on a micro-batch and returns a scalar loss, a mean over its
                items.
            *batch: Tensors, or nested containers of tensors, with the same first dimension. They
                are split along it into `--microbatches` parts (default: 1; with `--pipeline P` up
                to 4 P).
            weight: Takes a micro-batch and returns the number of items that its loss is a mean
                over. Default: the number of rows.
            reduction: As for `backward`.
            same_items: As for `backward`.
            cut: If False, each element of `batch` is already a micro-batch: the tuple of arguments
                to pass to `loss_of`. Default: True.

        Returns:
            The mean loss, or the sum if `reduction` is "sum" or "ddp": a 0-dim fp64 tensor,
            identical on all ranks of the replica.

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
        """Average the accumulated gradients across all ranks, clip them, and update parameters.

        The gradients are cleared afterwards. Collective.

        Args:
            max_norm: Clip to this global 2-norm, like `torch.nn.utils.clip_grad_norm_`. Default: no
                clipping.
            closure: Function that computes the loss and calls `engine.backward`. It replaces the
                backward passes before the step. Some optimizers call it several times, such as
                L-BFGS, which needs replicated states (`--zero 0`). The returned statistics describe
                the first call.

        Returns:
            `StepStats`: the mean loss, the gradient norm before clipping, the number of items, and
                whether the step was skipped.

        Raises:
            UsageError: There was no backward pass since the last step.
            NonFiniteError: A gradient is NaN or infinite, and there is no loss scale. With
                `--nonfinite skip` the step is skipped instead.
            CheckpointNotWritten: A background save has failed since the last step. The step itself
                is complete.

        Example:
            stats = engine.step(max_norm=1.0)
            world.print(f"step {engine.steps}: loss {stats.loss:.4f}")
        """
        return self._stepper.step(max_norm, closure)

    def reduce(self) -> float:
        """Reduce this step's gradients across all workers before `step` is called.

        `engine.step()` then uses the reduced gradients. Don't call `backward` in between.
        Collective.

        Returns:
            The global 2-norm of the mean gradient.

        Raises:
            UsageError: There was no backward pass since the last step.
            NonFiniteError: As for `step`.
        """
        return self._stepper.reduce()

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Set `param.grad` to the full averaged gradient inside the block, to read or change it.

        Use it between backward and step. Inside the block, every trained parameter's `grad` is the
        gradient of the mean over all workers' items, unscaled and unclipped, with the parameter's
        shape and dtype. It is None if no worker has a gradient. `engine.step()` uses rank 0's
        gradients, as they are at the end of the block. Setting a gradient to None excludes the
        parameter from the step. Collective: every rank must enter and leave the block.

        Raises:
            UsageError: There was no backward pass since the last step, or no worker has the full
                model (`--tensor`, `--pipeline`).

        Example:
            engine.backward(loss)
            with engine.full_gradients():
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            engine.step()
        """
        with self._stepper.full_gradients():
            yield

    def zero_grad(self) -> None:
        """Discard the gradients accumulated since the last step, if there are any.

        Must be called on every rank. A training loop does not need it, because `step` already
        clears the gradients.
        """
        self._stepper.zero_grad()

    # -- full parameters and optimizer state ----------------------------------------------------

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, write: bool = False
    ) -> Iterator[None]:
        """Gather full parameters inside the block, to read or write them with autograd off.

        Collective: every rank must enter and leave the block. Replicated parameters can also be
        read outside the block at any time.

        Args:
            module: Module whose parameters to gather. Default: all models.
            write: If True, rank 0's values are broadcast to all ranks at the end of the block,
                including the fp32 masters. Once islands have taken a step, each island gets the
                values of its first rank instead. Accumulated gradients are kept, so the block may
                also be used between backward and step (as SAM needs). Default: False.

        Example:
            with engine.full_parameters(write=True):
                model.embedding.weight.clamp_(-1, 1)
        """
        with self._access.full_parameters(module, write=write):
            yield

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Allow ranks to run different numbers of forward passes inside the block.

        Use it to generate sequences of different lengths, or to evaluate on rank 0 only. Training
        inside the block is an error. All ranks must enter and leave the block. A rank that has
        finished participates in the other ranks' gathers until all have finished. Does nothing if
        parameters are not sharded.

        Raises:
            UsageError: With `--pipeline`, because a forward pass needs all workers of a replica.

        Example:
            with engine.uneven(), torch.no_grad():
                if world.is_main:
                    print(generate(model, prompt))
        """
        with self._access.uneven():
            yield

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Replace parameters with their exponential moving average (`ema_decay`) inside the block.

        Only parameters that an optimizer trains have an average. All others keep their values.
        Collective.

        Example:
            with engine.ema(), torch.no_grad():
                evaluate(model)
        """
        with self._access.ema():
            yield

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Replace parameters with their anchor, the islands' last average, inside the block.

        Use it for evaluation. `export`, `model_state_dict` and checkpoints always use the anchor.
        Collective. Does nothing without `--islands`.

        Raises:
            UsageError: Gradients are accumulated for a step.
        """
        with self._access.anchor():
            yield

    def export(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Write a model's weights to a single file that plain PyTorch can load.

        Names, shapes and dtypes are those of the plain model. Tied weights are written once. Inside
        `engine.ema()` the averages are written. With `--trial` nothing is written. Call it on every
        rank, because it is collective if parameters are sharded. Rank 0 writes the file, and holds
        the full model in memory meanwhile.

        Args:
            path: File to write. Its format is that of `torch.save` if it ends in .pt, .pth or .bin,
                otherwise safetensors.
            model: The model to export. Default: the only one.

        Example:
            engine.export("model.safetensors")
        """
        self._access.export(path, model)

    def model_state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return a model's state_dict with full tensors on rank 0, and {} on other ranks.

        The tensors are copies on the CPU. Tied weights share one tensor. If parameters are sharded,
        the call is collective, and rank 0 holds the full model while it copies.

        Args:
            model: The model to copy. Default: the only one.
        """
        return self._access.model_state_dict(model)

    def optimizer_state_dict(
        self, optimizer: optim.Optimizer | None = None, *, for_resume: bool = False
    ) -> dict[str, Any]:
        """Return, on every rank, the state_dict that the optimizer would have in a single process.

        Collective. For 16-bit parameters it has the additional key `fp32_master_weights`, which
        torch's `load_state_dict` ignores.

        Args:
            optimizer: The optimizer whose state to return. Default: the only one.
            for_resume: Add the key `loss_weight_divisor`, which is needed to continue training from
                the state_dict. torch's `load_state_dict` ignores it too. Default: False.
        """
        return self._access.optimizer_state_dict(optimizer, for_resume=for_resume)

    def load_optimizer_state_dict(
        self, state: Mapping[str, Any] | None, optimizer: optim.Optimizer | None = None
    ) -> None:
        """Load a plain optimizer's state_dict for the same parameters.

        Load the weights first. An fp32 master in `state` is used only if it rounds to the loaded
        weight; otherwise the weight itself becomes the master. Collective.

        Args:
            state: The state_dict, either on every rank or only on rank 0 (None on the others).
            optimizer: The optimizer to load into. Default: the only one.

        Raises:
            CheckpointMismatch: The state_dict belongs to a different optimizer.
            UsageError: Gradients are accumulated for a step, or the model is split (`--tensor`,
                `--pipeline`).
        """
        self._access.load_optimizer_state_dict(state, optimizer)

    # -- checkpoints --------------------------------------------------------------------------

    def track(self, **objects: Any) -> None:
        """Save and load additional objects with the engine's checkpoints.

        Checkpoints contain rank 0's state, which is loaded on every rank.

        Args:
            **objects: The objects, by their names in the checkpoint. An object can be anything with
                `state_dict` and `load_state_dict`; a generator of torch, numpy or random; or a
                dict, list, deque or tensor, which is filled in place on load.

        Raises:
            UsageError: An object has an unsupported type.

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

        The checkpoint gets this name only once it is complete (for the format, see
        docs/checkpoint_format.md). With `--trial` nothing is written. Collective.

        Args:
            folder: Folder of the run's checkpoints.
            keep: Keep only the newest `keep` checkpoints, including this one. Default: all.
            background: Return once the state is copied to memory, and write it in a thread. A later
                failure is raised by the next `step`, `save`, `load` or `close`. Default: False.
            split_gb: Split files longer than this many GB (10^9 bytes). Default: 5.

        Returns:
            The path of the checkpoint, or None if the save failed and `--save-failure continue` is
            set.

        Raises:
            CheckpointNotWritten: No disk accepts the checkpoint. Raised on all ranks.
            UsageError: Gradients are accumulated for a step, or the call is inside `ema()`.

        Example:
            if engine.steps % 1000 == 0:
                engine.save("checkpoints", keep=3, background=True)
        """
        return self._checkpoints.save(folder, keep, background=background, split_gb=split_gb)

    def resume(self, folder: str | PathLike[str]) -> int:
        """Load the newest complete checkpoint in `folder`, if there is one.

        With the same world size, placement and settings, the resumed run is bit-identical to one
        that was never interrupted. Build models and split data before the call, because it sets
        each rank's random generators. A damaged checkpoint is skipped with a warning. With
        `--trial` nothing is loaded. Collective.

        Args:
            folder: Folder of the run's checkpoints, as passed to `save`.

        Returns:
            `steps`, the number of completed steps.

        Raises:
            CheckpointMismatch: The newest checkpoint belongs to a different model.
            FolderInUse: Another job saves to this folder.
            BrokenCheckpoint: A checkpoint is complete except for its checkpoint.json. Starting over
                next to its data would probably be a mistake.

        Example:
            engine.track(loader=loader)
            for step in range(engine.resume("checkpoints"), 10_000):
                ...
        """
        return self._checkpoints.resume(Path(folder))

    def load(
        self, path: str | PathLike[str], *, strict: bool = True, model_only: bool = False
    ) -> None:
        """Load a checkpoint, or model weights saved by another library.

        Collective. Pickle files are read without executing code from them.

        Args:
            path: One of Shardwise's checkpoints (`folder`/step-N), saved with any placement and
                world size; a checkpoint of another library (DeepSpeed, torch DCP, Lightning,
                Accelerate, the Transformers Trainer, a dict of torch.save); or model weights as
                .safetensors, .pt, or a Hugging Face folder.
            strict: If False, ignore missing and unexpected names. Default: True.
            model_only: Load only the weights; keep optimizers, steps and tracked objects. A file
                without optimizer state is always loaded this way. Default: False.

        Raises:
            CheckpointError: There is nothing to load.
            BrokenCheckpoint: Files are incomplete or damaged.
            CheckpointMismatch: The checkpoint belongs to a different model.

        Example:
            engine.load("checkpoints/step-1000", model_only=True)
        """
        self._checkpoints.load(Path(path), strict=strict, model_only=model_only)

    def publish(
        self,
        target: str | PathLike[str] | Callable[[PublishedPart], None],
        dtype: torch.dtype | None = None,
        *,
        keep: int = 2,
        only_changed: bool = True,
    ) -> Path | None:
        """Publish the weights for inference, without gathering them on any rank.

        Each rank writes its own parts to the folder `target`/weights-N, where N is `steps`. The
        folder is a Transformers model, which vLLM and SGLang can load. It also has a file
        fingerprints.json with every tensor's fingerprint. The link `target`/latest is then changed
        to point to the folder. With `--trial` nothing is published. Collective.

        Args:
            target: The folder, or a function that each rank calls with its own parts of tensors.
            dtype: Dtype of the published floating-point tensors. Default: their own.
            keep: Number of versions to keep in the folder.
            only_changed: Send only tensors that have changed since the last call with the same
                function. In a folder, link files in which no tensor has changed.

        Returns:
            The folder of this version, or None if `target` is a function.

        Raises:
            CheckpointNotWritten: The disk or the function fails. Raised on all ranks.
            FolderInUse: Another job saves or publishes into the folder.
            UsageError: Gradients are accumulated for a step, or an argument is invalid.

        Example:
            if engine.steps % 100 == 0:
                engine.publish("weights", dtype=torch.bfloat16)
        """
        publisher = self._checkpoints.publisher
        return publisher.publish(target, dtype, keep, only_changed=only_changed)

    def leave_folders(self) -> None:
        """Release the folders that this engine has saved to, so that other jobs can save there.

        The next save to a folder locks it again. Call this if each save goes to a new folder.
        """
        self._checkpoints.saver.leave()

    # -- the engine itself --------------------------------------------------------------------

    def describe(self) -> None:
        """Print a table of units and buckets on rank 0, with their sizes per rank and tier."""
        if self.world.is_main:
            name = self.world.collectives.name
            describe.show(describe.table_of(self._spec, self._states, name))

    def close(self) -> None:
        """Turn models and optimizers back into plain ones, including the optimizer state.

        The engine cannot be used afterwards. With `--islands`, the models hold the weights from the
        last averaging. Weights that were cast to 16 bits keep that dtype, and their optimizer
        state gets the dtype that torch's optimizers use for such weights. Collective.
        """
        self._randoms.stop_waiting()
        self._stepper.close()
        try:
            self._checkpoints.close()
        finally:
            # Use `finally`, because models must be restored even if a background save has failed.
            self._state.objects.end()
            if self._timing is not None:
                self._timing.close()
            if self._recording is not None:
                self._recording.close()
            living.discard(self._state.objects)
            _engines.discard(self)

    def _leave_in_child(self) -> None:
        """In a forked child, turn the models into plain ones, and make all further calls raise."""
        self._state.objects.leave_in_child()
        parts = ("_randoms", "_access", "_checkpoints", "_backward", "_stepper")
        # Every public method uses one of these parts, so every call raises.
        vars(self).update(dict.fromkeys(parts, _RefusedInChild(self.world.rank)))


class _RefusedInChild:
    """Replaces an engine's parts in a process that was forked from rank `rank`. Any use raises."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            f"Process {os.getpid()} was forked from rank {self._rank}, and an engine works only "
            "in the process that created it. The model in this process is a private copy, made "
            "by the fork: use it as in plain PyTorch. To train it further, call loss.backward() "
            "and step a new optimizer over model.parameters()."
        )


def _in_forked_child() -> None:
    for engine in list(_engines):
        engine._leave_in_child()


os.register_at_fork(after_in_child=_in_forked_child)
