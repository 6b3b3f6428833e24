"""Keeps the attributes of inner copies and of the user's optimizer the same.

Some optimizers keep numbers in attributes, beside their parameter groups and their state, and
change them in `step`. Every inner copy counts by itself, from the same start and in the same way.
The first copy works with the objects of the user's optimizer, so a list that it appends to is the
user's own; the others have copies of them. Values that cannot be changed in place are assigned back
after a step:

    user's optimizer ─▶ every copy ─▶ update ─▶ the first copy ─▶ user's optimizer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import optim

from shardwise.errors import ModelError
from shardwise.states.optimizer.optimizer_kind import (
    attributes_of,
    copied_attribute,
    is_known,
    same,
)

_MISSING = object()


class FollowedAttributes:
    """The attributes of `user` as its copy `inner` has them; steps change those named `changing`.

    The copy that `leads` shares objects with `user`.
    """

    def __init__(
        self,
        user: optim.Optimizer,
        inner: optim.Optimizer,
        changing: frozenset[str],
        *,
        leads: bool,
    ) -> None:
        self.user = user
        self.leads = leads
        self.changing = changing
        self._inner = inner
        self._follows = not is_known(user)  # torch's own keep nothing in attributes
        self._given: dict[str, Any] = {}
        self.follow()

    def follow(self) -> None:
        """Take the attributes of the user's optimizer that user code has replaced."""
        if not self._follows:
            return
        for name, value in attributes_of(self.user).items():
            if self._given.get(name, _MISSING) is not value:
                shared = self.leads or name not in self.changing
                vars(self._inner)[name] = value if shared else copied_attribute(value, {})
                self._given[name] = value

    def changes(self) -> dict[str, Any]:
        """The attributes that steps change, as the copy has them now."""
        return {k: vars(self._inner)[k] for k in self.changing if k in vars(self._inner)}

    def forget_changes(self) -> None:
        """Take what the user's optimizer has now as what the copy was given."""
        self._given = attributes_of(self.user)


def write_back(followed: Sequence[FollowedAttributes]) -> None:
    """Assign what the updates of a step have changed to the user's optimizers.

    Raises ModelError if two updates left different values.
    """
    changing = [each for each in followed if each.changing]
    first: dict[optim.Optimizer, dict[str, Any]] = {each.user: {} for each in changing}
    # The copy that leads may have no group that changes an attribute which another's changes.
    for each in sorted(changing, key=lambda each: not each.leads):
        first[each.user] = each.changes() | first[each.user]
    for each in changing:
        for name, value in each.changes().items():
            if not same(first[each.user][name], value):
                raise ModelError(
                    f"{type(each.user).__name__} keeps {name} in an attribute, and two parts of "
                    f"its parameters left it at {first[each.user][name]!r:.60} and {value!r:.60}. "
                    "Start with --zero 0, or let it keep the value by parameter, in self.state."
                )
    for each in changing:
        vars(each.user).update(first[each.user])
    for each in changing:
        each.forget_changes()
