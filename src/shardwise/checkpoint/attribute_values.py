"""Saves and restores an optimizer's attributes, and its state that belongs to no parameter.

Examples of attributes are counters, lists, tensors and wrapped optimizers. torch's `state_dict()`
does not contain them, so they would be reset on resume. They are saved as JSON. Larger tensors are
stored separately, and the JSON refers to them by name:

    optimizer.count = 7            "count": 7
    optimizer.slow = {w: tensor}   "slow": {"$map": [[{"$parameter": "0.weight"},
                                                      {"$stored": ["0.slow.0.weight", false]}]]}
    optimizer.base = AdamW(...)    "base": {"$optimizer": {"groups": ..., "state": ..., ...}}

A save contains only the attributes that have changed since the engine was created, because the
script sets all others. Loading fills existing containers, tensors and objects in place, so
references to them stay valid. It creates missing containers and tensors, but no other objects.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.checkpoint import json_values
from shardwise.checkpoint.json_values import NotPlain
from shardwise.checkpoint.spec_view import SpecView
from shardwise.checkpoint.tensor_names import listed
from shardwise.checkpoint.tracking import trackable
from shardwise.errors import BrokenCheckpoint, CheckpointMismatch, UsageError
from shardwise.model.optimizer_access import held
from shardwise.states.optimizer.optimizer_kind import attributes_of, common_state, is_known

_COMMON = "state"
"""Key of the state that belongs to no parameter. It is stored like an attribute."""

_MOST = 100_000
"""Maximum number of values per optimizer. An attribute beyond it probably refers to a dataset."""

_STATELESS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(type, functools.partial, torch.dtype, torch.device),
)

_OTHERS = {"_io", "_thread", "_weakref", "logging", "re", "shardwise", "threading", "torch"}
"""Packages whose objects (such as locks, loggers and groups of ranks) need not be saved."""

_MISSING = object()


def _objects_saved_elsewhere(optimizer: optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each part of the optimizer that is not saved as an attribute.

    Attributes may refer to these objects.
    """
    yield "optimizer", optimizer
    yield "held", held(optimizer)
    yield "param_groups", optimizer.param_groups
    for number, group in enumerate(optimizer.param_groups):
        yield f"param_groups.{number}", group
        yield f"param_groups.{number}.params", group["params"]


def _path_of(place: str, key: Any) -> str:
    """Return the path of the value under the encoded key `key` in the map at path `place`."""
    if isinstance(key, dict):
        key = next(iter(key.values()))
    return f"{place}.{key}" if isinstance(key, str) else f"{place}[{key}]"


@dataclass
class AttributeValues:
    """Snapshot of an optimizer's attributes.

    Args:
        fields: JSON encoding of each attribute, by attribute name.
        tensors: Separately stored tensors, by name.
        unsaved: Paths of the values that cannot be saved, by attribute name.
        marks: Objects to compare between snapshots, by attribute name. They are unequal if the
            attribute changed in a way that its JSON does not show.
    """

    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    unsaved: dict[str, list[str]]
    marks: dict[str, list[Any]]

    def digests(self) -> dict[str, str]:
        """Return a hash of each attribute, by name. It covers the attribute's stored tensors."""
        digests = {}
        for name, value in self.fields.items():
            content = hashlib.blake2b(repr(value).encode(), digest_size=16)
            for stored in _stored_names(value):
                data = self.tensors[stored].detach().cpu().contiguous()
                content.update(data.flatten().view(torch.uint8).numpy().tobytes())
            digests[name] = content.hexdigest()
        return digests

    def changed_since(self, initial: AttributeValues) -> AttributeValues:
        """Return a snapshot with only the attributes that differ from those in `initial`."""
        names = [
            name
            for name, value in self.fields.items()
            if value != initial.fields.get(name, _MISSING)
            or self.marks.get(name) != initial.marks.get(name)
        ]
        fields = {name: self.fields[name] for name in names}
        # Drop the tensors of unchanged attributes, so that they use no space in the checkpoint.
        wanted = {name for value in fields.values() for name in _stored_names(value)}
        return AttributeValues(
            fields,
            {name: value for name, value in self.tensors.items() if name in wanted},
            {name: self.unsaved[name] for name in names if name in self.unsaved},
            {},
        )


def _stored_names(value: Any) -> Iterator[str]:
    """Yield the names of the stored tensors to which an encoded value refers."""
    if isinstance(value, dict):
        if "$stored" in value:
            yield value["$stored"][0]
            return
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _stored_names(item)


def _is_map(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and not isinstance(pair[0], list)
        for pair in value
    )


