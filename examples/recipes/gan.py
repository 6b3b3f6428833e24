"""Train a GAN: two models, two optimizers, one folder of checkpoints.

    shardwise run -n 2 --zero 2 examples/recipes/gan.py

The GAN learns points on a circle. Prints the losses, and the mean radius of generated points.
"""

import torch
from torch import nn
from torch.nn.functional import softplus

import shardwise as sw

world = sw.init(seed=0)
generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
discriminator = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
# Two engines, because each optimizer steps alone. A backward touches its own engine's parameters.
g_engine = sw.Engine(generator, torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9)))
d_engine = sw.Engine(
    discriminator, torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
)
both = sw.Engines(generator=g_engine, discriminator=d_engine)
both.resume("gan-checkpoints")

with world.alike():  # the same data on every worker
    angles = torch.rand(2048) * 2 * torch.pi
circle = torch.stack([angles.cos(), angles.sin()], 1)
loader = sw.Loader(torch.utils.data.TensorDataset(circle), batch_size=256, shuffle=True)

for epoch in range(both.saves, 10):
    for (real,) in loader:
        noise = world.draw(lambda rows: torch.randn(rows, 4))  # this worker's rows of one draw
        fake = generator(noise)
        d_loss = (
            softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean()
        )
        d_engine.backward(d_loss)
        d_stats = d_engine.step()
        g_engine.backward(softplus(-discriminator(fake)).mean())
        g_stats = g_engine.step()
    world.print(f"epoch {epoch}: discriminator {d_stats.loss:.4f}, generator {g_stats.loss:.4f}")
    both.save("gan-checkpoints", keep=2)

with torch.no_grad(), world.alike():
    radius = generator(torch.randn(1000, 4)).norm(dim=1).mean()
world.print(f"mean radius {radius:.3f}")
