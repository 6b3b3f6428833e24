"""Train with numbers that floating point adds exactly; print who launched it, and a hash.

The weights start at integers and every update divides by powers of two, so that no sum is
rounded: any launcher and any number of workers must reach the very same bits.
"""

import hashlib

import torch

import shardwise as sw

torch.set_num_threads(1)
world = sw.init(seed=0)
digits = torch.arange(32 * 4, dtype=torch.float64).reshape(32, 4)
inputs = digits.mul(7).remainder(5).sub(2)
targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.0]], dtype=torch.float64)

model = torch.nn.Linear(4, 1, bias=False, dtype=torch.float64)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
engine = sw.Engine(model, optimizer)
loader = sw.Loader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8, shuffle=True)
for x, y in loader:
    engine.backward(torch.nn.functional.mse_loss(model(x), y))
    engine.step()

with engine.full_parameters():
    found = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()[:16]
if all(one == found for one in world.gather(found)):
    world.print(f"parity {found} by {world.launcher} of {world.size}")
