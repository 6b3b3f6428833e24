"""DeepSpeed's own unit tests through `--adopt deepspeed`: how many pass, and why the others do not.

    git clone https://github.com/deepspeedai/DeepSpeed
    python benchmarks/deepspeed_tests.py DeepSpeed              # tests on one and two processes
    python benchmarks/deepspeed_tests.py DeepSpeed --ranks 1    # tests on one process
    python benchmarks/deepspeed_tests.py DeepSpeed --into PAGE --keep found.json

The files are read from the checkout. Tests run in the process of pytest. For tests on two processes
`shardwise run -n 2` starts two pytests, which run the same tests in parallel; a test passes if it
passes on both. The test files import internals of DeepSpeed that scripts do not use (MoE,
DeepSpeedConfig): each is an empty class here, and a test that uses it fails. They also get the
names of the JSON's words (WARMUP_NUM_STEPS). One file needs the package hjson. --into writes the
table into a page, docs/reference/deepspeed_comparison.md. With --keep the results of each file
are kept, and a later call continues there.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
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
    "checkpoint/test_latest_checkpoint.py",
    "checkpoint/test_tag_validation.py",
)

SHIM = """
import sys
from types import ModuleType
from shardwise.deepspeed import modules

modules.adopt()
INSIDE = {
    "moe.layer": ("MoE",),
    "runtime.fp16.fused_optimizer": ("FP16_Optimizer",),
    "runtime.fp16.unfused_optimizer": ("FP16_UnfusedOptimizer",),
    "runtime.zero.stage_1_and_2": ("DeepSpeedZeroOptimizer",),
    "runtime.zero.stage3": ("DeepSpeedZeroOptimizer_Stage3",),
    "runtime.zero.partition_parameters": ("ZeroParamStatus",),
    "runtime.config": ("DeepSpeedConfig",),
    "runtime.zero.config": ("DeepSpeedZeroConfig",),
    "runtime.precision_config": ("get_bfloat16_config",),
    "runtime.utils": ("required_torch_version",),
    "ops.op_builder": ("CPUAdamBuilder", "FusedAdamBuilder"),
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
sys.modules["deepspeed.ops"].__compatible_ops__ = dict.fromkeys(INSIDE["ops.op_builder"], True)
"""

PLUGIN = """
import os
from pathlib import Path

import pytest

RANKS = int(os.environ["TESTS_RANKS"])


def _world():
    import deepspeed
    import shardwise

    deepspeed.init_distributed()
    return shardwise.world()


def _size(item):
    if not getattr(item.cls, "is_dist_test", False):
        return 1
    return next((m.args[0] for m in item.iter_markers("world_size")), item.cls().world_size)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if os.environ.get("RANK", "0") != "0":
        config.option.xmlpath = None


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if _size(item) == RANKS]


@pytest.fixture
def tmpdir(tmp_path):
    return _world().broadcast_object(str(tmp_path))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    if not getattr(item.cls, "is_dist_test", False):
        return (yield)
    made, world = item.cls(), _world()
    test = made._get_current_test_func(item._request)
    arguments = made._get_fixture_kwargs(item._request, test)
    item.cls.is_dist_test = False  # so that their hook starts no process
    item.runtest = lambda: _on_all(world, test, arguments)
    try:
        return (yield)
    finally:
        item.cls.is_dist_test = True


def _on_all(world, test, arguments):
    fault = None
    try:
        test(**arguments)
    except BaseException as error:
        fault = error
    found = world.gather(None if fault is None else f"{type(fault).__name__}: {fault}")
    # Each of their tests has new processes, whose engines end with them. The engines of a failed
    # test are freed with its traceback, at a different time on each rank: nobody closes them.
    from deepspeed.runtime import engine

    engines = [made() for made in engine._made]
    engine._made.clear()
    if fault is not None:
        raise fault
    if any(found):
        raise AssertionError(f"on another rank {next(each for each in found if each)}")
    for each in engines:
        if each is not None:
            each.destroy()
