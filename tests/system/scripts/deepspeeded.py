"""A script for stock DeepSpeed, which knows nothing of us: trains, saves, and prints its losses."""

import argparse

import deepspeed
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--folder")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(24, 4)
engine, optimizer, loader, schedule = deepspeed.initialize(
    args=args,
    model=model,
    model_parameters=model.parameters(),
    training_data=torch.utils.data.TensorDataset(x, x.prod(1, keepdim=True)),
)
assert isinstance(schedule, WarmupLR)
for inputs, targets in loader:
    loss = (engine(inputs.to(engine.device)) - targets.to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    mean = loss.detach() / deepspeed.comm.get_world_size()
    deepspeed.comm.all_reduce(mean)
    if deepspeed.comm.get_rank() == 0:
        print(f"loss {mean.item():.5f}")
engine.save_checkpoint(args.folder, client_state={"epoch": 1})
assert engine.load_checkpoint(args.folder)[1] == {"epoch": 1}
if deepspeed.comm.get_rank() == 0:
    print("by", type(engine).__module__, engine.zero_optimization_stage())
import deepspeed.sequence.layer  # noqa: E402 it is not there, which the last line says
