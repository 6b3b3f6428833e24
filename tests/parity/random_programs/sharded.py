"""The same program on ranks of Shardwise, written as the documents recommend."""

import contextlib
import copy
import hashlib
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset, TensorDataset

import shardwise as sw
from shardwise.states.storage import storage
from shardwise.states.storage.squared_sums import GRAIN
from tests.disk import on_a_disk
from tests.parity.random_programs import models as made_of
from tests.parity.random_programs.models import Batch, explicit, items
from tests.parity.random_programs.plain import EVALUATED, Ran, Script
from tests.parity.random_programs.program import Config, Part, Program, Step


def run_phase(
    world: Any, program: Program, phase: int, folder: str, watch: bool
) -> tuple[Ran, str]:
    """Run one phase of `program` on a rank; return a digest that must be equal on all ranks.

    The state of an earlier phase is loaded from `folder`, and saved for a later one.
    """
    usual = storage.SPAN
    exact = program.phases[phase].config.exact is not None
    storage.SPAN = 2 * GRAIN if exact else 48  # several spans, also in models as small as these
    # The program adds parameters that are in no optimizer yet.
    warnings.filterwarnings("ignore", ".*are in no optimizer")
    warnings.filterwarnings("ignore", "Sparse invariant checks")
    script = Sharded(world, program, phase, Path(folder))
    began = time.process_time()
    try:
        script.run(watch=watch)
    finally:
        script.models.clear()
        storage.SPAN = usual
    script.ran.seconds = time.process_time() - began
    return script.ran, script.digest


