"""The steps of gpu_first.py: `python gpu_first_steps.py FOLDER` runs the one that FOLDER/job.json
names, and appends a line of JSON to FOLDER/rows for each thing that it learns."""

import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import contenders
import formulas
import machine
import peaks
import rounds
import workloads
from contenders import Contender
from crew import Crew
from figures import Line, step_times
from largest import SHAPE, Tried, search, sized
from report import Result
from rounds import Plan
from workloads import Gpt, Llama, Setting, Workload

LIMIT = 150.0
"""Seconds that a crew may take for its start or its steps; compiling is among them."""

TWO_RANKS = Gpt(name="two-ranks", width=512, layers=8, vocabulary=8192, sequence=256, batch=8)

TINY = {"layers": 2, "vocabulary": 64, "sequence": 16, "batch": 4}

WORKLOADS: dict[str, dict[str, Workload]] = {
    "full": {
        "gpt": workloads.ON_A_DEVICE["gpt2-124m"],
        "llama": workloads.ON_A_DEVICE["llama-1.1b"],
        "two-ranks": TWO_RANKS,
    },
    "tiny": {
        "gpt": Gpt(name="gpt, tiny", width=32, tied=1, **TINY),
        "llama": Llama(name="llama, tiny", width=32, heads=4, kv_heads=2, inner=64, **TINY),
        "two-ranks": replace(TWO_RANKS, name="two-ranks, tiny", width=64, **TINY),
    },
}

FSDP2 = replace(contenders.FSDP2, options={"reshard": True, "own_cast": True})

FIELD = (
    replace(contenders.PLAIN, label="plain PyTorch"),
    contenders.row(0),
    contenders.row(3),
    FSDP2,
    contenders.in_bf16(contenders.row(0)),
    *contenders.PEERS["accelerate"],
    *contenders.PEERS["lightning"],
)
"""Who takes part on one GPU, in the order of value."""


@dataclass(frozen=True)
class Run:
    """The arguments of a step."""

    scale: str
    device: str
    name: str
    """Name of the device."""
    folder: Path
    until: float
    """On the monotonic clock."""
    measured: dict[str, Any]
    """Records of earlier steps by name."""
    contenders: list[str]
    """Keys of those that take part in the races; empty: all."""

    def tell(self, key: str, **row: Any) -> None:
        """Write a row at once; a later one with the same key replaces it."""
        with (self.folder / "rows").open("a") as file:
            file.write(json.dumps({"key": key} | row) + "\n")

    def workload(self, name: str) -> Workload:
        """The workload of this run's scale."""
        return WORKLOADS[self.scale][name]

    def chosen(self, field: Sequence[Contender]) -> list[Contender]:
        """Return those of `field` that take part."""
        return [each for each in field if not self.contenders or each.key in self.contenders]

    @property
    def is_tiny(self) -> bool:
        return self.scale == "tiny"

    @property
    def is_simulated(self) -> bool:
        """Whether the device is the one of tests/phantom."""
        return self.name == "a simulated device"


def main(folder: Path) -> None:
    """Run the step that the job names."""
    job = json.loads((folder / "job.json").read_text())
    run = Run(
        scale=job["scale"],
        device=job["device"],
        name=job["name"],
        folder=folder,
        until=time.monotonic() + job["seconds"],
        measured=job["measured"],
        contenders=job["contenders"],
    )
    STEPS[job["step"]](run)


# -- right: equality with plain PyTorch, one rank over NCCL ------------------------------------


