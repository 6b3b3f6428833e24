"""Invalid values, and settings without effect, are rejected in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise import config
from shardwise.config import FIELDS
from shardwise.errors import ConfigError
from tests.bad_input import values


@pytest.mark.parametrize(
    "name", [name for name, each in FIELDS.items() if each.metadata["metavar"]]
)
def test_refuses_invalid_text_of_setting(name: str) -> None:
    """Except values that only the file system, the row or the model can reject."""
    known_later = {"timeline", "record", "record_tensors", "time_layers", "units", "stages"}
    known_later |= {"shard", "zero"}
    for text in values.of_setting(name):
        if name not in known_later and text not in ("nvme:/proc/gone", "nvme:plain"):
            with pytest.raises(ConfigError, match="takes "):
                config.parse(name, text, "here")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("zero", [[1], [2]]),
        ("zero", ["1"]),
        ("units", [["a"]]),
        ("units", 3),
        ("record", {"a": 1}),
        ("timeline", 3),
        ("timeline", "a\0b"),
        ("timeline", "a" * 256),
        ("record", "a/" * 2048),
        ("seed", 2**64),
        ("timeout", 1e15),
        ("timeout", float("nan")),
        ("ema_decay", float("nan")),
        ("device", b"cpu"),
        ("units", "\udcff"),
    ],
)
def test_refuses_value_of_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"here: {name} takes "):
        config.parse(name, value, "here")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", "1_000", 1000),
        ("record", Path("a"), "a"),
        ("offload_optimizer", config.parse("offload_optimizer", "cpu", ""), "cpu"),
    ],
)
def test_accepts_value(name: str, value: Any, wanted: Any) -> None:
    found = config.parse(name, value, "here")
    assert wanted in (found, str(found))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"micro-batch-size = 1\nmicro_batch_size = 1", "the same setting"),
        (b"zero = '\xff'", "is not UTF-8"),
        (b"zero = " + b"[" * 5000 + b"]" * 5000, "is not TOML"),
        (b"zero = " + b"9" * 5000, "is not TOML|takes an integer"),
    ],
)
def test_refuses_malformed_file(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        config.resolve(config.sources({"SHARDWISE_CONFIG": str(file)}, {}))


def test_refuses_malformed_variables() -> None:
    for environ in (
        {"SHARDWISE_ZERO": "1", "SHARDWISE_zero": "1"},
        {config.FLAGS_VARIABLE: "x"},
        {config.FLAGS_VARIABLE: "[]"},
        {config.FLAGS_VARIABLE: '{"zero": 1}'},
        {config.FLAGS_VARIABLE: "[" * 10**5},
    ):
        with pytest.raises(ConfigError):
            config.sources(environ, {})


def test_override_of_horovod_variable_is_reported() -> None:
    environ = {"SHARDWISE_TIMELINE": "a", "HOROVOD_TIMELINE": "b"}
    settings, said = config.resolve(config.sources(environ, {}))
    assert settings.timeline == Path("a")
    assert said == ["timeline=a (environment) overrides b (HOROVOD_TIMELINE)"]


def told(flags: dict[str, str], environ: dict[str, str], keywords: dict[str, Any]) -> list[str]:
    found = config.sources({config.FLAGS_VARIABLE: json.dumps(flags)} | environ, keywords)
    needs = (*config.OF_A_RUN, *config.OF_AN_ENGINE)
    try:
        return config.idle(found, config.resolve(found)[0], needs)
    except ConfigError as error:
        return [f"refused: {error}"]


class TestWithoutEffect:
    @pytest.mark.parametrize(
        ("flags", "give"),
        [
            ({"sequence_parallel": "on"}, "--tensor T"),
            ({"schedule": "gpipe"}, "--pipeline P"),
            ({"stages": "a"}, "--pipeline P"),
            ({"shard_within": "host"}, "--zero 1, 2 or 3"),
            ({"equal_every": "10"}, "--islands N"),
            ({"outer": "nesterov:0.7,0.9"}, "--islands N"),
            ({"wire": "int8", "islands": "1"}, "--islands N"),
            ({"late": "2"}, "--islands N"),
            ({"spares": "2"}, "--survive K"),
            ({"behind": "0"}, "--islands N"),
            ({"schedule": "gpipe", "pipeline": "1"}, "--pipeline P"),
        ],
    )
    def test_idle_flag_raises_and_other_sources_warn(
        self, flags: dict[str, str], give: str
    ) -> None:
        (refusal,) = told(flags, {}, {})
        assert refusal.startswith("refused: --")
        assert refusal.endswith(f": leave it out, or add {give}.")
        environ = {f"SHARDWISE_{name.upper()}": value for name, value in flags.items()}
        (line,) = told({}, environ, {})
        assert "(environment) has no effect here, w" in line

    def test_keyword_of_one_engine_does_not_make_flag_idle(self) -> None:
        (line,) = told({"shard_within": "host"}, {}, {"zero": 0})
        assert line.startswith("shard_within=host (flag) has no effect here")

    def test_conditions_of_run_and_engine_differ(self) -> None:
        known = {need.name for need in config.OF_A_RUN}
        assert known == {
            *("sequence_parallel", "context_method", "schedule", "stages"),
            *("equal_every", "outer", "wire", "late", "behind", "spares"),
        }
        of_an_engine = {need.name for need in config.OF_AN_ENGINE}
        assert of_an_engine == {"shard_within", "guard_action", "guard_spikes", "guard_memory"}
        with pytest.raises(ConfigError, match="pipeline is not a setting of the engine"):
            config.refuse_elsewhere({"pipeline": 2}, "engine")

    @pytest.mark.parametrize(
        ("flags", "environ", "keywords"),
        [
            ({"schedule": "gpipe", "pipeline": "2"}, {}, {}),
            ({"schedule": "gpipe"}, {}, {"pipeline": 2}),
            ({"schedule": "1f1b"}, {}, {}),
            ({}, {}, {"schedule": "gpipe", "stages": "a"}),
            ({"pipeline": "1"}, {"SHARDWISE_SCHEDULE": "gpipe"}, {}),
            ({"timeout": "10"}, {}, {}),
            ({"timeout": "10", "warn_after": "20"}, {}, {}),
            ({"shard_within": "host"}, {}, {"zero": 2}),
            ({"equal_every": "10", "wire": "int4", "islands": "host"}, {}, {}),
            ({"late": "3", "outer": "mean", "islands": "2"}, {}, {}),
            ({"shard_within": "host", "zero": "1"}, {}, {}),
            ({"shard_within": "host", "shard": "optimizer"}, {}, {}),
        ],
    )
    def test_setting_with_effect_is_silent(
        self, flags: dict[str, str], environ: dict[str, str], keywords: dict[str, Any]
    ) -> None:
        """Also keywords that have an effect in other runs of a script, and overridden settings."""
        assert told(flags, environ, keywords) == []
