"""Pipeline parallelism: divides the layers into stages, spread over a replica's ranks.

Every rank runs the user's complete program, but computes only the layers of its own stages.

partition.py            divides layers into stages; layer_times.py measures the layers' times
stages.py               maps stages to ranks, and tracks the current run
stage_forwards.py       replaces the layers' `forward`; recomputed_layers.py handles checkpoints
stage_tensors.py        tensors whose values are on one stage, and whose shapes all ranks know
fake_outputs.py         computes output shapes of other ranks' layers, using fake_tensors.py
channels.py             sends messages between stages
pipeline_group.py       combines the stages, channels and parameters of a pipeline
parameter_ownership.py  frees, gathers and restores other stages' parameters
tied_weights.py         sends tied weights from their owner to the other stages
schedule.py             orders the forward and backward passes on each rank
runner.py               runs a batch by a schedule; split_backward.py serves zero-bubble
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
