"""With `--context`, a worker holds its part of the activations."""

from contextlib import AbstractContextManager

import pytest
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import shardwise as sw
from tests.distributed.contexts import Problem

PROBLEM = Problem(rows=(4,), length=16)


def counted(model: nn.Module, found: dict[int, int]) -> AbstractContextManager[None]:
    """Collect the storages that autograd saves for the backward pass, except parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    return saved_tensors_hooks(save, lambda tensor: tensor)


def saved_bytes(world: sw.World) -> int:
    """Return the saved bytes of the second step. In the first, the model is tested."""
    model, found = PROBLEM.model(), dict[int, int]()
    engine = sw.Engine(model, PROBLEM.optimizer_of(model), quiet=True)
    for number in range(2):
        batch = world.share(PROBLEM.batches(number)[0])
        found.clear()
        with counted(model, found):
            loss = PROBLEM.loss_of(model, batch)
        # The hooks hide the labels from the engine.
        engine.backward(loss, weight=int((batch[-1] != -100).sum()))
        engine.step()
    return sum(found.values())


@pytest.mark.parametrize("size", [2, 4])
def test_activations_are_divided_by_the_number_of_parts(group, size):
    model, whole = PROBLEM.model(), dict[int, int]()
    with counted(model, whole):
        loss = PROBLEM.loss_of(model, PROBLEM.batches(1)[0])
    assert loss.requires_grad
    parts = group(size, context=size, context_method="ulysses")(saved_bytes)
    assert max(parts) * size == pytest.approx(sum(whole.values()), rel=0.1)
