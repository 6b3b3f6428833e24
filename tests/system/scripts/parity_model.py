"""Trains a model of the parity tests, in fp32: parity_model.py MODEL OPTIMIZER."""

import sys
from pathlib import Path

from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.parity import problems

import shardwise as sw

sw.init(seed=0)
x, y = problems.DATA[sys.argv[1]](39, problems.torch.float32)
model = problems.MODELS[sys.argv[1]]()
optimizer = problems.OPTIMIZERS[sys.argv[2]](problems.parameter_groups(model, 2))
engine = sw.Engine(model, optimizer)
loader = sw.Loader(TensorDataset(x, y), batch_size=problems.BATCH, shuffle=True)
for _ in loader.epochs(3):
    for step in loader.steps():
        for inputs, targets in step:
            loss = problems.loss_of(model, inputs, targets)
            engine.backward(loss, weight=problems.weight_of(targets))
        engine.step(max_norm=0.5)
