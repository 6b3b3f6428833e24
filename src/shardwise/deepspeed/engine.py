"""Implements DeepSpeedEngine, DeepSpeed's training object, on a Shardwise engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn, optim
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.config.deepspeed import Batches, DeepSpeedJob
from shardwise.deepspeed import checkpoints, manual_backward
from shardwise.deepspeed.configured import Configured, EngineParts
from shardwise.deepspeed.loader import DeepSpeedDataLoader
from shardwise.deepspeed.monitor import MonitorMaster
from shardwise.errors import UsageError


class OutputTypes:
    """Restores the dtypes in which `module` computed its outputs."""

    # Shardwise's engine widens outputs to fp32, but scripts for DeepSpeed compute losses in the
    # module's own dtypes.

    def __init__(self, module: nn.Module, *, restores: bool) -> None:
        self._restores = restores
        self._dtypes: list[torch.dtype | None] = []

        def note(module: nn.Module, args: Any, output: Any) -> None:
            leaves = pytree.tree_leaves(output)
            self._dtypes = [each.dtype if isinstance(each, Tensor) else None for each in leaves]

        # This hook runs before the one that widens, because the engine registers that one later.
        self._handle = module.register_forward_hook(note)

    def restored(self, output: Any) -> Any:
        """Return `output` in the dtypes in which the module computed it."""
        if not self._restores:
            return output
        leaves, shape = pytree.tree_flatten(output)
        if len(leaves) != len(self._dtypes):
            return output
        found = [
            each.to(dtype) if dtype in (torch.bfloat16, torch.float16) else each
            for each, dtype in zip(leaves, self._dtypes, strict=True)
        ]
        return pytree.tree_unflatten(found, shape)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()


class ZeroParamStatus(Enum):
    """Whether a full parameter is available on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_parameter_ids = count()
"""Counter of parameters across all engines in this process, because scripts use `ds_id` as a key.
"""


def mark_sharded(parameters: Iterable[Tensor]) -> None:
    """Set the attributes that `parameters` would have in DeepSpeed's stage 3."""
    # Scripts check `ds_id` and `ds_status` to decide whether to gather a parameter before reading
    # it.
    for parameter in parameters:
        parameter.__dict__.update(
            ds_id=next(_parameter_ids),
            ds_shape=parameter.shape,
            ds_numel=parameter.numel(),
            ds_status=ZeroParamStatus.NOT_AVAILABLE,
        )


def unmark(parameters: Iterable[Tensor]) -> None:
    """Remove the attributes that `mark_sharded` set."""
    for parameter in parameters:
        for name in ("ds_id", "ds_shape", "ds_numel", "ds_status"):
            parameter.__dict__.pop(name, None)


