"""Run Python programs made of a document's blocks, each in a separate process.

Names that a block uses without defining them are created first, unless it calls `sw.init` itself.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo
import torch.nn.functional as F
from guide import Model, dataset, loss_fn

import shardwise as sw

GIVEN = (
    ("Model()", "model = Model().to(world.device)"),
    ("torch.optim.", "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"),
    (
        "CosineAnnealingLR(",
        "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)",
    ),
    ("sw.Engine(", "engine = sw.Engine(model, optimizer)"),
    ("sw.Loader(", "loader = sw.Loader(dataset, batch_size=16, shuffle=True)"),
)

LOADED = (sw.Engine, sw.Loader, sw.Metrics, torch._dynamo)
"""Imported here, once for all programs."""


def run(path: str) -> None:
    """Run the program in a file, in the folder of the file."""
    os.chdir(Path(path).parent)
    code = Path(path).read_text()
    names = {"torch": torch, "F": F, "sw": sw, "dataset": dataset, "loss_fn": loss_fn}
    names |= {"Model": Model, "flag": False, "batch": dataset[:16]}
    if "sw.init(" not in code:
        exec("world = sw.init(seed=0)", names)
        for makes, line in GIVEN:
            if makes not in code:
                exec(line, names)
        if "x, y in" not in code:
            x, y = names["world"].share(dataset[:16])
            names |= {"x": x, "y": y}
    exec(compile(code, path, "exec"), names)


def main() -> int:
    """Run all programs, one after the other; the names of those that fail are said."""
    failed = []
    for path in sys.argv[1:]:
        pid = os.fork()
        if pid == 0:
            try:
                run(path)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            sys.exit(0)  # exit handlers run as in any program
        if os.waitpid(pid, 0)[1]:
            failed.append(path)
    print("failed:", *failed, flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
