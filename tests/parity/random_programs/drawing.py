"""Draws a program from a seed. Pure: the same seed gives the same program anywhere."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.parity.random_programs import blocks, further
from tests.parity.random_programs.optimizers import BY_SIGN, OWN, REAL_ONLY, VARIANTS
from tests.parity.random_programs.program import (
    Config,
    Net,
    Optimizer,
    Options,
    Part,
    Phase,
    Program,
    Step,
)
from tests.parity.random_programs.sense import (
    CYCLED,
    SPLITTABLE,
    counts_forwards,
    looks_across,
    sensible,
)

EMBEDDINGS: tuple[Options, ...] = (
    (("max_norm", 0.8),),
    (("scale_grad_by_freq", True),),
    (("padding_idx", 0),),
    (("sparse", True),),
)
MILD_EVENTS = (
    *("evaluate", "evaluate", "evaluate_main", "evaluate_copy", "evaluate_loader", "export"),
    *("optimizer_state", "write", "lr", "save", "reopen"),
)
RARE_EVENTS = ("clamp", "write_direct")
RARE_LOSSES = ("l2", "norms", "hook", "penalty", "method", "functional")
SCHEDULES = ("", "", "cosine", "steps", "lambda", "one_cycle", "plateau")


def draw(seed: int) -> Program:
    """Return the program of this seed."""
    for attempt in range(100):
        program = _Drawing(seed, attempt).program()
        if sensible(program):
            return further.added_to(program)
    raise AssertionError(f"no sensible program for seed {seed}")


class _Drawing:
    def __init__(self, seed: int, attempt: int) -> None:
        self.seed = seed
        self.random = random.Random(f"{seed} {attempt}")

    def chance(self, likely: float) -> bool:
        return self.random.random() < likely

    def pick(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def program(self) -> Program:
        family = self.pick(["one"] * 8 + ["chain", "gan"])
        nets = self.nets(family)
        feed = "loader" if family != "gan" and self.chance(0.25) else "share"
        phases = 2 if self.chance(0.2) else 1
        if phases > 1 and any(b in blocks.COUNT_FORWARDS for n in nets for b in n.blocks):
            phases = 1
        drawn = Program(
            seed=self.seed,
            family=family,
            nets=nets,
            optimizers=tuple(self.optimizer(nets) for _ in range(2 if family == "gan" else 1)),
            feed=feed,
            warm=self.random.randint(1, 2) if self.chance(0.12) and family != "gan" else 0,
            ema=0.8 if self.chance(0.2) else None,
            average=self.chance(0.06),
        )
        later = self.later(drawn, phases)
        drawn = replace(
            drawn, optimizers=(replace(drawn.optimizers[0], later=later), *drawn.optimizers[1:])
        )
        return replace(drawn, phases=self.phases(drawn, phases))

    # -- models ---------------------------------------------------------------------------

    def nets(self, family: str) -> tuple[Net, ...]:
        if family == "one":
            return (self.net(self.pick(["features", "features", "tokens", "tokens", "pictures"])),)
        if family == "gan":
            return self.net("features"), self.net("features")
        return self.net(self.pick(["features", "pictures"])), self.net("features")

    def net(self, modality: str) -> Net:
        choices = list(blocks.ANY)
        if modality == "tokens":
            choices += [name for name in blocks.OVER_TIME for _ in range(4)]
        several = [self.pick(choices) for _ in range(self.random.randint(1, 4))]
        if self.chance(0.4):  # repeated blocks are units
            several = [several[0]] * self.random.randint(2, 3) + several[1:2]
        across = any(name in blocks.ACROSS_ROWS | blocks.COUNT_FORWARDS for name in several)
        recomputes = self.chance(0.1) and not across and "hooked" not in several
        return Net(
            modality=modality,
            blocks=tuple(several),
            tied=modality == "tokens" and self.chance(0.3),
            checkpoint=self.pick(["reentrant", "nonreentrant"]) if recomputes else "",
            embedding=self.pick(EMBEDDINGS) if modality == "tokens" and self.chance(0.2) else (),
            channels_last=modality == "pictures" and self.chance(0.4),
        )

    # -- optimizers -----------------------------------------------------------------------

    def optimizer(self, nets: Sequence[Net]) -> Optimizer:
        names = [name for net in nets for name in net.blocks]
        sparse = any(("sparse", True) in net.embedding for net in nets)
        if sparse:
            name = self.pick(["sgd", "adagrad", "sparse_adam"])
        elif self.chance(0.5):
            name = self.pick(["sgd", "adam", "adamw"])
        else:
            name = self.pick([each for each in (*VARIANTS, *OWN) if each != "sparse_adam"])
        unsteady = any(each in blocks.ZERO_GRADIENTS for each in names)
        if (name in BY_SIGN and unsteady) or (name in REAL_ONLY and "complex" in names):
            name = "adamw"
        options = {} if name in OWN else self.pick(VARIANTS[name])
        if sparse and name == "sgd":
            options = {}
        if "single" in names or "complex" in names:
            options = {k: v for k, v in options.items() if k not in ("fused", "foreach")}
        schedule = self.pick(SCHEDULES)
        if schedule == "one_cycle" and not (name in CYCLED or "momentum" in options):
            schedule = "lambda"
        return Optimizer(
            name=name,
            options=tuple(sorted(options.items())),
            groups=self.pick(["one", "one", "decay", "layers"]),
            rest=name in ("muon", "sparse_adam") or (not sparse and self.chance(0.1)),
            schedule=schedule,
        )

    def later(self, program: Program, phases: int) -> str:
        """Return a child that is added to the optimizer during training."""
        optimizer, net = program.optimizers[0], program.nets[0]
        allowed = (
            program.family == "one"
            and phases == 1
            and not optimizer.rest
            and optimizer.schedule in ("", "steps", "plateau")
            and not net.tied
            and len(net.blocks) > 1
        )
        return "blocks.1" if allowed and self.chance(0.12) else ""

    # -- configurations -------------------------------------------------------------------

    def config(self, program: Program, plain_parts: bool) -> Config:
        size = self.pick([1, 2, 2, 3, 4])
        fits = any(name in SPLITTABLE for name in program.nets[0].blocks)
        tensor = 2 if fits and size in (2, 4) and self.chance(0.25) else 1
        alone = size in (2, 4) and tensor == len(program.nets) == 1
        pipeline = 2 if alone and self.chance(0.15) else 1
        zero = self.pick([0, 1, 2, 3, 3])
        flat = tensor == pipeline == 1
        exact = None
        if program.feed == "loader" and flat and not looks_across(program) and self.chance(0.2):
            exact = {1: 4, 2: 4, 3: 3, 4: 4}[size]
        fb = plain_parts and self.chance(0.75 if pipeline > 1 else 0.05) and exact is None
        return Config(
            size=size,
            zero=zero,
            bucket_mb=self.pick([0.0002, 0.0005, 0.002, 25.0]),
            activations="recomputed" if self.chance(0.2) else "kept",
            overlap=self.chance(0.75),
            transport="gloo" if size in (2, 3) and flat and self.chance(0.15) else "auto",
            offload=self.offload(zero) if self.chance(0.1) else (),
            exact=exact,
            tensor=tensor,
            pipeline=pipeline,
            schedule=self.pick(["gpipe", "1f1b", "interleaved", "zero-bubble"])
            if pipeline > 1
            else "1f1b",
            microbatches=self.microbatches(program, fb or pipeline > 1),
            micro_batch_size=self.micro_batch(program) if exact is None else None,
            call="forward_backward" if fb else "backward",
        )

    def microbatches(self, program: Program, cut: bool) -> int | None:
        if not cut:
            return None
        return 1 if looks_across(program) else self.pick([None, 2, 3])

    def offload(self, zero: int) -> tuple[str, ...]:
        return {0: ("optimizer",), 1: ("optimizer",), 2: ("optimizer", "gradients")}.get(
            zero, self.pick([("optimizer", "params"), ("params",), ("optimizer",)])
        )

    def micro_batch(self, program: Program) -> int | None:
        """Return the rows of a micro-batch, if batches of the Loader may be cut."""
        if program.feed != "loader" or looks_across(program) or self.chance(0.5):
            return None
        return self.pick([1, 2])

    # -- steps ----------------------------------------------------------------------------

    def phases(self, program: Program, number: int) -> tuple[Phase, ...]:
        total = self.random.randint(4, 7)
        rows = self.random.randint(4, 9)
        frozen: set[str] = set()
        simple = self.chance(0.5)
        steps = [self.step(program, at, total, rows, frozen, simple) for at in range(total)]
        cut = self.random.randint(2, total - 1) if number > 1 else total
        config = self.config(program, all(_plain(step) for step in steps))
        phases = [Phase(config=config, steps=tuple(steps[:cut]))]
        if number > 1:
            other = self.config(program, all(_plain(step) for step in steps))
            phases.append(Phase(config=other, steps=tuple(steps[cut:])))
        return tuple(phases)

    def step(
        self, program: Program, at: int, total: int, rows: int, frozen: set[str], simple: bool
    ) -> Step:
        gan = program.family == "gan"
        sparse = any(("sparse", True) in net.embedding for net in program.nets)
        loader = program.feed == "loader"
        events = list(self.events(program, at, frozen))
        if loader:
            short = at == total - 1 and self.chance(0.5)
            part = Part(rows=self.random.randint(1, rows) if short else rows)
            if looks_across(program):
                part = replace(part, rows=rows)
            losses = self.losses(program)
            # Several losses of a batch count its items once.
            parts: tuple[Part, ...] = (replace(part, losses=losses),)
        elif simple:
            parts = (Part(rows=rows),)
        else:
            count = self.pick([1, 1, 2, 3])
            parts = tuple(self.part(program, rows) for _ in range(count))
            if len(set(map(_explicit, parts))) > 1:
                parts = tuple(replace(part, explicit=True) for part in parts)
        if not gan and self.chance(0.06):
            parts = tuple(Part(rows=part.rows, losses=("sum",)) for part in parts)
        ahead = (
            not (loader or gan)
            and parts[0].losses != ("sum",)
            and len(parts) > 1
            and self.chance(0.25)
        )
        if ahead:  # the last batch is not the batch of each loss
            parts = tuple(
                replace(part, explicit=True, shared=False, losses=part.losses[:1]) for part in parts
            )
        return Step(
            before=tuple(events),
            parts=parts,
            clip=None if sparse else self.pick([None, None, 0.05, 0.5, 100.0]),
            ahead=ahead,
        )

    def part(self, program: Program, rows: int) -> Part:
        even = self.chance(0.6) or looks_across(program)
        least = 4 if looks_across(program) else 1
        losses = self.losses(program)
        return Part(
            rows=self.random.randint(least, rows + 3),
            losses=losses,
            shared=len(losses) > 1 and losses[0] != "tokens" and self.chance(0.5),
            cuts=None if even else self.random.randrange(1000),
            explicit=not even or self.chance(0.2),
            factor=self.pick([2, 5]) if self.chance(0.1) else 1,
            between=self.chance(0.08),
            last=self.chance(0.5),
        )

    def losses(self, program: Program) -> tuple[str, ...]:
        if program.family == "gan":
            return ("mse",)
        pictures_or_numbers = program.nets[0].modality != "tokens"
        if program.family == "one" and self.chance(0.08):
            kinds = [k for k in RARE_LOSSES if k != "penalty" or pictures_or_numbers]
            if program.nets[0].checkpoint:
                kinds = ["l2", "norms"]
            kind = self.pick(kinds)
            return (kind if kind != "hook" or "hooked" in program.nets[0].blocks else "l2",)
        if program.nets[0].modality == "tokens" and self.chance(0.3):
            return ("tokens",)
        if self.chance(0.12) and not counts_forwards(program):
            return ("mse", "abs")
        return ("mse",)

    def events(self, program: Program, at: int, frozen: set[str]) -> Sequence[str]:
        if at == 0:
            return ()
        net, events = program.nets[0], []
        if program.optimizers[0].later and at == 2:
            events.append("add_group")
        freezable = ["stem", *(f"blocks.{i}" for i in range(len(net.blocks)))]
        if program.optimizers[0].later or net.tied:
            freezable = [name for name in freezable if name not in ("stem", "blocks.1")]
        if net.checkpoint == "reentrant":  # its first block would get no gradient
            freezable = [name for name in freezable if name != "stem"]
        if freezable and self.chance(0.1):
            name = self.pick(freezable)
            events.append(f"unfreeze:{name}" if name in frozen else f"freeze:{name}")
            frozen ^= {name}
        if self.chance(0.2):
            event = self.pick(MILD_EVENTS)
            if program.ema is not None and self.chance(0.4):
                event = "evaluate_ema"
            events.append(event if event != "reopen" else f"reopen:{self.random.randint(0, 3)}")
        elif self.chance(0.03):
            events.append(self.pick(RARE_EVENTS))
        return events


def _explicit(part: Part) -> bool:
    return part.explicit or part.factor != 1 or "tokens" in part.losses


def _plain(step: Step) -> bool:
    """Return whether its parts can be passed to forward_backward."""
    return not step.ahead and all(
        len(part.losses) == 1 and part.cuts is None and not part.shared for part in step.parts
    )
