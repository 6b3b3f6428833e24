"""Weights that several stages use: trained by the first of them, lent to the others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from shardwise.model.precision import NARROW
from shardwise.parallel.pipeline.stages import Stages


class Loans:
    """What the ranks of `line` lend each other; sent again when parameters have `changed`."""

    def __init__(self, line: Stages) -> None:
        self._line = line
        self._lent: set[nn.Parameter] = set()

    def changed(self) -> None:
        """Parameters have changed: what is lent is to be sent again."""
        self._lent.clear()

    def lend(self, atom: nn.Module, stage: int) -> None:
        """Let stages that use the parameters of another one have them, once after each change."""
        for parameter in atom.parameters():
            if parameter in self._line.cut.lent:
                if self._line.run.trying or not self._line.run.planned:
                    self._open_for(parameter)
                if not self._line.run.trying:
                    self._lend(parameter, stage)

    def borrow(self, parameter: nn.Parameter, stage: int) -> None:
        """The same of one parameter, which is used outside of all layers."""
        several = self._line.cut.lent.setdefault(parameter, [])
        if stage not in several:
            if self._line.run.planned and not self._line.run.trying:
                raise self._line.another_way(self._line.cut.owners[parameter], stage)
            several.append(stage)
            several.sort()
        if self._line.run.trying or not self._line.run.planned:
            self._open_for(parameter)
        if not self._line.run.trying:
            self._lend(parameter, self._line.cut.owners[parameter])
            self._lend(parameter, stage)

    def _lend(self, parameter: nn.Parameter, stage: int) -> None:
        """Send or receive a parameter, if `stage` is here and has not done so yet."""
        if parameter in self._lent or stage not in self._line.run.stages:
            return
        owner = self._line.cut.owners[parameter]
        if stage == owner:
            self._lent.add(parameter)
            with self._line.inside():
                for target in self._borrowers(parameter):
                    self._line.channels.send(
                        self._kind("lent", parameter), owner, target, parameter.detach()
                    )
        elif not self._line.has(parameter):
            self._lent.add(parameter)
            with torch.no_grad(), self._line.inside():
                parameter.data = self._line.channels.receive(
                    self._kind("lent", parameter),
                    owner,
                    self._first_here(parameter),
                    parameter,
                    self._line.device,
                )

    def _open_for(self, parameter: nn.Parameter) -> None:
        owner = self._line.cut.owners[parameter]
        for borrower in self._borrowers(parameter):
            self._line.channels.open(self._kind("lent", parameter), owner, borrower)
            self._line.channels.open(self._kind("back", parameter), borrower, owner)

    def _borrowers(self, parameter: nn.Parameter) -> list[int]:
        """The first stage of each rank that borrows a parameter."""
        ranks = {self._line.rank_of(self._line.cut.owners[parameter])}
        found = []
        for stage in self._line.cut.lent[parameter]:
            if self._line.rank_of(stage) not in ranks:
                ranks.add(self._line.rank_of(stage))
                found.append(stage)
        return found

    def _first_here(self, parameter: nn.Parameter) -> int:
        return next(s for s in self._line.cut.lent[parameter] if s in self._line.stages)

    @property
    def borrowed(self) -> list[nn.Parameter]:
        """What this rank uses and another one trains."""
        return [
            p
            for p, stages in self._line.cut.lent.items()
            if not self._line.has(p) and not self._line.stages.isdisjoint(stages)
        ]

    def give_back(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Send the owners the gradients of what is borrowed."""
        for parameter in filter(_is_trained, self.borrowed):
            if (gradient := gradients.get(parameter)) is None:
                gradient = torch.zeros_like(parameter)
            owner, stage = self._line.cut.owners[parameter], self._first_here(parameter)
            self._line.channels.send(
                self._kind("back", parameter), stage, owner, gradient.to(_wide(parameter))
            )

    def take_back(self, stage: int) -> list[tuple[nn.Parameter, Tensor]]:
        """The gradients of what `stage`, here, has lent, one of each borrower."""
        found = []
        for parameter in self.of(stage):
            like = torch.empty(parameter.shape, dtype=_wide(parameter), device="meta")
            kind = self._kind("back", parameter)
            for borrower in self._borrowers(parameter):
                grad = self._line.channels.receive(kind, borrower, stage, like, self._line.device)
                found.append((parameter, grad.to(parameter.dtype)))
        return found

    def of(self, stage: int) -> list[nn.Parameter]:
        """What `stage` trains and ranks of others use."""
        cut = self._line.cut
        return [
            p for p in cut.lent if cut.owners[p] == stage and self._borrowers(p) and _is_trained(p)
        ]

    def _kind(self, way: str, parameter: nn.Parameter) -> str:
        """The messages of one weight: ranks may come to several in different orders."""
        return f"{way} {self._numbers[parameter]}"

    @cached_property
    def _numbers(self) -> dict[nn.Parameter, int]:
        return {parameter: number for number, parameter in enumerate(self._line.cut.owners)}


def _wide(parameter: Tensor) -> torch.dtype:
    """What gradients of a weight add up in, and travel as."""
    return torch.float32 if parameter.dtype in NARROW else parameter.dtype


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad
