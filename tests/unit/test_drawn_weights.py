"""The parameters of a trial have values only while an operation uses them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.parallel.context.drawn_weights import DrawnWeights
from shardwise.parallel.tensor.without_dropout import WithoutRandomness

CPU = torch.device("cpu")


def made() -> tuple[DrawnWeights, nn.Parameter, nn.Parameter]:
    """Return weights with a matrix and a vector."""
    weights = DrawnWeights(CPU)
    matrix = weights.parameter_like(torch.empty(6, 5, device="meta"), centre=0.0)
    vector = weights.parameter_like(torch.empty(6, device="meta"), centre=1.0)
    return weights, matrix, vector


def values_of(weights: DrawnWeights, parameter: nn.Parameter) -> Tensor:
    """Return a copy of the values that operations see."""
    with weights:
        return parameter.detach().clone()


def run(weights: DrawnWeights, matrix: nn.Parameter, vector: nn.Parameter, x: Tensor) -> Tensor:
    """Use the matrix twice, once through a view, and return the output."""
    # A trial also replaces random numbers, but not those of the weights.
    with weights, WithoutRandomness(in_region=lambda: True):
        out = F.linear(x, matrix, vector) @ matrix.view(30).view(6, 5)
        torch.autograd.backward(out.square().sum(), inputs=[matrix, vector])
    return out.detach()


def test_operations_see_the_same_values_each_time():
    first, second = made(), made()
    for one, other in zip(first[1:], second[1:], strict=True):
        values = values_of(first[0], one)
        assert torch.equal(values, values_of(first[0], one))
        assert torch.equal(values, values_of(second[0], other))
        assert values.std() > 0
    assert abs(values_of(first[0], first[2]).mean() - 1) < 0.2


def test_computes_like_ordinary_parameters():
    weights, matrix, vector = made()
    plain = [nn.Parameter(values_of(weights, p)) for p in (matrix, vector)]
    x = torch.randn(3, 5, dtype=torch.float64)
    expected = F.linear(x, *plain) @ plain[0]
    expected.square().sum().backward()
    assert torch.equal(run(weights, matrix, vector, x), expected.detach())
    torch.testing.assert_close(weights.sketch_of(vector), plain[1].grad)
    # The random vector is not known here: the sketch of a matrix is one number per row, and linear.
    sketch = weights.sketch_of(matrix).clone()
    assert sketch.shape == (6,)
    run(weights, matrix, vector, x)
    torch.testing.assert_close(weights.sketch_of(matrix), 2 * sketch)
    other = made()
    run(*other, x + 1e-6)
    assert not torch.allclose(other[0].sketch_of(other[1]), sketch, rtol=1e-8, atol=0)


def test_no_values_of_matrices_remain_between_operations():
    weights, matrix, vector = made()
    with weights:
        out = F.linear(torch.ones(2, 5, dtype=torch.float64), matrix, vector)
        assert matrix.untyped_storage().nbytes() == 0
        torch.autograd.backward(out.sum(), inputs=[matrix, vector])
    assert matrix.untyped_storage().nbytes() == 0
    assert matrix.grad is None
    assert vector.grad is None


def test_vectors_have_values_for_code_that_bypasses_operations():
    weights, _, vector = made()
    assert torch.equal(torch.from_numpy(vector.detach().numpy()), values_of(weights, vector))


@pytest.mark.parametrize("read", [repr, Tensor.numpy, Tensor.tolist, Tensor.data_ptr])
def test_matrices_keep_their_values_once_code_has_read_them_directly(read):
    weights, matrix, _ = made()
    expected = values_of(weights, matrix)
    with weights, WithoutRandomness(), torch.no_grad():
        read(matrix.detach().mT)
        values = torch.from_numpy(matrix.detach().numpy())
        assert F.linear(torch.ones(1, 5, dtype=torch.float64), matrix).abs().sum() > 0
    assert torch.equal(values, expected)
    assert str(matrix)


def test_accepts_matrices_without_rows():
    parameter = DrawnWeights(CPU).parameter_like(torch.empty(0, 5, device="meta"), centre=0.0)
    assert parameter.shape == (0, 5)
