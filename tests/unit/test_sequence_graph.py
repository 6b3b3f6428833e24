"""Graphs of compiled units that are split by tokens: functions of nodes, and stand-ins."""

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, fx

from shardwise.parallel.tensor.compiled_sequences import _torch_function_of
from shardwise.parallel.tensor.compiled_stand_ins import StandIns
from shardwise.parallel.tensor.torch_functions import ELEMENTWISE, ELEMENTWISE_IN_PLACE


class Seen(Exception):
    """Carries the function and the arguments of a call."""


class Spy(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise Seen(func, args)


BOTH_ORDERS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]
TENSOR_FIRST = [
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.floordiv, operator.gt, operator.and_, operator.ior),
]


@pytest.mark.parametrize(
    ("target", "order"),
    [(target, [0, 1]) for target in BOTH_ORDERS + TENSOR_FIRST]
    + [(target, [1, 0]) for target in BOTH_ORDERS],
)
def test_operator_in_graph_is_judged_like_eager_call(target, order):
    spy, graph = torch.ones(2, dtype=torch.int64).as_subclass(Spy), fx.Graph()
    tensor = graph.placeholder("x")
    with pytest.raises(Seen) as seen:
        target(*([spy, 2][place] for place in order))
    func, args = seen.value.args
    node = graph.call_function(target, tuple([tensor, 2][place] for place in order))
    found, found_args = _torch_function_of(node, lambda each: each is tensor)
    for known in (ELEMENTWISE, ELEMENTWISE_IN_PLACE):
        assert (found in known) == (func in known)
    assert [each is tensor for each in found_args] == [each is spy for each in args]


def test_sparse_tensor_gets_no_stand_in():
    sparse = torch.eye(4).to_sparse()
    stand_ins = StandIns(SimpleNamespace(group=SimpleNamespace(size=2, rank=0)))
    (found,) = stand_ins.insert((sparse,), replace_first=True)
    assert found is sparse
