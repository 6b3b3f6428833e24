"""A script for DeepSpeed that names nothing of ours, and the JSON on the command line."""

import json
import re
import sys

import pytest

from tests.system.launcher import Launcher, script
from tests.system.test_launchers import run

pytestmark = pytest.mark.usefixtures("warm_programs")

WORDS = [sys.executable, "-m", "shardwise", "run"]
JSON = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    "zero_optimization": {"stage": 2, "contiguous_gradients": True},
}


def write(shardwise: Launcher, tree: dict[str, object]) -> None:
    (shardwise.folder / "ds.json").write_text(json.dumps(tree))


def test_deepspeeds_scripts_run_unchanged_and_flags_win(shardwise: Launcher) -> None:
    write(shardwise, JSON)
    rest = [script("deepspeeded"), "--deepspeed_config", "ds.json", "--folder", "saved"]
    seen = []
    for flags, stage in (([], 2), (["--zero", "3"], 3)):
        ran = run(shardwise, *WORDS, "-n", "2", *flags, "--adopt", "deepspeed", *rest)
        assert f"by shardwise.deepspeed.engine {stage}" in ran.out, ran.err
        assert "Shardwise has no deepspeed.sequence" in ran.err
        seen.append(re.findall(r"loss (\S+)", ran.out))
        assert len(seen[-1]) == 6
        assert (shardwise.folder / "saved" / "latest").read_text() == "global_step3"
    assert seen[0] == seen[1]


def test_a_json_as_settings_is_shown_and_refused_before_any_rank_starts(
    shardwise: Launcher,
) -> None:
    write(shardwise, JSON)
    words = [*WORDS, "-n", "2", "--dry-run", "--deepspeed", "ds.json", script("parity")]
    ran = run(shardwise, *words)
    assert ran.code == 0, ran.err
    for line in (
        "--zero 2  (zero_optimization.stage)",
        "samples per step: 8 = 2 x 2 backwards x 2 workers",
        "ignored, because they only tune DeepSpeed: zero_optimization.contiguous_gradients",
        "scheduler.type (a scheduler)",
    ):
        assert line in ran.out
    write(shardwise, JSON | {"train_batch_size": 6})
    ran = run(shardwise, *words)
    assert ran.code == 2
    assert "6 and gradient_accumulation_steps 2 do not multiply out on 2 workers" in ran.err
    write(shardwise, JSON | {"zero_optimisation": {}})
    ran = run(shardwise, *words)
    assert "no key 'zero_optimisation'. Did you mean zero_optimization?" in ran.err
