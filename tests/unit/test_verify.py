"""`shardwise verify`: conclusions from recorded runs, which are made up here."""

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise.errors import LaunchError
from shardwise.launch.flags import ADOPTED
from shardwise.layout import fingerprints
from shardwise.model.module_records import other_tensors
from shardwise.testing import _import_function, _train_plain
from shardwise.tools.verify import (
    causes,
    flow,
    learning_rates,
    page,
    placements,
    records,
    suspects,
    verdicts,
)
from shardwise.tools.verify.causes import Suspect
from shardwise.tools.verify.command import LOGS, _log_folder
from shardwise.tools.verify.comparing import compare
from shardwise.tools.verify.flow import Verification
from shardwise.tools.verify.placements import RunPlacement
from shardwise.tools.verify.records import FeedRecord, RecordedTraining, Step, WholeTensor
from shardwise.tools.verify.report import VerifyReport
from shardwise.tools.verify.request import VerifyRequest
from shardwise.tools.verify.runs import Run, RunFailed, ScriptCommand, command
from shardwise.tools.verify.verdicts import TrainingVerdict
from shardwise.tools.warm.warm_ranks import large_imports
from shardwise.world import tensor_log
from shardwise.world.tensor_log import Part, TensorLog


def whole(values: Tensor, *others: Tensor) -> WholeTensor:
    """Return a tensor: rank 0 has `values`, and each further rank one of `others`."""
    copies = {n: fingerprints.of(each) for n, each in enumerate((values, *others))}
    return WholeTensor(copies, values.flatten(), {n: [n] for n in copies})


def training(
    off: float = 0.0, *, begins: int = 1, steps: int = 4, fed: int = 7, **facts: Any
) -> RecordedTraining:
    """Return a run of two tensors.

    The second tensor differs by `off` from step `begins` on, the loss from the step after.
    """
    made = []
    for number in range(steps + 1):
        gone = off if number >= begins else 0.0
        one, two = torch.full((3,), 1.0 + number), torch.full((4,), 2.0 + number)
        tensors = {
            ("model", "0.weight"): whole(one.double()),
            ("model", "1.weight"): whole(two.double() + gone),
        }
        loss = 5.0 - number + (off if number > begins else 0.0)
        made.append(
            Step(
                number=number,
                loss=loss if number else math.nan,
                grad_norm=1.0 if number else math.nan,
                weight=8.0 if number else math.nan,
                lr=(0.1,),
                samples=(),
                fed=FeedRecord(40, fed if number else 0, (1.0, float(fed)), 8 if number else 0),
                numbers={},
                tensors=tensors,
            )
        )
    return RecordedTraining({0: made}, {0: ["", "0", "1"]}, {}, {"driver": "engine", **facts})


