"""A Horovod script that learns digits: `shardwise run -n 4 examples/horovod_mnist.py`.

    shardwise run -n 4 examples/horovod_mnist.py
    mpirun -np 4 python examples/horovod_mnist.py
    torchrun --nproc-per-node 4 examples/horovod_mnist.py

Only the line that imports hvd differs from a script for Horovod itself. It prints the training
loss, test loss and accuracy of each epoch.

The data are scikit-learn's 1,797 digits of 8 x 8 pixels, or with --data FILE.npz your own arrays
`x` (samples, height, width) and `y` (samples,), such as MNIST.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shardwise.horovod as hvd


def arguments() -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and backward")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.025, help="learning rate of one rank")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--batches-per-allreduce", type=int, default=2)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as fp16")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--checkpoint", type=Path, help="file to save the model to, each epoch")
    parser.add_argument("--data", type=Path, help="an .npz file with your own digits")
    return parser.parse_args()


def digits(path: Path | None) -> tuple[Dataset, Dataset]:
    """Return the digits to train on, and every fifth one to test on."""
    if path is None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x = x.reshape(-1, 8, 8)
    else:
        arrays = np.load(path)
        x, y = arrays["x"], arrays["y"]
    images = torch.tensor(x / x.max(), dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(y, dtype=torch.int64)
    tested = torch.arange(len(labels)) % 5 == 0
    return (
        TensorDataset(images[~tested], labels[~tested]),
        TensorDataset(images[tested], labels[tested]),
    )


class Net(nn.Module):
    """Two convolutions and two linear layers, for images of 8 x 8 pixels or more."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.dropout = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(32 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(self.dropout(self.conv2(x)))
        x = F.adaptive_max_pool2d(x, 2).flatten(1)
        x = F.dropout(F.relu(self.fc1(x)), 0.2, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def metric_average(value: float, name: str) -> float:
    """Return the mean of a number over all ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(model: nn.Module, optimizer: optim.Optimizer, loader: DataLoader, passes: int) -> float:
    """Train an epoch with `passes` backwards per step, and return this rank's mean loss."""
    model.train()
    total, batches = 0.0, list(loader)
    batches = batches[: len(batches) // passes * passes]
    for index, (data, target) in enumerate(batches):
        if index % passes == 0:
            optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        (loss / passes).backward()  # Horovod sums the passes, and divides only by the ranks
        if index % passes == passes - 1:
            optimizer.step()
        total += loss.item()
    return total / len(batches)


def test(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return this rank's mean loss and accuracy."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            right += (output.argmax(1) == target).sum().item()
            count += len(target)
    return loss / count, right / count


def main() -> None:
    """Train and test, in the steps of a Horovod script."""
    args = arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    train_set, test_set = digits(args.data)
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    model = Net()
    # Adasum needs no larger learning rate for more ranks.
    lr_scaler = args.batches_per_allreduce * (1 if args.use_adasum else hvd.size())
    optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        loss = metric_average(
            train(model, optimizer, train_loader, args.batches_per_allreduce), "train_loss"
        )
        test_loss, accuracy = test(model, test_loader)
        test_loss = metric_average(test_loss, "test_loss")
        accuracy = metric_average(accuracy, "accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch}  train {loss:.4f}  test {test_loss:.4f}  {accuracy:.1%}")
            if args.checkpoint is not None:
                torch.save({"epoch": epoch, "model": model.state_dict()}, args.checkpoint)


if __name__ == "__main__":
    main()
