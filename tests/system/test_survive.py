"""With `--survive`, killed ranks cost at most the step in progress, and the result stays exact."""

from __future__ import annotations

import re
import shutil
import signal
import sys

import pytest
import torch

from shardwise.net.restarts import SAVED
from tests.disk import wait_until
from tests.random_losses.drawing import GATHERS, MOMENTS, PUBLISHES
from tests.random_losses.reference import STEPS, check
from tests.system.launcher import Launcher, script

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="--survive needs Linux"),
    pytest.mark.usefixtures("warm_programs"),
]

CASES = [
    # size, --zero, transport, loop, optimizer, kills
    (3, 0, "auto", "steps", "sgd", "1:backward:4"),
    (3, 1, "gloo", "plain", "adamw", "0:reduce:9"),
    (3, 2, "auto", "plain", "sgd", "0:halfway:6"),
    # In a call of `engine.resume`: some ranks are already in the first call of an evaluation.
    (3, 3, "auto", "plain", "adamw", "0:halfway:0"),
    (3, 2, "auto", "steps", "adamw", "2:publish:4"),
    (3, 1, "auto", "plain", "adamw", "0:begun:4"),
    (3, 2, "auto", "steps", "sgd", "1:forward:6:TERM"),
    (3, 3, "gloo", "steps", "sgd", "1:gathered:4"),
    (3, 3, "auto", "plain", "adamw", "0:gather:6"),
    (3, 3, "auto", "steps", "writes", "1:backward:8"),
    (3, 2, "gloo", "steps", "writes", "1:backward:8"),
]
MORE = [
    # In the update before the evaluation.
    (3, 3, "auto", "steps", "sgd", f"1:update:{STEPS - 1}"),
    (3, 3, "gloo", "plain", "adamw", f"0:update:{STEPS - 1}"),
    # Between a step and a block of full parameters.
    *((3, zero, "auto", "steps", "writes", "1:open:5") for zero in range(4)),
    (3, 1, "auto", "steps", "writes", "0:begun:4"),
    *(
        (3, zero, transport, loop, "sgd", f"{rank}:{moment}:{at}")
        for number, (moment, zero) in enumerate(
            [
                *((moment, number % 3) for number, moment in enumerate((*MOMENTS, *PUBLISHES))),
                *((moment, 3) for moment in (*MOMENTS, *GATHERS)),
            ]
        )
        for transport in ("auto", "gloo")
        for loop in ("steps", "plain")
        for rank, at in [(number % 3, (2 * number + 1) % STEPS)]
    ),
]


@pytest.mark.parametrize(
    ("size", "zero", "transport", "loop", "kind", "kill"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
)
def test_a_killed_rank_costs_at_most_its_step(
    shardwise: Launcher, size: int, zero: int, transport: str, loop: str, kind: str, kill: str
) -> None:
    flags = ["-n", str(size), "--survive", "1", "--zero", str(zero), "--transport", transport]
    ran = shardwise.run("run", *flags, script("survives"), loop, kind, "out", kill)
    assert ran.code == 0, ran.err
    lost = int(kill[0])
    left = [rank for rank in range(size) if rank != lost]
    assert f"rank {lost} ended" in ran.err
    # A loss after the update may be noticed in the save or in the block that follows.
    expected = "in step|outside of a step" if "published" in kill else "in step"
    is_outside = any(each in kill for each in ("begun", "open", "halfway:0"))
    expected = "outside of a step" if is_outside else expected
    assert re.search(f"shardwise: lost rank {lost} ({expected})", ran.out)
    for place, rank in enumerate(left):
        assert f"rank {rank} is {place} of {size - 1} after step {STEPS}" in ran.out
    check(shardwise.folder, kind, left)


@pytest.mark.parametrize(
    ("zero", "transport", "kills"),
    [
        (2, "auto", ["1:backward:4"]),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                (0, "auto", ["2:reduce:4"]),
                (0, "gloo", ["0:update:5", "2:forward:8"]),
                (1, "gloo", ["3:publish:6"]),
                (2, "auto", ["0:begun:4", "1:halfway:9"]),
                (3, "auto", ["0:gather:5", "2:update:9"]),
                (3, "gloo", ["3:written:8"]),
            ]
        ),
    ],
)
def test_exact_run_keeps_its_bits_after_losses(
    shardwise: Launcher, zero: int, transport: str, kills: list[str]
) -> None:
    """Of three remaining ranks, one leaves: no node of the tree of sums has three micro-shards."""
    words = [script("survives"), "steps", "adamw"]
    alone = shardwise.run("run", "-n", "1", "--exact", "4", *words, "alone")
    assert alone.code == 0, alone.err
    shutil.rmtree(shardwise.folder / "checkpoints")
    flags = ["-n", "4", "--survive", "1", "--exact", "4", "--zero", str(zero)]
    ran = shardwise.run("run", *flags, "--transport", transport, *words, "out", *kills)
    assert ran.code == 0, ran.err
    assert "after losses: on 1 or 2 workers" in ran.out
    assert "left, because --exact 4 trains on 2 of the remaining workers" in ran.out
    undisturbed = torch.load(shardwise.folder / "alone-0.pt")
    found = [torch.load(path) for path in shardwise.folder.glob("out-*.pt")]
    assert len(found) == 3 - len(kills)
    for each in found:
        assert each["losses"] == undisturbed["losses"]
        assert torch.equal(each["weights"], undisturbed["weights"])