@contextmanager
def marked_whole(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Set `ds_status` of `parameters` to AVAILABLE inside the block."""
    marked = [each for each in parameters if "ds_status" in each.__dict__]
    before = [each.__dict__["ds_status"] for each in marked]
    for each in marked:
        each.__dict__["ds_status"] = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        for each, status in zip(marked, before, strict=True):
            each.__dict__["ds_status"] = status


class DeepSpeedEngine(Configured):
    """A module together with its training state, as in DeepSpeed.

    Created by `deepspeed.initialize`.

    A loss is divided by the number of accumulation steps, gradients are averaged across workers,
    and schedules step inside `step`. The module's attributes are also available on the engine.

    Attributes:
        module: The user's own module.
        optimizer: The torch optimizer, whose `param_groups` may be edited.
        lr_scheduler: The schedule, or None.
        training_dataloader: The loader of `training_data`, or None.
        losses: The mean loss of the last update.
    """

    def __init__(
        self,
        module: nn.Module,
        job: DeepSpeedJob,
        batches: Batches,
        world: sw.World,
        parts: EngineParts,
        outputs: OutputTypes,
        collate_fn: Any = None,
    ) -> None:
        super().__init__(job, batches, world, parts)
        self.module = module
        self.optimizer = parts.optimizer
        self.basic_optimizer = parts.optimizer
        self.training_dataloader: DeepSpeedDataLoader | None = None
        self.collate_fn = collate_fn
        self._outputs = outputs
        self._boundary: bool | None = None
        self._inside_no_sync = False
        self._unmanaged_backwards = 0
        self._step_applied = False
        self._grad_norm: float | None = None
        self.losses: float | None = None
        self.monitor = MonitorMaster(job, is_main=world.is_main)
        # Computed once, because walking all parameters in every backward pass would take longer
        # than the backward pass of a small model.
        self._trained_ids = frozenset(map(id, module.parameters()))
        if not _all_engines:  # replace Tensor.backward once, for all engines
            manual_backward.lead_backwards(_backwards)
        _all_engines[:] = [each for each in _all_engines if each() is not None] + [ref(self)]
        if parts.engine is not None and parts.engine.settings.hides_parameters:
            mark_sharded(module.parameters())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Use __dict__, because `self.module` would recurse here before __init__ has set it.
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(
                f"Neither Shardwise's DeepSpeedEngine nor its module has an attribute {name!r}."
            ) from None

    # -- forward and backward ---------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's outputs, in the dtypes in which it computed them."""
        return self._outputs.restored(self.module(*inputs, **kwargs))

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Accumulate the gradient of a loss, divided by the number of accumulation steps.

        Collective if gradients are sharded.

        Args:
            loss: Scalar tensor: the mean over this rank's micro-batch.
            retain_graph: As in `torch.Tensor.backward`.
            scale_wrt_gas: Whether to divide the loss by the number of accumulation steps.

        Returns:
            The divided loss, detached from its graph.

        Raises:
            UsageError: If the engine has no optimizer.
        """
        engine = self._engine("backward")
        self._unmanaged_backwards += 1
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        # Only the last backward pass of an update starts communication, which overlaps with the
        # rest of that pass. If the script decides when to step, it is unknown which backward pass
        # is the last, so `step` communicates instead.
        last = self._job.manages_accumulation and self.is_gradient_accumulation_boundary()
        engine.backward(
            loss,
            reduction="ddp" if self._job.averages else "sum",
            last=last and not self._inside_no_sync,
            retain_graph=retain_graph,
        )
        return loss.detach()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside the block without communication, at every stage.

        Raises:
            UsageError: If blocks are nested.
        """
        if self._inside_no_sync:
            raise UsageError(
                "no_sync() was entered inside another no_sync(): remove the inner block."
            )
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    def scale(self, loss: Tensor) -> Tensor:
        """Return a scalar equal to `loss`, whose backward() has the effect of `engine.backward`.

        Call its backward() only once.

        Args:
            loss: Scalar tensor.

        Raises:
            UsageError: If the engine has no optimizer.
        """
        self._engine("scale")
        return manual_backward.as_loss(loss, self.backward)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        if not self._job.manages_accumulation:
            return False
        return (self._counts.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next `step` updates the parameters.

        Raises:
            UsageError: If managed_gradient_accumulation is false, because every step then updates
                them.
        """
        if not self._job.manages_accumulation:
            raise UsageError(
                "set_gradient_accumulation_boundary has no effect with "
                "managed_gradient_accumulation=false, because every step() updates: leave it out."
            )
        self._boundary = is_boundary

    # -- step -------------------------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update the parameters if this is the last micro-batch of a step. Collective.

        The schedule steps too, unless the update is skipped.

        Args:
            lr_kwargs: Keyword arguments of the schedule's `step`.

        Raises:
            UsageError: If called inside `no_sync`, or if the engine has no optimizer.
        """
        engine = self._engine("step")
        if self._inside_no_sync:
            raise UsageError("engine.step() was called inside no_sync(): call it after the block.")
        self._step_applied = False
        if not self._job.manages_accumulation or self.is_gradient_accumulation_boundary():
            stats = engine.step(self._job.clipping or None)
            self._grad_norm, self.losses = stats.grad_norm, stats.loss
            self._step_applied = not stats.skipped
            self._follow(lr_kwargs or {})
        self._counts.micro_steps += 1

    def _follow(self, lr_kwargs: dict[str, Any]) -> None:
        """Update counters and report. Step the schedule unless the update was skipped."""
        counts = self._counts
        if not self._step_applied:
            counts.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        counts.global_steps += 1
        if self._job.manages_accumulation:
            counts.global_samples += self.train_batch_size()
        else:
            # The script decides when to step, so the number of backward passes per update may vary.
            per_backward = self._batches.micro * self.world.data_size
            counts.global_samples += per_backward * self._unmanaged_backwards
        self._unmanaged_backwards = 0
        every = self._job.steps_per_print
        if every and counts.global_steps % every == 0:
            self.world.print(
                f"step={counts.global_steps}, skipped={counts.skipped_steps}, lr={self.get_lr()}, "
                f"mom={self.get_mom()}"
            )
        if self.monitor.enabled:
            samples = counts.global_samples
            events: list[tuple[str, float, int]] = [
                ("Train/Samples/train_loss", float(self.losses or 0.0), samples),
                ("Train/Samples/lr", float(self.get_lr()[0]), samples),
            ]
            if self.fp16_enabled():
                events.append(("Train/Samples/loss_scale", self.loss_scale(), samples))
            self.monitor.write_events(events)

    def was_step_applied(self) -> bool:
        """Return whether the last `step` updated the parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient's 2-norm in the last update, before clipping.

        Returns None before the first update.
        """
        return self._grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients accumulated since the last update. Collective."""
        del set_to_none
        if self._parts.engine is not None:
            self._parts.engine.zero_grad()

    # -- data, full weights, checkpoints, shutdown ------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader for this rank's share of a dataset.

        Args:
            dataset: A map-style or iterable dataset.
            batch_size: Number of samples per batch on this rank (default: the micro-batch size).
            route: With "train", samples are shuffled. With any other value, they are not.
            pin_memory, data_sampler, collate_fn: As in torch's DataLoader.
            num_local_io_workers: Number of DataLoader workers (default: 0 on a CPU, else 2).

        Raises:
            UsageError: If `dataset` is not a dataset.
        """
        return DeepSpeedDataLoader(
            dataset,
            self._batches.micro if batch_size is None else batch_size,
            self.world,
            shuffle=route == "train",
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            workers=num_local_io_workers,
            drop_last=self._job.drop_last,
        )

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's full state_dict. Collective.

        If parameters are sharded or split, the main rank gets it and the other ranks get an empty
        dict.

        Args:
            exclude_frozen_parameters: Omit parameters that are not trained.
        """
        engine = self._parts.engine
        in_parts = engine is not None and (
            engine.settings.hides_parameters or not self.world.mesh.is_flat
        )
        if engine is None or not in_parts:
            found = dict(self.module.state_dict())
        else:
            found = engine.model_state_dict(self.module)
        frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}
        drop = frozen if exclude_frozen_parameters else set()
        return {name: value for name, value in found.items() if name not in drop}

    def _zero3_consolidated_16bit_state_dict(self) -> dict[str, Any] | None:
        """Return `module_state_dict` on the main rank, and None on the other ranks. Collective."""
        # It is private in DeepSpeed too, but scripts call it to save the weights.
        state = self.module_state_dict()
        return state if self.world.is_main else None

    def optimizer_state_dict(self, optimizer: optim.Optimizer | None = None) -> dict[str, Any]:
        """Return the state_dict that an optimizer would have in a single process. Collective.

        Every worker gets the full state. Use it instead of `optimizer.state_dict()`, which is
        incomplete if states are sharded.

        Args:
            optimizer: One of the engine's optimizers. May be omitted if there is only one.
        """
        return self._engine("optimizer_state_dict").optimizer_state_dict(optimizer)

    def load_optimizer_state_dict(
        self, state: dict[str, Any] | None, optimizer: optim.Optimizer | None = None
    ) -> None:
        """Load the full state of a plain optimizer. Collective.

        Args:
            state: A state_dict on the main rank. Ignored on other ranks.
            optimizer: One of the engine's optimizers. May be omitted if there is only one.
        """
        self._engine("load_optimizer_state_dict").load_optimizer_state_dict(state, optimizer)

    def save_16bit_model(
        self,
        save_dir: str | PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the module's weights to a single file with torch.save. Collective.

        The weights have the dtype in which they are trained.

        Args:
            save_dir: Folder to save to. Created if necessary.
            save_filename: Name of the file in the folder.
            exclude_frozen_parameters: Omit parameters that are not trained.

        Returns:
            True.
        """
        state = self.module_state_dict(exclude_frozen_parameters)
        return checkpoints.save_weights(self.world, state, Path(save_dir), save_filename)

    save_fp16_model = save_16bit_model

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights, optimizer state, schedule, counters and `client_state`. Collective.

        The checkpoint can be loaded under any placement and at any world size.

        Args:
            save_dir: Folder to save to. Created if necessary.
            tag: Name of the checkpoint in the folder (default: "global_step" and the number of
                steps).
            client_state: Numbers, strings, tensors, and dicts and lists of them.
            save_latest: Whether `load_checkpoint` without a tag loads this checkpoint.
            exclude_frozen_parameters: Ignored, because frozen parameters are saved too.

        Returns:
            True if it was saved, or False if the disk is full.

        Raises:
            UsageError: If called between micro-batches of a step, or if loading `client_state`
                would require executing code (pickle).
        """
        if exclude_frozen_parameters:
            self.world.say_once("save_checkpoint saves frozen parameters too.")
        return checkpoints.save(self, save_dir, tag, client_state or {}, save_latest=save_latest)

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint written by `save_checkpoint`, or by DeepSpeed itself. Collective.

        Args:
            load_dir: The folder that was passed to `save_checkpoint`.
            tag: Name of the checkpoint in the folder (default: the latest).
            load_module_strict: Whether all parameter names must match.
            load_optimizer_states: Whether to load the optimizer's state.
            load_lr_scheduler_states: Whether to load the schedule's state.
            load_module_only: Load only the weights.
            custom_load_fn: Not supported.

        Returns:
            The path of the checkpoint and its client_state, or (None, None) if `load_dir` has no
            latest checkpoint.

        Raises:
            CheckpointError: If the checkpoint is damaged or does not match the model.
        """
        if custom_load_fn is not None:
            raise UsageError(
                "load_checkpoint(custom_load_fn=...) is not supported: load into the model before "
                "deepspeed.initialize."
            )
        wanted = checkpoints.Wanted(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counts=not load_module_only,
        )
        return checkpoints.load(self, load_dir, tag, wanted)

    def destroy(self) -> None:
        """Turn the module and the optimizer back into plain ones. Collective."""
        self.monitor.close()
        if self._parts.engine is not None:
            self._parts.engine.close()
            self._parts.engine = None
            unmark(self.module.parameters())
        self._outputs.remove()


_all_engines: list[ref[DeepSpeedEngine]] = []
"""The engines of this process, oldest first.

These are weak references, so that an engine is freed when the script drops it.
"""


def _backwards() -> Iterator[tuple[frozenset[int], Callable[..., Tensor]]]:
    """Yield the parameter ids and the backward function of each engine with an optimizer."""
    for each in _all_engines:
        engine = each()
        if engine is not None and engine._parts.engine is not None:
            yield engine._trained_ids, engine.backward


def engine_of(parameter: Tensor) -> DeepSpeedEngine | None:
    """Return the engine that trains `parameter`, or None."""
    for each in reversed(_all_engines):
        engine = each()
        if engine is None or engine._parts.engine is None:
            continue
        if any(parameter is p for p in engine.module.parameters()):
            return engine
    return None
