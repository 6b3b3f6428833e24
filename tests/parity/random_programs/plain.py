"""The reference of every comparison: a program as a plain script, in one process.

It imports nothing of ours. `python -m tests.parity.random_programs.plain` reads pickled (program,
watch, perturbed) from stdin, and writes pickled `Ran`, or the text of an error, to stdout.
"""

import copy
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from tests.parity.random_programs import models as made_of
from tests.parity.random_programs import optimizers as trained_by
from tests.parity.random_programs.models import Model, explicit, items
from tests.parity.random_programs.program import Part, Program, Step

EVALUATED = 7
"""Number of rows in the batch of an evaluation."""
DECAY = 0.8
"""Decay of the average that a script keeps itself."""


@dataclass
class Ran:
    """The results of a program: losses and norms by step and engine, and observed tensors.

    `seen` has nested tensors by a name that begins with the step. `ended` is the final state. With
    `watch` a run records all parameters after each step.
    """

    losses: list[tuple[int, float]] = field(default_factory=list)
    norms: list[tuple[int, float]] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds of CPU of this process."""


class Script:
    """The common part of both sides: models, optimizers, schedules, and events that change them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ran = Ran()
        self.number = 0
        self.models = made_of.build(program)
        for model in self.models:
            made_of.keep_activations(model)
        self.optimizers = [
            trained_by.make(optimizer, [self.models[i] for i in owned])
            for optimizer, owned in zip(program.optimizers, program.owners, strict=True)
        ]
        total = sum(len(phase.steps) for phase in program.phases)
        self.schedulers = [
            made
            for optimizer, several in zip(program.optimizers, self.optimizers, strict=True)
            for each in several
            if (made := trained_by.schedule(optimizer, each, total)) is not None
        ]
        self.average = (
            AveragedModel(self.models[0], avg_fn=get_ema_avg_fn(DECAY)) if program.average else None
        )

    def train_mode(self) -> None:
        """Set all models to training mode."""
        for model in self.models:
            model.train()
            model.kept = []

    def warm_up(self) -> None:
        """Run the steps before an engine exists, each on one global batch."""
        made_of.tell_step(self.models, 0)
        for number in range(self.program.warm):
            data = made_of.batch(self.program, 500 + number, 0, 6)
            for engine, several in enumerate(self.optimizers):
                made_of.loss_of(self.program, self.models, engine, "mse", data).backward()
                for optimizer in several:
                    optimizer.step()
                for model in self.models:
                    model.zero_grad()

    def change(self, event: str) -> bool:
        """Carry out an event that changes models or optimizers; return whether it is one."""
        name, _, target = event.partition(":")
        if name in ("freeze", "unfreeze"):
            self.models[0].get_submodule(target).requires_grad_(name == "unfreeze")
        elif name == "add_group":
            trained_by.add_later(self.program.optimizers[0], self.optimizers[0], self.models[0])
        elif name == "lr":
            for group in self.optimizers[0][0].param_groups:
                group["lr"] = group["lr"] * 0.5
        elif name == "clamp":
            for p in self.models[0].parameters():
                if not p.is_complex():
                    p.data.clamp_(-0.4, 0.4)
        elif name == "fork":
            write_in_a_child(self.models)
        elif name == "write_direct":
            with torch.no_grad():
                self.models[0].head.bias.mul_(0.9)
        else:
            return False
        return True

    def copies(self) -> list[Model]:
        """Return copies of the models, without tensors that hooks have stored."""
        for model in self.models:
            model.kept = []
        return copy.deepcopy(self.models)

    def evaluate_copies(self, copies: list[Model]) -> None:
        """Record the outputs of copies."""
        for model in copies:
            model.eval()
        with torch.no_grad():
            out = made_of.output(self.program, copies, self.whole_batch())
        self.see("evaluate_copy", out)

    def step_schedulers(self, loss: float) -> None:
        """Advance the learning-rate schedules."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()

    def see(self, name: str, value: Any) -> None:
        """Record a value at this point."""
        self.ran.seen[f"{self.number}: {name}"] = value

    def whole_batch(self) -> Tensor:
        """Return the inputs of an evaluation."""
        return made_of.batch(self.program, 900 + self.number, 0, EVALUATED)[0]


def write_in_a_child(models: list[Model]) -> None:
    """Fork a child that overwrites every parameter and buffer; this process must not see it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks in a process with threads
        child = os.fork()
    if child == 0:
        try:
            for model in models:
                for tensor in (*model.parameters(), *model.buffers()):
                    with torch.no_grad():
                        tensor.data.fill_(9)
        finally:  # a parameter that is sharded raises
            os._exit(0)
    os.waitpid(child, 0)


