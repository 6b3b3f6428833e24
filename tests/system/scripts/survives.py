"""Trains in fp64 while ranks are killed at chosen moments, and stores the losses and the weights.

    survives.py steps|plain KIND OUT [RANK:MOMENT:STEP[:SIGNAL[:SECONDS]] ...]

KIND is `sgd` or `adamw`, or one of these:

    writes    SGD trains, one parameter is frozen, and the script changes two after some steps
    split     AdamW trains a model for `--tensor` and `--pipeline`
    stages    the same, and micro-batches pass through the stages
    context   AdamW trains a model with attention for `--context`
    experts   AdamW trains a mixture of experts for `--expert`

A rank is named by its number at the start of the run. The signal (default KILL) is sent to it at
this moment of the step, or so many seconds later. Step -1 is the first step that has this moment.
HOST in place of a signal kills all processes on the rank's host. CUT waits until the test has cut
the host's cable.

With `--spares`, steps take longer while ranks are missing, so that spares can join.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.random_losses.model import make_data, make_model
from tests.random_losses.reference import ADAMW

import shardwise as sw
from shardwise.checkpoint.atomic_folders import Draft
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.saver import CheckpointSaver
from shardwise.comm import SurvivorGroup
from shardwise.comm.socket_mesh import SocketMesh
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.parameters import ReplicatedParameters
from shardwise.states.parameters.unshard import WholeUnits

loop, kind, out, *kills = sys.argv[1:]
world = sw.init(seed=3, precision="fp64")
number, process = int(os.environ["RANK"]), os.getpid()
full = int(os.environ.get("TESTS_RANKS", "0"))
is_replaced = number < full and "SHARDWISE_LAUNCH_SPARE" in os.environ  # lost before
planned = [[*kill.split(":"), *["KILL", "0"][kill.count(":") - 2 :]] for kill in kills]
mine = {
    (moment, int(at)): (name, float(seconds))
    for rank, moment, at, name, seconds in planned
    if int(rank) == number and not is_replaced
}
torch.set_default_dtype(torch.float64)
rows, labels = make_data(kind)
model = make_model(kind).to(world.device)
if kind in ADAMW:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
if kind == "writes":
    model[0].bias.requires_grad_(False)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
names = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
plan = {"0": "colwise", "2": "rowwise"} if kind in ("split", "stages") else None
engine = sw.Engine(model, optimizer, units=names, tensor_plan=plan)
engine.track(scheduler=scheduler)
dataset = torch.utils.data.TensorDataset(rows, labels, torch.arange(50))
loader = sw.Loader(dataset, batch_size=8, shuffle=True)
engine.track(loader=loader)
held_out = sw.Loader(dataset, batch_size=8)


def kill_host() -> None:
    """Kill all processes on this host, except this one and sshd."""
    network, own = os.readlink("/proc/self/ns/net"), os.getpid()
    # Several times, because a process may start another one after /proc was read.
    for folder in chain.from_iterable(Path("/proc").glob("[0-9]*") for _ in range(3)):
        with suppress(OSError):  # it has ended
            is_here = os.readlink(folder / "ns" / "net") == network
            is_server = (folder / "comm").read_text().startswith("sshd")
            if is_here and not is_server and int(folder.name) != own:
                os.kill(int(folder.name), signal.SIGKILL)


def strike(name: str) -> None:
    """Send this process its signal, or lose its whole host."""
    if name == "CUT":
        Path("cut").touch()
        while not Path("is-cut").exists():
            time.sleep(0.01)
        return
    if name == "HOST":
        # In a process of another group. A warm Python kills the group of this process once the
        # process that has requested it is killed, so this one might not get to the end.
        if os.fork() == 0:
            os.setsid()
            kill_host()
            os._exit(0)
        signal.pause()
    os.kill(process, getattr(signal, f"SIG{name}"))


def reach(moment: str) -> None:
    """Send this process its signal if it is due at this moment."""
    if (found := mine.pop((moment, engine.steps), mine.pop((moment, -1), None))) is None:
        return
    name, seconds = found
    if seconds:
        timer = threading.Timer(seconds, strike, [name])
        timer.daemon = True
        timer.start()
        return
    strike(name)
    time.sleep(0.05)  # SIGSTOP takes effect with a delay


def around(owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Make `owner.name` reach a moment before and after it runs."""
    call: Callable[..., Any] = getattr(owner, name)

    @wraps(call)
    def wrapped(*given: Any, **named: Any) -> Any:
        reach(before)
        found = call(*given, **named)
        reach(after)
        return found

    setattr(owner, name, wrapped)


is_confirming = False


