"""Replaces the `forward` methods of a model whose layers are spread over several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.errors import ModelError
from shardwise.model.recomputation import RecomputedForward
from shardwise.parallel.pipeline import recomputed_layers
from shardwise.parallel.pipeline.parameter_ownership import CopyGuard, copy_error
from shardwise.parallel.pipeline.pipeline_group import PipelineGroup
from shardwise.parallel.pipeline.stage_tensors import StageTensor, runs_of, value_at
from shardwise.parallel.tensor.sequence_parallel import gather_nested


def install(pipeline: PipelineGroup, model: nn.Module) -> None:
    """Replace the `forward` of `model` and its layers until `pipeline` is closed."""
    partition = pipeline.partition
    for number, layer in enumerate(partition.layers):
        stage = partition.stage_of(number)
        pipeline.replaced_forwards.append(LayerForward(pipeline, layer.module, layer.name, stage))
    pipeline.replaced_forwards += [
        FloatingForward(pipeline, module) for module in partition.floating
    ]
    if model not in {layer.module for layer in partition.layers}:
        # A model that is a single layer has a LayerForward already.
        pipeline.replaced_forwards.append(ModelForward(pipeline, model))
    pipeline.replaced_forwards.append(CopyGuard(model))


class ReplacedForward(ABC):
    """Base class for callables that replace a module's `forward`.

    A copy of the module gets the original `forward`.
    """

    def __init__(self, pipeline: PipelineGroup, module: nn.Module) -> None:
        self._pipeline = pipeline
        self._module = module
        self._before: Callable[..., Any] | None = vars(module).get("forward")
        self._original: Callable[..., Any] = module.forward
        module.forward = self

    def undo(self) -> None:
        # Leave it if user code has replaced `forward` since.
        if vars(self._module).get("forward") is self:
            del self._module.forward
            if self._before is not None:
                self._module.forward = self._before

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of `module.forward`, and return the module's output."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Called by pickle and copy.deepcopy, through the module's `forward` attribute.
        if not self._pipeline.is_whole:
            raise copy_error("A copy", "to copy it")
        return getattr, (self._module, "forward")


class ModelForward(ReplacedForward):
    """Runs the model's forward pass in a new StageRun."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline.is_whole:
            return self._original(*args, **kwargs)
        with self._pipeline.forward():
            return self._original(*args, **kwargs)


class LayerForward(ReplacedForward):
    """Runs a layer on its stage. Other ranks only compute the shapes of its outputs."""

    def __init__(self, pipeline: PipelineGroup, module: nn.Module, name: str, stage: int) -> None:
        super().__init__(pipeline, module)
        self._name, self._stage = name, stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pipeline, stage = self._pipeline, self._stage
        if pipeline.is_whole:
            return self._original(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        later_stages = [
            leaf.stage for leaf in leaves if isinstance(leaf, StageTensor) and leaf.stage > stage
        ]
        if later_stages:
            raise ModelError(
                f"{self._name} is on stage {stage} and takes the output of the later stage "
                f"{max(later_stages)}. Register the modules in the order of their use, or "
                "name the first module of each stage: --stages. If a model is called on its own "
                "output, values return to the first stage, which --pipeline does not support. "
                "Use --zero 3 or --tensor to save memory instead."
            )
        # Every rank must call this, because opening a channel is collective.
        pipeline.tied_weights.send_for_layer(self._module, stage)
        result = run_on_stage(pipeline, stage, self._module, self._original, leaves, spec)
        self._check(result)
        return result

    def _check(self, result: Any) -> None:
        """Raise ModelError if `result` holds tensors inside an object that is not a pytree."""
        for leaf in pytree.tree_leaves(result):
            attributes = (
                getattr(leaf, "__dict__", {}).values() if not isinstance(leaf, Tensor) else ()
            )
            if any(isinstance(value, Tensor) for value in attributes):
                raise ModelError(
                    f"{self._name} returns a {type(leaf).__name__} with tensors in it, which "
                    "cannot be sent to other workers. Return tensors, tuples, lists or dicts, or "
                    "register the type with torch.utils._pytree."
                )


def run_on_stage(
    pipeline: PipelineGroup,
    stage: int,
    module: nn.Module,
    original: Callable[..., Any],
    leaves: list[Any],
    spec: pytree.TreeSpec,
) -> Any:
    """Run the forward pass of `module` on stage `stage`. Return stage tensors on all ranks."""
    runs, seed = runs_of(pipeline, leaves), pipeline.next_draw()
    with pipeline.within_stage():
        with torch._C.DisableTorchFunctionSubclass():
            values = [value_at(pipeline, leaf, stage) for leaf in leaves]
        if is_here := stage in pipeline.run.stages:
            # The layer must draw different random numbers from the program around it, which all
            # ranks run.
            pipeline.seed_generators(seed, "stage", stage)
            args, kwargs = pytree.tree_unflatten(values, spec)
            result = gather_nested(recomputed_layers.checkpoint_alone(original)(*args, **kwargs))
        else:
            fakes = [leaf.like if isinstance(leaf, StageTensor) else leaf for leaf in leaves]
            # Shapes do not depend on recomputation, so skip the checkpoint.
            plain = original.plain if isinstance(original, RecomputedForward) else original
            result = pipeline.fake_outputs.outputs_of(module, plain, fakes, spec)
        # On its stage, the layer may have drawn any number of times. Reseed all ranks identically.
        pipeline.seed_generators(seed, "all")
        return pytree.tree_map_only(
            Tensor,
            lambda value: StageTensor(pipeline, stage, value if is_here else None, value, runs),
            result,
        )


class FloatingForward(ReplacedForward):
    """Runs a module without parameters on its input's stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pipeline = self._pipeline
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if pipeline.is_whole or not any(isinstance(leaf, StageTensor) for leaf in leaves):
            return self._original(*args, **kwargs)
        # Use the last of the inputs' stages, because values are only sent to later stages.
        stage = max(leaf.stage for leaf in leaves if isinstance(leaf, StageTensor))
        pipeline.record_floating(self._module, stage)
        return run_on_stage(pipeline, stage, self._module, self._original, leaves, spec)