def test_references_to_messages_do_not_keep_connections_open(shardwise: Launcher) -> None:
    """Gloo closes its sockets only when nothing refers to a message of the group any more.

    Until then, a rank would wait for one that has already left the group, up to `--timeout`.
    """
    (shardwise.folder / "leaves.py").write_text(
        "import time, torch, torch.distributed as dist, shardwise as sw\n"
        "from shardwise.comm.survivors.connecting import retire_part\n"
        "from shardwise.errors import PeerLost\n"
        "world = sw.init(seed=0)\n"
        "part = world.collectives.second_group().inner\n"
        "group = part.messages._group\n"
        "world.barrier()\n"
        "if world.rank == 1:\n"
        "    held = dist.irecv(torch.zeros(1), group_src=0, group=group)\n"
        "    retire_part(part)\n"
        "    time.sleep(8)\n"
        "else:\n"
        "    began = time.monotonic()\n"
        "    try:\n"
        "        part.barrier()\n"
        "    except PeerLost:\n"
        "        print(f'noticed after {time.monotonic() - began:.1f} s')\n"
    )
    flags = ["-n", "2", "--survive", "1", "--transport", "gloo", "--timeout", "20"]
    ran = shardwise.run("run", *flags, "leaves.py")
    (seconds,) = re.findall(r"noticed after (\d+\.\d+) s", ran.out)
    assert float(seconds) < 4


@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.full)])
def test_loss_while_the_script_writes_parameters_is_named(shardwise: Launcher, zero: int) -> None:
    flags = ["-n", "3", "--survive", "1", "--zero", str(zero)]
    ran = shardwise.run("run", *flags, script("survives"), "steps", "writes", "out", "1:block:5")
    assert ran.code
    assert "A worker was lost in engine.full_parameters(write=True)" in ran.err
    assert "Start again from the last checkpoint" in ran.err


@pytest.mark.full
def test_one_rank_may_read_replicated_parameters(shardwise: Launcher) -> None:
    """A block that runs no collective without `--survive` runs none with it."""
    (shardwise.folder / "reads.py").write_text(
        "import torch, shardwise as sw\n"
        "world = sw.init(seed=0)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "data = torch.utils.data.TensorDataset(torch.ones(8, 4))\n"
        "for (x,) in sw.Loader(data, batch_size=4):\n"
        "    engine.backward(model(x).square().mean())\n"
        "    engine.step()\n"
        "if world.is_main:\n"
        "    with engine.full_parameters():\n"
        "        print('weights', model.weight.shape)\n"
        "world.barrier()\n"
    )
    ran = shardwise.run("run", "-n", "2", "--survive", "1", "--timeout", "20", "reads.py")
    assert ran.code == 0, ran.err
    assert "weights torch.Size([1, 4])" in ran.out


