"""Implements deepspeed.pipe, which trains a sequence of layers on the stages of a pipeline.

layers.py         LayerSpec, TiedLayerSpec: layers to build later; the stages that run them
partition.py      assigns layers to stages (pure arithmetic)
module.py         PipelineModule: the model, its stages, its loss
topology.py       the ranks' coordinates along the axes
engine.py         PipelineEngine: train_batch and eval_batch
"""

from shardwise.deepspeed.pipe.layers import LayerSpec, TiedLayerSpec
from shardwise.deepspeed.pipe.module import PipelineModule
from shardwise.deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
]
