"""Hints for other libraries' names, everywhere that Shardwise looks up a name."""

import inspect
from typing import Any

import accelerate
import pytest
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise import config
from shardwise.cli.main import main
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.errors import ConfigError
from shardwise.messages.other_libraries import HintsAtAttributes, hint

OURS = {
    name
    for each in (sw.Engine, sw.World, sw.Loader)
    for name in (*dir(each), *config.FIELDS, "rank", "size", "local_rank", "device")
}
"""What an engine, a world, a Loader or a setting has by the same name."""

WITHOUT_COUNTERPART = {
    # Names that users of the library seldom write, or that have no counterpart.
    "DDP": "dim gather join_device join_hook join_process_group scatter to_kwargs"
    " will_sync_module_buffers param_to_hook_all_reduce",
    "FSDP": "check_is_root flatten_sharded_optim_state_dict fsdp_modules get_state_dict_type"
    " ignored_modules ignored_states shard_placement_fn ignored_params dp_mesh_dims",
    "Accelerate": "context_parallel_rank deepspeed_ulysses_dl_adapter distributed_type"
    " fp8_backend is_composable_parallelism_enabled is_fsdp2 maybe_context_parallel non_blocking"
    " project_dir project_config register_load_state_pre_hook register_save_state_pre_hook"
    " save_iteration should_save_model use_seedable_sampler verify_device_map deepspeed_plugins"
    " kwargs_handlers",
    "Fabric": "call callbacks init_tensor logger plugins run to_device",
    "DeepSpeed": "config curriculum_learning_enabled data_efficiency_enabled dataloader_drop_last"
    " empty_partition_cache get_batch_info get_type global_samples managed_gradient_accumulation"
    " optimizer_name optimizer_params scale scheduler_name scheduler_params set_train_batch_size"
    " set_train_micro_batch_size sparse_tensor_module_names steps_per_print"
    " zero_optimization_partition_gradients zero_optimization_partition_weights"
    " zero_use_cpu_optimizer",
}


def public(cls: type, *also: Any) -> set[str]:
    """Attributes of a class that nn.Module has not, and the keywords that make one of it."""
    names = {name for name in dir(cls) if not hasattr(nn.Module, name)}
    for made in (cls, *also):
        names |= inspect.signature(made).parameters.keys()
    return {name for name in names if not name.startswith("_")} - {"kwargs", "args"}


@pytest.mark.parametrize(
    ("library", "names"),
    [
        ("DDP", public(DistributedDataParallel)),
        ("FSDP", public(FullyShardedDataParallel, fully_shard)),
        ("Accelerate", public(accelerate.Accelerator)),
        ("Fabric", public(Fabric)),
        ("DeepSpeed", {n for n in vars(DeepSpeedEngine) if not n.startswith("_")}),
    ],
)
def test_every_public_name_of_a_library_has_a_hint(library: str, names: set[str]) -> None:
    known = OURS | set(WITHOUT_COUNTERPART[library].split())
    assert [name for name in sorted(names - known) if hint(name) is None] == []


@pytest.mark.parametrize(
    "name",
    [
        "world_size",
        "all_reduce",
        "wait_for_everyone",
        "mixed_precision",
        "is_main_process",
        "state_dict",
        "save_checkpoint",
        "clip_grad_norm_",
    ],
)
def test_an_attribute_of_another_library_is_refused_with_what_to_write(name: str) -> None:
    class Part(HintsAtAttributes):
        size = 1

    with pytest.raises(AttributeError, match=f"'Part' object has no attribute '{name}'") as raised:
        getattr(Part(), name)
    assert str(hint(name)) in str(raised.value)
    assert not hasattr(Part(), name)
    with pytest.raises(AttributeError, match=r"attribute 'sizes'$"):
        _ = Part().sizes  # type: ignore[attr-defined]


def test_an_attribute_error_inside_a_property_keeps_its_words() -> None:
    class Part(HintsAtAttributes):
        @property
        def state_dict(self) -> int:
            return self.absent  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match=r"attribute 'absent'$"):
        _ = Part().state_dict


@pytest.mark.parametrize("cls", [sw.Engine, sw.World, sw.Loader])
def test_the_public_classes_have_hints(cls: type) -> None:
    with pytest.raises(AttributeError, match=r"world\.is_main"):
        _ = object.__new__(cls).is_main_process


def test_a_setting_of_another_library_is_refused_with_what_to_write() -> None:
    for name, wanted in [("zero_stage", "zero=0, 1, 2 or 3"), ("mixed_precision", "--precision")]:
        for source in ("the script", "file shardwise.toml"):
            said = str(config.unknown_key(name, config.FIELDS, source))
            assert wanted in said
            assert "Did you mean" not in said
    with pytest.raises(ConfigError, match="zero=0, 1, 2 or 3"):
        config.resolve(config.sources({"SHARDWISE_ZERO_STAGE": "3"}, {}))


def test_a_keyword_of_the_bridge_of_accelerate_is_refused_with_what_to_write() -> None:
    from shardwise.accelerate import Accelerator

    with pytest.raises(TypeError, match=r"Accelerator takes no zero_stage. Write zero=0, 1"):
        Accelerator(zero_stage=3)


def test_a_flag_of_another_library_is_refused_with_what_to_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given in ("--stage", "--zero-stage"):
        assert main(["run", "-n", "2", given, "3", "train.py"]) == 2
        assert "Write zero=0, 1, 2 or 3 (flag --zero)" in capsys.readouterr().err


def test_a_module_name_of_another_library_is_refused_with_what_to_write() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'DistributedDataParallel'\. Write eng"):
        _ = sw.DistributedDataParallel  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"cannot import name 'all_reduce'.*world\.sum"):
        from shardwise import all_reduce  # type: ignore[attr-defined] # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing_like_it'"):
        from shardwise import nothing_like_it  # type: ignore[attr-defined] # noqa: F401
    assert not hasattr(sw, "all_reduce")
    from shardwise import launch  # a submodule that has the name of a method of Fabric

    assert launch.__name__ == "shardwise.launch"
