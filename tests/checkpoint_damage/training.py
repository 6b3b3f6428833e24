"""The run whose checkpoints are damaged, and its resume. Runs on ranks."""

import hashlib
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from click import ClickException
from click.testing import CliRunner

import shardwise as sw
from shardwise.checkpoint.commands import checkpoint
from shardwise.errors import ShardwiseError
from tests.distributed.test_checkpoint import Everything, batch
from tests.distributed.test_checkpoint_faults import Own

STEPS = 3
"""Number of saved steps. The last checkpoint is damaged, sometimes the earlier ones too."""


class Config:
    """A configuration of a model, as transformers have one."""

    architectures = ("Everything",)

    def to_json_string(self) -> str:
        """Return the contents of config.json."""
        return '{"layers": 3}'


class Configured(Everything):
    """A model with a config.json."""

    config = Config()


@dataclass
class Training:
    """A model, its engine and all tracked objects, newly built."""

    model: Any
    engine: Any
    optimizer: Any
    scheduler: Any
    own: Any
    loader: Any

    def step(self, world: Any) -> float:
        """Train one step on a batch that depends on its number."""
        number = self.engine.steps
        x = world.share(batch(number).float())
        self.engine.backward(self.model(x, number).float())
        loss = self.engine.step().loss
        self.scheduler.step()
        self.own.state = self.own.state + 1
        return float(loss)

    def digest(self) -> str:
        """Return a checksum of everything that a checkpoint must restore, bit for bit."""
        seen = hashlib.sha256()
        with self.engine.full_parameters():
            values = {f"model {k}": v.clone() for k, v in self.model.state_dict().items()}
        for number, state in self.engine.optimizer_state_dict()["state"].items():
            values |= {f"state {number} {k}": torch.as_tensor(v) for k, v in state.items()}
        with self.engine.ema(), self.engine.full_parameters():
            values |= {f"average {k}": p.detach().clone() for k, p in self.model.named_parameters()}
        for name, value in sorted(values.items()):
            seen.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            seen.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for group in self.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            seen.update(repr(sorted(options.items())).encode())
        seen.update(repr((self.engine.steps, self.own.state.tolist())).encode())
        seen.update(repr((self.scheduler.state_dict(), self.loader.state_dict())).encode())
        return seen.hexdigest()[:16]


def built(world: Any, row: int, seed: int) -> Training:
    """Build the training as a script does; initial values depend on `seed`."""
    world.engines = 0
    torch.manual_seed(seed)
    model = Configured()
    groups = [{"params": list(model.blocks.parameters()), "lr": 3e-3}]
    first = {id(p) for p in groups[0]["params"]}
    groups.append({"params": [p for p in model.parameters() if id(p) not in first]})
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    engine = sw.Engine(model, optimizer, zero=row, bucket_mb=0.0005, ema_decay=0.9, quiet=True)
    own = Own(torch.arange(100.0) * seed)
    loader = sw.Loader([row for n in range(5) for row in batch(n).float()], 8)
    engine.track(scheduler=scheduler, own=own, loader=loader)
    return Training(model, engine, optimizer, scheduler, own, loader)


def saved(world: Any, folder: Path, split: float) -> list[str]:
    """Train, and save each step into `folder`; return the digests by step, starting at 1."""
    made, digests = built(world, 3, 5), []
    for _ in range(STEPS):
        made.step(world)
        made.engine.save(folder, split_gb=split)
        digests.append(made.digest())
    made.engine.close()
    world.barrier()
    return digests


@dataclass
class Seen:
    """Observations of a rank with a damaged checkpoint."""

    verified: int | None = None
    """Exit code of `shardwise checkpoint verify`, on the main rank."""
    verify_trace: str = ""
    steps: int | None = None
    """Step after the resume; None if it did not succeed."""
    digest: str = ""
    refusal: str = ""
    trace: str = ""
    """Traceback of an error that is not one of ours."""
    lines: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """CPU seconds of the resume alone."""


def verify_and_continue(world: Any, folder: Path, row: int, call: str) -> Seen:
    """Verify the newest checkpoint in `folder`, continue by `call` in `row`, and train one step."""
    seen = Seen()
    if world.is_main:
        words = ["verify", str(folder / f"step-{STEPS}")]
        ran = CliRunner().invoke(checkpoint, words, standalone_mode=False)
        seen.verified = ran.return_value if ran.exception is None else 1
        if not isinstance(ran.exception, ClickException | None):
            seen.verify_trace = "".join(traceback.format_exception(ran.exception))
    made = built(world, row, 77)
    world.print = lambda *words, **_: seen.lines.append(" ".join(map(str, words)))
    world.barrier()
    began = time.process_time()  # CPU time, because other processes may compete for the cores
    try:
        if call == "resume":
            made.engine.resume(folder)
        else:
            made.engine.load(folder / f"step-{STEPS}")
        seen.seconds = time.process_time() - began
        seen.steps, seen.digest = made.engine.steps, made.digest()
        made.step(world)
    except ShardwiseError as error:
        seen.refusal = f"{type(error).__name__}: {error}"
    except Exception:
        seen.trace = traceback.format_exc()
    finally:
        del world.print
    seen.seconds = seen.seconds or time.process_time() - began
    made.engine.close()
    return seen
