"""What a rank of a stock script records, of loops that are not the usual one."""

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo  # an optimizer imports it, which would take seconds in every process
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.tools.verify.stock import precision, readers, recorder, spawned
from shardwise.tools.verify.stock.recorder import Rounds
from shardwise.tools.verify.stock.stock_runs import StockRecords, describe_stall, read, users_line

STEPS = 4


def record(folder: Path, script: Callable[[], None], **request: object) -> StockRecords:
    """Run a script in a process that is recorded, and return the record."""
    known = {"record": str(folder), "view": None, "steps": STEPS, "stop_at": None, "alter": {}}
    known |= {"reference": False, "replay": None, "wide": None, "draws": False}

    def run() -> None:
        os.environ |= {"RANK": "0", recorder.VARIABLE: json.dumps(known | request)}
        torch.manual_seed(0)
        recorder.start()
        script()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -15)
    return read(folder, "the test")


def gradients(made: StockRecords, step: int, engine: int = 0) -> dict[str, list[float]]:
    tensors = made.training.engines[engine][step].tensors
    return {n: w.values.tolist() for (k, n), w in tensors.items() if k == "gradient"}  # type: ignore[union-attr]


def test_closure_has_computed_the_gradients(tmp_path: Path) -> None:
    def script() -> None:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 2)).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        torch.optim.LBFGS(model.parameters(), max_iter=2).step(closure)

    made = record(tmp_path, script)
    assert gradients(made, 1) == {"weight": [3.0, 3.0]}
    assert gradients(made, 1, engine=1) == {"weight": [3.0, 3.0]}
    assert made.steps[0][0]["fed"]["rows"] == 3