def right(run: Run) -> None:
    """Run each case in this process; a case that raises is a row with its error."""
    import tests.disk
    import torch
    from tests.gpu import test_checkpoint, test_precision, test_rows, training

    tests.disk.make_own()
    if run.is_tiny:
        training.STEPS = 4
    world = _world(run)
    fp32 = torch.float32

    def compiled(zero: int) -> None:
        ours = training.train(world, zero=zero, compile=True)
        training.assert_close(ours, training.train_plain(world), 1e-4)

    rows: list[tuple[int, dict[str, str]]] = [
        (0, {}),
        (3, {"optimizer": "nvme", "params": "nvme"}),
        (1, {"optimizer": "cpu"}),
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"optimizer": "nvme"}),
        (3, {"optimizer": "cpu", "params": "cpu"}),
    ]
    if run.is_tiny:
        del rows[2:]  # tests/phantom and tests/distributed have all of them
    cases: dict[str, Callable[[], None]] = {}
    for row, named in rows:
        name = f"ZERO_{row}" + "".join(f", {state} on {tier}" for state, tier in named.items())
        # Both clip the gradients and accumulate over two micro-batches.
        cases[f"{name}, fp32"] = lambda r=row, n=named: test_rows.as_plain(world, r, n, fp32, 2)
        cases[f"{name}, bf16-mixed"] = lambda r=row, n=named: test_precision.bf16_mixed(world, r, n)
    cases["loss scale, fp16-mixed"] = lambda: test_precision.fp16_mixed(world, 2, {})
    for background in (False, True):
        way = "in the background" if background else "at once"
        cases[f"save {way}, load, resume in bits"] = lambda b=background: test_checkpoint.case(
            world, run.folder / f"save-{b}", 3, {}, b
        )
    for how in ("recomputed", "cpu"):
        cases[f"activations {how}, the same bits"] = lambda h=how: _activations(world, h)
    cases["optimizer state in 8 bits"] = lambda: _eight_bits(world)
    cases["frozen weights in 4 bits"] = lambda: _four_bits(world)
    cases["head and loss in chunks"] = lambda: _chunks(world)
    # The compiler has no code for the simulated device of the tests.
    for row in () if run.is_simulated else (0, 3):
        cases[f"ZERO_{row}, compiled"] = lambda r=row: compiled(r)
    try:
        for name, case in cases.items():
            _try(run, name, case)
    finally:
        tests.disk.remove_own()


def _try(run: Run, name: str, case: Callable[[], None]) -> None:
    begun = time.monotonic()
    error = ""
    try:
        case()
    except BaseException as raised:  # also pytest's Skipped, which is no Exception
        words = str(raised).strip().splitlines() or [""]
        error = f"{type(raised).__name__}: {words[0]}"[:300]
    run.tell(name, error=error, seconds=round(time.monotonic() - begun, 2))


def _world(run: Run) -> Any:
    """Join a run as its only rank, over NCCL on a GPU."""
    import shardwise as sw
    from contenders.ours import name_rank
    from job import Job

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    workload = run.workload("gpt")
    job = Job(workload=workload, rank=0, size=1, shares=1, port=port, listen_fd=listener.detach())
    name_rank(job)
    return sw.init(seed=0, device=run.device, quiet=True)


def _eight_bits(world: Any) -> None:
    """State in 8 bits gives the same losses in two rows, and changes them by less than 1 %."""
    from tests.gpu import training

    plain = training.train_plain(world)
    replicated, sharded = (training.train(world, zero=z, optimizer_state="8bit") for z in (0, 3))
    training.assert_close(sharded, replicated, 1e-3)  # norms of other buckets round differently
    for ours, theirs in zip(replicated.losses, plain.losses, strict=True):
        assert abs(ours / theirs - 1) < 0.01, f"a loss is {ours:.5f}, not {theirs:.5f}"


def _four_bits(world: Any) -> None:
    """Frozen weights in 4 bits give the losses of a training on the rounded weights."""
    import torch
    from tests.gpu import training

    import shardwise as sw

    def losses(*, in_advance: bool = False, **settings: Any) -> list[float]:
        model, _ = training.build(world)
        for block in model.blocks:
            block.up.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        if in_advance:  # closing an engine leaves the rounded weights in the model
            sw.Engine(model, optimizer, frozen_weights="nf4").close()
        engine = sw.Engine(model, optimizer, **settings)
        found = []
        for step in range(5):
            engine.backward(training.loss_of(model, *training.batch(world, step)))
            found.append(engine.step().loss)
        engine.close()
        return found

    expected = losses(in_advance=True)
    for zero in (0, 3):
        ours = losses(frozen_weights="nf4", zero=zero)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=0)