def _is_pair(value: Any, first: type, second: type) -> bool:
    is_two = isinstance(value, list) and len(value) == 2
    return is_two and isinstance(value[0], first) and isinstance(value[1], second)


_FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("$parameter", "$same", "$enum"), lambda content: isinstance(content, str)),
    **dict.fromkeys(("$tuple", "$list", "$deque"), lambda content: isinstance(content, list)),
    "$kept": lambda content: content is None,
    "$given": lambda content: isinstance(content, dict),
    "$map": _is_map,
    "$small": lambda content: _is_pair(content, dict, bool),
    "$stored": lambda content: _is_pair(content, str, bool),
    "$object": lambda content: _is_pair(content, str, dict),
    "$optimizer": lambda content: (
        isinstance(content, dict)
        and all(map(_is_map, content["groups"]))
        and isinstance(content["attributes"], dict)
    ),
}
"""For each tag, a function that returns whether a save could have written its content."""


def check(fields: Mapping[str, Any]) -> None:
    """Raise BrokenCheckpoint if `fields` contains something that a save never writes."""
    for name, value in fields.items():
        try:
            _check(value)
        except (BrokenCheckpoint, KeyError, TypeError, ValueError) as error:
            raise BrokenCheckpoint(
                f"The attribute {name} of an optimizer is {value!r:.60} in checkpoint.json, which "
                "cannot be decoded. Use another checkpoint."
            ) from error


def _check(value: Any) -> None:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise TypeError("a list without a tag")
        return
    # Every encoded container is a dict with exactly one tag. Unpacking raises for anything else.
    ((tag, content),) = value.items()
    if tag not in _FORMS:
        json_values.decode(value)
        return
    if not _FORMS[tag](content):
        raise TypeError(tag)
    if tag in ("$tuple", "$list", "$deque"):
        inside = content
    elif tag == "$map":
        inside = [item for _, item in content]
    elif tag == "$object":
        inside = list(content[1].values())
    elif tag == "$optimizer":
        inside = [item for group in content["groups"] for _, item in group]
        inside += [content["state"], *content["attributes"].values()]
    else:
        inside = [content[0]] if tag == "$small" else [content] if tag == "$given" else []
    for item in inside:
        _check(item)


