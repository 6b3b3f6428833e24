"""What a model is cut into: the modules that stay in one piece, and which stage has each.

An *atom* is one of the model's repeated blocks, or a module outside of them that computes by
itself: an embedding, a norm, a head. Stages are rows of atoms in the order of registration. A
module without parameters (dropout, an activation) floats: it runs where its input is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.model.units import find_units

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, eq=False)
class Atom:
    """A module that one stage runs."""

    name: str
    module: nn.Module

    @property
    def size(self) -> int:
        """Elements of its parameters."""
        return sum(p.numel() for p in self.module.parameters())


@dataclass(frozen=True)
class Cut:
    """Which stage has what of a model: its atoms, and the parameters that each stage trains.

    A parameter of several stages is trained by the first of them and lent to the others.
    """

    atoms: Sequence[Atom]
    floating: Sequence[nn.Module]
    starts: Sequence[int]
    """By stage, its first atom."""
    loose: Mapping[nn.Parameter, int]
    """By parameter that lies in no atom, the atom before which it is used."""
    owners: dict[nn.Parameter, int] = field(default_factory=dict)
    lent: dict[nn.Parameter, list[int]] = field(default_factory=dict)
    """By tied parameter, the stages that use it beside its owner."""

    def __post_init__(self) -> None:
        users: dict[nn.Parameter, set[int]] = {}
        for number, atom in enumerate(self.atoms):
            for parameter in atom.module.parameters():
                users.setdefault(parameter, set()).add(self.stage_of(number))
        for parameter, number in self.loose.items():
            users.setdefault(parameter, set()).add(self.stage_of(number))
        for parameter, stages in users.items():
            first, *others = sorted(stages)
            self.owners[parameter] = first
            if others:
                self.lent[parameter] = others

    def stage_of(self, number: int) -> int:
        """The stage of an atom."""
        return sum(number >= start for start in self.starts) - 1

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.starts)

    def atoms_of(self, stage: int) -> Sequence[Atom]:
        """Those of a stage, in order."""
        ends = [*self.starts[1:], len(self.atoms)]
        return self.atoms[self.starts[stage] : ends[stage]]

    def in_words(self, stage: int) -> str:
        """The first and the last module of a stage."""
        names = [atom.name for atom in self.atoms_of(stage)]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def find(
    model: nn.Module, patterns: Sequence[str] | None
) -> tuple[list[Atom], list[nn.Module], dict[nn.Parameter, int]]:
    """The atoms of `model` in order, what floats, and the loose parameters, by the number of the
    first atom in the module that has them. `patterns` name the blocks, as `units` do."""
    blocks = {module for _, module in find_units(model, patterns)}
    around = {outer for outer in model.modules() if not blocks.isdisjoint(outer.modules())}
    atoms: list[Atom] = []
    floating: list[nn.Module] = []
    loose: dict[nn.Parameter, int] = {}
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, name: str) -> None:
        if module in seen:
            return
        seen.add(module)
        opens = module in around or isinstance(module, _LISTS) or module is model
        if module in blocks or not opens or not any(True for _ in module.children()):
            if next(module.parameters(), None) is None:
                floating.append(module)
            else:
                atoms.append(Atom(name, module))
            return
        for parameter in module._parameters.values():
            if parameter is not None:
                loose.setdefault(parameter, len(atoms))
        for key, child in module.named_children():
            walk(child, f"{name}.{key}" if name else key)

    walk(model, "")
    return atoms, floating, {p: min(n, len(atoms) - 1) for p, n in loose.items()}


def cut(
    model: nn.Module,
    stages: int,
    patterns: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    costs: Mapping[str, float] | None = None,
) -> Cut:
    """Cut `model` into `stages` rows of atoms: before the atoms that `names` name (patterns as of
    `units`), else so that the largest is as small as can be, by `costs` or by parameters.

    Raises ModelError for more stages than atoms, ConfigError for a name of no atom or of several.
    """
    atoms, floating, loose = find(model, patterns)
    if len(atoms) < stages:
        raise ModelError(
            f"{type(model).__name__} has {len(atoms)} layer(s) to share out "
            f"({_listed([atom.name or 'itself' for atom in atoms])}), fewer than {stages} stages. "
            "Start fewer with --pipeline, or name finer ones: --units 'encoder.layer.*'."
        )
    if names is not None:
        starts = [0, *(_named(atoms, name) for name in names)]
        if starts != sorted(set(starts)) or len(starts) != stages:
            raise ConfigError(
                f"--stages takes the first module of each stage but the first one, "
                f"{stages - 1} of them in the order of the layers, not {', '.join(names)}."
            )
    else:
        sizes = [costs[atom.name] if costs else float(atom.size) for atom in atoms]
        starts = balanced(sizes, stages)
        starts = with_something_to_train(starts, fresh_in(atoms))
    return Cut(atoms, floating, starts, loose)


def check_names(model: nn.Module, patterns: Sequence[str] | None, names: Sequence[str]) -> None:
    """Raise ConfigError for one of `names` at which no stage can begin; see `cut`."""
    found, _, _ = find(model, patterns)
    for name in names:
        _named(found, name)


def fresh_in(atoms: Sequence[Atom]) -> list[bool]:
    """By atom, whether it has a parameter to train that no earlier one has."""
    seen: set[nn.Parameter] = set()
    found = []
    for atom in atoms:
        own = {p for p in atom.module.parameters() if p.requires_grad} - seen
        found.append(bool(own))
        seen |= own
    return found


def with_something_to_train(starts: Sequence[int], fresh: Sequence[bool]) -> list[int]:
    """`starts`, stages without anything `fresh` begun earlier, as long as the one before keeps an
    atom."""
    moved = list(starts)
    for stage in range(len(moved) - 1, 0, -1):
        end = moved[stage + 1] if stage + 1 < len(moved) else len(fresh)
        while not any(fresh[moved[stage] : end]) and moved[stage] - 1 > moved[stage - 1]:
            moved[stage] -= 1
    return moved


def _named(atoms: Sequence[Atom], pattern: str) -> int:
    found = [n for n, atom in enumerate(atoms) if fnmatchcase(atom.name, pattern)]
    if len(found) == 1:
        return found[0]
    names = _listed([atom.name for atom in atoms])
    problem = f"is {len(found)} layers" if found else "names no layer"
    raise ConfigError(f"--stages: {pattern!r} {problem}. A stage begins at one of {names}.")


def _listed(names: Sequence[str], most: int = 8) -> str:
    few = ", ".join(names[:most])
    return few if len(names) <= most else f"{few} and {len(names) - most} more"


def balanced(sizes: Sequence[float], parts: int) -> list[int]:
    """Where each of `parts` rows of `sizes` begins, none empty, so that the largest sum is least;
    of those with that largest sum, the one whose sums of squares are least."""
    edges = [0.0, *accumulate(sizes)]
    best: dict[tuple[int, int], tuple[float, float, int]] = {(0, 0): (0.0, 0.0, 0)}
    for part in range(1, parts + 1):
        for end in range(part, len(sizes) - (parts - part) + 1):
            best[part, end] = min(_candidates(best, edges, part, end))
    starts, end = [], len(sizes)
    for part in range(parts, 0, -1):
        end = best[part, end][2]
        starts.append(end)
    return starts[::-1]


def _candidates(
    best: Mapping[tuple[int, int], tuple[float, float, int]],
    edges: Sequence[float],
    part: int,
    end: int,
) -> Iterator[tuple[float, float, int]]:
    for start in range(part - 1, end):
        if (before := best.get((part - 1, start))) is not None:
            size = edges[end] - edges[start]
            yield max(before[0], size), before[1] + size * size, start


def rows_of(starts: Sequence[int], count: int) -> list[range]:
    """The numbers in each row."""
    return [range(a, b) for a, b in pairwise([*starts, count])]