def _chunks(world: Any) -> None:
    """The chunked loss and its gradients equal those of all scores, in fp32."""
    import torch

    import shardwise as sw

    torch.manual_seed(0)
    head = torch.nn.Linear(64, 1000).to(world.device)
    hidden = torch.randn(1024, 64, device=world.device, requires_grad=True)
    target = torch.randint(1000, (1024,), device=world.device)
    whole = torch.nn.functional.cross_entropy(head(hidden), target)
    chunked = sw.chunked_cross_entropy(hidden, target, head, chunk=100)
    inputs = [hidden, *head.parameters()]
    expected = torch.autograd.grad(whole, inputs)
    for ours, theirs in zip(torch.autograd.grad(chunked, inputs), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(chunked.detach().cpu(), whole.detach().cpu(), rtol=1e-5, atol=0)


def _activations(world: Any, how: str) -> None:
    """Parameters after some steps have the bits that they have with activations kept."""
    import torch
    from tests.gpu import training

    import shardwise as sw

    def trained(**settings: str) -> list[Any]:
        world.engines = 0  # the random numbers of a step depend on the engine's number
        model, optimizer = training.build(world, width=256, blocks=4, drop=0.1)
        engine = sw.Engine(model, optimizer, zero=2, **settings)
        for step in range(3):
            x, y = training.batch(world, step, width=256, rows=512)
            engine.backward(training.loss_of(model, x, y))
            engine.step()
        with engine.full_parameters():
            values = [parameter.detach().cpu().clone() for parameter in model.parameters()]
        engine.close()
        return values

    setting = {"activations": how} if how == "recomputed" else {"offload_activations": how}
    for one, other in zip(trained(), trained(**setting), strict=True):
        assert torch.equal(one, other), "parameters differ from those with activations kept"


# -- fast and uncompiled: step time next to the peers ------------------------------------------


def fast(run: Run) -> None:
    """All contenders with their blocks compiled."""
    # Compiling takes most of the time, and no figure of a tiny size counts.
    _race(run, FIELD[:2] if run.is_tiny else FIELD, "inductor")


def uncompiled(run: Run) -> None:
    """The same, eager."""
    # The simulated device of the tests has no code for the other libraries.
    _race(run, FIELD[:4] if run.is_simulated else FIELD, "")


def _race(run: Run, field: Sequence[Contender], compiled: str) -> None:
    """Interleave two rounds of all contenders, which stay alive between their turns."""
    field = run.chosen(field)
    result = _result(run, "gpt", field, compiled=compiled)
    # Ranks of ZERO_3 agree on an order of gathers in their first twenty steps.
    first = 3 if run.is_tiny else 20
    steps = 2 if run.is_tiny else 10
    plans = [Plan(rounds=2, steps=steps, warm_up=warm_up, look_after=2) for warm_up in (first, 4)]
    with _started(run, field, result) as started:

        @contextmanager
        def turn(taker: Contender) -> Any:
            ranks = started[taker.key].result()
            yield ranks
            ranks.release()

        for number, plan in enumerate(plans):
            _round(run, result, field, number, plan, turn)


# -- two-ranks: one GPU over Gloo --------------------------------------------------------------


def two_ranks(run: Run) -> None:
    """Losses equal to one process, and the bytes of each state equal to the formula."""
    field = [contenders.PLAIN, *(contenders.row(zero, "gloo") for zero in range(4))]
    result = _result(run, "two-ranks", field, precision="fp32", ranks=2)
    plan = Plan(rounds=1, steps=2, warm_up=3)

    def weigh(line: Line, ranks: Crew) -> None:
        told = ranks.take(1).told
        if "bytes" in told[0]:
            zero = int(line.key.removeprefix("shardwise-")[0])
            line.device["state_bytes"] = max(each["bytes"]["all"] for each in told)
            line.device["formula_bytes"] = formulas.held(zero, told[0]["bytes"]["numel"], 2)

    with _started(run, field, result) as started:
        turn = _in_turn(started)
        _round(run, result, field, 0, plan, turn, weigh)


# -- offload: the optimizer on the host --------------------------------------------------------


def offload(run: Run) -> None:
    """A Llama-like 1B, ours and FSDP2's, next to the plain loop with all of it on the device."""
    options = dict(contenders.FSDP2_ON_HOST.options) | {"own_cast": True}
    cpu = replace(contenders.FSDP2_ON_HOST, options=options)
    plain = replace(contenders.PLAIN, label="plain PyTorch, all on the device")
    ours = contenders.offloaded(2, "cpu")
    field = [ours, cpu, plain, contenders.in_bf16(ours), contenders.offloaded(3, "cpu")]
    if run.device == "cpu":
        field.remove(cpu)  # FSDP2 offloads from an accelerator only
    field = run.chosen(field)
    result = _result(run, "llama", field)
    plan = Plan(rounds=1, steps=2 if run.is_tiny else 4, warm_up=3)
    with _started(run, field, result) as started:
        _round(run, result, field, 0, plan, _in_turn(started))


def _in_turn(
    started: dict[str, Future[Crew]],
) -> Callable[[Contender], AbstractContextManager[Crew]]:
    """Crews that end after their turn, so that the next one has their memory."""
    return lambda taker: started[taker.key].result()


# -- plan: predictions of `shardwise plan` next to measurements --------------------------------

PLANNED = {
    "uncompiled": ("gpt", {"shardwise-0": ""}),
    "offload": ("llama", {"plain": "", "shardwise-2-cpu": "--zero 2 --offload-optimizer cpu"}),
}
"""By step, its workload, and by contender the flags of the planned placement."""


def plan(run: Run) -> None:
    """Peak memory and step time as planned, next to the figures of earlier steps."""
    card = "H200" if "H200" in run.name else "H100"
    commands = {}
    for step, (name, _) in PLANNED.items():
        written = run.folder / f"{step}.json"
        command = [sys.executable, "-m", "shardwise", "plan", "--on", f"1x{card}"]
        command += ["--precision", "bf16-mixed", "--json", str(written)]
        command += [str(Path(__file__).with_name("plan_step.py"))]
        command.append(json.dumps(workloads.told(run.workload(name))))
        quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
        process = subprocess.Popen(command, stdout=quiet, stderr=pipe, text=True)
        commands[step] = written, process
    for step, (written, process) in commands.items():
        _, said = process.communicate()
        if not written.exists():
            words = said.strip().splitlines() or [f"plan ended with {process.returncode}"]
            run.tell(step, error=words[-1][:300])
            continue
        placements = json.loads(written.read_text())["placements"]
        for key, flags in PLANNED[step][1].items():
            _compare(run, step, key, flags, placements)


def _compare(run: Run, step: str, key: str, flags: str, placements: list[dict[str, Any]]) -> None:
    """Write one placement next to the contender that trained by it."""
    found = [p for p in placements if ("--offload" in p["command"]) == bool(flags)]
    planned = next((p for p in found if flags in p["command"]), None)
    told = run.measured.get(step, {}).get("rows", {}).get("result", {}).get("contenders", ())
    line = next((each for each in told if each["key"] == key), {})
    # A plain loop frees its gradients after the update. The placement keeps them in flat buffers.
    kept = planned["bytes_at_peak"]["gradients"] if planned and key == "plain" else 0
    run.tell(
        f"{step}, {key}",
        planned_bytes=planned and planned["peak_bytes"] - kept,
        planned_ms=planned and planned["seconds_per_step"] and 1e3 * planned["seconds_per_step"],
        measured_bytes=line.get("peak_bytes"),
        measured_ms=line.get("median_ms"),
        error="" if planned else "plan has no such placement",
    )


# -- save: one checkpoint of the 1B ------------------------------------------------------------


def save(run: Run) -> None:
    """GB/s of a save in the foreground, and the stall of the step by one in the background."""
    folder = str(run.folder / "checkpoint")
    taker = contenders.offloaded(2, "cpu")
    options = dict(taker.options) | {"folder": folder}
    taker = replace(taker, build="ours:saving", options=options)
    (run.folder / "checkpoint").mkdir()
    with Crew(taker, run.workload("llama"), 1, LIMIT, _setting(run, 1)) as ranks:
        first = ranks.take(5)
        base = median(step_times(first.ends)[1:])
        foreground = ranks.take(2)
        told = foreground.told[0]["saves"]
        run.tell(
            "foreground",
            bytes=told["bytes"],
            seconds=told["foreground"],
            gb_per_s=told["bytes"] / told["foreground"] / 1e9,
            step_ms=base,
        )
        after = ranks.take(4)
        call = 1e3 * after.told[0]["saves"]["background"]
        # The first of these steps holds the call, which no step of this stint can show.
        slower = sum(max(0.0, ms - base) for ms in step_times(after.ends))
        run.tell("background", call_ms=call, stall_ms=call + slower, step_ms=base)


# -- largest: the largest model that trains, with the time that is left ------------------------


MOST_LAYERS = 28
"""5.9B parameters, whose states take 95 GB: what needs more than the host's memory may end the
whole run, and not only the process that asked for it."""


def largest(run: Run) -> None:
    """Doubles the layers until they do not fit, ours before plain PyTorch."""
    if run.device == "cpu":
        return  # a host's memory is not to be filled
    shape = replace(SHAPE, width=32, vocabulary=64, sequence=8) if run.is_tiny else SHAPE
    first, most = (1, 2) if run.is_tiny else (16, MOST_LAYERS)

    def told(name: str, found: Tried) -> None:
        if not found.runs:
            why = next(iter(found.failed.values()))
            # A size that took too long is the end of the budget, and no failure.
            took_too_long = why.startswith(("more than", "no time"))
            run.tell(name, why=why, error="" if took_too_long else why)
            return
        layers = max(found.runs)
        run.tell(
            name,
            layers=layers,
            parameters=sized(shape, layers).parameters,
            tokens_per_s=found.runs[layers].tokens,
            peak_bytes=found.runs[layers].peak,
            cut=found.cut or layers == MOST_LAYERS,
            error="",
        )

    # Ending a process that holds tens of GB takes some seconds.
    search(shape, first, most, run.until - time.monotonic() - 5, told)


# -- shared by the steps -----------------------------------------------------------------------


def _result(
    run: Run,
    name: str,
    field: Sequence[Contender],
    *,
    precision: str = "bf16-mixed",
    compiled: str = "",
    ranks: int = 1,
) -> Result:
    """An empty table of the workload."""
    workload = run.workload(name)
    return Result(
        workload=workload,
        setting=replace(_setting(run, ranks), precision=precision, compiled=compiled),
        ranks=ranks,
        device=run.name,
        flops=peaks.flops(workload),
        lines=[Line(taker.key, taker.label) for taker in field],
    )


def _setting(run: Run, ranks: int) -> Setting:
    threads = max(1, machine.cores() // ranks)
    return Setting(device=run.device, precision="bf16-mixed", threads=threads)


@contextmanager
def _started(run: Run, field: Sequence[Contender], result: Result) -> Any:
    """Start all crews in parallel, because imports take most of a start and cores are idle.

    Yields a future for each contender's key. Its result raises the exception of the start.
    """
    with ExitStack() as alive, ThreadPoolExecutor(1 if run.is_tiny else len(field)) as pool:

        def start(taker: Contender) -> Crew:
            ranks = Crew(taker, result.workload, result.ranks, LIMIT, result.setting, math.inf)
            alive.callback(ranks.close)
            return ranks

        yield {taker.key: pool.submit(start, taker) for taker in field}


def _round(
    run: Run,
    result: Result,
    field: Sequence[Contender],
    number: int,
    plan: Plan,
    turn: Callable[[Contender], AbstractContextManager[Crew]],
    look: Callable[[Line, Crew], None] | None = None,
) -> None:
    """Take one round; write the figures before each turn, and at the end."""
    by_key = {line.key: line for line in result.lines}
    look = look or (rounds.look_at_cpu if run.device == "cpu" else rounds.look_at_gpu)

    def told(words: str) -> None:
        print(f"{run.until - time.monotonic():5.0f} s left  {words}", flush=True)
        run.tell("result", **result.as_json())

    rounds.take_round(number, field, by_key, plan, turn, told, look)
    run.tell("result", **result.as_json())


STEPS = {
    "right": right,
    "fast": fast,
    "uncompiled": uncompiled,
    "two-ranks": two_ranks,
    "offload": offload,
    "plan": plan,
    "save": save,
    "largest": largest,
}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
