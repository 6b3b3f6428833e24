"""Attributes that updates change are assigned back to the user's optimizer."""

import pytest
import torch
from torch import optim

from shardwise.errors import ModelError
from shardwise.states.optimizer.optimizer_kind import bare_copy
from shardwise.states.optimizer.optimizer_options import FollowedAttributes, write_back_attributes


class Counting(optim.SGD):
    count = 0


def followed(*changing):
    """Return an optimizer and the attributes that follow its copies; the first copy leads."""
    user = Counting([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    user.count = 0
    return user, [
        FollowedAttributes(user, bare_copy(user), frozenset(names), leads=number == 0)
        for number, names in enumerate(changing)
    ]


@pytest.mark.parametrize("leading", [[], ["other"]])
def test_assigns_back_attributes_that_only_a_later_copy_changes(leading):
    user, copies = followed(leading, ["count"], ["count"])
    for each in copies[1:]:
        each._inner.count = 3
    write_back_attributes(copies)
    assert user.count == 3


def test_refuses_copies_that_change_an_attribute_differently():
    _, copies = followed([], ["count"], ["count"])
    copies[1]._inner.count, copies[2]._inner.count = 3, 4
    with pytest.raises(ModelError, match="keeps count in an attribute"):
        write_back_attributes(copies)
