"""Records facts about a stock script that are not part of its training. Some causes depend on them.

| fact    | content                                                                  |
|---------|--------------------------------------------------------------------------|
| groups  | reductions that the script performs: name and size of the group          |
| reduced | scalars that the script reduces in an evaluation, with its row count     |
| printed | lines that the script prints in an evaluation                            |
| saves   | tensors that the script saves under parameter names                      |
| kinds   | class of each parameter's module                                         |
| split   | names of parameters that are split over ranks                            |
| static  | whether the script uses DistributedDataParallel with static_graph=True   |
"""

from __future__ import annotations

import builtins
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.tools.verify.stock import readers

PRINTED = 200
"""Maximum number of printed lines to record."""


class ScriptFacts:
    """Collects facts about one process, by patching torch functions.

    Args:
        is_here: Returns whether the current process is the recording one.
        evaluated: Returns the current evaluation's row count, or 0 during training.
        note: Adds an event to the current step.
        step: Returns the number of completed steps.
    """

    def __init__(
        self,
        is_here: Callable[[], bool],
        evaluated: Callable[[], int],
        note: Callable[[str], None],
        step: Callable[[], int],
    ) -> None:
        self._is_here, self._evaluated, self._note, self._step = is_here, evaluated, note, step
        self._groups: Counter[str] = Counter()
        self._reduced: list[dict[str, Any]] = []
        self._printed: list[dict[str, Any]] = []
        self._saves: list[dict[str, Any]] = []
        self._drawn_at = -1
        self._has_static_graph = False
        self._parameters: dict[str, Tensor] = {}
        self._kinds: dict[str, str] = {}

    def follow(self) -> None:
        """Start collecting facts."""
        distributed = torch.distributed
        if distributed.is_available():
            for name in ("all_reduce", "reduce", "reduce_scatter_tensor"):
                _before(distributed, name, self._reduces(name))
            _before(nn.parallel.DistributedDataParallel, "_set_static_graph", self._is_static)
        for name in ("dropout", "alpha_dropout"):
            _before(nn.functional, name, self._draws)
        _before(nn.functional, "scaled_dot_product_attention", self._draws_in_attention)
        _before(builtins, "print", self._prints)
        _before(torch, "save", self._saves_tensors)

    def know(self, models: list[tuple[str, nn.Module]], names: Mapping[Tensor, str]) -> None:
        """Record which modules an optimizer's parameters belong to."""
        self._parameters |= {name: parameter for parameter, name in names.items()}
        for _, model in models:
            for module in model.modules():
                for parameter in module.parameters(recurse=False):
                    if parameter in names:
                        self._kinds[names[parameter]] = type(module).__name__

    def plain(self) -> dict[str, Any]:
        """Return all facts as values that JSON can represent."""
        return {
            "groups": dict(self._groups),
            "reduced": self._reduced,
            "printed": self._printed[:PRINTED],
            "saves": self._saves,
            "kinds": self._kinds,
            "static": self._has_static_graph,
            "split": [name for name, p in self._parameters.items() if _is_split(p)],
        }

    def _is_static(self, *args: Any, **kwargs: Any) -> None:
        self._has_static_graph = True

    def _reduces(self, name: str) -> Callable[..., None]:
        def note(*args: Any, **kwargs: Any) -> None:
            if not self._is_here():
                return
            group = kwargs.get("group")
            self._groups[f"{name} {torch.distributed.get_world_size(group)}"] += 1
            tensor = args[0] if args else kwargs.get("tensor")
            if not self._evaluated() or not isinstance(tensor, Tensor) or tensor.numel() > 8:
                return
            values = [float(each) for each in tensor.detach().flatten()]
            rows = self._evaluated()
            self._reduced.append({"step": self._step(), "values": values, "rows": rows})

        return note

    def _draws(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> None:
        """Record the random state from which the first dropout of a step draws."""
        if self._drawn_at == self._step() or not self._is_here() or not torch.is_grad_enabled():
            return
        if not p or not training:
            return
        self._drawn_at = self._step()
        state = torch.get_rng_state().numpy().tobytes()
        self._note(f"dropout {hashlib.blake2b(state, digest_size=8).hexdigest()}")

    def _draws_in_attention(self, *args: Any, **kwargs: Any) -> None:
        # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, ...)
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        self._draws(torch.empty(0), rate)

    def _prints(self, *args: Any, **kwargs: Any) -> None:
        if self._is_here() and self._evaluated() and kwargs.get("file") is None:
            text = " ".join(map(str, args))
            self._printed.append({"step": self._step(), "text": text})

    def _saves_tensors(self, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self._is_here():
            return
        entries = []
        for name, tensor in _named_tensors(value):
            parameter = self._parameters.get(name)
            if parameter is None:
                continue
            own, saved = readers.local(parameter).detach(), readers.local(tensor).detach()
            entries.append(
                {
                    "name": name,
                    "has": saved.numel(),
                    "of": parameter.numel(),  # of the whole tensor, for a DTensor
                    # A copy may have another dtype, or be on another device.
                    "is_parameter": saved.shape == own.shape and bool((saved.to(own) == own).all()),
                }
            )
        if entries:
            self._saves.append({"step": self._step(), "entries": entries})


def _before(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Patch `owner.name` so that it first calls `note` with the same arguments."""
    plain = getattr(owner, name)

    @wraps(plain)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # torch.compile would trace the note
            note(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(owner, name, noted)


def _named_tensors(value: Any, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dictionaries, each with its innermost key as a plain name."""
    if isinstance(value, Mapping) and depth:
        for key, each in value.items():
            if isinstance(each, Tensor) and isinstance(key, str):
                if each.layout is torch.strided and not each.is_meta:
                    yield readers.plain_name(key), each
            else:
                yield from _named_tensors(each, depth - 1)


def _is_split(parameter: Tensor) -> bool:
    """Return whether the parameter is a DTensor that is sharded along a mesh axis."""
    placements = getattr(parameter, "placements", ())
    return readers.local(parameter).numel() < parameter.numel() and bool(placements)
