"""`verify --stock` names the cause in scripts with a mistake, and none in scripts without one.

The runs are forks (see forked_stock.py), since each cause needs four to ten runs.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
THREADS = ROOT / "examples" / "mistakes" / "threads"
CAUSES = Path(__file__).parent / "scripts" / "stock_causes.py"
CORRECT = Path(__file__).parent / "scripts" / "stock_correct.py"

PAGE = ROOT / "docs" / "thread_bugs.md"
NUMBER = re.compile(r"\d+(\.\d+)?(e-?\d+)?")

OF_THREADS = {
    "01_expert_gradients": "expert gradients multiplied",
    "02_router_gradient": "gradients not reduced",
    "03_norm_without_experts": "norm without a part of the parameters",
    "04_auxiliary_loss": "a term of the loss scaled by the ranks",
    "05_evaluation_loss": "metric multiplied by the ranks",
    "06_token_means": "mean of means",
    "07_offloaded_gradients": "micro-batches dropped",
    "08_accumulation_divided_again": "accumulation divided twice",
    "09_averaged_twice": "gradients averaged twice",
    "10_fsdp_sums": "gradients summed",
    "11_fsdp_of_one_rank": "gradients not reduced",
    "12_muon_of_shards": "update of shards",
    "13_tied_weights": "untied weights",
    "14_average_of_shards": "EMA of shards",
    "15_stream_of_all": "same data on every rank",
    "16_bias_in_evaluation": "evaluation changes the training",
    "17_bias_in_recomputation": "buffers change again in recomputation",
    "18_bias_of_one_rank": "buffers not synchronised",
    "19_bias_per_micro_batch": "buffers updated per micro-batch",
}
PLANTED = {
    "wrong_group": "reduced over the wrong group",
    "clip_before_unscale": "clipping before unscaling",
    "padded_evaluation": "duplicates in evaluation",
    "unweighted_metric": "metrics averaged unweighted",
    "dropout_alike": "same dropout on all ranks",
    "unused": "unused parameters",
    "batch_norm": "BatchNorm with local statistics",
    "buffers": "buffers not synchronised",
    "bf16_accumulation": "bf16 accumulation",
    "context_loss": "loss multiplied by the ranks",
    "saved_shard": "one rank's shard saved",
    "static_graph": "static_graph with a graph that changes",
    "other_rates": "learning rates differ between ranks",
    "own_shuffles": "every rank reads all samples",
    "sums": "sums averaged over ranks",
    "shard_norm": "clipping by a local norm",
}
WITHOUT_MISTAKE = (
    "average",
    "tied",
    "own_reduction",
    "full_evaluation",
    "weighted_metric",
    "copied_layers",
    "context",
    "two_clips",
    "scaler",
    "unused",
    "accumulation",
    "static_graph",
    "own_part",
    "closure",
)
FAST = {"14_average_of_shards", "padded_evaluation", "full_evaluation"}


class Verify(Protocol):
    def __call__(self, script: Path, *words: str, size: int = 2) -> dict[str, Any]: ...


@pytest.fixture(scope="module")
def verify() -> Iterator[Verify]:
    """A process that verifies scripts in forks of itself."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.system.forked_stock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(script: Path, *words: str, size: int = 2) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            request = {"script": str(script), "words": words, "size": size}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer

        yield ask
        process.stdin.close()
        process.wait(30)


def marked(names: Any) -> list[Any]:
    return [pytest.param(each, marks=[] if each in FAST else pytest.mark.full) for each in names]


@pytest.mark.parametrize("thread", marked(OF_THREADS))
def test_names_the_cause_of_a_thread(verify: Verify, thread: str) -> None:
    found = verify(THREADS / f"{thread}.py")
    assert found["verdict"] == "differs", found
    assert found["names"][0] == OF_THREADS[thread], found
    # Numbers differ by rounding from machine to machine.
    page = NUMBER.sub("#", PAGE.read_text())
    assert "\n".join(NUMBER.sub("#", each) for each in found["words"]) in page


@pytest.mark.full
@pytest.mark.parametrize("thread", OF_THREADS)
def test_names_no_cause_in_the_corrected_script_of_a_thread(verify: Verify, thread: str) -> None:
    found = verify(THREADS / f"{thread}.py", "--right")
    assert found["names"] == [], found
    assert found["verdict"] in ("bits", "rounding"), found


def test_has_a_script_for_every_thread() -> None:
    assert {path.stem for path in THREADS.glob("[0-9]*.py")} == OF_THREADS.keys()


@pytest.mark.parametrize("mistake", marked(PLANTED))
def test_names_the_planted_cause(verify: Verify, mistake: str) -> None:
    found = verify(CAUSES, mistake, size=4 if mistake == "wrong_group" else 2)
    assert found["verdict"] == "differs", found
    assert found["names"][0] == PLANTED[mistake], found


@pytest.mark.parametrize("trait", marked(WITHOUT_MISTAKE))
def test_names_no_cause_in_a_correct_script(verify: Verify, trait: str) -> None:
    found = verify(CORRECT, trait)
    assert found["names"] == [], found
    assert found["verdict"] in ("bits", "rounding"), found


@pytest.mark.full
def test_small_error_in_fp64_is_a_difference(verify: Verify) -> None:
    found = verify(CAUSES, "small_error")
    assert found["names"] == [], found
    assert found["verdict"] == "differs", found


@pytest.mark.full
def test_small_error_is_not_proved_if_a_layer_computes_in_fp32(verify: Verify) -> None:
    found = verify(CORRECT, "fp32_layer")
    assert found["names"] == [], found
    assert found["verdict"] == "unproved", found
    assert "in ToCopyBackward0 (float32; called by stock_correct.py:" in found["words"][0]


@pytest.mark.full
def test_dropout_with_a_seed_per_rank_is_not_a_mistake(verify: Verify) -> None:
    found = verify(CORRECT, "dropout")
    assert found["names"] == []
    assert found["verdict"] == "unproved"
    assert "draws its own dropout masks" in found["words"][0]
