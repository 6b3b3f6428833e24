"""The ranks that share out the layers of a model, as this one sees them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from shardwise.collectives import Collectives
from shardwise.errors import ModelError, UsageError
from shardwise.model import meta
from shardwise.parallel.pipeline.atoms import Cut
from shardwise.parallel.pipeline.channels import Channels
from shardwise.parallel.pipeline.forwards import (
    AtomForward,
    FloatingForward,
    Forward,
    ModelForward,
    refused,
)
from shardwise.parallel.pipeline.values import Following, Run, fakes, stand_in, unsaved
from shardwise.randomness import seed_from


class Line:
    """The stages of a model over the ranks of `group`, stage s on rank s % size.

    It stands in for the forwards of `model` and its atoms, and moves what goes between stages.
    """

    cut: Cut

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.channels = Channels(group, self.rank_of)
        self.stages: frozenset[int] = frozenset()
        self.run = Run(self.stages)
        self.is_whole = False
        """Whether this rank has the whole model for now, so that forwards are the plain ones."""
        self.writes = False
        """Whether what is written into it then is taken in."""
        self._following = Following(self)
        self._seed, self._draws = 0, 0
        self._forms: dict[Any, Any] = {}
        self._lent: set[nn.Parameter] = set()
        self._uses_outside = False
        self._forwards: list[Forward] = []
        self._handles: list[RemovableHandle] = []

    def share(self, cut: Cut) -> None:
        """Know which stage has what. Collective."""
        self.cut = cut
        self.stages = frozenset(range(self.group.rank, cut.stages, self.group.size))
        self.run = Run(self.stages)

    def rank_of(self, stage: int) -> int:
        """The rank of `group` that has a stage."""
        return stage % self.group.size

    def has(self, parameter: Tensor) -> bool:
        """Whether this rank trains `parameter`."""
        owner = self.cut.owners.get(parameter)  # type: ignore[call-overload]
        return owner is None or owner in self.stages

    def trained(self) -> list[nn.Parameter]:
        """What gradients come to on this rank."""
        own = [p for p, owner in self.cut.owners.items() if owner in self.stages]
        return [p for p in [*own, *self.borrowed] if p.requires_grad]

    @property
    def shares_at_home(self) -> bool:
        """Whether two stages of one rank use the same parameter."""
        return any(
            len({self.rank_of(s) for s in (owner, *self.cut.lent[p])}) <= len(self.cut.lent[p])
            for p, owner in self.cut.owners.items()
            if p in self.cut.lent
        )

    def stage_of_module(self, module: nn.Module) -> int:
        """The stage that runs `module`, or the first one that runs a part of it."""
        for number, atom in enumerate(self.cut.atoms):
            if any(module is inner for inner in atom.module.modules()):
                return self.cut.stage_of(number)
        inside = set(module.modules())
        numbers = [n for n, atom in enumerate(self.cut.atoms) if atom.module in inside]
        return self.cut.stage_of(min(numbers, default=0))

    # -- standing in for forwards -----------------------------------------------------------

    def install(self, model: nn.Module) -> None:
        """Stand in for the forwards of `model` and its layers."""
        for number, atom in enumerate(self.cut.atoms):
            stage = self.cut.stage_of(number)
            self._forwards.append(AtomForward(self, atom.module, atom.name, stage))
        for module in self.cut.floating:
            self._forwards.append(FloatingForward(self, module))
        if model not in {atom.module for atom in self.cut.atoms}:
            self._forwards.append(ModelForward(self, model))
        for module in model.modules():
            if any(is_elsewhere(p) for p in module._parameters.values() if p is not None):
                self._handles += [
                    module.register_state_dict_pre_hook(_refuse_to_tell),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(_refuse_to_load),  # type: ignore[no-untyped-call]
                ]

    def reset(self) -> None:
        """Forget what is under way, and the ways on which it may still come."""
        self.run = Run(self.stages)
        self._lent.clear()
        self.channels.close()

    def close(self) -> None:
        """Give the modules their own forwards back, and leave the ways between stages."""
        for forward in reversed(self._forwards):
            forward.undo()
        self._forwards.clear()
        for handle in self._handles:
            handle.remove()
        self.channels.close()

    # -- runs -------------------------------------------------------------------------------

    def begin(self, seed: int) -> None:
        """What is drawn from now on follows from `seed`; values of a step before are forgotten."""
        self._seed, self._draws = seed, 0
        self.run = Run(self.stages)

    def changed(self) -> None:
        """Parameters have changed: what is lent is to be sent again."""
        self._lent.clear()

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Inside the block forwards are those of `run`."""
        before, self.run = self.run, run
        try:
            yield
        finally:
            self.run = before

    def draw(self) -> int:
        """A number for what is drawn next, alike on all ranks of the line."""
        self._draws += 1
        return seed_from("stages", self._seed, self._draws)

    def sow(self, *coordinates: int | str) -> None:
        """Set the generators of this rank."""
        seed = seed_from(*coordinates)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)

    # -- moves ------------------------------------------------------------------------------

    def owner(self, parameter: Tensor) -> int | None:
        """The stage that trains a parameter; None for one that is not the model's."""
        return self.cut.owners.get(parameter)  # type: ignore[call-overload, no-any-return]

    def open(self, source: int, target: int) -> None:
        """Make the ways between two stages, on all ranks: not while a schedule runs."""
        if self.channels.are_open(source, target):
            return
        if self.run.planned and not self.run.trying:
            raise self._another_way(source, target)
        self.channels.open("forward", source, target)
        self.channels.open("backward", target, source)

    def _another_way(self, source: int, target: int) -> UsageError:
        return UsageError(
            f"Stage {source} has something for stage {target} that it did not have in the first "
            "micro-batch. Let the model's forward take the same way through its layers for every "
            "batch, or use a plain loop: loss = ...; engine.backward(loss)."
        )

    def settle(self) -> None:
        """Return when what was sent has come."""
        self.channels.settle()

    def tidy(self) -> None:
        """Forget what has come, where a plain loop runs forwards only."""
        if not self.run.planned:
            self.channels.tidy()

    def gradient(self, source: int, target: int, value: Tensor) -> Tensor:
        """The gradient of a value that `source`, here, has sent to `target`."""
        return self.channels.receive("backward", target, source, value, self.device)

    def return_gradient(self, source: int, target: int, leaf: Tensor) -> None:
        """Send the gradient of a value that `target`, here, has of `source`."""
        grad, leaf.grad = leaf.grad, None
        self.channels.send(
            "backward", target, source, torch.zeros_like(leaf) if grad is None else grad
        )

    def send(self, source: int, target: int, value: Tensor) -> None:
        """Send a value forward."""
        self.channels.send("forward", source, target, value.detach())
        if value.requires_grad and torch.is_grad_enabled():
            self.run.sent.append((source, target, value))

    def receive(self, source: int, target: int, like: Tensor) -> Tensor:
        """Receive a value: a leaf of this rank's graph, where it carries gradients."""
        value = self.channels.receive("forward", source, target, like, self.device)
        if like.requires_grad and torch.is_grad_enabled():
            value.requires_grad_()
            self.run.received.append((source, target, value))
        return value

    def spread(self, source: int, value: Tensor | None, like: Tensor) -> Tensor:
        """What `source` has, on all ranks. Collective."""
        if value is None:
            value = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        value = value.detach().contiguous()
        rank = self.rank_of(source)
        near = value.to(self.group.small_device) if value.device.type == "cpu" else value
        if near.numel():
            self.group.broadcast(near.view(-1), rank).wait()
        return near.to(value.device)

    def lend(self, atom: nn.Module, stage: int) -> None:
        """Let stages that use the parameters of another one have them, once after each change."""
        for parameter in atom.parameters():
            if parameter in self.cut.lent:
                if self.run.trying or not self.run.planned:
                    self._open_for(parameter)
                if not self.run.trying:
                    self._lend(parameter, stage)

    def borrow(self, parameter: nn.Parameter, stage: int) -> None:
        """The same of one parameter, which is used outside of all layers."""
        several = self.cut.lent.setdefault(parameter, [])
        self._uses_outside = True
        if stage not in several:
            if self.run.planned and not self.run.trying:
                raise self._another_way(self.cut.owners[parameter], stage)
            several.append(stage)
            several.sort()
        if self.run.trying or not self.run.planned:
            self._open_for(parameter)
        if not self.run.trying:
            self._lend(parameter, self.cut.owners[parameter])
            self._lend(parameter, stage)

    def _lend(self, parameter: nn.Parameter, stage: int) -> None:
        """Send or receive a parameter, if `stage` is here and has not done so yet."""
        if parameter in self._lent or stage not in self.run.stages:
            return
        owner = self.cut.owners[parameter]
        if stage == owner:
            self._lent.add(parameter)
            with self.inside():
                for target in self._borrowers(parameter):
                    self.channels.send("lent", owner, target, parameter.detach())
        elif not self.has(parameter):
            self._lent.add(parameter)
            with torch.no_grad(), self.inside():
                parameter.data = self.channels.receive(
                    "lent", owner, self._first_here(parameter), parameter, self.device
                )

    def _open_for(self, parameter: nn.Parameter) -> None:
        owner = self.cut.owners[parameter]
        for borrower in self._borrowers(parameter):
            self.channels.open("lent", owner, borrower)
            self.channels.open("back", borrower, owner)

    def _borrowers(self, parameter: nn.Parameter) -> list[int]:
        """The first stage of each rank that borrows a parameter."""
        ranks = {self.rank_of(self.cut.owners[parameter])}
        found = []
        for stage in self.cut.lent[parameter]:
            if self.rank_of(stage) not in ranks:
                ranks.add(self.rank_of(stage))
                found.append(stage)
        return found

    def _first_here(self, parameter: nn.Parameter) -> int:
        return next(s for s in self.cut.lent[parameter] if s in self.stages)

    @property
    def borrowed(self) -> list[nn.Parameter]:
        """What this rank uses and another one trains."""
        return [
            p
            for p, stages in self.cut.lent.items()
            if not self.has(p) and not self.stages.isdisjoint(stages)
        ]

    def give_back(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Send the owners the gradients of what is borrowed."""
        for parameter in filter(_is_trained, self.borrowed):
            if (gradient := gradients.get(parameter)) is None:
                gradient = torch.zeros_like(parameter)
            owner, stage = self.cut.owners[parameter], self._first_here(parameter)
            self.channels.send("back", stage, owner, gradient)

    def take_back(self, stage: int) -> list[tuple[nn.Parameter, Tensor]]:
        """The gradients of what `stage`, here, has lent, one of each borrower."""
        return [
            (p, self.channels.receive("back", borrower, stage, p, self.device))
            for p in self.cut.lent
            if self.cut.owners[p] == stage and _is_trained(p)
            for borrower in self._borrowers(p)
        ]

    # -- having, letting go, putting together -------------------------------------------------

    def let_go(self) -> None:
        """Free the memory of what other ranks train: it is NaN here, in the same shape."""
        for parameter in self.cut.owners:
            if not self.has(parameter):
                self._rest(parameter)

    def leave_unbuilt(self) -> None:
        """The same of what was built without memory and is another rank's."""
        for parameter in self.cut.owners:
            if parameter.is_meta and not self.has(parameter):
                nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=self.device)
                meta.make_real(parameter, nothing.expand(parameter.shape))

    def _rest(self, parameter: nn.Parameter) -> None:
        fill = torch.nan if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
        parameter.data = parameter.data.new_full((), fill).expand(parameter.shape)

    def _bring(self, parameter: nn.Parameter, shape: torch.Size | tuple[int, ...]) -> None:
        """Have the values of its owner. Collective."""
        owner = self.rank_of(self.cut.owners[parameter])
        if owner == self.group.rank:
            value = parameter.data.contiguous()
        else:
            value = torch.empty(shape, dtype=parameter.dtype, device=self.device)
        if value.numel():
            self.group.broadcast(value.view(-1), owner).wait()
        if owner != self.group.rank:
            parameter.data = value

    @contextmanager
    def wholes(
        self,
        model: nn.Module,
        chosen: Sequence[nn.Parameter],
        shapes: Mapping[nn.Parameter, tuple[int, ...]],
        *,
        write: bool,
    ) -> Iterator[None]:
        """Inside the block this rank has all of `chosen`, and forwards are plain. Collective.

        `shapes` are those of what layers split further, where that is whole now.
        """
        several = [p for p in dict.fromkeys(chosen) if p in self.cut.owners]
        held = {p: p.data for p in several if not self.has(p)}
        with torch.no_grad():
            for parameter in several:
                self._bring(parameter, shapes.get(parameter, tuple(parameter.shape)))
            self.bring_buffers(model)
        self.is_whole, self.writes = True, write
        try:
            yield
        finally:
            self.is_whole = self.writes = False
            for parameter, value in held.items():
                parameter.data = value
            if write:
                self.changed()

    def bring_buffers(self, model: nn.Module) -> None:
        """Have the buffers of every module as the rank has them that runs it. Collective."""
        for module in model.modules():
            source = self.rank_of(self.stage_of_module(module))
            for buffer in module._buffers.values():
                if buffer is not None and buffer.numel():
                    flat = buffer.detach().contiguous().view(-1).view(torch.uint8)
                    near = flat.to(self.group.small_device)
                    self.group.broadcast(near, source).wait()
                    buffer.copy_(near.to(buffer.device).view(buffer.dtype).view(buffer.shape))

    def states_elsewhere(
        self, held: Mapping[nn.Parameter, Any], optimizers: Sequence[optim.Optimizer]
    ) -> dict[nn.Parameter, Any]:
        """The optimizers' state of what other ranks train. Collective."""
        places = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        mine = {
            number: _on_cpu(held[p]) for number, p in enumerate(places) if p in held and self.has(p)
        }
        found: dict[nn.Parameter, Any] = {}
        for rank, told in enumerate(self.group.gather_objects(mine)):
            if rank != self.group.rank:
                for number, state in told.items():
                    found[places[number]] = {
                        key: value.to(self.device)
                        if isinstance(value, Tensor) and value.ndim
                        else value
                        for key, value in state.items()
                    }
        return found

    def undo(
        self,
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        shapes: Mapping[nn.Parameter, tuple[int, ...]],
    ) -> None:
        """Give every rank the whole model, and all of the optimizers' state. Collective."""
        with torch.no_grad():
            for parameter in self.cut.owners:
                self._bring(parameter, shapes.get(parameter, tuple(parameter.shape)))
            self.bring_buffers(model)
        held: dict[Any, Any] = {p: state for o in optimizers for p, state in o.state.items()}
        elsewhere = self.states_elsewhere(held, optimizers)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in elsewhere:
                        optimizer.state[parameter] = elsewhere[parameter]

    # -- forms ------------------------------------------------------------------------------

    def form_of(
        self,
        name: str,
        module: nn.Module,
        plain: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
    ) -> Any:
        """What the `plain` forward of a module that is elsewhere returns: stand-ins for tensors.

        Worked out once for each form of the arguments.
        """
        key = (
            *(name, module.training, torch.is_grad_enabled(), spec),
            torch.is_autocast_enabled(self.device.type),
            *(_form(leaf) for leaf in leaves),
        )
        found = self._forms.get(key)
        if found is None:
            found = self._forms[key] = self._work_out(name, module, plain, leaves, spec)
        out, forms = found
        made = [stand_in(form) if isinstance(form, Tensor) else form for form in forms]
        return pytree.tree_unflatten(made, out)

    def _work_out(
        self,
        name: str,
        module: nn.Module,
        plain: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
    ) -> Any:
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        before = torch.get_rng_state()
        with fakes, unsaved():
            stands = {
                key: stand_in(value.detach()).requires_grad_(value.requires_grad)
                for key, value in tensors.items()
            }
            likes = [stand_in(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(likes, spec)
            try:
                with self.plainly(), _without_hooks(module), _reparametrize_module(module, stands):
                    result = plain(*args, **kwargs)
            except Exception as error:
                raise ModelError(
                    f"{name} is on another worker, and what it returns cannot be worked out "
                    f"without its data: {type(error).__name__}: {error}"
                ) from error
        torch.set_rng_state(before)
        flat, out = pytree.tree_flatten(result)
        return out, [
            stand_in(leaf.detach()).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in flat
        ]

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Inside the block forwards are the modules' own."""
        before, self.is_whole = self.is_whole, True
        try:
            with self._following.off():
                yield
        finally:
            self.is_whole = before

    def following(self) -> Any:
        """What follows parameters that are used outside of all layers, unless none is."""
        known = self.run.planned and not self.run.trying
        return nullcontext() if known and not self._uses_outside else self._following

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside the block operations are those of one stage."""
        with self._following.off():
            yield


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    plain = isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device, type(None)))
    return leaf if plain else type(leaf)


def is_elsewhere(parameter: Tensor) -> bool:
    """Whether another rank has the values of `parameter`."""
    return parameter.numel() > 1 and parameter.untyped_storage().nbytes() == parameter.itemsize


def _refuse_to_tell(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    del prefix, keep_vars
    if any(is_elsewhere(p) for p in module._parameters.values() if p is not None):
        raise refused("state_dict()", "to read or copy it")


def _refuse_to_load(module: nn.Module, state: Any, *_: Any) -> None:
    del state
    if any(is_elsewhere(p) for p in module._parameters.values() if p is not None):
        raise refused("load_state_dict()", "with write=True")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Inside the block nobody hears of the forwards of `module`."""
    held = [(inner, key, vars(inner)[key]) for inner in module.modules() for key in _HOOKS]
    try:
        for inner, key, _ in held:
            vars(inner)[key] = OrderedDict()
        yield
    finally:
        for inner, key, hooks in held:
            vars(inner)[key] = hooks


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