TENSOR = ["--tensor", "2"]
PIPELINE = ["--pipeline", "2", "--stages", "2"]
CONTEXT = ["--context", "2"]
EXPERT = ["--expert", "2"]
REPLICAS = [
    # --zero, axes, transport, loop, kind, kills, ranks that are left
    (2, TENSOR, "auto", "steps", "split", ["3:backward:4"], [0, 1]),
    (2, PIPELINE, "gloo", "steps", "stages", ["0:forward:4"], [2, 3]),
]
MORE_REPLICAS = [
    (0, TENSOR, "gloo", "plain", "split", ["0:forward:4"], [2, 3]),
    (0, PIPELINE, "auto", "steps", "stages", ["1:reduce:5"], [2, 3]),
    (1, TENSOR, "auto", "steps", "split", ["2:update:3"], [0, 1]),
    (1, PIPELINE, "gloo", "plain", "split", ["3:confirm:3"], [0, 1]),
    (2, TENSOR, "gloo", "steps", "split", ["1:publish:6"], [2, 3]),
    (2, PIPELINE, "auto", "plain", "split", ["2:halfway:7"], [0, 1]),
    (3, TENSOR, "auto", "steps", "split", ["1:gather:6"], [2, 3]),
    (3, TENSOR, "gloo", "plain", "split", ["2:begun:4"], [0, 1]),
    (3, PIPELINE, "auto", "steps", "stages", ["2:gathered:4"], [0, 1]),
    (3, PIPELINE, "gloo", "steps", "stages", ["1:backward:8"], [2, 3]),
    (0, CONTEXT, "auto", "steps", "context", ["0:forward:4"], [2, 3]),
    (2, CONTEXT, "gloo", "plain", "context", ["3:reduce:6"], [0, 1]),
    (3, CONTEXT, "auto", "plain", "context", ["1:backward:5"], [2, 3]),
    (0, EXPERT, "auto", "steps", "experts", ["0:forward:4"], [2, 3]),
    (1, EXPERT, "auto", "plain", "experts", ["2:publish:6"], [0, 1]),
    (2, EXPERT, "gloo", "plain", "experts", ["3:reduce:6"], [0, 1]),
    (3, EXPERT, "auto", "steps", "experts", ["1:backward:5"], [2, 3]),
    (3, EXPERT, "gloo", "plain", "experts", ["2:begun:4"], [0, 1]),
    # In the update before the evaluation: the other part of the model gathers without this rank.
    (1, TENSOR, "auto", "steps", "split", [f"3:update:{STEPS - 1}"], [0, 1]),
    (2, PIPELINE, "auto", "steps", "stages", [f"3:update:{STEPS - 1}"], [0, 1]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "axes", "transport", "loop", "kind", "kills", "left"),
    [*REPLICAS, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_REPLICAS)],
)
def test_a_lost_rank_costs_its_replica(
    shardwise: Launcher,
    zero: int,
    axes: list[str],
    transport: str,
    loop: str,
    kind: str,
    kills: list[str],
    left: list[int],
) -> None:
    """The other rank of the replica leaves, after it has sent its part of the states."""
    flags = ["-n", "4", "--survive", "1", "--zero", str(zero), "--transport", transport, *axes]
    ran = shardwise.run("run", *flags, script("survives"), loop, kind, "out", *kills)
    assert ran.code == 0, ran.err
    assert f"after a loss: all 2 workers of its group ({axes[0]} 2) leave" in ran.out
    assert f"left, because {axes[0]} 2 trains on 2 of the remaining workers" in ran.out
    for place, rank in enumerate(left):
        assert f"rank {rank} is {place} of 2 after step {STEPS}" in ran.out
    check(shardwise.folder, kind, left)


def test_the_last_replica_returns_to_the_checkpoint(shardwise: Launcher) -> None:
    flags = ["-n", "2", "--survive", "1", "--tensor", "2"]
    ran = shardwise.run("run", *flags, script("survives"), "steps", "split", "out", "1:forward:6")
    assert ran.code
    assert "after a loss: the run ends, because --tensor 2 needs all of its workers" in ran.out
    assert "Lost rank 1, and no complete group of 2 workers is left" in ran.err


def test_split_tensors_with_muon_are_refused(shardwise: Launcher) -> None:
    """A loss in the update could leave it incomplete on all other ranks."""
    (shardwise.folder / "muon.py").write_text(
        "import torch, shardwise as sw\n"
        "sw.init(seed=0)\n"
        "layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]\n"
        "model = torch.nn.Sequential(*layers)\n"
        "optimizer = torch.optim.Muon(model.parameters())\n"
        "sw.Engine(model, optimizer, tensor_plan={'0': 'colwise', '1': 'rowwise'})\n"
    )
    ran = shardwise.run("run", "-n", "2", "--survive", "1", "--tensor", "2", "muon.py")
    assert ran.code
    assert "Muon needs whole tensors, but --tensor 2 splits 2 of group 0" in ran.err
    assert "could not finish such an update after a loss" in ran.err


