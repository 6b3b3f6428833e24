"""Implements PipelineModule, a sequence of layers that is divided into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from shardwise.bridging.joining import divide
from shardwise.deepspeed import checkpointing
from shardwise.deepspeed.comm import join_run
from shardwise.deepspeed.pipe.layers import (
    LayerSpec,
    PlacedLayer,
    Recomputing,
    Stage,
    TiedLayerSpec,
)
from shardwise.deepspeed.pipe.partition import starts_of
from shardwise.deepspeed.pipe.topology import (
    AXES,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from shardwise.engine.pipeline_parallel import stages_of
from shardwise.errors import UsageError
from shardwise.parallel.pipeline.partition import Layer, adds_parameters
from shardwise.world import randomness


class PipelineModule(nn.Module):
    """A sequence of layers, divided into stages.

    Creating one is collective, because it joins the run.

    Every rank builds all layers with the same random numbers. Once its engine is created, it keeps
    only the layers of its stage. Names in the state_dict are DeepSpeed's: the layer's index, or
    tied_modules.KEY. With `--schedule interleaved`, each rank has two stages, and stage s is on
    rank s % num_stages of its pipeline. The last stage holds the parameters of `loss_fn`.

    Args:
        layers: Modules, LayerSpecs, TiedLayerSpecs or functions.
        num_stages: Number of stages (default: the axis "pipe" of `topology`). The flag `--pipeline`
            overrides it.
        topology: The axes of the run, in place of `num_stages`.
        loss_fn: Returns the loss from outputs and labels (default: the last layer's output).
        seed_layers: Seed the generators with `base_seed` + index before each layer is built.
        seed_fn: A function that seeds them (default: seeds random, numpy and torch).
        base_seed: The first of these seeds.
        partition_method: "parameters", "uniform" or "type:REGEX".
        activation_checkpoint_interval: Number of consecutive layers that the backward pass
            recomputes at a time, or 0 for none.
        activation_checkpoint_func: The function that implements activation checkpointing.
        checkpointable_layers: Names of the layer types that may be recomputed (default: all).
        dynamic_shape: Ignored, because shapes may change from batch to batch.

    Attributes:
        forward_funcs: The function of each layer.
        parts: Index of each stage's first layer, followed by the number of layers.
        stage_id: The stage of this rank.

    Raises:
        UsageError: If a layer has another type, or if the number of stages does not fit the run.

    Example:
        ```python
        module = PipelineModule(
            layers=[LayerSpec(nn.Linear, 8, 8), nn.ReLU(), LayerSpec(nn.Linear, 8, 1)],
            num_stages=2,
            loss_fn=nn.MSELoss(),
        )
        engine, *_ = deepspeed.initialize(model=module, config="ds.json")
        loss = engine.train_batch(iter(loader))
        ```
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        del dynamic_shape  # shapes may change from batch to batch
        self._world = join_run({})
        divide(self._world, "PipelineModule", **_axes(num_stages, topology, self._world.size))
        self.loss_fn = loss_fn
        self.tied_modules = nn.ModuleDict()
        seed = (seed_fn or randomness.seed_everything) if seed_layers else None
        # Every rank builds all layers in order, so that all draw the same random numbers.
        self._places = [self._place(n, layer, seed, base_seed) for n, layer in enumerate(layers)]
        self.forward_funcs = [place.call for place in self._places]
        self._method = partition_method
        self._recomputing = Recomputing(
            activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers
        )
        self.num_stages = self._world.pipeline_size
        self.stage_id = self._world.pipeline_rank
        stages = stages_of(self._world.settings) if self.num_stages > 1 else 1
        self.parts = [*self._starts(stages), len(self._places)]
        self._stages: list[nn.Module]
        self.modules_of_stages(1)
        if not any(parameter.is_meta for parameter in self.parameters()):
            # Meta tensors are allocated later, when the engine has chosen this rank's layers.
            self.to(self._world.device)

    # -- layers -----------------------------------------------------------------------------

    def _place(
        self, number: int, layer: Any, seed: Callable[[int], Any] | None, base: int
    ) -> PlacedLayer:
        """Register the module of layer `number` under DeepSpeed's name, and return the layer."""
        if seed is not None:
            seed(base + number)
        if isinstance(layer, PipelineModule):
            raise UsageError(
                f"Layer {number} is a PipelineModule: pass its layers instead of the module."
            )
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module = self.tied_modules[layer.key]
            call = module if layer.forward_fn is None else partial(layer.forward_fn, module)
            return PlacedLayer(number, call, module, layer.typename.__name__)
        if isinstance(layer, LayerSpec | nn.Module):
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            self.add_module(str(number), module)
            return PlacedLayer(number, module, module, type(module).__name__)
        if not callable(layer):
            raise UsageError(
                f"Layer {number} of a PipelineModule must be a module, a LayerSpec or a function, "
                f"not {layer!r}."
            )
        return PlacedLayer(number, layer, None, getattr(layer, "__name__", type(layer).__name__))

    def _starts(self, stages: int) -> list[int]:
        known = [place.module or nn.Identity() for place in self._places]
        layers = [Layer(str(n), module) for n, module in enumerate(known)]
        sizes = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in known]
        names = [place.name for place in self._places]
        return starts_of(self._method, names, sizes, adds_parameters(layers), stages)

    def modules_of_stages(self, stages: int) -> list[tuple[str, nn.Module]]:
        """Return the name and the module of each of `stages` stages, for Shardwise's pipeline."""
        edges = [*self._starts(stages), len(self._places)]
        cut = [self._places[a:b] for a, b in pairwise(edges)]
        # Do not register them as children of this module, because names in the state_dict are
        # DeepSpeed's.
        made: list[nn.Module] = [Stage(places, self._recomputing) for places in cut]
        vars(self)["_stages"] = made
        names = [f"layers {places[0].number} to {places[-1].number}" for places in cut]
        return list(zip(names, made, strict=True))

    def forward(self, forward_input: Any) -> Any:
        """Run all layers on `forward_input`, a tensor or a tuple of tensors."""
        for stage in self._stages:
            stage.training = self.training
            forward_input = stage(forward_input)
        return forward_input

    # -- queries from scripts ---------------------------------------------------------------

    def loss_of(self, inputs: Any, labels: Any) -> Any:
        """Return the loss of a micro-batch."""
        outputs = self(inputs)
        return outputs if self.loss_fn is None else self.loss_fn(outputs, labels)

    def partitions(self) -> list[int]:
        """Return the index of each stage's first layer, followed by the number of layers."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Return the rank on the pipeline axis that runs layer `layer_idx`."""
        stage = sum(layer_idx >= start for start in self.parts[:-1]) - 1
        return stage % self.num_stages

    def num_pipeline_stages(self) -> int:
        """Return the number of stages."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set the number of consecutive layers that the backward pass recomputes, or 0 for none."""
        self._recomputing.interval = interval

    @property
    def activation_checkpoint_interval(self) -> int:
        """Number of consecutive layers that the backward pass recomputes, or 0 for none."""
        return self._recomputing.interval

    def topology(self) -> ProcessTopology:
        """Return the ranks' coordinates along the axes."""
        world = self._world
        return PipeModelDataParallelTopology(
            world.pipeline_size, world.tensor_size, world.data_size
        )

    def mpu(self) -> PipelineParallelGrid:
        """Return this rank's position in the grid."""
        return PipelineParallelGrid(self._world)


def _axes(num_stages: int | None, topology: ProcessTopology | None, workers: int) -> dict[str, int]:
    """Return the axis sizes that a script requests.

    Raises UsageError if it requests none, or requests a size that does not fit `workers`.
    """
    if topology is not None:
        if unknown := [axis for axis in topology.get_axis_names() if axis not in AXES]:
            raise UsageError(
                f"PipelineModule(topology=...) has the axis {unknown[0]!r}, but the axes of a run "
                "are pipe, data and model. Write ProcessTopology with these names, or num_stages=."
            )
        if topology.world_size() != workers:
            raise UsageError(
                f"PipelineModule(topology=...) has {topology.world_size()} workers, but this run "
                f"has {workers}: start as many, or change the topology."
            )
        axes = {"pipeline": topology.get_dim("pipe"), "tensor": topology.get_dim("model")}
        return {name: size for name, size in axes.items() if size}
    if num_stages is None:
        raise UsageError("PipelineModule needs num_stages or a topology: pass one of them.")
    return {"pipeline": num_stages}
