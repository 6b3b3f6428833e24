"""Pipeline parallelism: divides layers into stages, one or more on each rank of a replica.

Every rank runs the user's whole program, but computes only the layers of this rank's stages.

partition.py            divides layers into stages; layer_times.py  times layers
stages.py               maps stages to ranks, and tracks the current run
stage_forwards.py       replaces the forwards of layers; recomputed_layers.py  under checkpoints
stage_tensors.py        tensors whose values one stage has, and whose shapes all ranks know
fake_outputs.py         computes the shapes of a layer's outputs on other ranks; fake_tensors.py
channels.py             messages between stages
pipeline_group.py       the ranks of a pipeline: stages, channels and parameters together
parameter_ownership.py  frees, gathers and restores parameters of other stages
tied_weights.py         sends a weight from its owner to the other stages that use it
schedule.py             the order of forwards and backwards on each rank
runner.py               runs a batch by a schedule; split_backward.py  for zero-bubble
"""

from shardwise.parallel.pipeline import partition, runner
from shardwise.parallel.pipeline.layer_times import LayerTimes
from shardwise.parallel.pipeline.partition import Partition
from shardwise.parallel.pipeline.pipeline_group import PipelineGroup
from shardwise.parallel.pipeline.schedule import Action, actions_of
from shardwise.parallel.pipeline.stage_forwards import install
from shardwise.parallel.pipeline.stage_tensors import StageRun, StageTensor

__all__ = [
    "Action",
    "LayerTimes",
    "Partition",
    "PipelineGroup",
    "StageRun",
    "StageTensor",
    "actions_of",
    "install",
    "partition",
    "runner",
]