class TestComparing:
    def test_equal_runs_have_the_same_bits(self) -> None:
        found = compare(training(), training())
        assert found.same_bits
        assert found.first(0.0) is None
        assert found.largest == 0.0

    def test_finds_the_first_step_and_tensor_that_differ(self) -> None:
        found = compare(training(), training(1e-3, begins=2))
        assert not found.same_bits
        assert found.within(1e-2)
        first = found.first(1e-8)
        assert first is not None
        assert first.number == 2
        assert first.loss == 0.0
        (tensor,) = first.beyond(1e-8)
        assert tensor.name == "1.weight"
        assert tensor.relative == pytest.approx(1e-3 / 4.0)
        assert (tensor.exact, tensor.theirs, tensor.ours) == (True, 4.0, 4.001)

    def test_tensors_are_in_the_order_of_the_forward(self) -> None:
        one, two = training(), training()
        for run, off in ((one, 0.0), (two, 1.0)):
            run.engines[0][1].tensors.clear()  # type: ignore[attr-defined]
            for name in ("10.w", "9.w", "head.w", "9.w.exp_avg", "unused"):
                kind = "optimizer" if "exp" in name else "model"
                run.engines[0][1].tensors[kind, name] = whole(torch.ones(2) + off)  # type: ignore[index]
        one = replace(one, order={0: ["", "head", "9", "10"]})
        first = compare(one, two).first(0.0)
        assert first is not None
        names = [each.name for each in first.tensors]
        assert names == ["unused", "head.w", "9.w", "9.w.exp_avg", "10.w"]

    def test_copies_of_other_ranks_are_compared(self) -> None:
        one, two = training(), training()
        values = torch.full((3,), 2.0).double()
        two.engines[0][1].tensors["model", "0.weight"] = whole(values, values + 0.5)  # type: ignore[index]
        first = compare(one, two).first(1e-8)
        assert first is not None
        assert first.tensors[0].strays == (1,)
        assert first.tensors[0].relative > 0.05

    def test_near_zero_tensor_is_compared_with_its_kind(self) -> None:
        one, two = training(), training()
        for run, tiny in ((one, 1e-18), (two, -1e-18)):
            run.engines[0][2].tensors["model", "bias"] = whole(torch.tensor([tiny]).double())  # type: ignore[index]
        found = compare(one, two)
        assert not found.same_bits
        assert found.within(1e-8)

    def test_near_zero_loss_is_compared_with_the_largest(self) -> None:
        one, two = training(), training()
        for run, tiny in ((one, 0.0), (two, 1e-18)):
            run.engines[0][4] = replace(run.engines[0][4], loss=tiny, grad_norm=2 * tiny)
        found = compare(one, two)
        assert not found.same_bits
        assert found.within(1e-12)
        two.engines[0][4] = replace(two.engines[0][4], loss=1e-3)
        assert not compare(one, two).within(1e-8)

    def test_fingerprints_estimate_a_difference_without_values(self) -> None:
        one, two = training(), training(1e-3)
        for step in two.engines[0]:
            for key, each in step.tensors.items():
                step.tensors[key] = replace(each, values=None)  # type: ignore[index]
        first = compare(one, two).first(1e-8)
        assert first is not None
        assert not first.tensors[0].exact
        assert 1e-4 < first.tensors[0].relative < 1e-3

    @pytest.mark.parametrize("kind", ["optimizer", "buffer", "average"])
    def test_tensor_of_only_one_engine_is_a_difference(self, kind: str) -> None:
        one, two = training(), training()
        one.engines[0][1].tensors[kind, "0.x"] = whole(torch.ones(2))  # type: ignore[index]
        first = compare(one, two).first(1e-8)
        assert first is not None
        (tensor,) = first.tensors
        assert (tensor.name, tensor.missing, tensor.relative) == ("0.x", True, math.inf)
        assert "which only one of the two runs has" in verdicts.describe_step(first, 1e-8)
        assert compare(training(driver="plain"), one).same_bits

    def test_nan_on_one_side_is_a_difference(self) -> None:
        one = training()
        one.engines[0][2] = replace(one.engines[0][2], loss=math.nan)
        assert compare(one, one).same_bits
        assert compare(one, training()).largest == math.inf
        assert compare(training(), one).largest == math.inf
        original = replace(one, facts={"driver": "plain"})
        assert compare(original, training()).same_bits

    def test_elements_next_to_nan_are_compared(self) -> None:
        one, two = training(), training()
        for run, last in ((one, 1.0), (two, 2.0)):
            values = torch.tensor([math.nan, last]).double()
            run.engines[0][1].tensors["model", "0.weight"] = whole(values)  # type: ignore[index]
        assert compare(one, two).largest == math.inf

    def test_step_skipped_by_one_run_is_a_difference(self) -> None:
        one = training()
        one.engines[0][2] = replace(one.engines[0][2], skipped=True)
        first = compare(one, training()).first(1e-8)
        assert first is not None
        assert first.number == 2
        assert "One of the two skipped this step" in verdicts.describe_step(first, 1e-8)

    def test_different_numbers_of_steps_are_a_difference(self) -> None:
        found = compare(training(), training(steps=3))
        assert not found.same_bits
        assert not found.within(1e9)
        assert compare(training(), training(steps=3), steps=2).same_bits

    def test_matches_names_by_the_order_of_the_optimizer(self) -> None:
        one, two = training(), training()
        names = {"0.weight": "net.a", "1.weight": "net.b"}
        shapes = {"0.weight": (3,), "1.weight": (4,)}
        moved = [
            replace(s, tensors={(k, names[n]): w for (k, n), w in s.tensors.items()})
            for s in one.engines[0]
        ]
        one = replace(
            one, engines={0: moved}, parameters={0: [[(names[n], s) for n, s in shapes.items()]]}
        )
        assert not compare(one, two).same_bits
        two = replace(two, parameters={0: [list(shapes.items())]})
        assert compare(one, two).same_bits


