"""Copies and pickles of a model in an engine contain none of our objects."""

import copy
import io
import pickletools
import zipfile

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.distributed.sharded import Stack, adamw, batch, seeded

SETTINGS = {
    "replicated": {},
    "sharded state": {"zero": 2},
    "sharded": {"zero": 3, "bucket_mb": 0.001},
    "mixed": {"precision": "bf16-mixed"},
    "cast": {"precision": "bf16", "zero": 3},
    "recomputed": {"activations": "recomputed", "zero": 3},
    "recomputed, replicated": {"activations": "recomputed"},
    "moved": {"offload_activations": "nvme"},
    "synchronised": {"sync_batch_norm": True},
    "averaged": {"ema_decay": 0.9},
}


class Normalised(Stack):
    """A model with BatchNorm and a user's hook."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_forward_hook(users_hook)

    def forward(self, x):
        return super().forward(self.norm(x))


def users_hook(module, args, output):
    """Do nothing. A user's hook, which every copy keeps."""


def modules_named_in(file):
    """Return the modules that a file of torch.save needs for its objects."""
    with zipfile.ZipFile(file) as held:
        pickled = held.read(next(n for n in held.namelist() if n.endswith("data.pkl")))
    codes = [(code.name, said) for code, said, _ in pickletools.genops(pickled)]
    return {said.split()[0] for name, said in codes if name == "GLOBAL"}


def copies_are_plain(world, settings, folder):
    model = seeded(Normalised) if "precision" not in settings else seeded(Normalised).float()
    if settings.get("offload_activations") == "nvme":
        settings = settings | {"offload_activations": f"nvme:{folder}"}
    engine = sw.Engine(model, adamw(model), **settings)
    x = batch(0).to(model.head.weight.dtype if "precision" not in settings else torch.float32)
    engine.backward(model(x).square().mean())
    engine.step()
    with engine.full_parameters():
        file = io.BytesIO()
        torch.save(model, file)
        twin = copy.deepcopy(model)
    assert not [n for n in modules_named_in(file) if n.startswith("shardwise")]
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for each in (loaded, twin) if "precision" not in settings else (loaded,):
        for module in each.modules():
            assert not any("shardwise" in type(v).__module__ for v in vars(module).values())
            hooks = {**module._forward_pre_hooks, **module._forward_hooks}
            assert set(hooks.values()) <= {users_hook}
        assert users_hook in each._forward_hooks.values()
        each.state_dict()
        each(x.to(each.head.weight.dtype)).sum().backward()
    engine.close()
    assert not {"__getstate__", "__deepcopy__", "forward"} & set(vars(model.blocks[0]))
    assert not {"__getstate__", "__deepcopy__", "forward"} & set(vars(model))


@pytest.mark.parametrize("name", SETTINGS)
def test_copies_are_plain(group, name, tmp_path):
    group(2)(copies_are_plain, SETTINGS[name], str(tmp_path))
