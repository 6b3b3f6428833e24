"""Losses, norms and rates, next to the real DeepSpeed: the same script and JSON.

    python benchmarks/deepspeed_parity.py                     # all cases, on 1 and 2 ranks
    python benchmarks/deepspeed_parity.py --ranks 2 --only bf16
    python benchmarks/deepspeed_parity.py --pipeline          # a PipelineModule in two stages

Each library runs all cases in one start of torchrun on the CPU; a rank runs this script with
--worker. Adams are torch's in both, so that DeepSpeed compiles none. Its first start on several
ranks still compiles code for shared memory, for one minute or two; later starts take seconds.
Printed are the largest relative differences of the mean loss over the ranks, of the gradient's norm
before clipping, if DeepSpeed has one, and of the learning rate. With --pipeline a small language
model trains, whose embedding is its head too, next to plain PyTorch in one process as well. With
--figures the rates and betas of DeepSpeed's schedules are written, which a test compares ours with.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import deepspeed_pipeline
import figure

LIMIT = 900
"""Seconds for one library to train all cases."""

Rows = list[list[float]]
"""The figures of each step."""

STEPS = 20
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
SCHEDULES = {
    "WarmupLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8},
    "WarmupDecayLR": {"total_num_steps": 16, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 16, "warmup_num_steps": 4, "warmup_type": "linear"},
    "OneCycle": {
        "cycle_min_lr": 1e-3,
        "cycle_max_lr": 1e-2,
        "cycle_first_step_size": 5,
        "decay_step_size": 3,
        "decay_lr_rate": 0.5,
    },
    "LRRangeTest": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 4},
}


def cases() -> dict[str, dict[str, Any]]:
    """The JSON of each case, by name."""
    found = {}
    for stage in range(4):
        zero = {"zero_optimization": {"stage": stage}}
        found[f"fp32 stage {stage}"] = zero
        found[f"fp32 stage {stage}, accumulation 3, clipping 0.1"] = zero | {
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.1,
        }
        found[f"bf16 stage {stage}"] = zero | {"bf16": {"enabled": True}}
        found[f"bf16 stage {stage}, accumulation 3, clipping 0.1"] = zero | {
            "bf16": {"enabled": True},
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.1,
        }
    for name, params in SCHEDULES.items():
        found[f"{name}, stage 1"] = {
            "zero_optimization": {"stage": 1},
            "scheduler": {"type": name, "params": params},
        }
    for name in ("AdamW", "Adagrad", "SGD"):
        own = {"torch_adam": True} if name == "AdamW" else {}
        found[f"{name}, stage 0"] = {"optimizer": {"type": name, "params": {"lr": 1e-2} | own}}
    found["no clipping, stage 2"] = {"gradient_clipping": 0, "zero_optimization": {"stage": 2}}
    base = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM}
    return {name: base | config for name, config in found.items()}


def train(deepspeed: Any, config: dict[str, Any]) -> list[list[float]]:
    """Loss (mean over ranks), norm and rate of each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    draws = torch.Generator().manual_seed(1 + engine.global_rank)
    rows = []
    for _ in range(STEPS):
        losses = []
        for _ in range(engine.gradient_accumulation_steps()):
            x = torch.randn(4, 16, generator=draws).to(dtype)
            y = torch.randn(4, 8, generator=draws).to(dtype)
            loss = torch.nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().double())
        mean = torch.stack(losses).mean()
        deepspeed.comm.all_reduce(mean)
        mean /= deepspeed.comm.get_world_size()
        norm = engine.get_global_grad_norm()
        rows.append(
            [float(mean), float("nan" if norm is None else norm), float(engine.get_lr()[0])]
        )
    engine.destroy()
    return rows


# -- next to each other ------------------------------------------------------------------------


