"""The benchmarks as a user runs them, at a size that says nothing about speed."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.usefixtures("warm_programs")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--width", "32", "--layers", "2", "--vocabulary", "64", "--sequence", "8", "--batch", "4"]


def run(command: str, *arguments: str | Path, code: int = 0) -> str:
    """Run `python benchmarks/COMMAND ARGUMENTS`, expecting exit status `code`.

    Return its output.
    """
    done = subprocess.run(
        [sys.executable, BENCHMARKS / command, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of benchmarks/; other folders of scripts have modules of the same names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def figures(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("figures")


@pytest.fixture
def step_time(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("step_time")


@pytest.mark.full  # tests/phantom/test_benchmarks.py runs the measurements
def test_contenders_do_the_same_work(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    once = ["--config", "A", "--ranks", "2", "--rounds", "1", "--steps", "1"]
    shown = run(
        "step_time.py", *TINY, *once, "--rows", "0,2", "--peers", "ddp", "--json", str(path)
    )

    written = json.loads(path.read_text())
    (result,) = written["results"]
    by_key = {line["key"]: line for line in result["contenders"]}
    assert list(by_key) == ["plain", "ddp", "shardwise-0", "shardwise-2"]
    for key, line in by_key.items():
        assert line["note"] == ""
        assert line["losses"] == pytest.approx(by_key["plain"]["losses"], abs=5e-5), key
        assert line["median_ms"] > 0
        assert line["label"] in shown
    assert len(by_key["plain"]["losses"]) > 1
    assert by_key["ddp"]["over_ddp"] == 1.0
    assert result["limit_ms"] == pytest.approx(
        by_key["plain"]["median_ms"] / min(2, result["cores"])
    )
    assert written["machine"]["command"].startswith("python benchmarks/step_time.py --width 32")
    assert "| Shardwise ZERO_2 |" in run("markdown.py", str(path))
    scaling = run("markdown.py", "--scaling", str(path)).splitlines()
    assert scaling[0] == "| ms/step (speed-up) | A, changed, 2 ranks |"
    assert scaling[2].endswith(" (1.00) |")
    run("plot.py", "--scaling", str(path), tmp_path / "scaling.png")
    short = run("markdown.py", "--short", str(path)).splitlines()
    assert short[0] == "| ms/step (x DDP) | A, changed, 2 ranks |"
    assert short[-1].startswith("| **Shardwise ZERO_2** | ")


@pytest.mark.full
def test_layers_shared_out_do_the_same_work(tmp_path: Path) -> None:
    """This includes torch's manual pipelining. The benchmark fails if losses differ."""
    tiny = [*TINY, "--layers", "4", "--microbatches", "4"]
    tiny += ["--schedules", "1f1b", "--stages", "blocks.3"]
    path = tmp_path / "figures.json"
    shown = run("pipeline.py", *tiny, "--rounds", "1", "--steps", "2", "--json", str(path))
    assert "torch 1F1B, by hand" in shown
    figures = json.loads(path.read_text())["lines"]
    assert len(figures) == 7
    assert all(line["rounds_ms"] and not line["note"] for line in figures)


