"""DeepSpeed's JSON as settings: keys, contradictions, batch sizes, and "auto"."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from shardwise import config
from shardwise.config import deepspeed
from shardwise.config.deepspeed.keys import ALIASES, KEYS, MAPPED, REFUSED, SECTIONS, TUNING
from shardwise.errors import ConfigError

SIZES = {"train_batch_size": 8}


def nested(name, value):
    """Return a JSON with only the key of this dotted name."""
    for word in reversed(name.split(".")):
        value = {word: value}
    return value


def refusal(tree, **options):
    with pytest.raises(ConfigError) as caught:
        deepspeed.parse(tree, **options)
    return str(caught.value)


def test_every_key_has_one_class_and_known_type():
    assert {key.kind for key in KEYS.values()} == {MAPPED, TUNING, REFUSED}
    assert {key.takes for key in KEYS.values()} <= {
        *("any", "open", "whole", "number", "switch", "word", "path")
    }
    assert not SECTIONS & KEYS.keys()
    assert all(new in KEYS or new in SECTIONS for new in ALIASES.values())


@pytest.mark.parametrize("name", [k.name for k in KEYS.values() if k.kind == REFUSED])
def test_refused_key_raises_unless_off(name):
    on = 0.5 if name.endswith(".ratio") else 4
    assert name in refusal(SIZES | nested(name, on))
    off = 1.0 if name.endswith(".ratio") else False
    deepspeed.parse(SIZES | nested(name, off))
    if KEYS[name].takes == "open":
        deepspeed.parse(SIZES | nested(name, {"enabled": False}))
        assert name in refusal(SIZES | nested(name, {"enabled": True}))


@pytest.mark.parametrize("name", [k.name for k in KEYS.values() if k.kind == TUNING])
def test_tuning_key_is_ignored_and_reported(name):
    job = deepspeed.parse(SIZES | nested(name, {} if KEYS[name].takes == "open" else 3))
    assert job.settings == {}
    assert job.document.ignored == [name]
    assert name in "".join(deepspeed.short_lines(job))


@pytest.mark.parametrize(
    ("tree", "settings"),
    [
        ({}, {}),
        ({"zero_optimization": {"stage": 2}}, {"zero": 2}),
        ({"zero_optimization": True}, {"zero": 1}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16", "nonfinite": "skip"}),
        ({"bfloat16": {"enabled": True, "check_grad_overflow": False}}, {"precision": "bf16"}),
        ({"fp16": {"enabled": True}}, {"precision": "fp16-mixed"}),
        ({"torch_autocast": {"enabled": True}}, {"precision": "bf16-mixed"}),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            {"precision": "fp16-mixed"},
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            {"zero": 3, "offload_params": "cpu"},
        ),
        (
            {
                "zero_optimization": {
                    "stage": 1,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"},
                }
            },
            {"zero": 1, "offload_optimizer": "nvme:/scratch"},
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            {"zero": 2, "offload_optimizer": "cpu"},
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 5e6, "overlap_comm": False}},
            {"bucket_mb": 5_000_000 * 4 / 2**20, "overlap": False},
        ),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, {"shard_within": "host"}),
        ({"tensor_parallel": {"autotp_size": 2}}, {"tensor": 2}),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            {"offload_activations": "cpu"},
        ),
        ({"train_micro_batch_size_per_gpu": 4}, {"micro_batch_size": 4}),
    ],
)
def test_keys_become_legal_settings(tree, settings):
    job = deepspeed.parse(SIZES | tree)
    assert job.settings == settings
    assert job.source_keys.keys() == settings.keys()
    source = config.SettingsSource("the JSON", job.settings)
    found, _ = config.resolve([source])
    assert found.placement is not None


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"train_batch_siz": 4}, ["'train_batch_siz'", "train_batch_size?"]),
        (
            {"zero_optimization": {"stge": 1}},
            ["zero_optimization.stge", "zero_optimization.stage?"],
        ),
        ({"stage": 3}, ["'stage'", "zero_optimization.stage?"]),
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage", "not 4"]),
        ({"zero_optimization": 7}, ["zero_optimization takes an object"]),
        ({"bf16": {"enabled": "yes"}}, ["bf16.enabled takes true or false"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["bf16.enabled", "fp16.enabled"]),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            ["zero_optimization.offload_param", "zero_optimization.stage 2"],
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}},
            ["cpu_offload", "offload_optimizer.device nvme"],
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            ["offload_optimizer.device", "nvme_path"],
        ),
        (
            {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
            ["gradient_allreduce_op sum", "zero_optimization.stage 3"],
        ),
        ({"gradient_allreduce_op": "max"}, ["gradient_allreduce_op", "'max'"]),
        ({"gradient_clipping": -1}, ["gradient_clipping"]),
        ({"gradient_clipping": float("nan")}, ["gradient_clipping takes a number"]),
        ({"train_batch_size": 2.5}, ["train_batch_size takes an integer", "2.5"]),
        ({"optimizer": {"type": "Lamb"}}, ["Lamb is not supported", "AdamW"]),
        ({"optimizer": {"type": "OneBitAdam"}}, ["OneBitAdam is not supported"]),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}},
            ["max_grad_norm", "gradient_clipping"],
        ),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, ["loss_scale"]),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, ["torch_autocast.dtype", "int8"]),
    ],
)
def test_refusal_names_keys(tree, words):
    message = refusal(SIZES | tree)
    assert all(word in message for word in words), message


def test_refuses_malformed_file(tmp_path):
    path = tmp_path / "ds.json"
    assert "cannot be read" in refusal(path)
    path.write_text("{train_batch_size: 4}")
    assert "is not JSON" in refusal(path)
    path.write_text(f'{{"gradient_clipping": {"9" * 400}}}')
    assert "is not JSON: it has an integer of 400 digits" in refusal(path)
    path.write_text("[1]")
    assert "is a JSON array, not an object" in refusal(path)
    path.write_text('{"train_batch_size": 4, "train_batch_size": 8}')
    assert "the key 'train_batch_size' appears twice" in refusal(path)
    path.write_text(json.dumps(SIZES))
    assert deepspeed.parse(path).document.values == SIZES


def test_reads_hjson_if_installed(tmp_path, monkeypatch):
    """DeepSpeed reads its files with hjson, which accepts comments and bare keys."""
    path = tmp_path / "ds.json"
    path.write_text("{train_batch_size: 4  # in all\n}")
    hjson = ModuleType("hjson")
    hjson.loads = lambda text, object_pairs_hook: object_pairs_hook([("train_batch_size", 4)])
    hjson.__spec__ = ModuleSpec("hjson", None)
    monkeypatch.setitem(sys.modules, "hjson", hjson)
    assert deepspeed.parse(path).document.values == {"train_batch_size": 4}


def test_auto_takes_value_of_caller_or_is_dropped():
    tree = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "eps": "auto", "betas": [0.9, 0.95]},
        },
    }
    job = deepspeed.parse(tree, {"train_batch_size": 16, "optimizer.params.lr": 0.1})
    assert job.document.get("train_batch_size") == 16
    assert job.settings == {}
    assert job.optimizer.params == {"lr": 0.1, "betas": [0.9, 0.95]}
    line = deepspeed.short_lines(job)[0]
    assert "train_batch_size 16" in line
    assert "bf16.enabled left out" in line


@pytest.mark.parametrize(
    ("given", "workers", "found"),
    [
        ((32, 16, 1), 2, (32, 16, 1)),
        ((32, 8, None), 2, (32, 8, 2)),
        ((32, None, 2), 2, (32, 8, 2)),
        ((None, 8, 2), 2, (32, 8, 2)),
        ((32, None, None), 2, (32, 16, 1)),
        ((None, 16, None), 2, (32, 16, 1)),
    ],
)
def test_two_batch_sizes_determine_third(given, workers, found):
    sizes = deepspeed.solve(*given, workers, "ds.json")
    assert (sizes.total, sizes.micro, sizes.steps) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((33, 17, 2), "17 x 2 x 2 is 68"),
        ((32, 18, None), "18 x 0 x 2 is 0"),
        ((1, None, None), "0 x 1 x 2 is 0"),
        ((None, None, 2), "the batch size is missing"),
        ((0, None, None), "1 or more"),
    ],
)
def test_refuses_inconsistent_batch_sizes(given, words):
    with pytest.raises(ConfigError, match=words):
        deepspeed.solve(*given, 2, "ds.json")


def test_flag_overrides_json_and_json_overrides_script(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(SIZES | {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    )
    flags = {config.FLAGS_VARIABLE: json.dumps({"deepspeed": str(path), "zero": "1"})}
    found, said = config.resolve(config.sources(flags, {"precision": "fp32"}))
    assert (found.zero, found.precision) == (1, "bf16")
    assert any("zero=1 (flag) overrides 2" in line for line in said)
    assert any("precision=bf16" in line and "overrides fp32" in line for line in said)
    environ = {"SHARDWISE_DEEPSPEED": str(path)}
    assert config.resolve(config.sources(environ, {}))[0].zero == 2


def test_document_has_current_tables():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "deepspeed_keys.md").read_text()
    begin, end = "<!-- keys: begin -->\n", "<!-- keys: end -->"
    assert text.partition(begin)[2].partition(end)[0] == deepspeed.table(), (
        "write: python scripts/deepspeed_keys.py"
    )


def test_every_key_of_an_installed_deepspeed_is_known():
    """Compares the table with the schema of DeepSpeed, if it is installed."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    sections = {
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    }
    known = {*KEYS, *SECTIONS, *ALIASES}
    for section, model in sections.items():
        names = {f"{section}.{f.alias or name}" for name, f in model.model_fields.items()}
        assert names <= known, names - known
