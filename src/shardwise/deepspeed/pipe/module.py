"""PipelineModule: a model that is a row of layers, over the stages of our pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from shardwise.bridging.joining import divide
from shardwise.deepspeed import checkpointing
from shardwise.deepspeed.comm import join_run
from shardwise.deepspeed.pipe.layers import LayerSpec, TiedLayerSpec
from shardwise.deepspeed.pipe.partition import starts_of
from shardwise.deepspeed.pipe.stage import Place, Recomputing, Stage
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
    """Runs `layers` one after the other: modules, LayerSpecs, TiedLayerSpecs or functions.

    `num_stages`, or the axis "pipe" of `topology`, is how many stages they are divided into;
    `--pipeline` of the command wins. Every worker builds all layers, with the same random numbers,
    and keeps those of its stage when its engine is made. `loss_fn(outputs, labels)` is the loss;
    without one, what the last layer returns. `partition_method` is "parameters", "uniform" or
    "type:REGEX". With `activation_checkpoint_interval` so many layers in a row are run again in
    backward. Names in the state_dict are DeepSpeed's: the layer's number, or tied_modules.KEY.

    Attributes: `forward_funcs`, what is called in each place; `parts`, the first layer of each
    stage and the number of all; `stage_id`. With `--schedule interleaved` there are two stages for
    each worker, in `parts` too, and stage s is on worker s % num_stages. Parameters of `loss_fn`
    are the last stage's. Collective: it joins the run, and cuts it into pipelines. Raises
    UsageError for what is no layer, and for stages that cannot be.
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
        del dynamic_shape  # forms are followed from batch to batch
        self._world = join_run({})
        divide(self._world, "PipelineModule", **_axes(num_stages, topology, self._world.size))
        self.loss_fn = loss_fn
        self.tied_modules = nn.ModuleDict()
        seed = (seed_fn or randomness.seed_everything) if seed_layers else None
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
            self.to(self._world.device)  # else its engine makes and places what a stage has

    # -- layers -----------------------------------------------------------------------------

    def _place(
        self, number: int, layer: Any, seed: Callable[[int], Any] | None, base: int
    ) -> Place:
        """What is called in place `number`; its module is registered under DeepSpeed's name."""
        if seed is not None:
            seed(base + number)
        if isinstance(layer, PipelineModule):
            raise UsageError(f"Layer {number} is a PipelineModule: give its layers themselves.")
        if isinstance(layer, TiedLayerSpec):
            return self._tied(number, layer)
        if isinstance(layer, LayerSpec | nn.Module):
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            self.add_module(str(number), module)
            return Place(number, module, module, type(module).__name__)
        if not callable(layer):
            raise UsageError(
                f"Layer {number} of a PipelineModule is a module, a LayerSpec or a function, not "
                f"{layer!r}."
            )
        return Place(number, layer, None, getattr(layer, "__name__", type(layer).__name__))

    def _tied(self, number: int, layer: TiedLayerSpec) -> Place:
        if layer.key not in self.tied_modules:
            self.tied_modules[layer.key] = layer.build()
        module = self.tied_modules[layer.key]
        call = module if layer.forward_fn is None else partial(layer.forward_fn, module)
        return Place(number, call, module, layer.typename.__name__)

    def _starts(self, stages: int) -> list[int]:
        known = [place.module or nn.Identity() for place in self._places]
        layers = [Layer(str(n), module) for n, module in enumerate(known)]
        sizes = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in known]
        names = [place.name for place in self._places]
        return starts_of(self._method, names, sizes, adds_parameters(layers), stages)

    def modules_of_stages(self, stages: int) -> list[tuple[str, nn.Module]]:
        """The layers of each of `stages` stages as one module, with its name: what the pipeline
        runs."""
        edges = [*self._starts(stages), len(self._places)]
        cut = [self._places[a:b] for a, b in pairwise(edges)]
        # Not among the module's children, which have the names that DeepSpeed gives them.
        made: list[nn.Module] = [Stage(places, self._recomputing) for places in cut]
        vars(self)["_stages"] = made
        names = [f"layers {places[0].number} to {places[-1].number}" for places in cut]
        return list(zip(names, made, strict=True))

    def forward(self, forward_input: Any) -> Any:
        """What the last layer makes of `forward_input`, a tensor or a tuple of some."""
        for stage in self._stages:
            stage.training = self.training
            forward_input = stage(forward_input)
        return forward_input

    # -- what scripts ask -------------------------------------------------------------------

    def loss_of(self, inputs: Any, labels: Any) -> Any:
        """The loss of a micro-batch."""
        outputs = self(inputs)
        return outputs if self.loss_fn is None else self.loss_fn(outputs, labels)

    def partitions(self) -> list[int]:
        """The first layer of each stage, and the number of all."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The worker along the pipeline that has layer `layer_idx`."""
        stage = sum(layer_idx >= start for start in self.parts[:-1]) - 1
        return stage % self.num_stages

    def num_pipeline_stages(self) -> int:
        """How many stages there are."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Run so many layers in a row again in backward from now on; 0 for none."""
        self._recomputing.interval = interval

    @property
    def activation_checkpoint_interval(self) -> int:
        """How many layers in a row are run again in backward, 0 for none."""
        return self._recomputing.interval

    def topology(self) -> ProcessTopology:
        """Where the workers stand."""
        world = self._world
        return PipeModelDataParallelTopology(
            world.pipeline_size, world.tensor_size, world.data_size
        )

    def mpu(self) -> PipelineParallelGrid:
        """This worker's place."""
        return PipelineParallelGrid(self._world)


def _axes(num_stages: int | None, topology: ProcessTopology | None, workers: int) -> dict[str, int]:
    """The axes that a script asks for. Raises UsageError where it names none, or a wrong size."""
    if topology is not None:
        if unknown := [axis for axis in topology.get_axis_names() if axis not in AXES]:
            raise UsageError(
                f"PipelineModule(topology=...) has the axis {unknown[0]!r}: workers stand along "
                "pipe, data and model. Write ProcessTopology with these names, or num_stages=."
            )
        if topology.world_size() != workers:
            raise UsageError(
                f"PipelineModule(topology=...) is one of {topology.world_size()} workers, and "
                f"there are {workers}."
            )
        axes = {"pipeline": topology.get_dim("pipe"), "tensor": topology.get_dim("model")}
        return {name: size for name, size in axes.items() if size}
    if num_stages is None:
        raise UsageError("PipelineModule takes num_stages or a topology.")
    return {"pipeline": num_stages}