@pytest.mark.full
def test_a_convolutional_network(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    once = ["--config", "R", "--ranks", "2", "--rounds", "1", "--steps", "1"]
    tiny = ["--width", "32", "--image", "16", "--classes", "8", "--batch", "2"]
    rows = ["--rows", "3", "--peers", "none", "--disk", tmp_path]
    run("step_time.py", *once, *tiny, *rows, "--json", path)

    (result,) = json.loads(path.read_text())["results"]
    assert result["configuration"]["kind"] == "resnet"
    lines = {line["key"]: line for line in result["contenders"]}
    assert list(lines) == ["plain", "shardwise-3", "shardwise-3-nvme"]
    for line in lines.values():
        assert line["losses"] == pytest.approx(lines["plain"]["losses"], abs=5e-5)


@pytest.mark.full
def test_primitives() -> None:
    shown = run("collectives.py", "--ranks", "2", "--mb", "1", "--repeats", "2")
    for name in ("reduce_scatter_single", "isend/irecv", "Gloo.barrier", "Shared.all_gather"):
        assert name in shown


@pytest.mark.parametrize(("zero", "held"), [(0, 1600), (1, 1000), (2, 700), (3, 400)])
def test_the_formula_of_a_row(load: Callable[[str], ModuleType], zero: int, held: float) -> None:
    assert load("formulas").held(zero, parameters=100, ranks=4) == held


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "megatron"], "No such peer: megatron. There are apart, ddp, zro"),
        (["--config", "B"], "No such configuration: B. There are A, C, R, small"),
        (["--config", "R", "--heads", "2"], "No chosen configuration has a --heads."),
        (["--ranks", "3"], "A batch of 8 rows cannot be cut into 3 equal shares"),
        (["--width", "100", "--heads", "3"], "A width of 100 cannot be cut into 3 equal heads"),
        (["--rounds", "0"], "0 is below 1"),
    ],
)
def test_a_wrong_flag_is_named(
    step_time: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as left:
        step_time.main(arguments)
    assert left.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_step_ends_with_its_last_rank(figures: ModuleType) -> None:
    ms = 1_000_000
    ends = [[10 * ms, 20 * ms, 50 * ms], [12 * ms, 25 * ms, 40 * ms]]
    assert figures.step_times(ends) == [13.0, 25.0]


@pytest.mark.parametrize(
    ("ranks", "cores", "part"), [(1, 2, 1.0), (2, 2, 0.5), (4, 2, 0.5), (2, 8, 0.5), (8, 8, 0.125)]
)
def test_the_limit(figures: ModuleType, ranks: int, cores: int, part: float) -> None:
    assert figures.limit_scale(ranks, cores) == part


def test_a_ratio_is_taken_within_its_round(figures: ModuleType) -> None:
    slow_in_round_two = figures.Line("a", "a", rounds=[[20.0], [400.0], [20.0]])
    ddp = figures.Line("ddp", "ddp", rounds=[[10.0], [200.0], [10.0]])
    assert figures.ratio(slow_in_round_two, ddp) == 2.0
    assert figures.ratio(slow_in_round_two, ddp, 0.5) == 4.0
    assert figures.ratio(slow_in_round_two, None) is None


def test_a_contender_that_trains_something_else_shows(figures: ModuleType) -> None:
    lines = [figures.Line("a", "a", losses=[4.0, 3.9]), figures.Line("b", "b", losses=[4.0, 3.8])]
    assert figures.disagreement(lines) == pytest.approx(0.1)
    assert figures.disagreement(lines[:1]) == 0.0


@pytest.mark.parametrize("limit", [0, 1, 5, 8, 19, 20, 33])
def test_the_largest_size_is_found_in_few_attempts(
    load: Callable[[str], ModuleType], limit: int
) -> None:
    tried: list[int] = []

    def attempt(layers: int) -> bool:
        tried.append(layers)
        return layers <= limit

    found = load("largest").largest(attempt, 20)
    assert found == min(limit, 20)
    assert len(tried) == len(set(tried)) <= 9


def test_documents_show_what_the_results_say(tmp_path: Path) -> None:
    results = BENCHMARKS / "results" / "2026-11-23-step-time.json"
    words = run("plot.py", results, tmp_path / "step_time.png")
    assert (tmp_path / "step_time.png").stat().st_size > 10_000
    assert words in (BENCHMARKS.parent / "README.md").read_text()
    table = run("markdown.py", "--short", results)
    assert table in (BENCHMARKS.parent / "docs" / "speed.md").read_text()


@pytest.mark.full
def test_bridges_do_the_work_of_the_engine(tmp_path: Path) -> None:
    """Run each library with DDP and with Shardwise, and compare with the engine's own loop."""
    for name in ("accelerate", "transformers", "lightning"):
        pytest.importorskip(name, reason=f"the {name} package is not there")
    path = tmp_path / "result.json"
    once = ["--ranks", "2", "--rows", "3", "--rounds", "1", "--steps", "1", "--json", str(path)]
    libraries = ["--libraries", "accelerate,trainer,fabric,lightning", "--peers", "ddp,fsdp2"]
    run("step_time.py", "--config", "A", *TINY, *once, *libraries)
    (result,) = json.loads(path.read_text())["results"]
    by_key = {line["key"]: line for line in result["contenders"]}
    for library in ("accelerate", "trainer", "fabric", "lightning"):
        line = by_key[f"{library}-3"]
        assert line["losses"] == pytest.approx(by_key["plain"]["losses"], abs=5e-5)
        assert line["over_its_ddp"] > 0
        assert line["over_engine"] > 0
        assert by_key[f"{library}-ddp"]["over_its_ddp"] == 1.0


@pytest.mark.full
def test_whose_mean_is_exact(tmp_path: Path) -> None:
    """Ours is; the Trainer's of BERT is multiplied by workers and micro-batches."""
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name, reason=f"the {name} package is not there")
    path = tmp_path / "result.json"
    run("exact_mean.py", "--cases", "classes", "accelerate", "--json", str(path))
    cases = json.loads(path.read_text())["cases"]
    assert cases["classes"]["ours"] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert cases["accelerate"]["ours"] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert cases["classes"]["stock"][0] == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize("name", ["A", "C"])