class _Encoder:
    """Encodes the attributes of one optimizer.

    Args:
        number: Index of the optimizer in the engine. The names of its tensors start with it.
    """

    def __init__(self, optimizer: optim.Optimizer, number: int, spec: SpecView) -> None:
        self._optimizer = optimizer
        self._number = number
        self._names = {named.parameter: named.name for named in spec.located()}
        self._by_id = {id(parameter): name for parameter, name in self._names.items()}
        self._modules = {module for model in spec.models for module in model.modules()}
        self._places = {id(value): place for place, value in _objects_saved_elsewhere(optimizer)}
        # Keeps the encoded objects alive, because Python may reuse the id of a freed object.
        self._alive: list[Any] = []
        self._values_left = _MOST
        self._depth_in_objects = 0
        self._name = ""
        self._values = AttributeValues({}, {}, {}, {})

    def encode(self) -> AttributeValues:
        found = attributes_of(self._optimizer) | {_COMMON: common_state(held(self._optimizer))}
        for self._name, value in found.items():
            self._values.fields[self._name] = self._encode(value, self._name)
        return self._values

    def _mark(self, mark: Any) -> None:
        self._values.marks.setdefault(self._name, []).append(mark)

    def _encode(self, value: Any, place: str) -> Any:
        # An attribute that refers to a dataset would take minutes to encode, so stop early.
        self._values_left -= 1
        if self._values_left < 0:
            return self._skip(value, place)
        # Before the check for tensors, because a parameter is saved as a reference. Its values are
        # in the model set.
        if isinstance(value, nn.Parameter) and value in self._names:
            return {"$parameter": self._names[value]}
        if (isinstance(value, nn.Module) and value in self._modules) or isinstance(
            value, _STATELESS
        ):
            return {"$kept": None}
        if not isinstance(value, Tensor | dict | list | tuple):
            try:
                return json_values.encode(value)
            except NotPlain:
                self._mark(_Identity(value))  # not a plain value, so one of the cases below
        if isinstance(value, Enum):
            # Only the name is saved, because the script defines the class.
            return {"$enum": value.name}
        if isinstance(value, tuple):
            # Tuples are immutable, so a shared one can be encoded several times.
            return {"$tuple": self._encode_items(value, place)}
        if id(value) in self._places:
            return {"$same": self._places[id(value)]}
        # Record the path before encoding the contents, so that a cycle becomes a "$same".
        self._places[id(value)] = place
        self._alive.append(value)
        if isinstance(value, Tensor):
            return self._encode_tensor(value, place)
        if isinstance(value, dict):
            return {"$map": self._encode_map(value, place)}
        if isinstance(value, list | deque):
            return {
                "$list" if isinstance(value, list) else "$deque": self._encode_items(value, place)
            }
        if isinstance(value, optim.Optimizer):
            return {"$optimizer": self._encode_optimizer(value, place)}
        return self._encode_object(value, place)

    def _encode_items(self, items: Any, place: str) -> list[Any]:
        return [self._encode(item, f"{place}.{index}") for index, item in enumerate(items)]

    def _encode_map(self, value: Mapping[Any, Any], place: str) -> list[Any]:
        encoded = []
        for key, item in value.items():
            known: Any
            if isinstance(key, nn.Parameter) and key in self._names:
                known = {"$parameter": self._names[key]}
            elif type(key) is int and key in self._by_id:  # optimizers use slow[id(parameter)]
                known = {"$id": self._by_id[key]}
            else:
                try:
                    known = json_values.encode(key)
                except NotPlain:
                    self._skip(key, f"{place}[...]")
                    continue
            encoded.append([known, self._encode(item, _path_of(place, known))])
        return encoded

    def _encode_tensor(self, value: Tensor, place: str) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return self._skip(value, place)
        on_device = value.device.type != "cpu"
        try:
            return {"$small": [json_values.encode(value), on_device]}
        except NotPlain:
            # Writes through .data do not increment the version counter, so assume that every tensor
            # has changed. Inside objects, rely on the counter, because an object may refer to the
            # dataset, whose tensors must not be saved needlessly.
            self._mark(_Identity(value) if self._depth_in_objects else object())
            name = f"{self._number}.{place}"
            self._values.tensors[name] = value.detach()
            return {"$stored": [name, on_device]}

    def _encode_optimizer(self, other: optim.Optimizer, place: str) -> dict[str, Any]:
        """Encode `other`, an optimizer among the attributes. Usually it is a wrapped optimizer."""
        groups = []
        for number, group in enumerate(other.param_groups):
            here = f"{place}.param_groups.{number}"
            # A wrapper often shares its param_groups with the wrapped optimizer.
            is_shared = id(group) in self._places
            self._places.setdefault(id(group), here)
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append([] if is_shared else self._encode_map(options, here))
        fields = attributes_of(other).items()
        return {
            "groups": groups,
            "state": self._encode(held(other), f"{place}.state"),
            "attributes": {name: self._encode(v, f"{place}.{name}") for name, v in fields},
        }

    def _encode_object(self, value: Any, place: str) -> Any:
        """Encode any other object: its `state_dict()` if trackable, otherwise its attributes."""
        self._depth_in_objects += 1
        try:
            if (state := _state_dict_of(value)) is not _MISSING:
                # Each call may return new objects, so their identity proves nothing.
                self._mark(object())
                return {"$given": self._encode(state, f"{place}.state_dict()")}
            package = type(value).__module__.partition(".")[0]
            # Neither saved nor reported as missing, because the script recreates such objects.
            if package in _OTHERS:
                return {"$kept": None}
            if package in sys.stdlib_module_names or not hasattr(value, "__dict__"):
                return self._skip(value, place)
            fields = vars(value).items()
            encoded = {name: self._encode(field, f"{place}.{name}") for name, field in fields}
            return {"$object": [type(value).__qualname__, encoded]}
        finally:
            self._depth_in_objects -= 1

    def _skip(self, value: Any, place: str) -> Any:
        """Record that the value at path `place` cannot be saved, and return its encoding."""
        # Changes of a mutable value cannot be detected, so assume that it has changed.
        counts = isinstance(value, Iterator) or hasattr(value, "__array__")
        is_constant = isinstance(value, Hashable) and not counts
        self._mark(_Identity(value) if is_constant else object())
        places = self._values.unsaved.setdefault(self._name, [])
        places.append(f"{place} (a {type(value).__name__})")
        return {"$kept": None}


class _Identity:
    """Identity of an object, for comparison between snapshots.

    Two instances are equal if they refer to the same object. If the object is a tensor, it must
    also not have been written to in between.
    """

    def __init__(self, value: Any) -> None:
        self._version = value._version if isinstance(value, Tensor) else 0
        try:
            self._find: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # a type without weak references, such as bytes
            self._find = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or self._version != other._version:
            return False
        return self._find() is not None and self._find() is other._find()

    __hash__ = object.__hash__


