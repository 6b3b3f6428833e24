"""DeepSpeed's own unit tests through `--adopt deepspeed`: how many pass, and why the rest do not.

    git clone https://github.com/deepspeedai/DeepSpeed
    python benchmarks/deepspeed_tests.py DeepSpeed            # on one process
    python benchmarks/deepspeed_tests.py DeepSpeed --ranks    # those on two processes too

Their files are read where they are. Tests of one process run in that of pytest. What the test files
import of DeepSpeed's inside, which scripts do not use, is an empty class here: their models import
MoE, their tests DeepSpeedConfig. A test that uses such a class fails, and is counted so. The names
of the JSON's words (WARMUP_NUM_STEPS) are given to them too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

FILES = (
    "runtime/test_ds_config_dict.py",
    "runtime/test_multi_output_model.py",
    "runtime/test_data.py",
    "runtime/test_lr_schedulers.py",
    "runtime/test_multiple_models.py",
    "runtime/zero/test_ignore_unused_parameters.py",
)

SHIM = """
import sys
from types import ModuleType
from shardwise.deepspeed import modules

modules.adopt()
INSIDE = {
    "moe.layer": ("MoE",),
    "pipe": ("PipelineModule", "LayerSpec", "TiedLayerSpec"),
    "runtime.config": ("DeepSpeedConfig",),
    "runtime.zero.config": ("DeepSpeedZeroConfig",),
    "runtime.precision_config": ("get_bfloat16_config",),
    "runtime.utils": ("required_torch_version",),
    "ops.op_builder": ("CPUAdamBuilder",),
}


def _empty(name):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError(f"{name} is of DeepSpeed's inside, and not in Shardwise")

    return type(name, (), {"__init__": __init__, "NAME": name})


for path, names in INSIDE.items():
    words = ["deepspeed", *path.split(".")]
    for end in range(2, len(words) + 1):
        full = ".".join(words[:end])
        if full not in sys.modules:
            sys.modules[full] = ModuleType(full)
            sys.modules[full].__path__ = []
            setattr(sys.modules[".".join(words[: end - 1])], words[end - 1], sys.modules[full])
    for name in names:
        if not hasattr(sys.modules[full], name):
            setattr(sys.modules[full], name, _empty(name))
schedules = sys.modules["deepspeed.runtime.lr_schedules"]
SPELT = {"WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear", "WARMUP_LR": "WarmupLR"}
SPELT |= {"WARMUP_DECAY_LR": "WarmupDecayLR", "WARMUP_COSINE_LR": "WarmupCosineLR"}
SPELT |= {"ONE_CYCLE": "OneCycle", "LR_RANGE_TEST": "LRRangeTest"}
KEYS = (
    "LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE "
    "WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO "
    "CYCLE_MIN_LR CYCLE_MAX_LR CYCLE_FIRST_STEP_SIZE DECAY_LR_RATE DECAY_STEP_SIZE CYCLE_MIN_MOM "
    "CYCLE_MAX_MOM DECAY_MOM_RATE TOTAL_NUM_STEPS"
)
vars(schedules).update(SPELT | {key: key.lower() for key in KEYS.split()})
sys.modules["deepspeed.git_version_info"] = info = ModuleType("deepspeed.git_version_info")
info.torch_info = {"version": "0.0", "cuda_version": "0.0", "hip_version": "0.0"}
sys.modules["deepspeed.ops"].__compatible_ops__ = {"CPUAdamBuilder": True}
"""

PLUGIN = """
import os

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    if not getattr(item.cls, "is_dist_test", False):
        return (yield)
    made = item.cls()
    size = next((m.args[0] for m in item.iter_markers("world_size")), made.world_size)
    if size != 1:
        if not os.environ.get("ON_RANKS"):
            pytest.skip("on two processes: --ranks")
        return (yield)
    import deepspeed

    deepspeed.init_distributed()
    test = made._get_current_test_func(item._request)
    arguments = made._get_fixture_kwargs(item._request, test)
    item.cls.is_dist_test = False  # so that their hook starts no process
    item.runtest = lambda: test(**arguments)
    try:
        return (yield)
    finally:
        item.cls.is_dist_test = True
"""


def run(source: Path, files: list[str], *, on_ranks: bool) -> ElementTree.Element:
    """The results of pytest, as JUnit's XML."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "deepspeed").mkdir()
        (folder / "deepspeed" / "__init__.py").write_text(SHIM)
        (folder / "in_process.py").write_text(PLUGIN)
        tests = source / "tests"
        paths = os.pathsep.join((str(folder), str(tests)))
        environ = os.environ | {"PYTHONPATH": paths, "SHARDWISE_QUIET": "on"}
        environ |= {"SHARDWISE_DEVICE": "cpu"} | ({"ON_RANKS": "1"} if on_ranks else {})
        words = ["-q", "-p", "in_process", "-W", "ignore", "--tb=short", f"--junitxml={folder}/out"]
        chosen = [str(tests / "unit" / each) for each in files]
        subprocess.run(
            [sys.executable, "-m", "pytest", *words, *chosen],
            env=environ,
            cwd=tests,
            stdout=sys.stderr,
        )
        return ElementTree.parse(folder / "out").getroot()


def reason(case: ElementTree.Element) -> str:
    """Why a test did not pass, in few words; empty for one that did."""
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            return re.sub(r"\s+", " ", found.get("message", kind))[:110]
    return ""


def report(root: ElementTree.Element) -> None:
    """Print the table: passed of all, by file, and each reason with how often it came."""
    by_file: dict[str, list[str]] = {}
    for case in root.iter("testcase"):
        parts = [part for part in case.get("classname", "").split(".") if part.startswith("test_")]
        by_file.setdefault(parts[0] if parts else case.get("name", ""), []).append(reason(case))
    print("| file | passed | of | why the rest not |\n|---|---|---|---|")
    for name, reasons in by_file.items():
        rest = Counter(each for each in reasons if each)
        words = "; ".join(f"{count} x {why}" for why, count in rest.most_common())
        print(f"| {name} | {reasons.count('')} | {len(reasons)} | {words} |")


def main() -> None:
    """Run the tests, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkout of DeepSpeed")
    parser.add_argument("--ranks", action="store_true", help="tests on two processes too")
    parser.add_argument("--files", nargs="+", default=list(FILES))
    given = parser.parse_args()
    report(run(given.source.resolve(), given.files, on_ranks=given.ranks))


if __name__ == "__main__":
    main()