class NarrowBackward(torch.autograd.Function):
    """The identity, with a backward pass that adds up its gradient in fp32."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(gradient.shape, dtype=torch.float32)
        return (total + gradient.float()).to(gradient.dtype)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("wide", "narrow"), [("default", True), ("promoted", False)])
def test_casts_in_a_backward_method_are_logged_unless_they_have_no_effect(
    tmp_path: Path, wide: str, narrow: bool, direct: bool
) -> None:
    def script() -> None:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = NarrowBackward.apply(model(torch.ones(3, 2))).mean() / 3
        torch.autograd.backward(loss) if direct else loss.backward()
        optimizer.step()

    facts = record(tmp_path, script, wide=wide).ranks[0]
    assert facts["dtypes"] == ["float64"]
    assert any("in NarrowBackwardBackward (float32" in each for each in facts["narrow"]) is narrow
    assert bool(facts["narrow"]) is narrow


def test_overflowing_step_leaves_no_losses_to_the_next(tmp_path: Path) -> None:
    def script() -> None:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            x = torch.full((4, 2), float("inf") if step == 1 else 1.0)
            optimizer.zero_grad()
            scaler.scale(model(x).mean() / 2).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()

    made = record(tmp_path, script)
    assert [len(row["terms"]) for row in made.steps[0]] == [1, 1, 1]
    # The scale has changed from 1024 to 512, and factors are those before it.
    assert [row["terms"][0]["factor"] for row in made.steps[0]] == [0.5, 0.5, 0.5]
    assert gradients(made, 2) == {"weight": [0.5, 0.5]}
    assert made.training.engines[0][1].grad_norm == pytest.approx(0.5**0.5)


def test_every_parameter_has_a_name(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2, bias=False)
            self.two = nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight
            self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))

    def script() -> None:
        model, scale = Tied(), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        late = nn.Linear(1, 1, bias=False)
        for step in range(3):
            y = model.two(model.one(torch.ones(1, 2))) * scale * (model.phase * 1j).abs()
            (y.sum() + late(torch.ones(1, 1)).sum()).backward()
            if step == 1:
                optimizer.add_param_group({"params": late.parameters()})
            optimizer.step()
            optimizer.zero_grad()

    made = record(tmp_path, script)
    names = ["one.weight", "phase", "parameters[2]"]
    assert set(gradients(made, 1)) == set(names)
    assert len(gradients(made, 1)["phase"]) == 2  # real and imaginary part
    assert set(gradients(made, 3)) == {
        "models[0].one.weight",
        "models[0].phase",
        "parameters[2]",
        "models[1].weight",
    }


def test_ends_after_the_steps_of_an_optimizer_that_is_made_again(tmp_path: Path) -> None:
    def script() -> None:
        model = nn.Linear(2, 1)
        for _ in range(100):
            model(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    made = record(tmp_path, script)
    assert len(made.training.engines) == STEPS


def test_script_records_after_a_subprocess_that_imported_torch(tmp_path: Path) -> None:
    def train() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    record(tmp_path, lambda: None)  # the subprocess makes no step
    assert record(tmp_path, train).training.steps == 1
    # A subprocess at the end of the script does not take its place.
    assert record(tmp_path, lambda: None).ranks[0]["driver"] == "plain"


def test_compiled_model_keeps_its_graph(tmp_path: Path) -> None:
    def script() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
        for _ in range(3):
            compiled(torch.ones(4, 2)).mean().backward()
            optimizer.step()

    made = record(tmp_path, script)
    assert set(gradients(made, 3)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert [row["fed"]["rows"] for row in made.steps[0][1:]] == [4, 4]


def test_stop_at_a_step_leaves_a_record(tmp_path: Path) -> None:
    def script() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(100):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    assert record(tmp_path, script, stop_at=2).training.steps == 2


def test_batches_get_wide_and_mixed_precision_is_off(tmp_path: Path) -> None:
    def script() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(4, 2, dtype=torch.float32)), batch_size=2)
        for (x,) in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).sum()
            assert loss.dtype is torch.float64
            loss.backward()
            optimizer.step()

    made = record(tmp_path, script, wide="default")
    assert made.ranks[0]["dtypes"] == ["float64"]
    assert made.training.steps == 2


def test_wide_policies_of_fsdp_have_no_narrow_dtype() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    class Policy(MixedPrecisionPolicy):  # a copy, so that the test leaves torch as it is
        pass

    precision._set_argument(Policy, "param_dtype", None)
    assert Policy(torch.bfloat16, output_dtype=torch.float32).param_dtype is None
    assert Policy(param_dtype=torch.bfloat16).output_dtype is None


def test_rounds_count_every_optimizer_once() -> None:
    rounds = Rounds(2)
    generator, discriminator = {1, 2}, {3}
    assert [rounds.begin(discriminator), rounds.end()] == [0, False]
    assert [rounds.begin(generator), rounds.end()] == [0, False]
    assert [rounds.begin(discriminator), rounds.end()] == [1, False]  # the generator comes
    assert [rounds.begin(generator), rounds.end()] == [1, True]
    made_again = Rounds(2)
    assert [made_again.begin({1}), made_again.begin({1})] == [0, 1]
    assert made_again.end()


STACK_OF_A_RANK = """Current thread 0x1 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 30 in all_reduce
  File "/home/me/train.py", line 57 in reduce
  File "/home/me/train.py", line 90 in <module>
"""


def test_stall_names_ranks_steps_and_lines(tmp_path: Path) -> None:
    assert users_line(STACK_OF_A_RANK) == "train.py:57 (reduce)"
    for rank, steps in ((0, 3), (1, 2)):
        folder = tmp_path / f"rank-{rank}"
        folder.mkdir()
        for step in range(steps + 1):
            (folder / f"engine-0-step-{step}.pt").touch()
    (tmp_path / "rank-0" / recorder.STACK).write_text(STACK_OF_A_RANK)
    said = describe_stall(tmp_path, "the ranks", 30)
    assert "Rank 0 is after 3 steps in train.py:57 (reduce). Rank 1 is after 2 steps." in said


def test_sparse_gradients_are_recorded_dense() -> None:
    sparse = torch.ones(3).to_sparse()
    assert readers.part("gradient", "a", sparse, 0).values.tolist() == [1, 1, 1]


def test_spawned_reference_is_told_of_one_rank() -> None:
    def train(rank: int, world_size: int, batch_size: int, gpus: int) -> None: ...

    assert spawned.with_one_rank(train, (2, 2, 3), 2) == (1, 2, 3)
    assert spawned.VARIABLE == recorder.VARIABLE