def uneven_cuts(rows: int, size: int, seed: int) -> list[int]:
    """Return the borders of uneven shares of `rows` for `size` ranks; some may be empty."""
    draw = torch.Generator().manual_seed(seed)
    inner = torch.randint(0, rows + 1, (size - 1,), generator=draw).sort().values.tolist()
    return [0, *inner, rows]


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """A dataset of rows in order, with shard() for the rows of each worker."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.num_shards = tensors, len(tensors[0])

    def shard(self, num_shards: int, index: int) -> "Stream":
        return Stream([each[index::num_shards] for each in self.tensors])

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*self.tensors, strict=True)


class Sharded(Script):
    """Runs the program on one of several ranks."""

    def __init__(self, world: Any, program: Program, phase: int, folder: Path) -> None:
        super().__init__(program)
        self.world, self.phase, self.folder = world, phase, folder
        self.config = program.phases[phase].config
        self.digest = ""
        self._take_settings()
        self.number = program.first_step(phase)
        self.loader: Any = None
        if program.feed != "share":
            parts = [
                made_of.batch(program, number, 0, step.parts[0].rows)
                for number, step in program.steps()
            ]
            rows = next(program.steps())[1].parts[0].rows
            whole = [torch.cat(each) for each in zip(*parts, strict=True)]
            data = Stream(whole) if program.feed == "stream" else TensorDataset(*whole)
            self.loader = sw.Loader(
                data, batch_size=rows, micro_batch_size=self.config.micro_batch_size
            )

    def _take_settings(self) -> None:
        """Set the settings that a run gets from flags, except the mesh of its group."""
        if self.config.exact is not None:
            os.environ["SHARDWISE_EXACT"] = str(self.config.exact)
            self.world.settings = self.world.settle()

    def run(self, *, watch: bool) -> None:
        """Run the steps of this phase."""
        program = self.program
        self.train_mode()
        if self.phase == 0:
            self.warm_up()
        for event in program.before_phase(self.phase):
            if event.split(":")[0] in ("freeze", "unfreeze", "add_group"):
                self.change(event)
        self.engines = self.make_engines(self.config.zero)
        if self.phase:
            self.load()
        steps = program.phases[self.phase].steps
        given = self.batches()
        for number, step in enumerate(steps, program.first_step(self.phase)):
            self.number = number
            made_of.tell_step(self.models, self.number)
            for event in step.before:
                self.happen(event)
            losses = [self.train(step, engine, given) for engine in range(len(self.engines))]
            self.step_schedulers(losses[0])
            if self.average is not None:
                self.average.update_parameters(self.models[0])
            if watch:
                with self.whole():
                    self.see("after", self.state())
        if self.phase + 1 < len(program.phases):
            self.save()
        else:
            self.number += 1
            self.end()

    # -- engines --------------------------------------------------------------------------

    def make_engines(self, zero: int) -> list[Any]:
        """Create one engine for each of the program's owners."""
        config = self.config
        settings: dict[str, Any] = {
            f"offload_{state}": f"nvme:{on_a_disk()}" for state in config.offload
        }
        if config.pipeline > 1:
            settings["schedule"] = config.schedule
        if config.microbatches is not None:
            settings["microbatches"] = config.microbatches
        if self.program.synchronised:
            settings["sync_batch_norm"] = True
        engines = []
        for number, owned in enumerate(self.program.owners):
            average = {"ema_decay": self.program.ema} if number == 0 and self.program.ema else {}
            engine = sw.Engine(
                [self.models[i] for i in owned],
                self.optimizers[number],
                zero=zero,
                bucket_mb=config.bucket_mb,
                overlap=config.overlap,
                activations=config.activations,
                **settings,
                **average,
            )
            engines.append(engine)
        return engines

    def track(self) -> None:
        """Save and load the script's own objects with the first engine."""
        tracked = {f"scheduler{i}": each for i, each in enumerate(self.schedulers)}
        if self.loader is not None:
            tracked["loader"] = self.loader
        self.engines[0].track(**tracked)

    def save(self) -> None:
        self.track()
        for number, engine in enumerate(self.engines):
            engine.save(self.folder / f"engine{number}")

    def load(self) -> None:
        self.track()
        for number, engine in enumerate(self.engines):
            engine.resume(self.folder / f"engine{number}")

    @contextlib.contextmanager
    def whole(self, *, write: bool = False) -> Iterator[None]:
        """Gather all parameters of all engines inside the block."""
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.full_parameters(write=write))
            yield

    def state(self) -> list[dict[str, Tensor]]:
        """Return all tensors of all models while they are gathered."""
        return [{k: v.clone() for k, v in m.state_dict().items()} for m in self.models]

    # -- a step ---------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """Return the steps of the Loader, if there is one."""
        if self.loader is not None:
            for _ in self.loader.epochs(1):
                yield from self.loader.steps()

    def train(self, step: Step, engine: int, given: Iterator[Any]) -> float:
        """Run one step of an engine, and return its loss."""
        if self.loader is not None:
            for data in next(given):
                part = step.parts[0]
                told = self.told_of(part, data)
                self.backward_all(part, engine, data, told)
        else:
            self.train_by_hand(step, engine)
        stats = self.engines[engine].step(max_norm=step.clip)
        self.ran.losses.append((self.number, stats.loss))
        self.ran.norms.append((self.number, stats.grad_norm))
        return stats.loss

    def train_by_hand(self, step: Step, engine: int) -> None:
        """Run all forward and backward passes of a step, with world.share."""
        waiting = []
        for index, part in enumerate(step.parts):
            data, told = self.take(index, part)
            if part.between:
                self.evaluate("between")
            if part.last:
                told["last"] = index == len(step.parts) - 1
            if index and "weight" in told and (step.ahead or part.cuts is not None):
                told["same_items"] = False  # of other items than the last shared batch
            if step.ahead:
                waiting.append((self.losses(part, engine, data), told))
            else:
                self.backward_all(part, engine, data, told)
        for losses, told in waiting:
            for loss in losses:
                self.engines[engine].backward(loss, **told)

    def take(self, index: int, part: Part) -> tuple[Batch, dict[str, Any]]:
        """Return this rank's rows of a part, and the arguments of backward for them."""
        data = made_of.batch(self.program, self.number, index, part.rows)
        if part.cuts is None:
            mine = self.world.share(data)
            rows = self.world.current_batch.batch.samples
        else:
            size, rank = self.world.data_size, self.world.data_rank
            cuts = uneven_cuts(part.rows, size, part.cuts)
            rows = cuts[rank + 1] - cuts[rank]
            first = cuts[rank] if rows else 0
            mine = data[0][first:][: rows or 1], data[1][first:][: rows or 1]
        if part.losses[0] == "sum":
            return mine, {"reduction": "sum"}
        if not (explicit(part) or part.cuts is not None):
            return mine, {}
        return mine, {"weight": items(part.losses, mine) * part.factor if rows else 0}

    def told_of(self, part: Part, data: Batch) -> dict[str, Any]:
        """Return the arguments of backward for a Loader's batch: a weight only for tokens."""
        if part.losses[0] == "sum":
            return {"reduction": "sum"}
        return {"weight": items(part.losses, data)} if "tokens" in part.losses else {}

    def losses(self, part: Part, engine: int, data: Batch) -> list[Tensor]:
        if part.shared:
            return made_of.losses_of_one_graph(self.program, self.models, part.losses, data)
        return [
            made_of.loss_of(self.program, self.models, engine, name, data) for name in part.losses
        ]

    def backward_all(self, part: Part, engine: int, data: Batch, told: dict[str, Any]) -> None:
        """Run forward and backward passes for one share of a batch."""
        if self.config.call == "forward_backward":
            self.forward_backward(part, engine, data, told)
            return
        graph = self.losses(part, engine, data) if part.shared else []
        for number, name in enumerate(part.losses):
            if number and "weight" in told:
                told["same_items"] = True
            if part.shared:
                told["retain_graph"] = number < len(graph) - 1
                loss = graph[number]
            else:
                loss = made_of.loss_of(self.program, self.models, engine, name, data)
            self.engines[engine].backward(loss, **told)

    def forward_backward(self, part: Part, engine: int, data: Batch, told: dict[str, Any]) -> None:
        """Run the step by forward_backward, which keeps all workers of a pipeline busy."""

        def loss_of(*data: Tensor) -> Tensor:
            return made_of.loss_of(self.program, self.models, engine, part.losses[0], data)

        told.pop("last", None)
        if "weight" in told:
            told["weight"] = lambda *data: items(part.losses, data) * part.factor
        self.engines[engine].forward_backward(loss_of, *data, **told)

    # -- events ---------------------------------------------------------------------------

    def happen(self, event: str) -> None:
        """Carry out an event between two steps."""
        if self.change(event):
            return
        name, _, target = event.partition(":")
        getattr(self, f"on_{name}")(*([target] if target else []))

    def evaluate(self, name: str) -> None:
        """Record the outputs of an evaluation over shares of a batch, joined again."""
        for model in self.models:
            model.eval()
        with torch.no_grad():
            x = self.world.share(self.whole_batch())
            out = made_of.output(self.program, self.models, x)
            out = out[: self.world.current_batch.batch.samples]
            every = self.world.gather(out)
        self.see(name, torch.cat(every[:: len(every) // self.world.data_size]))
        self.train_mode()

    def on_evaluate(self) -> None:
        self.evaluate("evaluate")

    def on_evaluate_ema(self) -> None:
        with self.engines[0].ema():
            self.evaluate("evaluate_ema")

    def on_evaluate_main(self) -> None:
        """Evaluate on the workers of the first replica only."""
        for model in self.models:
            model.eval()
        with contextlib.ExitStack() as stack, torch.no_grad():
            for engine in self.engines:
                stack.enter_context(engine.uneven())
            if self.world.data_rank == 0:
                out = made_of.output(self.program, self.models, self.whole_batch())
                if self.world.is_main:
                    self.see("evaluate_main", out)
        self.train_mode()

    def on_evaluate_copy(self) -> None:
        """Evaluate a copy that was made while parameters were gathered, which is a plain model."""
        with self.whole():
            copies = self.copies()
        self.evaluate_copies(copies)

    def on_evaluate_loader(self) -> None:
        """Collect outputs from a Loader whose last batch is short."""
        for model in self.models:
            model.eval()
        mine: list[Tensor] = []
        with torch.no_grad():
            for (x,) in sw.Loader(TensorDataset(self.whole_batch()), batch_size=EVALUATED - 1):
                mine.append(made_of.output(self.program, self.models, x))
        every = self.world.gather(mine)
        every = every[:: len(every) // self.world.data_size]  # one of each replica
        in_order = [out for batch in zip_longest(*every) for out in batch if out is not None]
        self.see("evaluate_loader", torch.cat(in_order))
        self.train_mode()

    def on_export(self) -> None:
        path = self.folder / "exported.pt"
        self.engines[0].export(path, self.models[0])
        self.world.barrier()
        self.see("export", torch.load(path, weights_only=True))

    def on_optimizer_state(self) -> None:
        found = [self.engines[0].optimizer_state_dict(o) for o in self.optimizers[0]]
        self.see("optimizer_state", copy.deepcopy(found))

    def on_write(self) -> None:
        with self.whole(write=True), torch.no_grad():
            self.models[0].head.weight.mul_(0.95)

    def on_reopen(self, zero: str) -> None:
        for engine in self.engines:
            engine.close()
        self.engines = self.make_engines(int(zero))

    def on_save(self) -> None:
        """Save and load immediately, which must change nothing and not move a Loader."""
        self.save()
        if self.loader is not None:
            return
        for number, engine in enumerate(self.engines):
            engine.load(self.folder / f"engine{number}" / f"step-{engine.steps}")

    def end(self) -> None:
        """Return the final state."""
        with self.whole():
            self.see("model", self.state())
        for engine, several in zip(self.engines, self.optimizers, strict=True):
            for number, optimizer in enumerate(several):
                found = copy.deepcopy(engine.optimizer_state_dict(optimizer))
                self.see(f"optimizer {self.engines.index(engine)}.{number}", found)
        if self.program.ema is not None:
            with self.engines[0].ema(), self.whole():
                self.see("ema", self.state())
        for engine in self.engines:
            engine.close()
        closed = pytree.tree_leaves(self.state())
        if self.average is not None:
            self.see("average", dict(self.average.module.state_dict()))
        self.digest = _digest(closed)


def _digest(tensors: list[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def group_settings(config: Config) -> dict[str, Any]:
    """Return the settings that the group of ranks is started with."""
    told: dict[str, Any] = {}
    if config.transport != "auto":
        told["transport"] = config.transport
    if config.tensor > 1:
        told["tensor"] = config.tensor
    if config.pipeline > 1:
        told["pipeline"] = config.pipeline
    return told
