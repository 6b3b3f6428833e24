"""Settings: precedence of sources, types, and rejected typing errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise import config
from shardwise.config import Settings, SettingsSource
from shardwise.errors import ConfigError, PlacementError
from shardwise.launch.flag_table import flags_of


def resolve(environ: dict[str, str], **keywords: Any) -> tuple[Settings, list[str]]:
    return config.resolve(config.sources(environ, keywords))


def flags(**values: str) -> dict[str, str]:
    return {config.FLAGS_VARIABLE: json.dumps(values)}


class TestPrecedence:
    def test_each_source_sets_a_value(self, tmp_path: Path) -> None:
        file = tmp_path / "c.toml"
        file.write_text("micro-batch-size = 3\n")
        for environ, keywords in [
            (flags(micro_batch_size="3"), {}),
            ({"SHARDWISE_MICRO_BATCH_SIZE": "3"}, {}),
            ({"SHARDWISE_CONFIG": str(file)}, {}),
            (flags(config=str(file)), {}),
            ({}, {"micro_batch_size": 3}),
        ]:
            settings, overrides = resolve(environ, **keywords)
            assert settings == Settings(micro_batch_size=3)
            assert overrides == []

    def test_strongest_source_wins_and_reports_overrides(self, tmp_path: Path) -> None:
        file = tmp_path / "c.toml"
        file.write_text("seed = 3\n")
        environ = flags(seed="1", config=str(file)) | {"SHARDWISE_SEED": "2"}
        settings, overrides = resolve(environ, seed=4)
        assert settings.seed == 1
        assert overrides == [
            "seed=1 (flag) overrides 2 (environment)",
            f"seed=1 (flag) overrides 3 (file {file})",
            "seed=1 (flag) overrides 4 (the script)",
        ]

    def test_equal_values_are_no_override(self) -> None:
        assert resolve(flags(zero="2"), zero=2)[1] == []

    def test_zero_flag_overrides_shard_keyword(self) -> None:
        settings, overrides = resolve(flags(zero="1"), shard=["optimizer", "gradients"])
        assert settings.placement.level == 1
        assert overrides == ["zero=1 (flag) overrides shard=optimizer,gradients (the script)"]


class TestTypes:
    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("zero", "2", 2),
            ("shard", "gradients, optimizer", ("gradients", "optimizer")),
            ("shard", ["optimizer"], ("optimizer",)),
            ("overlap", "off", False),
            ("overlap", False, False),
            ("bucket_mb", 12, 12.0),
            ("ema_decay", "0.99", 0.99),
            ("precision", "bf16", "bf16"),
            ("timeout", None, 300.0),
        ],
    )
    def test_accepts_value(self, name: str, text: Any, value: Any) -> None:
        assert config.parse(name, text, "here") == value

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("zero", "two", "here: zero takes an integer, not 'two'"),
            ("micro_batch_size", "0", "an integer of 1 or more, not '0'"),
            ("timeout", "-1", "a number above 0"),
            ("record", "", "here: record takes the name of a folder, not ''"),
            ("timeout", "inf", "a number above 0"),
            ("ema_decay", "1", "a number between 0 and 1"),
            ("overlap", "maybe", "on or off"),
            ("precision", "fp8", "one of fp32, bf16-mixed"),
            ("shard", "weights", "one or more of parameters, gradients, optimizer, not 'weights'"),
        ],
    )
    def test_refuses_value(self, name: str, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config.parse(name, text, "here")

    def test_message_spells_flag_as_typed(self) -> None:
        with pytest.raises(ConfigError, match=r"^--micro-batch-size takes an integer"):
            resolve(flags(micro_batch_size="x"))


class TestTypos:
    @pytest.mark.parametrize(
        ("environ", "keywords", "message"),
        [
            ({"SHARDWISE_ZREO": "2"}, {}, "SHARDWISE_ZREO: .* 'zreo'. Did you mean zero"),
            ({"SHARDWISE_ZERO": "5"}, {}, "variable SHARDWISE_ZERO takes an integer from 0 to 3"),
            ({}, {"precison": "fp32"}, "the script: .* 'precison'. Did you mean precision"),
            ({}, {"qqqqqq": 1}, "Known settings: device, transport, rendezvous, "),
        ],
    )
    def test_suggests_nearest_key(
        self, environ: dict[str, str], keywords: Any, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            resolve(environ, **keywords)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("zreo = 2", "file .*: there is no setting 'zreo'. Did you mean zero"),
            ("bucketmb = 2", "no setting 'bucketmb'. Did you mean bucket-mb"),
            ("log_dir = 'x'", "no setting 'log_dir'. --log-dir is only a flag of shardwise run"),
            ("n = 2", "-n is only a flag of shardwise run"),
            ("[zero]\nstage = 2", "zero takes one value"),
            ("zero =", "is not TOML"),
            (None, "cannot be read: No such file"),
        ],
    )
    def test_refuses_config_file(self, tmp_path: Path, text: str | None, message: str) -> None:
        file = tmp_path / "c.toml"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            resolve({"SHARDWISE_CONFIG": str(file)})

    def test_ignores_variables_of_launcher(self) -> None:
        assert resolve({"SHARDWISE_LAUNCH_RANK": "0"})[0] == Settings()


class TestRow:
    @pytest.mark.parametrize(
        ("settings", "level"),
        [
            (Settings(), 0),
            (Settings(zero=2), 2),
            (Settings(shard=("optimizer",)), 1),
            (Settings(zero=1, shard=("optimizer",)), 1),
        ],
    )
    def test_zero_and_shard_select_row(self, settings: Settings, level: int) -> None:
        assert settings.placement.level == level

    def test_refuses_contradicting_rows(self) -> None:
        with pytest.raises(ConfigError, match="select different rows"):
            _ = Settings(zero=2, shard=("optimizer",)).placement

    def test_refuses_illegal_row(self) -> None:
        with pytest.raises(PlacementError):
            _ = Settings(shard=("gradients",)).placement


def test_every_setting_has_a_group_and_a_help_of_one_line() -> None:
    for name, field in config.FIELDS.items():
        groups = {"where", "spread", "islands", "precision", "recover", "watch"}
        assert field.metadata["group"] in groups, name
        assert 0 < len(field.metadata["help"]) <= 66, name


def test_sources_have_names() -> None:
    found = config.sources({}, {"seed": 1})
    assert found == [
        SettingsSource("flag", {}),
        SettingsSource("environment", {}),
        SettingsSource("the script", {"seed": 1}),
    ]


class TestTimeline:
    def test_reads_horovod_timeline_variable(self) -> None:
        assert resolve({"HOROVOD_TIMELINE": "a.json"})[0].timeline == Path("a.json")
        assert resolve({"HOROVOD_TIMELINE": "DYNAMIC"})[0].timeline is None
        assert resolve({"HOROVOD_TIMELINE": ""})[0].timeline is None
        ours = {"HOROVOD_TIMELINE": "a.json", "SHARDWISE_TIMELINE": "b.json"}
        assert resolve(ours)[0].timeline == Path("b.json")

    def test_refuses_folder_as_timeline(self) -> None:
        with pytest.raises(ConfigError, match="--timeline takes the name of a file"):
            resolve(flags(timeline="folder/"))


def test_flags_alone_lists_every_flag_of_run() -> None:
    spelt = {word for flag in flags_of("run") for word in flag.opts if "_" not in word}
    assert spelt - {"-hostfile"} == set(config.FLAGS_ALONE)
