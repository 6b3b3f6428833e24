"""Splits the experts of user-defined blocks, which are named in `expert_plan`, across ranks.

A plan maps patterns of module names to the options of the equivalent `sw.MoE`:

    {"blocks.*.moe": {"router": "gate", "experts": "experts", "top_k": 2}}

A trial compares each block with this `sw.MoE`, on random weights and tokens in fp64. Outputs and
all gradients must be equal. If they are, the `sw.MoE` replaces the block's `forward`. The block
keeps its class, its submodules and their names.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.model import module_hooks
from shardwise.parallel.expert.fused_experts import TOLERANCE
from shardwise.parallel.expert.moe import MoE

ExpertPlan = Mapping[str, Mapping[str, Any]]
"""Pattern of module names -> names of submodules and options of `sw.MoE`."""

_PARTS = {"router": "router", "experts": "experts", "shared": None}
"""Options that name submodules, with their defaults."""

_OPTIONS = ("top_k", "scores", "normalize", "scale")


class PlannedBlock:
    """A user-defined block with experts, and the equivalent `sw.MoE` built from its submodules."""

    def __init__(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> None:
        self.name, self.module, self._options = name, module, options
        self.layer = _layer_of(name, module, options)

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Run the `sw.MoE` on the block's only argument."""
        (x,) = (*args, *kwargs.values())
        self.layer.training = self.module.training
        return self.layer(x)  # type: ignore[no-any-return]

    def keep_whole(self) -> None:
        """Make the block a single unit, so that all of its parameters are gathered together."""
        module_hooks.replace(self.module, "is_one_unit", True)

    def connect(self) -> None:
        """Replace the block's `forward`."""
        module_hooks.replace(self.module, "forward", self)

    def disconnect(self) -> None:
        """Restore the block. Safe to call twice."""
        module_hooks.give_back(self.module, "forward", self)
        module_hooks.give_back(self.module, "is_one_unit", True)

    def why_not(self) -> str | None:
        """Return why the `sw.MoE` cannot replace the block, or None if a trial has succeeded."""
        forward = inspect.signature(type(self.module).forward).parameters.values()
        if len([p for p in forward if p.default is p.empty]) != 2:  # self and the tokens
            return "its forward takes more than the tokens"
        if any(True for _ in self.module.buffers()):
            return "it has buffers, which sw.MoE does not read"
        if not isinstance(self.layer.router, nn.Linear):
            return "its router is no nn.Linear"
        try:
            generator = torch.Generator().manual_seed(0)
            # The values are not needed, and a model on the meta device has none.
            twin = copy.deepcopy(self.module).to_empty(device="cpu").double()
            with torch.no_grad():
                for parameter in twin.parameters():
                    scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
                    parameter.normal_(std=scale, generator=generator)
            layer = _layer_of(self.name, twin, self._options).train(twin.training)
            # Enough tokens, so that every expert receives some.
            shape = (2, 4 * len(layer.experts), self.layer.router.in_features)
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            attributes = _attributes_of(twin)
            theirs = _results(twin, x, twin)
            if _attributes_of(twin) != attributes:
                return "its forward sets attributes, such as a loss, which sw.MoE does not set"
            ours = _results(layer, x, twin)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            return f"its trial failed ({type(error).__name__}: {error})"
        for name, one in ours.items():
            if one.shape != theirs[name].shape or not torch.allclose(
                one, theirs[name], rtol=TOLERANCE, atol=TOLERANCE
            ):
                return f"with these options, sw.MoE has another value of {name}"
        return None


def blocks_of(named: Iterable[tuple[str, nn.Module]], plan: ExpertPlan) -> list[PlannedBlock]:
    """Return the blocks that `plan` names. Raises ModelError if a pattern or option is invalid."""
    modules = list(named)
    found: dict[nn.Module, PlannedBlock] = {}
    for pattern, options in plan.items():
        matches = [(n, m) for n, m in modules if is_named(n, pattern)]
        if not matches:
            raise ModelError(f"expert_plan: no module is called {pattern}.")
        for name, module in matches:
            if module in found:
                raise ModelError(f"expert_plan: {name} matches several patterns. Keep one.")
            found[module] = PlannedBlock(name, module, options)
    return list(found.values())


def is_named(name: str, pattern: str) -> bool:
    """Return whether `pattern` matches `name`, component by component: `*` does not match a dot."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _layer_of(name: str, module: nn.Module, options: Mapping[str, Any]) -> MoE:
    """Return an `sw.MoE` built from the submodules of `module` that `options` names."""
    for option in options:
        if option not in (*_PARTS, *_OPTIONS):
            raise ModelError(
                f"expert_plan: {name} has the unknown option {option!r}. Options are "
                f"{', '.join((*_PARTS, *_OPTIONS))}."
            )
    if isinstance(module, MoE):
        raise ModelError(f"expert_plan: {name} is an sw.MoE already. Leave it out.")
    parts: dict[str, Any] = {}
    for part, default in _PARTS.items():
        path = options.get(part, default)
        try:
            parts[part] = None if path is None else module.get_submodule(path)
        except AttributeError:
            raise ModelError(
                f"expert_plan: {name} ({type(module).__name__}) has no submodule {path}. Name its "
                f'{part}: {{"{name}": {{"{part}": "..."}}}}.'
            ) from None
    others = {key: options[key] for key in _OPTIONS if key in options}
    return MoE(parts["router"], parts["experts"], shared=parts["shared"], **others)


def _attributes_of(module: nn.Module) -> list[dict[str, int]]:
    """Return the ids of the attributes of `module` and of each of its submodules."""
    return [{key: id(value) for key, value in vars(m).items()} for m in module.modules()]


def _results(run: nn.Module, x: Tensor, owner: nn.Module) -> dict[str, Tensor]:
    """Return the output of `run` on `x`, and the gradients of `x` and of `owner`'s parameters."""
    fresh = x.clone().requires_grad_()
    named = dict(owner.named_parameters())
    for parameter in named.values():
        parameter.requires_grad_()
    with torch.enable_grad():
        output = run(fresh)
        if not isinstance(output, Tensor):
            raise TypeError(f"its forward returns {type(output).__name__}, not a tensor")
        slope = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view_as(output)
        found = torch.autograd.grad(
            output, [fresh, *named.values()], slope, materialize_grads=True, allow_unused=True
        )
    names = ["the gradient of the input", *(f"the gradient of {name}" for name in named)]
    return {"the output": output.detach(), **dict(zip(names, found, strict=True))}