class Plain(Script):
    """Runs the program without Shardwise."""

    def perturb(self, seed: int) -> None:
        """Move every number of every parameter by one ulp up or down, as rounding might."""
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in (p for model in self.models for p in model.parameters()):
                real = torch.view_as_real(p) if p.is_complex() else p
                up = torch.rand(real.shape, generator=draw) < 0.5
                real.copy_(torch.nextafter(real, torch.where(up, torch.inf, -torch.inf).to(real)))

    def run(self, *, watch: bool) -> Ran:
        """Run all steps."""
        program = self.program
        self.train_mode()
        self.warm_up()
        self.ema = self._fresh_averages()
        self.ever_trained: set[int] = set()
        for self.number, step in program.steps():
            made_of.tell_step(self.models, self.number)
            for event in step.before:
                self.happen(event)
            losses = [self.train(step, engine) for engine in range(len(program.owners))]
            self.step_schedulers(losses[0])
            if self.average is not None:
                self.average.update_parameters(self.models[0])
            if watch:
                self.see("after", self.state())
        self.number += 1
        self.end()
        return self.ran

    def _averaged(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the first engine."""
        for number in self.program.owners[0]:
            yield from self.models[number].parameters()

    def _fresh_averages(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._averaged()]

    def state(self) -> list[dict[str, Tensor]]:
        """Return all tensors of all models."""
        return [{k: v.clone() for k, v in m.state_dict().items()} for m in self.models]

    def train(self, step: Step, engine: int) -> float:
        """Run one step of the optimizers of `engine`."""
        program = self.program
        mine = [p for i in program.owners[engine] for p in self.models[i].parameters()]
        total = sum(self.weigh(step, i, part) for i, part in enumerate(step.parts))
        told, graphs = 0.0, []
        for index, part in enumerate(step.parts):
            if part.between:
                self.evaluate("between")
            share = 1.0 if part.losses[0] == "sum" else self.weigh(step, index, part) / total
            for loss in self.losses(index, part, engine):
                told += loss.item() * share
                graphs.append(loss * share)
            if not step.ahead:
                self.backward(graphs, mine)
                graphs = []
        self.backward(graphs, mine)
        trained = [p for o in self.optimizers[engine] for g in o.param_groups for p in g["params"]]
        norm = clipped(trained, step.clip)
        for optimizer in self.optimizers[engine]:
            optimizer.step()
        for model in self.models:
            model.zero_grad()
        if program.ema is not None and engine == 0:
            # A parameter that no optimizer has trained yet has no average.
            self.ever_trained |= {id(p) for p in trained if p.requires_grad}
            for kept, p in zip(self.ema, self._averaged(), strict=True):
                decay = program.ema if id(p) in self.ever_trained else 0.0
                kept.mul_(decay).add_(p.detach(), alpha=1 - decay)
        self.ran.losses.append((self.number, told))
        self.ran.norms.append((self.number, norm))
        return told

    def backward(self, graphs: list[Tensor], mine: list[nn.Parameter]) -> None:
        several = len(self.program.owners) > 1
        inputs = [p for p in mine if p.requires_grad] if several else None
        for number, loss in enumerate(graphs):
            loss.backward(inputs=inputs, retain_graph=number < len(graphs) - 1)

    def weigh(self, step: Step, index: int, part: Part) -> float:
        """Return the weight of a part of the step."""
        data = made_of.batch(self.program, self.number, index, part.rows)
        return items(part.losses, data) * (part.factor if explicit(part) else 1)

    def losses(self, index: int, part: Part, engine: int) -> list[Tensor]:
        data = made_of.batch(self.program, self.number, index, part.rows)
        if part.shared:
            return made_of.losses_of_one_graph(self.program, self.models, part.losses, data)
        return [
            made_of.loss_of(self.program, self.models, engine, name, data) for name in part.losses
        ]

    # -- events ---------------------------------------------------------------------------

    def happen(self, event: str) -> None:
        """Carry out an event between two steps."""
        if self.change(event):
            return
        if event in ("evaluate", "evaluate_main", "evaluate_loader"):
            self.evaluate(event)
        elif event == "evaluate_copy":
            self.evaluate_copies(self.copies())
        elif event == "evaluate_ema":
            with self.averaged():
                self.evaluate(event)
        elif event == "export":
            self.see(event, self.state()[0])
        elif event == "optimizer_state":
            self.see(event, [copy.deepcopy(o.state_dict()) for o in self.optimizers[0]])
        elif event == "write":
            with torch.no_grad():
                self.models[0].head.weight.mul_(0.95)
        elif event.startswith("reopen"):
            # Another engine starts new averages, without the parameters that were trained before.
            self.ema, self.ever_trained = self._fresh_averages(), set()
        else:
            assert event == "save", event

    def evaluate(self, name: str) -> None:
        """Record the outputs of the models in evaluation."""
        for model in self.models:
            model.eval()
        with torch.no_grad():
            self.see(name, made_of.output(self.program, self.models, self.whole_batch()))
        self.train_mode()

    def averaged(self) -> "Averaged":
        return Averaged(list(self._averaged()), self.ema)

    def end(self) -> None:
        """Return the final state."""
        self.see("model", self.state())
        for engine, several in enumerate(self.optimizers):
            for number, optimizer in enumerate(several):
                self.see(f"optimizer {engine}.{number}", copy.deepcopy(optimizer.state_dict()))
        if self.program.ema is not None:
            with self.averaged():
                self.see("ema", self.state())
        if self.average is not None:
            self.see("average", dict(self.average.module.state_dict()))


def clipped(trained: list[nn.Parameter], clip: float | None) -> float:
    """Clip all gradients by their norm, and return it; torch supports only dense ones."""
    sparse = [p.grad for p in trained if p.grad is not None and p.grad.is_sparse]
    if not sparse:
        return nn.utils.clip_grad_norm_(trained, clip or float("inf")).item()
    grads = [p.grad.to_dense() for p in trained if p.grad is not None]
    return torch.stack([grad.norm() for grad in grads]).norm().item()


class Averaged:
    """Context manager that sets parameters to their averages."""

    def __init__(self, parameters: list[nn.Parameter], averages: list[Tensor]) -> None:
        self.pairs = list(zip(parameters, averages, strict=True))

    def __enter__(self) -> None:
        self.kept = [p.detach().clone() for p, _ in self.pairs]
        for p, average in self.pairs:
            p.data.copy_(average)

    def __exit__(self, *_: object) -> None:
        for (p, _), kept in zip(self.pairs, self.kept, strict=True):
            p.data.copy_(kept)


def serve() -> None:
    """Answer requests until stdin ends."""
    torch.set_num_threads(1)
    while True:
        try:
            program, watch, perturbed = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Ran | str
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "Sparse invariant checks")
                began = time.process_time()
                script = Plain(program)
                if perturbed is not None:
                    script.perturb(perturbed)
                answer = script.run(watch=watch)
                answer.seconds = time.process_time() - began
        except Exception:
            answer = traceback.format_exc()
        assert not any(name.split(".")[0] == "shardwise" for name in sys.modules)
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    # Run the module under the name that the tests import, so that pickles have the same names.
    from tests.parity.random_programs import plain

    plain.serve()
