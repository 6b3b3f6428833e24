"""Damages checkpoints of other libraries at random: each read ends in equal values or a sentence.

A seed chooses a format, a damage and a file. The checkpoint is then opened, checked and read like
an import does.
"""

import random
import shutil
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from shardwise.checkpoint.formats.comparing import tensors_of
from shardwise.checkpoint.formats.optimizers import fields_alone
from shardwise.checkpoint.formats.recognise import open_checkpoint
from shardwise.errors import CheckpointError
from tests import foreign_checkpoints as foreign
from tests import seeded
from tests.checkpoint_damage import damaging
from tests.seeded import Result

COMMAND = seeded.Command(
    name="foreign_damage",
    about="Damage checkpoints of other libraries at random, and read them.",
    thing="damage",
    things="damages",
    fine=("sentence", "equal", "other names", "not summed there"),
    wrong=("silent difference", "several lines", "traceback"),
)

DAMAGES: dict[str, Callable[[random.Random, Path], str]] = {
    "flip": damaging.flip,
    "flip early": damaging.flip_early,
    "truncate": damaging.truncate,
    "extend": damaging.extend,
    "blank": damaging.blank,
    "lose": damaging.lose,
}
"""Damages to the files of a folder, by name."""

UNSUMMED = {
    "safetensors": (".safetensors",),
    "dcp": (".metadata",),
    "torchtitan": (".metadata",),
    "composer sharded": (".metadata",),
    "lightning sharded": (".metadata",),
    "megatron": (".metadata", ".txt"),
    "nanotron": (".safetensors", ".json", ".txt"),
}
"""Files of a format, by their ends, whose format has no checksum that could show a change."""


def _safetensors(folder: Path, model: torch.nn.Module, optimizer: Any) -> Path:
    del optimizer
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    return folder


WRITERS: dict[str, foreign.Writer] = {
    "torch dict": foreign.torch_dict,
    "dcp": foreign.dcp_nested,
    "torchtitan": foreign.torchtitan,
    "fsdp1 full": foreign.fsdp1_full,
    "safetensors": _safetensors,
}
"""The formats that are damaged."""

MORE: dict[str, foreign.Writer] = {
    "timm": foreign.timm,
    "composer sharded": foreign.composer_sharded,
    "lightning sharded": foreign.lightning_sharded,
    **foreign.OF_LAYERS,
}
"""Further formats, which every fourth seed damages."""


Content = tuple[dict[str, torch.Tensor], Any]


def read(path: Path) -> Content:
    """Read everything, as an import does. Returns all tensors by name, and the fields."""
    with open_checkpoint(path) as found:
        for damage in found.damages(0, 1):
            raise CheckpointError(damage)
        tensors = {name: leaf.value() for name, leaf in tensors_of(found, all_names=True).items()}
        fields = fields_alone(found)[1]
        fields.pop("written_by", None)
        return tensors, fields


class Runner:
    """Writes a checkpoint of each format into `folder`, and damages copies of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Path, str, Content]] = {}
        for name, writer in {**WRITERS, **MORE}.items():
            home = folder / name.replace(" ", "-")
            home.mkdir(parents=True)
            model = foreign.build(kind=foreign.Layers if name in foreign.OF_LAYERS else foreign.Net)
            optimizer = foreign.optimizer_of(model, "one")
            foreign.train(model, optimizer, 0, foreign.STEPS)
            path = writer(home, model, optimizer)
            self._made[name] = home, str(path.relative_to(home)), read(path)

    def __call__(self, seed: int) -> Result:
        """Damage a copy according to `seed`, and judge how it is read."""
        rng = random.Random(seed)
        name = rng.choice(list(WRITERS if seed % 4 else MORE))
        home, inside, wanted = self._made[name]
        copy = self._folder / f"damaged-{seed}"
        shutil.copytree(home, copy)
        path = copy / inside
        kind = rng.choice(list(DAMAGES))
        try:
            place = path if path.is_dir() else copy
            if any(child.is_dir() for child in place.iterdir()):
                files = [file for file in place.rglob("*") if file.is_file()]
                place = rng.choice(sorted(files)).parent
            words = DAMAGES[kind](rng, place)
            outcome, said, story = judge(path, wanted, words, UNSUMMED.get(name, ()))
        finally:
            shutil.rmtree(copy)
        return Result(
            kind=outcome,
            of=f"{name}, {kind}",
            words=f"{name}: {words}: {said}",
            story=story,
        )


def judge(
    path: Path, wanted: Content, words: str, unsummed: tuple[str, ...]
) -> tuple[str, str, str]:
    """Return kind, words and details of the result of reading `path`."""
    try:
        tensors, fields = read(path)
    except CheckpointError as error:
        said = str(error)
        # One sentence or two for people, not a dump of Python objects over several lines.
        fine = "\n" not in said and len(said) < 700
        return ("sentence" if fine else "several lines"), said, said
    except Exception as error:
        return "traceback", repr(error)[:200], traceback.format_exc()
    if _are_equal(tensors, wanted[0]) and str(fields) == str(wanted[1]):
        return "equal", "equal values", ""
    if tensors.keys() != wanted[0].keys():
        # A load compares the names with those of the model, and refuses others.
        return "other names", str(sorted(tensors.keys() ^ wanted[0].keys()))[:200], ""
    if any(end in words for end in unsummed):
        return "not summed there", "the format has no checksum for it", ""
    return "silent difference", "other values", str((tensors, fields))[:4000]


def _are_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name])
        for name, value in one.items()
    )