class TestRecords:
    def test_assembles_whole_tensors_from_all_ranks(self, tmp_path: Path) -> None:
        values = torch.randn(10, dtype=torch.float64)
        for rank, (first, end) in enumerate(((0, 6), (6, 10))):
            log = TensorLog(tmp_path, rank)
            parts = [
                Part("model", "w", values[first:end], first),
                Part("buffer", "b", torch.full((2,), float(rank)), copy=rank),
            ]
            log.write(0, 0, FIGURES | {"fed": fed(rank)}, parts)
            log.note("rank", {"driver": "engine", "rank": [f"a.py:{rank}"]})
        found = records.read(tmp_path)
        assert found.driver == "engine"
        assert found.facts["rank"] == ["a.py:0", "a.py:1"]
        (step,) = found.engines[0]
        weight, buffer = step.tensors["model", "w"], step.tensors["buffer", "b"]
        assert weight.fingerprint.same_bits(fingerprints.of(values))
        assert weight.values is not None
        assert torch.equal(weight.values, values)
        assert not weight.strays
        assert buffer.strays == [1]
        assert (step.fed.rows, step.fed.elements) == (5, 10)

    def test_engine_that_ends_early_does_not_cut_others(self, tmp_path: Path) -> None:
        logs = [TensorLog(tmp_path, rank) for rank in range(2)]
        for rank, engine, step in ((0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0), (1, 1, 0)):
            logs[rank].write(engine, step, FIGURES | {"fed": fed(rank)}, [])
        found = records.read(tmp_path)
        assert {engine: len(steps) for engine, steps in found.engines.items()} == {0: 1, 1: 1}

    def test_sparse_tensors_are_not_recorded(self) -> None:
        module = torch.nn.Module()
        module.register_buffer("sparse", torch.eye(3).to_sparse())
        module.register_buffer("dense", torch.ones(3))
        module.plain = torch.eye(3).to_sparse()
        assert [part.name for part in other_tensors([("", module)], 0)] == ["dense"]
        counted = tensor_log.FeedTotals()
        counted.add([torch.eye(3).to_sparse(), torch.ones(3)])
        assert (counted.elements, counted.rows) == (3, 3)

    def test_records_only_requested_values(self, tmp_path: Path) -> None:
        (tmp_path / "wanted.json").write_text(json.dumps({"names": ["a"]}))
        parts = [Part("model", name, torch.ones(3)) for name in ("a", "b")]
        TensorLog(tmp_path, 0).write(0, 0, FIGURES | {"fed": fed(0)}, parts)
        tensors = records.read(tmp_path).engines[0][0].tensors
        assert tensors["model", "a"].values is not None
        assert tensors["model", "b"].values is None


FIGURES: dict[str, Any] = {
    "lr": [0.1],
    "numbers": {},
    "order": [],
    "samples": [],
    "parameters": [],
}


def fed(rank: int) -> dict[str, Any]:
    return {"elements": 5, "hashes": rank, "sums": [1.0, 2.0], "rows": 2 + rank}


P = RunPlacement
BIG = P(
    size=4,
    settings={
        "zero": "3",
        "offload_optimizer": "cpu",
        "offload_params": "cpu",
        "micro_batch_size": "2",
        "tensor": "2",
        "compile": "on",
        "seed": "5",
    },
)


