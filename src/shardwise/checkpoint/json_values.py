"""Encodes the state of schedulers, loaders and optimizers as JSON. Decoding never runs code.

JSON's own types are stored unchanged. A value of any other type becomes a map with a single key
that starts with a dollar sign:

    {"$tuple": [...]}                       {"$map": [[key, value], ...]}
    {"$counter": [[key, count], ...]}       {"$float": "nan"}
    {"$tensor": {"dtype": "F32", "shape": [], "values": [3.0]}}
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.format import dtype_name, dtype_of
from shardwise.checkpoint.schema import DEEPEST, Fault, plain_value
from shardwise.errors import BrokenCheckpoint

LARGEST = 64
"""Maximum number of elements in a tensor that is encoded as JSON."""


class NotPlain(TypeError):
    """Raised if a value cannot be encoded. The message names its type."""


def encode(value: Any) -> Any:
    """Return the JSON encoding of `value`.

    Raises NotPlain if it contains a type without an encoding, or is nested too deeply.
    """
    try:
        encoded = _encode(value)
        plain_value("value", encoded)
    except (RecursionError, Fault) as error:
        raise NotPlain(f"a value of more than {DEEPEST} levels") from error
    return encoded


def _encode(value: Any) -> Any:
    # Compare exact types, because an IntEnum or a dict subclass would be decoded as its base type.
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    if type(value) is list:
        return [_encode(item) for item in value]
    if type(value) is tuple:
        return {"$tuple": [_encode(item) for item in value]}
    if type(value) is Counter:
        return {"$counter": [[_encode(k), n] for k, n in value.items()]}
    if type(value) in (dict, OrderedDict, defaultdict):
        # A user's key that starts with a dollar sign must not be mistaken for a tag.
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item) for key, item in value.items()}
        return {"$map": [[_encode(k), _encode(v)] for k, v in value.items()]}
    # Check by name, so that numpy need not be imported.
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return _encode(value.item())
    raise NotPlain(f"{type(value).__module__}.{type(value).__qualname__}")


def _encode_tensor(value: Tensor) -> Any:
    # Callers store tensors that are too large for JSON in a file.
    if value.numel() > LARGEST or value.is_complex() or value.is_quantized:
        raise NotPlain(f"a tensor of the shape {tuple(value.shape)} and {value.dtype}")
    values = value.detach().cpu().flatten().tolist()
    return {
        "$tensor": {
            "dtype": dtype_name(value.dtype),
            "shape": list(value.shape),
            "values": [_encode(number) for number in values],
        }
    }


def decode(value: Any) -> Any:
    """Decode a value that `encode` returned. Raises BrokenCheckpoint if it is invalid."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (key := next(iter(value))).startswith("$"):
        try:
            return _DECODERS[key](value[key])
        except (ArithmeticError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise BrokenCheckpoint(
                f"checkpoint.json has a value that cannot be decoded: {str(value)[:80]}. Use "
                "another checkpoint."
            ) from error
    return {key: decode(item) for key, item in value.items()}


_DECODERS: dict[str, Any] = {
    "$tuple": lambda content: tuple(decode(item) for item in content),
    "$float": float,
    "$counter": lambda content: Counter({decode(key): count for key, count in content}),
    "$map": lambda content: {decode(key): decode(item) for key, item in content},
    "$tensor": lambda content: torch.tensor(
        [decode(item) for item in content["values"]], dtype=dtype_of(content["dtype"])
    ).reshape(content["shape"]),
}