@pytest.mark.parametrize(
    "flags",
    [["--exact", "4"], pytest.param(["--micro-batch-size", "2"], marks=pytest.mark.full)],
)
def test_plain_loop_is_refused_if_fewer_workers_need_several_micro_batches(
    shardwise: Launcher, flags: list[str]
) -> None:
    words = ["-n", "4", "--survive", "1", *flags, script("survives"), "plain", "sgd", "out"]
    ran = shardwise.run("run", *words)
    assert ran.code
    assert f"With {flags[0]} {flags[1]}, a step of Loader(TensorDataset) has several" in ran.err


@pytest.mark.full
def test_ranks_are_lost_one_after_another_until_one_is_left(shardwise: Launcher) -> None:
    kills = ["0:forward:2", "3:exchange:5", "1:update:9"]
    ran = shardwise.run(
        "run", "-n", "4", "--survive", "1", script("survives"), "steps", "adamw", "out", *kills
    )
    assert ran.code == 0, ran.err
    assert f"rank 2 is 0 of 1 after step {STEPS}" in ran.out
    check(shardwise.folder, "adamw", [2])


@pytest.mark.full
@pytest.mark.parametrize("most", [1, 2])
def test_two_ranks_are_lost_at_once(shardwise: Launcher, most: int) -> None:
    kills = ["1:reduce:3", "2:reduce:3"]
    ran = shardwise.run(
        *("run", "-n", "4", "--survive", str(most), script("survives"), "plain", "sgd", "out"),
        *kills,
    )
    if most == 1 and ran.code:
        assert "2 workers were lost at once (ranks 1, 2), more than --survive 1" in ran.err
        return
    # With --survive 1, the second may be lost only after the others have agreed.
    assert ran.code == 0, ran.err
    check(shardwise.folder, "sgd", [0, 3])


@pytest.mark.full
def test_a_rank_lost_with_its_second_copy_returns_to_the_checkpoint(shardwise: Launcher) -> None:
    flags = ["-n", "4", "--survive", "2", "--zero", "2"]
    kills = ["1:reduce:3", "2:reduce:3"]
    ran = shardwise.run("run", *flags, script("survives"), "steps", "sgd", "out", *kills)
    assert ran.code
    assert "Ranks 1 and 2 were lost together" in ran.err


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 2])
def test_a_stopped_rank_is_killed(shardwise: Launcher, zero: int) -> None:
    flags = ["-n", "3", "--survive", "1", "--zero", str(zero), "--timeout", "20"]
    ran = shardwise.run("run", *flags, script("survives"), "steps", "sgd", "out", "1:reduce:3:STOP")
    assert ran.code == 0, ran.err
    check(shardwise.folder, "sgd", [0, 2])


@pytest.mark.full
def test_sigterm_to_the_launcher_saves_and_stops_the_run(shardwise: Launcher) -> None:
    """The other test sends SIGTERM to a rank, which leaves alone."""
    folder = shardwise.folder
    process = shardwise.start(
        *("run", "-n", "2", "--survive", "1", script("survives"), "plain", "sgd", "out"),
        "0:backward:6:STOP:9999",
    )
    wait_until(lambda: any((folder / "checkpoints").glob("step-*")), 60)
    process.send_signal(signal.SIGTERM)
    ran = shardwise.finish(process)
    assert ran.code in (0, SAVED)  # 0: it was faster than the signal
    assert "leaves after step" not in ran.err


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 2])
def test_a_resumed_run_loses_a_rank(shardwise: Launcher, zero: int) -> None:
    """The second copies are those of the loaded states."""
    flags = ["-n", "3", "--zero", str(zero)]
    words = [script("survives"), "steps", "adamw", "out"]
    ran = shardwise.run("run", *flags, "--stop-after", "8", *words)
    assert ran.code == 0, ran.err
    ran = shardwise.run("run", *flags, "--survive", "1", *words, "1:reduce:9")
    assert ran.code == 0, ran.err
    assert "at step 4" in ran.out  # the save of step 8 would have come after the stop
    check(shardwise.folder, "adamw", [0, 2], first=4)