def _state_dict_of(value: Any) -> Any:
    try:
        return trackable("value", value).state_dict()
    except UsageError:
        return _MISSING


class _Restorer:
    """Restores the attributes of one optimizer.

    Args:
        read: Returns the stored tensor with a given name.

    Attributes:
        lost: Paths of saved values for which the optimizer has no matching object.
    """

    def __init__(
        self, optimizer: optim.Optimizer, spec: SpecView, read: Callable[[str], Tensor]
    ) -> None:
        self.lost: list[str] = []
        self._optimizer = optimizer
        self._read = read
        self._device = spec.device
        self._parameters = {named.name: named.parameter for named in spec.located()}
        self._places: dict[str, Any] = dict(_objects_saved_elsewhere(optimizer))

    def restore(self, name: str, saved: Any) -> None:
        if name == _COMMON:
            common, state = common_state(held(self._optimizer)), held(self._optimizer)
            # Restore before removing the old keys, because old values may be filled in place.
            new = self._restore_value(common, saved, name)
            for key in common:
                state.pop(key, None)
            state.update(new)
        else:
            self._put(vars(self._optimizer), name, saved, name)

    def _put(self, into: MutableMapping[Any, Any], key: Any, saved: Any, place: str) -> None:
        value = self._restore_value(into.get(key, _MISSING), saved, place)
        if value is not _MISSING:
            into[key] = value

    def _restore_value(self, now: Any, saved: Any, place: str) -> Any:
        """Return the restored value for path `place`.

        Args:
            now: The current value. If possible, it is filled in place and returned.
            saved: The encoded value.
        """
        tag, content = next(iter(saved.items())) if isinstance(saved, dict) else ("", saved)
        if tag == "$parameter":
            return self._parameters[content]
        if tag == "$same" and content in self._places:
            return self._places[content]
        if tag == "$enum" and isinstance(now, Enum):
            return type(now)[content]
        if tag == "$tuple":
            before = now if isinstance(now, tuple) else ()
            parts = [self._restore_value(n, s, p) for n, s, p in _pairs(before, content, place)]
            # Keep the class of a named tuple.
            return type(now)._make(parts) if hasattr(now, "_make") else tuple(parts)
        if tag in ("$small", "$stored"):
            encoded, on_device = content
            value = json_values.decode(encoded) if tag == "$small" else self._read(encoded)
            if isinstance(now, Tensor) and now.shape == value.shape:
                now.detach().copy_(value)
                value = now
            elif on_device:
                value = value.to(self._device)
        elif tag == "$map":
            value = self._restore_map(now, content, place)
        elif tag in ("$list", "$deque"):
            kind: Any = list if tag == "$list" else deque
            value = now if isinstance(now, kind) else kind()
            self._places[place] = value  # first, because the contents may refer to the list itself
            old = list(value)
            value.clear()
            value.extend(self._restore_value(n, s, p) for n, s, p in _pairs(old, content, place))
        elif tag in ("$optimizer", "$object", "$given", "$kept", "$enum", "$same"):
            value = now
            if not self._fill(now, tag, content, place):
                self.lost.append(place)
        else:
            return json_values.decode(saved)
        self._places[place] = value
        return value

    def _restore_map(self, now: Any, content: Any, place: str) -> Any:
        into: MutableMapping[Any, Any] = now if isinstance(now, dict) else {}
        self._places[place] = into  # first, because the contents may refer to the map itself
        # Clear the dict and refill it in the saved order, because the optimizer may rely on the
        # order of its keys.
        old = dict(into)
        into.clear()
        for key, saved in content:
            known: Any
            if isinstance(key, dict) and "$parameter" in key:
                known = self._parameters[key["$parameter"]]
            elif isinstance(key, dict) and "$id" in key:
                known = id(self._parameters[key["$id"]])
            else:
                known = json_values.decode(key)
            value = self._restore_value(old.get(known, _MISSING), saved, _path_of(place, key))
            if value is not _MISSING:
                into[known] = value
        return into

    def _fill(self, now: Any, tag: str, content: Any, place: str) -> bool:
        """Fill `now`, an object that only the script can create. Return False if that fails."""
        if tag in ("$enum", "$same"):
            return False
        if tag == "$kept":
            return now is not _MISSING
        if tag == "$given":
            if _state_dict_of(now) is _MISSING:
                return False
            state = self._restore_value(_MISSING, content, f"{place}.state_dict()")
            trackable("value", now).load_state_dict(state)
            return True
        self._places[place] = now
        if tag == "$object":
            kind, fields = content
            if type(now).__qualname__ != kind:
                return False
        else:
            if not isinstance(now, optim.Optimizer):
                return False
            for number, (group, options) in enumerate(
                zip(now.param_groups, content["groups"], strict=True)
            ):
                here = f"{place}.param_groups.{number}"
                self._places.setdefault(here, group)
                for key, saved in options:
                    self._put(group, key, saved, _path_of(here, key))
            self._restore_value(held(now), content["state"], f"{place}.state")
            fields = content["attributes"]
        for name, saved in fields.items():
            self._put(vars(now), name, saved, f"{place}.{name}")
        return True