class TestPlacements:
    def test_placement_as_flags(self) -> None:
        assert str(P(size=2, settings={"zero": "3", "compile": "on", "overlap": "off"})) == (
            "-n 2 --zero 3 --compile --no-overlap"
        )
        assert str(P(size=None, launcher=("-H", "a:2"))) == "-H a:2"
        passing = P(size=2, launcher=("-H", "a:2", "-x", "A=1", "--ssh", "ssh -J b", "-x", "B"))
        assert str(passing.reference()) == "-n 1 -x A=1 -x B --zero 0"

    def test_reference_keeps_training_settings_on_one_rank(self) -> None:
        assert str(BIG.reference()) == "-n 1 --zero 0 --seed 5"
        exact = P(size=2, settings={"exact": "4", "precision": "bf16-mixed", "zero": "1"})
        assert str(exact.reference()) == "-n 1 --zero 0 --exact 4 --precision bf16-mixed"

    @pytest.mark.parametrize(
        ("differs", "smallest"),
        [
            (lambda p: True, "-n 2 --zero 0 --seed 5"),
            (lambda p: p.level == 3, "-n 1 --seed 5 --zero 3"),
            (lambda p: p.level >= 2 and p.size > 1, "-n 2 --seed 5 --zero 2"),
            (lambda p: "micro_batch_size" in p.settings, "-n 1 --micro-batch-size 2"),
            (lambda p: "tensor" in p.settings, "-n 2 --tensor 2"),
            (lambda p: p.size == 4, "-n 4"),
            (lambda p: "compile" in p.settings, "-n 1 --compile"),
            (lambda p: "offload_params" in p.settings, "-n 1 --offload-params cpu"),
        ],
    )
    def test_finds_the_smallest_placement_that_differs(
        self, differs: Callable[[RunPlacement], bool], smallest: str
    ) -> None:
        found = placements.find_smallest(BIG, differs)
        assert differs(found)
        words = str(found)
        kept = {word for word in smallest.split() if word.startswith("--")}
        assert words.startswith(smallest.split(" --")[0])
        assert {w for w in words.split() if w.startswith("--")} >= kept

    def test_tries_only_legal_placements(self) -> None:
        tried: list[RunPlacement] = []

        def differs(placement: RunPlacement) -> bool:
            tried.append(placement)
            return False

        assert placements.find_smallest(BIG, differs) == BIG
        assert all(each.is_legal for each in tried)
        assert len({str(each) for each in tried}) == len(tried)