def test_the_shapes_that_formulas_of_bytes_go_by_are_those_of_the_model(
    load: Callable[[str], ModuleType], name: str
) -> None:
    workload = load("workloads").changed(load("workloads").CONFIGURATIONS[name], {"layers": 2})
    found = load("slow_links_contenders").shapes(workload)
    with torch.device("meta"):
        model = load("models").GptModel(workload)
    assert sorted(found) == sorted(tuple(p.shape) for p in model.parameters())
    assert sum(torch.Size(shape).numel() for shape in found) == workload.parameters


def test_power_sgd_sends_two_thin_matrices(load: Callable[[str], ModuleType]) -> None:
    compressed = load("slow_links_contenders")._compressed
    assert compressed((100, 60), 4) == 4 * 160
    assert compressed((100, 8), 4) == 800, "would be more than half as many"
    assert compressed((50,), 4) == 50


@pytest.mark.full
def test_slow_links(tmp_path: Path, load: Callable[[str], ModuleType]) -> None:
    link = load("link")
    try:
        link.Link().close()
    except link.NoNamespaces as error:
        pytest.skip(f"may not make network namespaces: {error}")
    path = tmp_path / "result.json"
    takers = ["--contenders", "ddp,post-local-sgd,int8,int4-late", "--rates", "10"]
    how = ["--every", "6", "--late", "2", "--steps", "3", "--json", str(path)]
    run("slow_links.py", "--width", "64", "--sequence", "8", "--batch", "2", *takers, *how)
    lines = {line["key"]: line for line in json.loads(path.read_text())["results"]}
    assert list(lines) == ["ddp", "post-local-sgd", "int8", "int4-late"]
    for line in lines.values():
        assert line["note"] == ""
        assert line["bytes"][0] == pytest.approx(line["formula"], rel=0.05)
    assert lines["int8"]["between"] == 0
    assert lines["ddp"]["median_s"] > 0.9 * lines["ddp"]["formula"] * 8 / 10e6


@pytest.mark.full
def test_the_quality_of_islands(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    small = ["--layers", "1", "--width", "32", "--context", "16", "--batch-size", "2"]
    some = ["--vocabulary", "300", "--tokens", "2560", "--held-out", "8", "--every", "4"]
    chosen = ["--wires", "int8", "--rarely", "20", "--rates", "1e-3,3e-3", "--seeds", "0,1"]
    data = ["--data", str(Path(json.__file__).parent), "--json", str(path)]
    shown = run("island_quality.py", *small, *some, *chosen, *data)
    ways = json.loads(path.read_text())["ways"]
    assert [way["larger"] for way in ways] == [1, 4, 1, 1, 1]
    for way in ways:
        assert len(way["found"]) == 3, "both rates with one seed, the better with the other"
        assert way["label"] in shown