def halfway(owner: Any, name: str) -> None:
    """Kill this process after the first of the messages that confirm a step."""
    call: Callable[..., Any] = getattr(owner, name)

    @wraps(call)
    def wrapped(*given: Any, **named: Any) -> Any:
        found = call(*given, **named)
        if is_confirming:
            reach("halfway")
        return found

    setattr(owner, name, wrapped)


def confirm(
    self: SurvivorGroup,
    call: Callable[..., tuple[int, ...]] = SurvivorGroup.confirm,
    **keywords: bool,
) -> tuple[int, ...]:
    """Confirm a step."""
    global is_confirming
    reach("confirm")
    is_confirming = True
    leaving = call(self, **keywords)
    is_confirming = False
    reach("update")
    return leaving


if mine:
    around(Gradients, "reduce", before="reduce", after="exchange")
    around(ReplicatedParameters, "publish", before="publish", after="published")
    SurvivorGroup.confirm = confirm  # type: ignore[method-assign]
    around(Draft, "begin", before="save")
    around(CheckpointSaver, "_begin", after="begun")
    around(CheckpointSaver, "_write", after="written")
    around(WholeUnits, "unshard", before="gather", after="gathered")
    around(SurvivorGroup, "invite", before="invite", after="invited")
    around(SurvivorGroup, "admit", before="admit", after="admitted")
    around(SurvivorGroup, "enter", before="enter", after="entered")
    around(Checkpoints, "come_back", before="come_back", after="loaded")
    halfway(SocketMesh, "send")
    halfway(torch.distributed, "isend")

engine.resume("checkpoints")
losses: list[float] = []
used: list[int] = []


def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run a forward pass."""
    scores = model(x)
    if ("backward", engine.steps) in mine and scores.requires_grad:
        scores.register_hook(lambda grad: reach("backward"))
    return nn.functional.cross_entropy(scores.reshape(-1, 3), y.reshape(-1))


def train(x: torch.Tensor, y: torch.Tensor) -> None:
    """Run a forward and a backward pass."""
    reach("forward")
    x, y = x.to(world.device), y.to(world.device)
    if world.size < full:
        time.sleep(0.5)
    elif full and max(world.collectives.places) >= full:  # the first spares have joined
        reach("refilled")
    if kind == "stages":
        engine.forward_backward(loss_of, x, y)
    else:
        engine.backward(loss_of(x, y))


def save() -> None:
    """Save every few steps."""
    if engine.steps % 4 == 0:
        reach("saving")
        engine.save("checkpoints", keep=2)


def evaluate() -> None:
    """Check that the ranks evaluate each row once."""
    with torch.no_grad():
        seen = sum(int(index.sum()) for _, _, index in held_out)
    assert world.sum(torch.tensor(seen * world.counts)).item() == 49 * 50 / 2


evaluate()
for _ in loader.epochs(2):
    if loop == "steps":
        for step in loader.steps():
            for x, y, index in step:
                train(x, y)
                taken = index.tolist()
            losses.append(engine.step(max_norm=1.0).loss)
            if kind == "writes" and engine.steps == 5:
                reach("open")
                with engine.full_parameters(write=True):
                    reach("block")
                    model[0].bias.add_(0.25)
                    model[3].bias.add_(0.25)
            used += taken
            scheduler.step()
            save()
    else:
        for x, y, index in loader:
            train(x, y)
            stats = engine.step(max_norm=1.0)
            if not stats.repeated:
                losses.append(stats.loss)
                used += index.tolist()
            scheduler.step()
            if not stats.repeated:
                save()


def held(state: OptimizerState) -> list[list[torch.Tensor]]:
    """Return the masters and the state of all segments that `state` updates, for each bucket."""
    found = []
    for index in range(len(state.intervals)):
        tensors = [
            tensor
            for segment, entries in state.state_of(index)
            for tensor in (segment.tensor, *entries.values())
            if tensor is not None
        ]
        found.append([tensor.detach().cpu().clone() for tensor in tensors])
    return found


assert os.getpid() == process
evaluate()
engine.save("checkpoints")
with engine.full_parameters():
    weights = torch.cat([each.detach().flatten() for each in model.parameters()]).cpu()
states = engine._states
stored = {"losses": losses, "weights": weights, "used": used, "own": held(states.optimizer)}
if states.copies is not None:
    pairings = [states.copies.pairing(bucket) for bucket in states.parameters.buckets]
    owners = [pairing.members[pairing.owner] for pairing in pairings]
    copies = zip(owners, held(states.copies.optimizer), strict=True)
    stored["copies"] = dict(enumerate(copies))
torch.save(stored, f"{out}-{number}.pt")
print(f"rank {number} is {world.rank} of {world.size} after step {engine.steps}")