"""


def run(source: Path, file: str, ranks: int) -> ElementTree.Element | None:
    """Return pytest's results for the tests of `file` on so many ranks, as JUnit's XML; None if it
    wrote no results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "deepspeed").mkdir()
        (folder / "deepspeed" / "__init__.py").write_text(SHIM)
        (folder / "in_process.py").write_text(PLUGIN)
        tests = source / "tests"
        given = filter(None, [os.environ.get("PYTHONPATH")])  # hjson, which a file imports
        paths = os.pathsep.join((str(folder), str(tests), *given))
        environ = os.environ | {"PYTHONPATH": paths, "SHARDWISE_QUIET": "on"}
        environ |= {"SHARDWISE_DEVICE": "cpu", "TESTS_RANKS": str(ranks)}
        words = ["-q", "-p", "in_process", "-W", "ignore", "--tb=short", f"--junitxml={folder}/out"]
        launched = ["shardwise", "run", "-n", str(ranks), "-m"] if ranks > 1 else []
        line = [sys.executable, "-m", *launched, "pytest", *words, str(tests / "unit" / file)]
        subprocess.run(line, env=environ, cwd=tests, stdout=sys.stderr)
        out = folder / "out"
        return ElementTree.parse(out).getroot() if out.exists() else None


def reason(case: ElementTree.Element) -> str:
    """Return in few words why a test did not pass; empty if it passed."""
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            words = re.sub(r"\S*/pytest-\S*/", "", found.get("message", kind))
            return textwrap.shorten(words, 120, placeholder=" ...")
    return ""


def table(found: dict[str, list[str]]) -> str:
    """Return the number of passed tests by file, and each reason with its count."""
    lines = ["| file | passed | of | why the rest not |", "|---|---|---|---|"]
    for name, reasons in found.items():
        rest = Counter(each for each in reasons if each)
        words = "; ".join(f"{count} x {why}" for why, count in rest.most_common())
        words = words.replace("|", "/").replace("<", "(").replace(">", ")")
        lines.append(f"| {name} | {reasons.count('')} | {len(reasons)} | {words} |")
    return "\n".join(lines) + "\n"


def put_into(document: Path, text: str) -> None:
    """Put `text` between the marks of `document`."""
    begin, end = "<!-- tests: begin -->\n", "<!-- tests: end -->"
    before, _, rest = document.read_text().partition(begin)
    _, _, after = rest.partition(end)
    document.write_text(f"{before}{begin}{text}{end}{after}")


def ask(given: argparse.Namespace) -> dict[str, list[str]]:
    """Return the reason of each test by file; results that --keep has are not measured again."""
    kept: dict[str, list[str]] = {}
    if given.keep is not None and given.keep.exists():
        kept = json.loads(given.keep.read_text())
    found: dict[str, list[str]] = {}
    for file in given.files:
        reasons = found.setdefault(Path(file).stem, [])
        for ranks in given.ranks:
            name = f"{file}, {ranks}"
            if name not in kept:
                root = run(given.source.resolve(), file, ranks)
                kept[name] = [] if root is None else [*map(reason, root.iter("testcase"))]
                if given.keep is not None and root is not None:
                    given.keep.write_text(json.dumps(kept, indent=1) + "\n")
            reasons += kept[name]
        print(table({Path(file).stem: reasons}).splitlines()[-1], file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Run the tests, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkout of DeepSpeed")
    ranks = {"type": lambda text: [int(word) for word in text.split(",")], "default": [1, 2]}
    parser.add_argument("--ranks", metavar="1,2", help="tests on so many processes", **ranks)
    parser.add_argument("--files", nargs="+", default=list(FILES))
    parser.add_argument("--keep", type=Path, help="a file of results, to go on from")
    parser.add_argument("--into", type=Path, help="the document whose table this is")
    given = parser.parse_args()
    text = table(ask(given))
    print(text, end="")
    if given.into is not None:
        put_into(given.into, text)


if __name__ == "__main__":
    main()
