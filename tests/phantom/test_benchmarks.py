"""The benchmarks of a GPU on the simulated device, at sizes that mean nothing.

The device must provide all of their figures: launches, synchronisations, bytes, losses. It takes no
time. It does not run DDP and FSDP2, which call CUDA itself, nor torch.compile. The same code runs
them on the CPU.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

GPT = "--config gpt2-124m --width 32 --layers 2 --vocabulary 64 --sequence 8 --batch 4"
ONCE = "--rounds 1 --steps 2"


@pytest.fixture
def python(warm_device, monkeypatch, tmp_path) -> Path:
    """Return an interpreter whose scripts find a simulated GPU."""
    for name, value in warm_device.environ().items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "python"
    script = ROOT / "tests" / "phantom" / "script.py"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def modules(monkeypatch) -> Iterator[None]:
    """Return modules of benchmarks/ by name.

    Other folders of scripts have modules of the same name.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in BENCHMARKS.glob("*.py")] + ["contenders"]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


def step_time(python: Path | str, flags: str, folder: Path):
    """Return the result of `step_time.py` with these flags, and its text."""
    path = folder / "figures.json"
    done = subprocess.run(
        [python, BENCHMARKS / "step_time.py", *flags.split(), "--json", path],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


def test_warm_process_does_not_import_torch_before_its_modules():
    """A simulated device must be loaded before torch."""
    words = "import server, sys; print('torch' in sys.modules)"
    folder = ROOT / "tests" / "system" / "warm_python"
    environ = {name: os.environ[name] for name in os.environ if name != "TESTS_WARM"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", words],
        cwd=folder,
        env={**environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


@pytest.mark.full
def test_one_device(python, tmp_path):
    flags = f"--device cuda {GPT} {ONCE} --rows 0,3 --peers none --precision fp32,bf16-mixed"
    figures, shown = step_time(python, flags, tmp_path)
    assert figures["machine"]["device"] == "a simulated device"
    assert len(figures["results"]) == 2
    for result in figures["results"]:
        assert result["tflop_per_step"] > 0
        assert result["contenders"][0]["synchronisations"] == 0
        for line in result["contenders"]:
            assert line["note"] == ""
            assert line["label"] in shown
            assert line["mfu"] is None  # the peak of this device is not known
            assert line["peak_bytes"] > 0
            assert line["launches"] > 0
            assert line["synchronisations"] <= 1
            assert len(line["losses"]) == 22
            assert line["losses"][-1] < line["losses"][0]
        assert result["loss_disagreement"] < 0.05


@pytest.mark.full
@pytest.mark.parametrize("how", ["fp32 --compile", "bf16", "bf16-mixed"])
def test_the_peers_do_the_same_work(tmp_path, how):
    flags = f"{GPT} {ONCE} --ranks 1 --rows 0 --peers ddp,fsdp2 --precision {how}"
    figures, _ = step_time(sys.executable, flags, tmp_path)
    (result,) = figures["results"]
    plain, *others = result["contenders"]
    assert [line["key"] for line in others] == ["ddp", "fsdp2", "fsdp2-keep", "shardwise-0"]
    for line in others:
        assert line["note"] == ""
        assert line["median_ms"] > 0
        assert line["losses"] == pytest.approx(plain["losses"], rel=2e-2)


def test_only_skipped_tests_are_no_success(tmp_path):
    """Without a GPU; test_gpu.py runs them on the simulated device."""
    environ = {"PYTHON": sys.executable, "OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [ROOT / "scripts" / "gpu", "sanitizer"],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gpu: failed: sanitizer" in done.stderr
    assert "needs a GPU" in done.stdout
    assert " skipped, " in done.stdout
    assert (tmp_path / "sanitizer.txt").read_text() in done.stdout


def test_unknown_step(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts" / "gpu", "speed"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no such step: speed; there are tests two-ranks sanitizer first" in done.stderr


# -- what needs no device ---------------------------------------------------------------------

EVENTS = [
    {"name": "counted steps", "cat": "user_annotation", "ts": 100, "dur": 100},
    {"name": "counted steps", "cat": "gpu_user_annotation", "ts": 110, "dur": 300},
    {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 90, "dur": 5},
    {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 110, "dur": 5},
    {"name": "cuLaunchKernelEx", "cat": "cuda_driver", "ts": 120, "dur": 5},
    {"name": "cudaMemcpyAsync", "cat": "cuda_runtime", "ts": 125, "dur": 5},
    {"name": "cudaStreamSynchronize", "cat": "cuda_runtime", "ts": 130, "dur": 5},
    {"name": "cudaDeviceSynchronize", "cat": "cuda_runtime", "ts": 210, "dur": 5},
    {"name": "gemm", "cat": "kernel", "ts": 200, "dur": 50},
    {"name": "gelu", "cat": "kernel", "ts": 240, "dur": 20},
    {
        "name": "Memcpy HtoD (Pinned -> Device)",
        "cat": "gpu_memcpy",
        "ts": 220,
        "dur": 80,
        "args": {"bytes": 4_000_000},
    },
    {
        "name": "Memcpy DtoH (Device -> Pageable)",
        "cat": "gpu_memcpy",
        "ts": 250,
        "dur": 1,
        "args": {"bytes": 8},
    },
    {"name": "an instant", "cat": "cuda_runtime", "ts": 150},
]


@pytest.mark.parametrize("precision", ["tf32", "bf16-mixed", "fp32"])
def test_switches_of_tf32_do_not_contradict_each_other(modules, precision):
    """Reading switches that contradict each other raises, and the compiler reads them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    try:
        importlib.import_module("worker")._choose_arithmetic(precision)
        assert matmul.allow_tf32 == cudnn.allow_tf32 == (precision == "tf32")
        assert (cudnn.conv.fp32_precision == "tf32") == (precision == "tf32")
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


def test_reads_profile(modules):
    trace = importlib.import_module("device_trace")
    seen = trace.seen_in(EVENTS)
    assert (seen.launches, seen.synchronisations) == (2, 1)
    assert seen.copies["up"] == trace.Copies(1, 4_000_000, 80, hidden=0.5)
    assert seen.copies["down"] == trace.Copies(1, 8, 1, hidden=None)


def test_profile_without_a_device_has_no_figures(modules):
    seen = importlib.import_module("device_trace").seen_in(EVENTS[:1])
    assert seen.launches is seen.synchronisations is seen.copies["up"].nbytes is None
    line = importlib.import_module("figures").Line("a", "a")
    importlib.import_module("figures").add_device_figures(
        line, 2, [{"peak": 5}], [dataclasses.asdict(seen)]
    )
    assert line.peak == 5
    assert line.device["not_profiled"] == "the trace has no calls of CUDA"
    assert line.device["up"]["bytes"] is None


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_unreadable_profile_keeps_the_steps(modules, monkeypatch):
    trace = importlib.import_module("device_trace")
    monkeypatch.setattr(trace, "seen_in", lambda events: {}["traceEvents"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with trace.recorded() as seen:
        taken = torch.ones(1) + 1
    assert taken.item() == 2
    assert seen().launches is None
    assert seen().why_not == "KeyError: 'traceEvents'"


def test_figures_per_step_of_the_largest_rank(modules):
    figures = importlib.import_module("figures")
    line = figures.Line("a", "a")
    copies = {"count": 4, "nbytes": 8_000_000_000, "took": 200_000.0, "hidden": 0.9}
    none = {"count": 0, "nbytes": 0, "took": 0.0, "hidden": None}
    seen = [
        {"launches": n, "synchronisations": 2, "copies": {"up": copies, "down": none}}
        for n in (10, 20)
    ]
    figures.add_device_figures(line, 2, [{"peak": 5}, {"peak": 7}], seen)
    assert line.peak == 7
    assert line.device["launches"] == 10
    assert line.device["synchronisations"] == 1
    up = {"copies": 2, "bytes": 4e9, "gb_per_s": 40.0, "hidden": 0.9}
    assert line.device["up"] == up
    assert line.device["down"]["gb_per_s"] is None


@pytest.mark.parametrize(
    ("precision", "share"), [("bf16", 0.5), ("bf16-mixed", 0.5), ("tf32", 1.0), ("fp32", 7.395)]
)
def test_share_of_the_peak_of_a_device(modules, precision, share):
    peaks = importlib.import_module("peaks")
    found = peaks.mfu(494_700_000_000, 1.0, "NVIDIA H100 80GB HBM3", precision)
    assert found == pytest.approx(share, rel=1e-3)
    assert peaks.mfu(1, 1.0, "a simulated device", precision) is None


def test_flops_match_the_formula(modules):
    """For a GPT: 6 for each multiplied weight and token, plus attention."""
    peaks, workloads = map(importlib.import_module, ("peaks", "workloads"))
    gpt = workloads.Gpt(name="a", width=64, layers=2, vocabulary=128, sequence=16, batch=4)
    tokens = 4 * 16
    weights = 2 * 12 * 64**2 + 128 * 64
    attention = 2 * 2 * tokens * 16 * 64 * 2 * 3
    assert peaks.flops(gpt) == pytest.approx(6 * weights * tokens + attention, rel=0.05)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2-124m", 124.5),
        ("llama-1.1b", 1100.0),
    ],
)
def test_the_models_have_the_size_of_their_names(modules, name, millions):
    import torch

    models, workloads = map(importlib.import_module, ("models", "workloads"))
    with torch.device("meta"):
        model = models.build(workloads.ON_A_DEVICE[name])
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=1e-3)


RANK = """
    import json, os, signal, sys, time
    from multiprocessing.connection import Connection

    *_, fd, spec = sys.argv
    crew = Connection(int(fd))
    say = lambda **message: crew.send(message)
    ends = json.loads(spec)["options"]["ends"]
    if ends == "gone":
        say(empty=None)
        sys.exit("no more")
    elif ends == "full":
        say(full="Traceback: ...\\ntorch.OutOfMemoryError: CUDA out of memory.")
    elif ends == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif ends == "never":
        time.sleep(60)
    else:
        say(error="Traceback: ...\\nValueError: wrong")
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("ends", "note"),
    [
        ("full", "does not fit: torch.OutOfMemoryError: CUDA out of memory."),
        ("killed", "does not fit: rank 0 was killed, as the system does for the host's memory"),
        ("wrong", "failed: rank 0: Traceback: ...\nValueError: wrong"),
        ("never", "left out: no time was left for it"),
    ],
)
def test_reasons_for_missing_figures(modules, tmp_path, ends, note):
    crew, rounds, figures, contenders, workloads = map(
        importlib.import_module, ("crew", "rounds", "figures", "contenders", "workloads")
    )
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    crew.PYTHON = [sys.executable, str(tmp_path / "rank.py")]
    taker = contenders.Contender(key="a", label="a", build="a", options={"ends": ends})
    budget = rounds.Budget(1 if ends == "never" else 60)
    lines = {"a": figures.Line("a", "a")}

    def start(taker):
        return crew.Crew(taker, workloads.CONFIGURATIONS["A"], 1, 30, until=budget.until)

    plan = rounds.Plan(rounds=1, steps=1)
    rounds.take_round(0, [taker], lines, plan, start, lambda turn: None, budget=budget)
    assert lines["a"].note == note
    assert not lines["a"].rounds


def test_lost_rank_is_a_failure_of_its_contender(modules, tmp_path):
    crew, contenders, workloads = map(importlib.import_module, ("crew", "contenders", "workloads"))
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    crew.PYTHON = [sys.executable, str(tmp_path / "rank.py")]
    taker = contenders.Contender(key="a", label="a", build="a", options={"ends": "gone"})
    with crew.Crew(taker, workloads.CONFIGURATIONS["A"], 1, 30) as ranks:
        ranks._processes[0].wait()
        for ask in (ranks.release, ranks.release, lambda: ranks.take(1)):
            with pytest.raises(crew.CrewFailed, match="rank 0 died; it wrote:\nno more"):
                ask()


def test_keeps_times_if_profiling_is_not_permitted(modules):
    report, figures, workloads, rounds, crew, contenders = map(
        importlib.import_module,
        ("report", "figures", "workloads", "rounds", "crew", "contenders"),
    )

    class Unseen:
        """A crew on a system where profiling is not permitted."""

        def take(self, steps, traced=False):
            if traced:
                raise crew.CrewFailed("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
            ends = [[1_000_000 * n for n in range(steps)]]
            return crew.Stint(ends, [[2.0] * steps], [{}])

    line = figures.Line("a", "A")
    result = report.Result(
        workload=workloads.ON_A_DEVICE["gpt2-124m"],
        setting=workloads.Setting(device="cuda"),
        ranks=1,
        device="NVIDIA H200",
        flops=10**9,
        lines=[line],
    )
    taker = contenders.Contender(key="a", label="A", build="a")
    plan = rounds.Plan(rounds=1, steps=2)
    rounds.take_round(
        0,
        [taker],
        {"a": line},
        plan,
        lambda taker: contextlib.nullcontext(Unseen()),
        lambda turn: None,
        rounds.look_at_gpu,
    )
    written = result.as_json()
    (row,) = written["contenders"]
    assert row["median_ms"] == 1.0
    assert row["mfu"] == pytest.approx(1 / 66.9, rel=1e-3)
    assert "CUPTI_ERROR" in row["not_profiled"]
    assert "| A | 1.0 |" in "".join(report.markdown(written, report.ON_GPU))


def test_leaves_out_turns_without_time(modules):
    rounds, figures, contenders = map(importlib.import_module, ("rounds", "figures", "contenders"))
    takers = [contenders.Contender(key=key, label=key, build=key) for key in "ab"]
    lines = {"a": figures.Line("a", "a", rounds=[[1.0]]), "b": figures.Line("b", "b")}
    told: list[str] = []
    plan = rounds.Plan(rounds=2, steps=1)
    rounds.take_round(1, takers, lines, plan, None, told.append, budget=rounds.Budget(0))
    assert not told
    assert lines["a"].note == ""
    assert lines["a"].rounds == [[1.0]]
    assert lines["b"].note.startswith("left out")


def test_profile_may_follow_the_last_round(modules):
    """A profiler may slow down all later steps."""
    rounds, figures, contenders, crew = map(
        importlib.import_module, ("rounds", "figures", "contenders", "crew")
    )

    class Ready:
        def take(self, steps):
            return crew.Stint([list(range(steps))], [[1.0] * steps], [{"peak": 9}])

    line, looks = figures.Line("a", "A"), []
    taker = contenders.Contender(key="a", label="A", build="a")
    plan = rounds.Plan(rounds=2, steps=2, look_after=2)
    for number in range(2):
        rounds.take_round(
            number,
            [taker],
            {"a": line},
            plan,
            lambda taker: contextlib.nullcontext(Ready()),
            lambda turn: None,
            lambda line, ranks, round_=number: looks.append(round_),
        )
        assert line.peak == 9
        assert line.losses
    assert looks == [1]


def test_names_the_commit_without_git(modules, monkeypatch, tmp_path):
    machine = importlib.import_module("machine")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.describe()["commit"] == "unknown"
    monkeypatch.setenv("COMMIT", "0123abc")
    assert machine.describe()["commit"] == "0123abc"


# -- scripts/gpu first ------------------------------------------------------------------------


def first(python: Path | str, folder: Path, *steps: str, budget: int = 5000):
    """Run `scripts/gpu first` at tiny sizes; returns its figures, its table and its exit code."""
    script = [ROOT / "scripts" / "gpu", "first"]
    if steps:
        script = [python, BENCHMARKS / "gpu_first.py", "--out", folder, "--scale", "tiny"]
        script += ["--budget", str(budget), "--steps", *steps]
    environ = {"PYTHON": str(python), "SCALE": "tiny", "OUT": str(folder), "BUDGET": str(budget)}
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        script,
        env=os.environ | environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert (folder / "first.txt").exists(), done.stdout + done.stderr
    table = (folder / "first.txt").read_text()
    assert table in done.stdout
    assert len(table.splitlines()) <= 60
    return json.loads((folder / "first.json").read_text()), done.stdout, done.returncode


def assert_trained(step, *keys: str):
    """Check that the contenders of a step have times, and losses that agree."""
    assert step["error"] == ""
    assert not step["cut"]
    result = step["rows"]["result"]
    lines = {line["key"]: line for line in result["contenders"]}
    for key in keys:
        assert lines[key]["note"] == ""
        assert lines[key]["median_ms"] is not None
    assert result["losses_agree"]
    return lines


def assert_all_equal(step):
    """Check that every case of the step `right` ran, and equals plain PyTorch."""
    assert not step["cut"]
    assert {name: row["error"] for name, row in step["rows"].items() if row["error"]} == {}
    assert len(step["rows"]) >= 9


@pytest.mark.full
def test_gpu_first_on_the_simulated_device(python, tmp_path):
    steps = ("right", "uncompiled", "offload", "save", "largest")
    figures, shown, code = first(python, tmp_path, *steps)
    steps = figures["steps"]
    # The simulated device runs neither FSDP2 nor the wrappers of DDP: each of them is one line of
    # the table, and the step continues.
    assert code == 1
    assert "FAILED uncompiled: FSDP2: RuntimeError: " in shown
    assert_all_equal(steps["right"])
    lines = assert_trained(steps["uncompiled"], "plain", "shardwise-0", "shardwise-3")
    # In its first twenty steps a rank of ZERO_3 waits once more, for the order of gathers.
    for key, most in (("shardwise-0", 1), ("shardwise-3", 2)):
        assert lines[key]["synchronisations"] <= most
        assert lines[key]["launches"] > 0
        assert lines[key]["peak_bytes"] > 0
    lines = assert_trained(steps["offload"], "plain", "shardwise-2-cpu", "shardwise-3-cpu")
    assert lines["shardwise-2-cpu"]["down"]["bytes"] > 0
    parameters = 4 * (2 * (2 * 32 * (32 + 16 + 1) + 3 * 32 * 64) + (2 * 64 + 1) * 32)
    ours = lines["shardwise-3-cpu"]
    assert ours["down"]["bytes"] >= parameters  # gradients
    assert ours["up"]["bytes"] >= 2 * parameters  # for forward, and for backward
    rows = steps["save"]["rows"]
    assert rows["foreground"]["bytes"] > 0
    assert rows["background"]["stall_ms"] >= rows["background"]["call_ms"] > 0
    for row in steps["largest"]["rows"].values():
        assert row["error"] == ""
        assert row["layers"] == 2
        assert row["peak_bytes"] > 0


@pytest.mark.full
def test_gpu_first_on_the_cpu(warm_host, monkeypatch, tmp_path):
    for name, value in warm_host.environ().items():
        monkeypatch.setenv(name, value)
    figures, _, code = first(sys.executable, tmp_path, "two-ranks", "plan")
    assert figures["machine"]["device"] == "cpu"
    ours = [f"shardwise-{zero}-gloo" for zero in range(4)]
    lines = assert_trained(figures["steps"]["two-ranks"], "plain", *ours)
    for key in ours:
        assert lines[key]["state_bytes"] == pytest.approx(lines[key]["formula_bytes"], rel=0.02)
    rows = figures["steps"]["plan"]["rows"]
    assert set(rows) == {"uncompiled, shardwise-0", "offload, plain", "offload, shardwise-2-cpu"}
    for row in rows.values():
        assert row["planned_bytes"] > 0
        assert row["planned_ms"] > 0
    assert code == 0


@pytest.mark.full
def test_gpu_first_whole_on_the_cpu(tmp_path):
    figures, shown, code = first(sys.executable, tmp_path)
    assert code == 0, shown
    assert_all_equal(figures["steps"]["right"])
    assert_trained(figures["steps"]["fast"], "plain", "shardwise-0")
    keys = (
        "plain",
        "shardwise-0",
        "shardwise-3",
        "fsdp2",
        "shardwise-0-bf16",
        "accelerate",
        "lightning",
    )
    assert_trained(figures["steps"]["uncompiled"], *keys)
    assert all(not step["cut"] for step in figures["steps"].values())


def test_gpu_first_is_cut_off_in_time_and_keeps_its_rows(tmp_path):
    begun = time.monotonic()
    figures, shown, _ = first(sys.executable, tmp_path, "right", "save", budget=6)
    assert time.monotonic() - begun < 30
    assert any(step["cut"] for step in figures["steps"].values())
    assert "cut off" in shown
    assert not list(tmp_path.glob(".first-*"))


def test_gpu_first_reports_what_failed(modules):
    report = importlib.import_module("gpu_first_report")
    row = {"key": "a", "label": "A", "note": "failed: rank 0: Traceback\nValueError: wrong"}
    row |= {"median_ms": None, "peak_bytes": None, "losses": [], "over_plain": None, "mfu": None}
    shape = {"name": "gpt", "batch": 1, "sequence": 2}
    result = {"contenders": [row], "losses_agree": False, "loss_disagreement": 1.0}
    result |= {"configuration": shape, "setting": {"precision": "fp32"}}
    step = {"error": "", "cut": False, "seconds": 1.0}
    cases = {f"case {n}": {"error": "AssertionError: far"} for n in range(99)}
    figures = {
        "machine": {
            "device": "H100",
            "date": "2026-12-01 00:00 UTC",
            "commit": "c",
            "versions": "v",
        },
        "steps": {
            "right": step | {"rows": cases},
            "fast": step | {"rows": {"result": result}},
            "save": step | {"rows": {}, "error": "OSError: full"},
            "largest": step | {"rows": {"plain": {"why": "more than 9 s", "error": ""}}},
        },
    }
    wrong = report.failures(figures)
    assert len(wrong) == 102
    assert "fast: A: ValueError: wrong" in wrong
    assert "save: OSError: full" in wrong
    lines = report.lines(figures)
    assert len(lines) <= 60
    assert lines[-1] == "102 failed"
    assert "plain  more than 9 s" in [line.rstrip() for line in lines]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rank 0: Traceback\nValueError: wrong", "ValueError: wrong"),
        (
            "torch.AcceleratorError: CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`",
            "torch.AcceleratorError: CUDA error: out of memory",
        ),
        ("crew.CrewFailed: rank 0: no\n[W1] destroy_process_group", "crew.CrewFailed: rank 0: no"),
        ("does not fit: torch.OutOfMemoryError: no", "does not fit: torch.OutOfMemoryError: no"),
        ("", ""),
    ],
)
def test_finds_the_line_of_an_exception(modules, text, line):
    assert importlib.import_module("gpu_first_report").exception_in(text) == line


def test_the_page_about_speed_has_the_newest_figures(modules):
    report = importlib.import_module("gpu_first_report")
    _, title, section = report.PAGE.read_text().partition(report.TITLE)
    assert title + section == report.section(BENCHMARKS / "results")


def test_figures_of_a_gpu_are_published(modules, monkeypatch, tmp_path):
    report = importlib.import_module("gpu_first_report")
    page = tmp_path / "speed.md"
    page.write_text("# Speed\n\n" + report.section(tmp_path))
    assert "has not been measured yet" in page.read_text()
    monkeypatch.setattr(report, "PAGE", page)
    facts = {
        "device": "NVIDIA H100",
        "date": "2026-12-01 10:00 UTC",
        "commit": "c",
        "versions": "v",
    }
    save = {"bytes": 2e9, "gb_per_s": 1.5, "seconds": 1.33, "step_ms": 100.0}
    step = {"error": "", "cut": False, "seconds": 9.0, "rows": {"foreground": save}}
    file = tmp_path / "first.json"
    file.write_text(json.dumps({"machine": facts, "steps": {"save": step}}))
    kept = report.publish(file, tmp_path)
    assert kept.name == "2026-12-01-gpu-first.json"
    shown = page.read_text()
    assert "results/2026-12-01-gpu-first.json): one NVIDIA H100, v, commit c" in shown
    assert "| foreground | 2.00 | 1.50 | 1.33 | - | 100 |" in shown
    # A later run of the day replaces the steps that it measured.
    save["seconds"] = 1.22
    file.write_text(json.dumps({"machine": facts, "steps": {"save": step}}))
    assert report.publish(file, tmp_path).name == "2026-12-01b-gpu-first.json"
    assert "| foreground | 2.00 | 1.50 | 1.22 | - | 100 |" in page.read_text()
    assert "1.33" not in page.read_text()
    assert "has not been measured yet" not in shown
