"""Hooks that report when a unit's parameters are needed."""

import copy
import pickle

from shardwise.model.unit_hooks import ModuleHook, UnitHooks


def test_copies_of_a_hook_refer_to_no_engine():
    hook = ModuleHook(UnitHooks(), 0, 0)
    for twin in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert twin._hooks is None
        assert twin._open == []
