"""Horovod's elastic training: `shardwise run -n 4 --restarts 3 examples/horovod_elastic.py`.

    shardwise run -n 4 --restarts 3 examples/horovod_elastic.py --fail 35
    shardwise run --nnodes 1:4 --nproc-per-node 2 --restarts 5 --rdzv-endpoint node1:29500 \\
        examples/horovod_elastic.py                  # on each host; hosts may join and leave

It fits a line through noisy points, commits every 10 steps, and resumes from the last commit when a
rank has died, on more or fewer ranks. With --fail STEP the last rank kills itself at that step. It
prints where each start begins, and at the end the line: y = 3.00 x -1.00.
"""

import argparse
import os
import signal

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import shardwise.horovod as hvd

SLOPE, OFFSET = 3.0, -1.0


def dataset() -> TensorDataset:
    """Return 1200 points near a line."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 1, generator=draw)
    return TensorDataset(x, SLOPE * x + OFFSET + 0.1 * torch.randn(1200, 1, generator=draw))


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, args: argparse.Namespace) -> None:
    """Train the remaining epochs."""
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, epoch {state.epoch}, step {state.step}", flush=True)
    fresh = state.step == 0
    loader = DataLoader(dataset(), batch_size=args.batch_size, sampler=state.sampler)
    while state.epoch < args.epochs:
        for batch, (x, y) in enumerate(loader):
            state.optimizer.zero_grad()
            nn.functional.mse_loss(state.model(x), y).backward()
            state.optimizer.step()
            state.step += 1
            state.sampler.record_batch(batch, args.batch_size)
            if state.step == args.fail and hvd.rank() == hvd.size() - 1 and fresh:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step % args.commit_every == 0:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
    if hvd.rank() == 0:
        slope, offset = state.model.weight.item(), state.model.bias.item()
        print(f"after {state.step} steps: y = {slope:.2f} x {offset:+.2f}")


def main() -> None:
    """Make the state, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3, help="default %(default)s")
    parser.add_argument(
        "--batch-size", type=int, default=10, help="samples per rank (default %(default)s)"
    )
    parser.add_argument(
        "--commit-every", type=int, default=10, help="steps between commits (default %(default)s)"
    )
    parser.add_argument("--fail", type=int, default=0, help="step at which the last rank dies")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    model = nn.Linear(1, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(dataset())
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, step=0, sampler=sampler)
    state.register_reset_callbacks([lambda: set_rate(optimizer)])
    train(state, args)


def set_rate(optimizer: optim.Optimizer) -> None:
    """Scale the learning rate to the present number of ranks."""
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


if __name__ == "__main__":
    main()