def both(ranks: int, names: list[str], *flags: str) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """Return the figures of ours and of DeepSpeed's by case."""
    found = []
    for library in ("deepspeed", "shardwise.deepspeed"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            mine = [__file__, "--worker", library, "--out", str(out), "--names", json.dumps(names)]
            environ = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
            environ |= {"CUDA_VISIBLE_DEVICES": "", "SHARDWISE_QUIET": "on"}
            _run([sys.executable, *words, *mine, *flags], environ, library)
            found.append(json.loads(out.read_text()))
    theirs, ours = found
    return ours, theirs


def _run(command: list[str], environ: dict[str, str], library: str) -> None:
    """Run `command`; raise SystemExit with its output if it fails or does not end.

    DeepSpeed compiles at first, and waits forever for a compiler that was killed.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True) as ranks:
        try:
            wrote, why = ranks.communicate(timeout=LIMIT), f"failed with {ranks.returncode}"
        except subprocess.TimeoutExpired:
            ranks.terminate()  # torchrun ends its workers
            wrote, why = ranks.communicate(), f"did not end in {LIMIT} s"
    if ranks.returncode:
        raise SystemExit("\n".join([f"{library} {why}:", *(text[-4000:] for text in wrote)]))


def difference(ours: Rows, theirs: Rows, column: int) -> float:
    """Return the largest relative difference in a column; NaN if DeepSpeed has no figure."""
    pairs = [(a[column], b[column]) for a, b in zip(ours, theirs, strict=True)]
    return max((abs(a - b) / max(abs(b), 1e-12) if a != b else 0.0) for a, b in pairs)


def _shown(value: float) -> str:
    return "-" if value != value else f"{value:.1e}"


def compare(ranks: int, names: list[str]) -> list[str]:
    """Return the table of all cases on `ranks`."""
    ours, theirs = both(ranks, names)
    rows = []
    for name in names:
        cells = [_shown(difference(ours[name], theirs[name], column)) for column in range(3)]
        rows.append([name, *cells, f"{ours[name][-1][0]:.6f}"])
    return figure.table([f"{ranks} rank(s)", "loss", "norm", "rate", "last loss"], rows)


def compare_pipelines(replicas: int, names: list[str]) -> list[str]:
    """Return the table of all cases in two stages on `replicas`."""
    stages, known = deepspeed_pipeline.STAGES, deepspeed_pipeline.CASES
    ours, theirs = both(stages * replicas, names, "--pipeline")
    alone = {clipping: deepspeed_pipeline.plain(replicas, clipping) for clipping in (0.0, 1.0)}
    rows = []
    for name in names:
        values = [difference(ours[name], theirs[name], column) for column in range(2)]
        values.append(difference(ours[name], alone[known[name][1]], 0))
        rows.append([name, *map(_shown, values)])
    title = f"{stages} stages x {replicas} replica(s)"
    return figure.table([title, "loss", "norm", "loss beside plain PyTorch"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as a worker, compare the two, or write figures."""
    flags = figure.parser(__doc__)
    flags.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="or replicas")
    flags.add_argument("--only", default="", help="cases whose names contain this")
    flags.add_argument("--pipeline", action="store_true", help="a PipelineModule in two stages")
    for hidden in ("--worker", "--out", "--names"):
        flags.add_argument(hidden, help=argparse.SUPPRESS)
    given = flags.parse_args(arguments)
    if given.worker:
        deepspeed = import_module(given.worker)
        deepspeed.init_distributed()
        found = {
            name: deepspeed_pipeline.train(deepspeed, *deepspeed_pipeline.CASES[name])
            if given.pipeline
            else train(deepspeed, cases()[name])
            for name in json.loads(given.names)
        }
        if deepspeed.comm.get_rank() == 0:
            Path(given.out).write_text(json.dumps(found))
    else:
        figure.begin()
        torch.set_num_threads(1)  # as each rank has
        known, table = (
            (deepspeed_pipeline.CASES, compare_pipelines) if given.pipeline else (cases(), compare)
        )
        for size in given.ranks:
            names = [name for name in known if given.only in name]
            figure.show("", *table(size, names))


if __name__ == "__main__":
    main()