def _pairs(old: Any, content: list[Any], place: str) -> Iterator[tuple[Any, Any, str]]:
    for index, saved in enumerate(content):
        yield old[index] if index < len(old) else _MISSING, saved, f"{place}.{index}"


class OptimizerAttributes:
    """Tracks which attributes of an engine's optimizers have changed since the engine was created.

    Optimizers from torch.optim are skipped, because all their state is in `state` and
    `param_groups`.
    """

    def __init__(self, spec: SpecView) -> None:
        self._spec = spec
        self._initial = {
            # Drop the tensors: references to them would keep tensors alive after the optimizer
            # has replaced them.
            optimizer: replace(_Encoder(optimizer, number, spec).encode(), tensors={})
            for number, optimizer in enumerate(spec.optimizers)
            if not is_known(optimizer)
        }

    def changed(self, optimizer: optim.Optimizer) -> AttributeValues | None:
        """Return the attributes that have changed, or None for a torch.optim optimizer."""
        if optimizer not in self._initial:
            return None
        number = self._spec.optimizers.index(optimizer)
        now = _Encoder(optimizer, number, self._spec).encode()
        return now.changed_since(self._initial[optimizer])

    def describe_losses(self) -> Iterator[str]:
        """Yield a warning for each changed attribute that contains values that cannot be saved."""
        for optimizer in self._initial:
            values = self.changed(optimizer)
            for name, places in values.unsaved.items() if values is not None else ():
                yield (
                    f"{type(optimizer).__name__} keeps {listed(places)} in its attribute {name}, "
                    "which a checkpoint cannot hold, so a resume would restart it. Keep tensors, "
                    "numbers, text, or lists and dicts of these."
                )

    def restore(
        self,
        optimizer: optim.Optimizer,
        saved: Mapping[str, Any],
        read: Callable[[str], Tensor],
        say: Callable[[str], None],
        *,
        common: bool = True,
    ) -> None:
        """Restore the attributes of `optimizer`.

        An attribute that is missing from `saved` still had its initial value when the checkpoint
        was saved, so it is reset to its initial value in this run.

        Args:
            saved: The encoded attributes.
            read: Returns the stored tensor with a given name.
            say: Called with a warning if some values cannot be restored.
            common: Also reset the state that belongs to no parameter if it is not in `saved`.

        Raises:
            CheckpointMismatch: The optimizer was built differently from the saved one.
        """
        if (now := self.changed(optimizer)) is None:
            return
        initial = self._initial[optimizer].fields
        names = [n for n in now.fields if n in initial and (common or n != _COMMON)]
        initial_values = {name: initial[name] for name in names}
        unknown = [
            n for n, value in initial_values.items() if n not in saved and any(_stored_names(value))
        ]
        restorer = _Restorer(optimizer, self._spec, read)
        try:
            with torch.no_grad():
                # An attribute that still had its initial value at the save may have changed here.
                for name, value in {**initial_values, **saved}.items():
                    if name not in unknown:
                        restorer.restore(name, value)
        except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
            raise CheckpointMismatch(
                f"The attributes of {type(optimizer).__name__} in the checkpoint do not match the "
                f"optimizer here ({type(error).__name__}: {error}). Build the optimizer that was "
                "saved, or load only the model: engine.load(path, model_only=True)."
            ) from error
        if lost := restorer.lost + unknown:
            say(
                f"these attributes of {type(optimizer).__name__} cannot be restored from the "
                f"checkpoint and keep their values: {listed(lost)}."
            )

    def plain(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """Return the changed attributes for use in a `state_dict`, or {} if nothing has changed."""
        values = self.changed(optimizer)
        # State that belongs to no parameter is already in torch's own part of the state_dict.
        fields = {} if values is None else {k: v for k, v in values.fields.items() if k != _COMMON}
        if values is None or not fields:
            return {}
        return {"values": fields, "tensors": values.tensors}

    def take_plain(
        self, optimizer: optim.Optimizer, plain: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        """Restore the attributes of `optimizer` from a value returned by `plain`."""
        read = plain["tensors"].__getitem__
        self.restore(optimizer, plain["values"], read, say, common=False)
