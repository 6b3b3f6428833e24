"""What checkpoint.json has of the optimizers: read, compared with those here, given to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, optim

from shardwise.checkpoint import plain
from shardwise.checkpoint.names import listed
from shardwise.engine.inventory import Lending
from shardwise.errors import BrokenCheckpoint, CheckpointMismatch


@dataclass(frozen=True)
class Numbers:
    """What stands in checkpoint.json of the optimizers: by optimizer and group the options, by
    parameter what is one value, and the parameters at which segments were cut."""

    options: list[list[dict[str, Any]]]
    state: dict[str, dict[str, Any]]
    borders: list[str]

    def take_options(self, faces: Sequence[optim.Optimizer]) -> None:
        """Let the groups have the options (rates, what schedulers keep there) that were saved."""
        for face, several in zip(faces, self.options, strict=True):
            for group, saved in zip(face.param_groups, several, strict=True):
                for key, value in saved.items():
                    now = group.get(key)
                    if isinstance(now, Tensor) and isinstance(value, Tensor):
                        now.copy_(value)  # a rate that is a tensor may be part of a CUDA graph
                    else:
                        group[key] = value


def read(fields: Mapping[str, Any]) -> Numbers:
    """Raises BrokenCheckpoint for what cannot have been written."""
    try:
        return Numbers(
            [
                [{key: plain.decode(v) for key, v in g["options"].items()} for g in told["groups"]]
                for told in fields["optimizers"]
            ],
            {
                name: {key: plain.decode(value) for key, value in entries.items()}
                for name, entries in fields["state"].items()
            },
            [str(name) for name in fields["borders"]],
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise BrokenCheckpoint(
            f"The optimizers in checkpoint.json are not as they are written ({error}). Take "
            "another checkpoint."
        ) from error


def check(lending: Lending, fields: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch for other optimizers, groups or parameters in them than those that
    were saved."""
    classes = [(type(o).__name__, len(o.param_groups)) for o in lending.recipe.optimizers]
    try:
        there = [(told["class"], len(told["groups"])) for told in fields["optimizers"]]
    except (KeyError, TypeError) as error:
        raise BrokenCheckpoint(
            "The optimizers in checkpoint.json have no class or groups."
        ) from error
    if classes != there:

        def said(several: list[tuple[str, int]]) -> str:
            return " and ".join(f"{name} of {count} group(s)" for name, count in several)

        raise CheckpointMismatch(
            f"The checkpoint is of the optimizers {said(there)}, and here are {said(classes)}. "
            "Make the same ones, or load the model alone: engine.load(path, model_only=True)."
        )
    _check_groups(lending, fields)
    lost = sorted(set(fields["state"]) - set(lending.optimized.values()))
    if lost:
        raise CheckpointMismatch(
            f"The checkpoint has optimizer state of parameters that are in no optimizer here: "
            f"{listed(lost)}. Give the optimizer the same ones, or load the model alone: "
            "model_only=True."
        )


def _check_groups(lending: Lending, fields: Mapping[str, Any]) -> None:
    """Options go to groups by their place: raise CheckpointMismatch where that is another's."""
    there = {
        name: place
        for place, group in enumerate(_groups(told["groups"] for told in fields["optimizers"]))
        for name in group.get("parameters", ())
    }
    names = lending.optimized
    faces = lending.recipe.optimizers
    for place, group in enumerate(_groups(face.param_groups for face in faces)):
        for name in (names[p] for p in group["params"]):
            if there.get(name, place) != place:
                raise CheckpointMismatch(
                    f"{name} is in parameter group {place} here and was in group {there[name]} "
                    "when the checkpoint was saved (counted over all optimizers), so it would get "
                    "the rate and the options of others. Make the groups in the same order, or "
                    "load the model alone: engine.load(path, model_only=True)."
                )


def _groups(several: Iterable[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    return itertools.chain.from_iterable(several)