class TestCauses:
    A, B, C = (Suspect(name=name, words=name) for name in "abc")

    def test_first_suspect_that_removes_the_difference_is_the_cause(self) -> None:
        found = causes.find([self.A, self.B], lambda several: several == [self.B], "clue")
        assert found.causes == [self.B]

    def test_two_causes_together(self) -> None:
        found = causes.find(
            [self.A, self.B, self.C],
            lambda several: {self.A.name, self.C.name} <= names(several),
            "",
        )
        assert names(found.causes) == {"a", "c"}

    def test_number_of_workers_is_part_of_a_particular_cause(self) -> None:
        size = Suspect(name="size", words="Size.", joint_words="Beside it, at a.py:3.")
        found = causes.find([self.A, size], lambda tried: len(tried) == 2, "")
        (one,) = found.causes
        assert (one.name, one.words) == ("a", "a Beside it, at a.py:3.")

    @pytest.mark.parametrize(
        ("rates", "said"),
        [
            ((1.0, 0.81, 0.6561), "is stepped 2 times in each step"),
            ((2.0, 1.8, 1.62), "2, 2 times the reference's 1"),
            ((1.0, 0.8, 0.6), "0.8, 0.888889 times the reference's 0.9"),
        ],
    )
    def test_distinguishes_fast_schedules_from_scaled_rates(
        self, rates: tuple[float, ...], said: str
    ) -> None:
        one, two = training(steps=6), training(steps=3)
        for number, step in enumerate(one.engines[0][1:]):
            one.engines[0][number + 1] = replace(step, lr=(0.9**number,))
        for number, rate in enumerate(rates):
            two.engines[0][number + 1] = replace(two.engines[0][number + 1], lr=(rate,))
        (found,) = learning_rates.suspect_rates(one, two, 2)
        assert said in found.words

    def test_prefers_the_particular_cause(self) -> None:
        size = Suspect(name="size", words="")
        several = [self.A, self.B, size]
        found = causes.find(several, lambda tried: len(names(tried) - {"rank"}) >= 2, "")
        assert names(found.causes) == {"a", "b"}

    def test_no_cause_if_no_trial_removes_the_difference(self) -> None:
        found = causes.find([self.A, self.B], lambda several: False, "look there")
        assert (found.causes, found.clue) == ([], "look there")

    def test_suspects_follow_from_the_notes(self) -> None:
        one = training()
        plain = compare(one, training(0.1))
        assert suspected(one, training(0.1), plain) == []
        seen = training(0.1, batch_norm=["1"], dropout=["a.py:3"], rank=["a.py:9"], size=["a.py:1"])
        assert suspected(one, seen, plain) == ["batch_norm", "dropout", "rank", "size"]
        other = training(0.1, fed=8)
        assert suspected(one, other, compare(one, other)) == ["draws"]

    @pytest.mark.parametrize("library", ADOPTED)
    def test_suspects_batches_that_grow_with_the_workers(self, library: str) -> None:
        one, two = training(), training(0.1, fed=8, bridge=[library])
        apart = compare(one, two)
        grown = [replace(step, rows=(4, 8)) for step in apart.steps]
        growing, *_ = suspects.list_suspects(one, two, replace(apart, steps=grown), 1e-8, 2)
        assert growing.alter == {"batches": 2}
        assert (
            "trains on 8 rows, and on 4 in the reference). With batches of 1/2 of the rows the"
            in (growing.words)
        )
        assert "to train as on one worker, " in growing.words

    def test_suspects_a_weight_that_contradicts_the_loss(self) -> None:
        told = "worker 0: a mean over 6 items (mean), weighed by 4"
        one, two = training(), training(0.1, weight=["a.py:3"], losses=[told])
        compared = compare(one, two)
        (suspect,) = suspects.list_suspects(one, two, compared, 1e-8, 2)
        assert suspect.alter == {"weight": True}
        assert (
            f"weight= at a.py:3 is not the number of items that this loss is a mean over ({told})"
            in suspect.words
        )
        assert told in flow.clue(compared, two, against=False)

    @pytest.mark.parametrize("library", ADOPTED)
    def test_suspects_losses_averaged_by_a_library(self, library: str) -> None:
        one = training()
        two = training(0.1, bridge=[library], **{"reduction ddp by a library": ["a.py:3"]})
        (suspect,) = suspects.list_suspects(one, two, compare(one, two), 1e-8, 2)
        assert suspect.words.startswith(f"{library} averages the losses of the workers")
        assert ("exact_mean=True" in suspect.words) == (library != "deepspeed")

    def test_suspects_a_divided_loss(self) -> None:
        one, two = training(), training()
        halved = [replace(s, loss=s.loss / 2) for s in two.engines[0]]
        two = replace(two, engines={0: halved})
        (suspect,) = suspects.list_suspects(one, two, compare(one, two), 1e-8, 2)
        assert suspect.alter == {"loss": pytest.approx(2.0)}
        assert "divided by 2 (the number of workers)" in suspect.words

    def test_suspects_a_different_learning_rate(self) -> None:
        one, two = training(), training(0.1)
        two = replace(two, engines={0: [replace(s, lr=(0.2,)) for s in two.engines[0]]})
        (suspect,) = suspects.list_suspects(one, two, compare(one, two), 1e-8, 2)
        assert suspect.alter == {"lr": {"0": [[0.1]] * 4}}
        assert "2 times" in suspect.words


def names(several: Any) -> set[str]:
    return {each.name for each in several}


def suspected(one: RecordedTraining, two: RecordedTraining, comparison: Any) -> list[str]:
    return [each.name for each in suspects.list_suspects(one, two, comparison, 1e-8, 2)]


def plan(tmp_path: Path, **more: Any) -> VerifyRequest:
    given: dict[str, Any] = {
        "script": ScriptCommand(words=("train.py",)),
        "placements": [P(size=2, settings={"zero": "2"})],
        "steps": 4,
        "out": tmp_path,
    }
    return VerifyRequest(**{**given, **more})


