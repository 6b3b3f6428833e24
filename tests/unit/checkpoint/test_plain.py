"""Values to JSON and back; tensor names of any library."""

import json
import math
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch

from shardwise.checkpoint.json_values import NotPlain, decode, encode
from shardwise.checkpoint.tensor_names import match
from shardwise.errors import BrokenCheckpoint


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -0.0, 0.1, 1e-300, 2**80, "text", [], {}, [1, [2.5, None]], (0.9, 0.999),
        {"a": {"b": (1,)}}, {1: 2, "x": 3}, {"$tuple": 4}, Counter({30: 2}), math.inf, -math.inf,
    ],
)  # fmt: skip
def test_values(value):
    again = there_and_back(value)
    assert again == value
    assert type(again) is type(value)


def test_nan_and_maps_of_other_kinds():
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back(OrderedDict(a=1)) == {"a": 1}
    assert there_and_back(np.float32(0.1)) == float(np.float32(0.1))


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.0), torch.tensor([0.1, math.nan]), torch.tensor([[1, 2]]),
        torch.tensor([True]), torch.tensor([1.5], dtype=torch.bfloat16), torch.empty(0, 3),
    ],
)  # fmt: skip
def test_small_tensors(value):
    again = there_and_back(value)
    assert again.dtype == value.dtype
    assert again.shape == value.shape
    assert torch.equal(again.nan_to_num(7), value.nan_to_num(7))


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, deque(), torch.zeros(65), 1j])
def test_values_that_are_not_plain_are_refused(value):
    with pytest.raises(NotPlain):
        encode({"a": [value]})


@pytest.mark.parametrize(
    "told",
    [
        {"$tensor": {"dtype": "F31", "shape": [], "values": [1]}},
        {"$tensor": {"dtype": "F32", "shape": [5], "values": [1]}},
        {"$tensor": 3},
        {"$float": "one"},
        {"$map": [[[], 1]]},
        {"$code": "x"},
    ],
)
def test_invalid_encodings_are_refused(told):
    with pytest.raises(BrokenCheckpoint, match=r"cannot be decoded"):
        decode(told)


# -- names --------------------------------------------------------------------------------------


def wanted(*names):
    return {name: [name] for name in names}


@pytest.mark.parametrize(
    ("held", "found"),
    [
        (["a.w", "b"], {"a.w": "a.w", "b": "b"}),
        (["module.a.w", "module.b"], {"a.w": "module.a.w", "b": "module.b"}),
        (["_orig_mod.a.w", "_orig_mod.b"], {"a.w": "_orig_mod.a.w", "b": "_orig_mod.b"}),
        (["a._orig_mod.w", "b"], {"a.w": "a._orig_mod.w", "b": "b"}),
        (["module._orig_mod.a.w", "module.b"], {"a.w": "module._orig_mod.a.w", "b": "module.b"}),
        (["_orig_mod.module.a.w"], {"a.w": "_orig_mod.module.a.w"}),
    ],
)
def test_prefixes_of_wrappers(held, found):
    told = match(wanted("a.w", "b"), held)
    assert told.found == found
    assert told.missing == [name for name in ("a.w", "b") if name not in found]
    assert told.unexpected == []


def test_a_submodule_that_is_called_module():
    ours = wanted("module.w", "module.b")
    assert match(ours, ["module.w", "module.b"]).found == {n: n for n in ours}
    told = match(ours, ["module.module.w", "module.module.b"])
    assert told.found == {"module.w": "module.module.w", "module.b": "module.module.b"}


def test_tied_weights_by_any_of_their_names():
    ours = {"embed.w": ["embed.w", "head.w"], "b": ["b"]}
    assert match(ours, ["head.w", "b"]).found == {"embed.w": "head.w", "b": "b"}
    told = match(ours, ["embed.w", "head.w", "x"])
    assert (told.found, told.missing, told.unexpected) == ({"embed.w": "embed.w"}, ["b"], ["x"])
