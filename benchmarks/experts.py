"""Compares a mixture of experts with --expert to DDP, which replicates it, and to DeepSpeed's MoE.

    shardwise run -n 2 --expert 2 benchmarks/experts.py
    DS_ACCELERATOR=cpu shardwise run -n 4 --expert 4 benchmarks/experts.py --deepspeed

The contenders train the same model on the same batches, one step each in turn. DeepSpeed
(deepspeed.moe.layer.MoE, the group `peers` of pyproject.toml) spreads its experts over as many
workers, and drops no tokens either. The program prints the machine, the median time per step with
its quartiles, the median CPU time of rank 0, and the bytes of parameters, gradients and optimizer
state that one worker holds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from machine import describe


class Block(nn.Module):
    """A mixture of experts with a residual connection."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.moe = sw.MoE(
            nn.Linear(width, experts, bias=False),
            nn.ModuleList([expert(width, hidden) for _ in range(experts)]),
            top_k=2,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, width)."""
        return x + self.moe(self.norm(x))


def expert(width: int, hidden: int) -> nn.Module:
    """Return a feed-forward expert."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def build(args: argparse.Namespace) -> nn.Module:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    blocks = [Block(args.width, args.hidden, args.experts) for _ in range(args.layers)]
    return nn.Sequential(*blocks, nn.Linear(args.width, 32))


def main() -> None:
    """Time both contenders in turn, and print the table."""
    args = arguments()
    world = sw.init(seed=0)
    x = torch.randn(args.tokens, args.width)
    y = torch.randint(32, (args.tokens,))

    ours = build(args)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    engine = sw.Engine(ours, optimizer, zero=args.zero, quiet=True)

    def step_ours() -> float:
        loss = nn.functional.cross_entropy(ours(x), y)
        engine.backward(loss)
        return engine.step().loss

    # The run has a default group already. DDP gets one of its own, over Gloo.
    plain = DistributedDataParallel(build(args), process_group=dist.new_group(backend="gloo"))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def step_plain() -> float:
        plain_optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        plain_optimizer.step()
        return loss.item()

    steps = {"shardwise": step_ours, "DDP": step_plain}
    models: dict[str, nn.Module] = {"DDP": plain}
    if args.deepspeed:
        models["DeepSpeed"], steps["DeepSpeed"] = deepspeed_step(args, world.expert_size, x, y)
    times = timed(steps, args.steps)
    # The first step creates the optimizer's state.
    held = {"shardwise": engine.state_bytes} | {n: held_bytes(m) for n, m in models.items()}
    engine.close()
    if world.is_main:
        for name, words in describe().items():
            print(f"{name}: {words}")
        print(
            f"{world.size} workers, {args.layers} layers of {args.experts} experts, width "
            f"{args.width}, hidden {args.hidden}, {args.tokens} tokens per worker, fp32"
        )
        middles = {}
        for name, each in times.items():
            seconds, of_cpu = zip(*each, strict=True)
            low, middles[name], high = statistics.quantiles(seconds, n=4)
            print(
                f"{name:10} {1e3 * middles[name]:8.1f} ms per step ({1e3 * low:.1f} to "
                f"{1e3 * high:.1f}), {1e3 * statistics.median(of_cpu):6.1f} ms of CPU time, "
                f"{held[name] / 2**20:6.1f} MiB of state per worker"
            )
        for name in [*times][1:]:
            print(f"time of shardwise / {name}: {middles['shardwise'] / middles[name]:.2f}")


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of this worker's fp32 parameters, gradients and AdamW's moments."""
    return 4 * 4 * sum(p.numel() for p in model.parameters())


class DeepSpeedBlock(nn.Module):
    """The block with DeepSpeed's layer."""

    def __init__(self, args: argparse.Namespace, spread: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.norm = nn.LayerNorm(args.width)
        self.moe = MoE(
            args.width,
            expert(args.width, args.hidden),
            num_experts=args.experts,
            ep_size=spread,
            k=2,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, width)."""
        return x + self.moe(self.norm(x))[0]


def deepspeed_step(
    args: argparse.Namespace, spread: int, x: Tensor, y: Tensor
) -> tuple[nn.Module, Callable[[], float]]:
    """Return the model under DeepSpeed, and a function that trains it for one step."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    blocks = [DeepSpeedBlock(args, spread) for _ in range(args.layers)]
    model = nn.Sequential(*blocks, nn.Linear(args.width, 32))
    group = {"params": list(model.parameters()), "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(group)
    config = {"train_micro_batch_size_per_gpu": args.tokens, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config
    )

    def step() -> float:
        loss = nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return model, step


def timed(
    steps: dict[str, Callable[[], float]], count: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the times of `count` steps of each contender, in turn, after three to warm up.

    Each is a pair of seconds: elapsed, and of this process's CPU time.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(count + 3):
        for name, step in steps.items():
            start, cpu = time.perf_counter(), time.process_time()
            step()
            if number >= 3:
                times[name].append((time.perf_counter() - start, time.process_time() - cpu))
    return times


def arguments() -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    number = "(default %(default)s)"
    parser.add_argument("--experts", type=int, default=8, help=f"experts per layer {number}")
    parser.add_argument("--layers", type=int, default=4, help=f"layers {number}")
    parser.add_argument("--width", type=int, default=256, help=f"numbers per token {number}")
    parser.add_argument("--hidden", type=int, default=512, help=f"width of experts {number}")
    parser.add_argument("--tokens", type=int, default=512, help=f"tokens per worker {number}")
    parser.add_argument("--steps", type=int, default=20, help=f"timed steps {number}")
    parser.add_argument("--deepspeed", action="store_true", help="also time DeepSpeed's MoE")
    parser.add_argument("--zero", type=int, default=0, help=f"row of the placement {number}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