def judged(
    tmp_path: Path, make: Callable[[Run, str], RecordedTraining], **more: Any
) -> verdicts.Result:
    asked = plan(tmp_path, **more)
    verification = Verification(asked, make)
    verification.check()
    return verification.judge(asked.placements[0])


def is_wide(run: Run) -> bool:
    return run.placement is not None and run.placement.settings.get("precision") == "fp64"


def is_alone(run: Run) -> bool:
    return run.placement is None or run.placement.size == 1


class TestVerdicts:
    def test_equal_bits_need_two_runs(self, tmp_path: Path) -> None:
        made: list[str] = []

        def make(run: Run, words: str) -> RecordedTraining:
            made.append(words)
            return training()

        result = judged(tmp_path, make)
        assert result.verdict is TrainingVerdict.BITS
        assert made == ["the reference", "-n 2 --zero 2"]
        assert "Equal to the last bit over 4 steps" in verdicts.sentences(result)[0]

    def test_rounding_is_proved_in_fp64(self, tmp_path: Path) -> None:
        def make(run: Run, words: str) -> RecordedTraining:
            return training(0.0 if is_alone(run) else 1e-12 if is_wide(run) else 1e-3)

        result = judged(tmp_path, make)
        assert result.verdict is TrainingVerdict.ROUNDING
        assert "in fp64 the same script agrees to" in verdicts.sentences(result)[0]

    def test_agreement_as_it_is_needs_no_fp64(self, tmp_path: Path) -> None:
        result = judged(tmp_path, lambda run, words: training(0.0 if is_alone(run) else 1e-12))
        assert (result.verdict, result.wide) == (TrainingVerdict.ROUNDING, None)

    def test_unproved_if_the_script_fails_in_fp64(self, tmp_path: Path) -> None:
        def make(run: Run, words: str) -> RecordedTraining:
            if is_wide(run):
                raise RunFailed(words, 1, "RuntimeError: mat1 and mat2")
            return training(0.0 if is_alone(run) else 1e-6)

        result = judged(tmp_path, make)
        assert result.verdict is TrainingVerdict.UNPROVED
        assert "RuntimeError: mat1 and mat2" in verdicts.sentences(result)[0]

    def test_names_step_tensor_placement_and_cause(self, tmp_path: Path) -> None:
        def make(run: Run, words: str) -> RecordedTraining:
            bad = not is_alone(run) and "dropout" not in run.alter
            return training(1e-3 if bad else 0.0, begins=2, dropout=["model.py:7"])

        result = judged(
            tmp_path, make, placements=[P(size=4, settings={"zero": "3", "micro_batch_size": "2"})]
        )
        assert result.verdict is TrainingVerdict.DIFFERS
        first, smallest, cause = verdicts.sentences(result)
        assert first.startswith("Differs in fp64, first in step 1. The first in forward order") or (
            "first in step 1" in first and "1.weight, by 0.00025" in first
        )
        assert smallest == "The smallest placement that differs: -n 2 --zero 0"
        assert cause.startswith("Cause: dropout at model.py:7")

    def test_compares_first_tensors_of_a_large_model_by_value(self, tmp_path: Path) -> None:
        wanted: list[Any] = []

        def make(run: Run, words: str) -> RecordedTraining:
            wanted.append(run.values)
            made = training(0.0 if is_alone(run) else 1e-3)
            if run.values is None:
                for step in made.engines[0]:
                    for key, each in step.tensors.items():
                        step.tensors[key] = replace(each, values=None)  # type: ignore[index]
            return made

        result = judged(tmp_path, make, causes=False)
        assert wanted == [None] * 4 + [["1.weight"]] * 2
        assert "1.weight, by 0.00033 (element 0: 3.001, not 3)" in verdicts.sentences(result)[0]

    def test_names_a_reference_that_is_not_repeatable(self, tmp_path: Path) -> None:
        count = iter(range(100))

        def make(run: Run, words: str) -> RecordedTraining:
            return training(next(count) * 1e-3)

        result = judged(tmp_path, make)
        assert result.found is not None
        assert [each.name for each in result.found.causes] == ["nondeterministic"]

    def test_names_a_missing_seed(self, tmp_path: Path) -> None:
        count = iter(range(100))

        def make(run: Run, words: str) -> RecordedTraining:
            assert run.placement is not None
            return training(0.0 if "seed" in run.placement.settings else next(count) * 1e-3)

        result = judged(tmp_path, make)
        assert result.found is not None
        assert [each.name for each in result.found.causes] == ["seed"]

    def test_refuses_a_script_without_an_engine(self, tmp_path: Path) -> None:
        def make(run: Run, words: str) -> RecordedTraining:
            return replace(training(), facts={"driver": ""})

        with pytest.raises(LaunchError, match=r"train.py creates no sw.Engine"):
            judged(tmp_path, make)

    def test_each_verdict_has_words_and_its_own_exit_code(self) -> None:
        assert len({each.words for each in TrainingVerdict}) == len(TrainingVerdict)
        assert TrainingVerdict.BITS.value == 0
        assert not {each.value for each in TrainingVerdict} & {1, 2}

    def test_original_runs_without_a_launcher(self, tmp_path: Path) -> None:
        runs: list[Run] = []

        def make(run: Run, words: str) -> RecordedTraining:
            runs.append(run)
            return replace(
                training(), facts={"driver": "plain" if run.placement is None else "engine"}
            )

        original = ScriptCommand(words=("plain.py", "--epochs", "1"))
        assert judged(tmp_path, make, against=original).verdict is TrainingVerdict.BITS
        assert (runs[0].script, runs[0].placement) == (original, None)
        words = command(runs[0], tmp_path)
        assert words[1:4] == ["-P", "-m", "shardwise.tools.verify.script"]
        assert words[5:] == ["plain.py", "--epochs", "1"]
        assert "run" in command(runs[1], tmp_path)


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_report_has_page_picture_and_json(tmp_path: Path, off: float) -> None:
    def make(run: Run, words: str) -> RecordedTraining:
        return training(0.0 if is_alone(run) else off)

    asked = plan(tmp_path)
    result = judged(tmp_path, make)
    page.write(VerifyReport(plan=asked, results=[result]), tmp_path, tmp_path / "ci.json")
    told = json.loads((tmp_path / "ci.json").read_text())
    assert told == json.loads((tmp_path / "verify.json").read_text())
    assert told["exit_code"] == result.verdict.value
    (placement,) = told["placements"]
    assert placement["first_tensor"] == ("1.weight" if off else None)
    assert placement["first_step"] == (0 if off else None)
    shown = (tmp_path / "verify.html").read_text()
    assert result.verdict.words in shown
    assert "<svg" in shown
    assert (tmp_path / "verify.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("module", ["inner.test_it", "test_it", "another"])
def test_function_in_a_test_package_is_importable(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "beside.py").write_text("VALUE = 7")
    path = folder / "test_it.py"
    path.write_text("from .beside import VALUE\ndef make(): return VALUE")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("inner", "inner.beside", "inner.test_it"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        assert _import_function(str(path), "make", module, str(tmp_path))() == 7
    finally:
        for name in ("inner", "inner.beside", "inner.test_it"):
            sys.modules.pop(name, None)


def test_plain_run_seeds_all_generators() -> None:
    drawn: list[tuple[float, ...]] = []

    def make() -> Any:
        drawn.append((random.random(), np.random.random(), float(torch.rand(()))))
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, [(torch.ones(2, 2),)], lambda model, x: model(x).mean()

    for _ in range(2):
        _train_plain(make, 1)
    assert drawn[0] == drawn[1]


def test_removes_only_files_of_an_earlier_call(tmp_path: Path) -> None:
    logs = tmp_path / LOGS
    for folder in (tmp_path / "runs", logs / "record-abc", logs / "mine"):
        folder.mkdir(parents=True)
    kept = [tmp_path / "runs/01.txt", logs / "mine/01.txt", logs / "notes.txt"]
    for path in (*kept, logs / "01.txt", logs / "record-abc/x"):
        path.write_text("")
    assert _log_folder(tmp_path) == logs
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)


@pytest.mark.parametrize(
    ("script", "beside", "found"),
    [
        ("import datasets, matplotlib\nfrom transformers import Trainer", {}, "dmt"),
        ("import datasets\nimport matplotlib", {"datasets.py": ""}, "m"),
        ("import os, transformers\nos.environ['HF_HOME'] = '/here'", {}, ""),
        ("import mine\nimport matplotlib", {"mine.py": "import transformers"}, "mt"),
        ("import mine\nimport matplotlib", {"mine.py": "import os; os.environ.update()"}, ""),
        ("from mine import one\nimport matplotlib", {"mine/one.py": "from os import putenv"}, ""),
        ("import matplotlib", {"mine.py": "import os; os.environ.update()"}, "m"),
    ],
)
def test_early_imports_are_those_of_the_script(
    tmp_path: Path, script: str, beside: dict[str, str], found: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    for name, text in beside.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    imported = large_imports((str(tmp_path / "train.py"), "--epochs", "1"))
    assert "".join(name[0] for name in imported) == found


def test_lists_samples_of_only_one_run() -> None:
    one, two = training(), training(0.1, begins=2)
    one.engines[0][2] = replace(one.engines[0][2], samples=tuple(range(12)))
    two.engines[0][2] = replace(two.engines[0][2], samples=(0, 0, 1, 12))
    first = compare(one, two).first(1e-8)
    assert first is not None
    assert first.samples == (tuple(range(2, 12)), (0, 12))
    assert "not on 2, 3, 4, 5, 6, 7 and 4 more, but also on 0, 12." in verdicts.describe_step(
        first, 1e-8
    )
    assert (
        verdicts.describe_samples((), (3,))
        == "It trains on different samples of the dataset: also on 3."
    )
    assert "samples" not in verdicts.describe_step(replace(first, samples=((), ())), 1e-8)


@pytest.mark.parametrize(
    ("rows", "said"),
    [(4, "though the total batch is the same"), (8, "trains on 8 rows, and on 4 in the reference")],
)
def test_rate_suspect_says_whether_the_batch_grows(rows: int, said: str) -> None:
    one, two = training(steps=3), training(steps=3)
    for run, rate, count in ((one, 0.1, 4), (two, 0.2, rows)):
        run.engines[0][1:] = [
            replace(s, lr=(rate,), fed=replace(s.fed, rows=count)) for s in run.engines[0][1:]
        ]
    (found,) = learning_rates.suspect_rates(one, two, 2)
    assert said in found.words


@pytest.mark.parametrize(
    ("theirs", "ours", "size", "said"),
    [
        (lambda n: 0.8 ** (n + 1), lambda n: 0.8 ** (2 * n + 2), 1, "stepped 2 times in each step"),
        (lambda n: 0.8**n, lambda n: 0.8 ** (3 * n), 1, "stepped 3 times in each step"),
        (lambda n: 0.8**n, lambda n: 0.8 ** (4 * n), 2, "4 times in each step, once for each mic"),
        (lambda n: 0.8**n, lambda n: 0.8 ** (2 * n), 2, "2 times in each step, once for each work"),
        (lambda n: 0.1, lambda n: 0.3, 1, "depends on the placement: 0.3, 3 times"),
        (lambda n: 0.1, lambda n: 0.2, 2, "scaled with the number of workers: 0.2, 2 times"),
    ],
)
def test_suspects_a_scheduler_stepped_per_micro_batch(
    theirs: Callable[[int], float], ours: Callable[[int], float], size: int, said: str
) -> None:
    one, two = training(steps=12), training(steps=3)
    for run, rate in ((one, theirs), (two, ours)):
        for number, step in enumerate(run.engines[0][1:]):
            run.engines[0][number + 1] = replace(step, lr=(rate(number),))
    (found,) = learning_rates.suspect_rates(one, two, size)
    assert said in found.words


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "100 %"), (0.0667, "6.7 %"), (0.00051, "0.00051"), (12.3, "1200 %"), (math.inf, "inf")],
)
def test_large_relative_differences_are_in_percent(value: float, text: str) -> None:
    assert verdicts._relative(value) == text
