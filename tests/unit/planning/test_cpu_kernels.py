"""What kernels of a CPU take beside tensors, against what was counted of them."""

import math

import pytest
import torch

from shardwise.tools.plan.cpu_kernels import copied_bytes, product_buffer, product_buffers
from shardwise.tools.plan.fake_operators import grouped_mm, lstm_workspace
from shardwise.tools.plan.record import Operation


def product(rows, inner, columns, dtype="float32"):
    shapes = ((rows, inner), (inner, columns))
    return Operation("mm", 0, 0, dtype, -1, "forward", "", shapes)


# Megabytes that MKL asked malloc for, of one thread, in a process that multiplied these once.
ONE_THREAD = [
    ((256, 512, 2048), 1.983),
    ((2048, 256, 2048), 1.459),
    ((512, 256, 8000), 3.687),
    ((8000, 512, 256), 0.804),
    ((1024, 1024, 1024), 1.393),
    ((4096, 4096, 4096), 3.753),
    ((10, 2048, 256), 0.229),
    ((1024, 1024, 16), 0.619),
    ((300, 3000, 300), 0.711),
]
TWO_THREADS = [
    ((256, 2048, 2048), 3.573),
    ((512, 256, 8000), 7.112),
    ((256, 1024, 3072), 5.147),
    ((1024, 1024, 4096), 7.505),
]


# Kilobytes by which a process with two threads grew that multiplied these once.
TOUCHED = [
    ((128, 64, 9216), 3304),
    ((128, 160, 6000), 7636),
    ((700, 200, 6000), 5016),
    ((128, 256, 16000), 6516),
    ((128, 300, 16000), 7636),
    ((700, 500, 16000), 10180),
    ((128, 1000, 4000), 6148),
]


@pytest.mark.parametrize(("shape", "megabytes"), ONE_THREAD)
def test_the_buffer_of_one_thread(shape, megabytes):
    assert product_buffer(product(*shape), 1).length / 1e6 == pytest.approx(megabytes, rel=0.02)


@pytest.mark.parametrize(("shape", "megabytes"), TWO_THREADS)
def test_the_buffers_of_two_threads(shape, megabytes):
    assert 2 * product_buffer(product(*shape), 2).length / 1e6 == pytest.approx(megabytes, rel=0.02)


@pytest.mark.parametrize(("shape", "kilobytes"), TOUCHED)
def test_what_is_touched_of_a_buffer(shape, kilobytes):
    touched = 2 * product_buffer(product(*shape), 2).touched
    assert touched / 1024 == pytest.approx(kilobytes, rel=0.02)


def test_a_buffer_is_taken_again_where_it_is_large_enough():
    small, large = product(64, 64, 64), product(512, 512, 2048)
    alone = product_buffers([large], 2)
    assert product_buffers([large, small, large], 2) == alone
    assert product_buffers([small, large], 2) == alone + product_buffers([small], 2)
    assert product_buffers([product(64, 64, 64, "bfloat16")], 2) == 0


def test_a_later_product_touches_more_of_a_buffer():
    short, full = product(128, 64, 9216), product(128, 128, 9216)
    assert product_buffers([short, full], 2) == product_buffers([full], 2)
    assert product_buffers([short], 2) < 0.6 * product_buffers([full], 2)


def convolution(name, made, *shapes, result=()):
    read = sum(math.prod(shape) for shape in shapes)
    return Operation(
        name, 0, 4 * (read + made), "float32", -1, "forward", "", shapes, result=result
    )


def forward(x, weight, result):
    return convolution("convolution", math.prod(result), x, weight, result=result)


def test_a_convolution_copies_into_blocks_of_channels():
    x, weight, result = (2, 32, 10, 10), (16, 32, 3, 3), (2, 16, 10, 10)
    # The copies of all that is read, while the result has one form only.
    assert copied_bytes(forward(x, weight, result)) == 4 * (6400 + 4608)
    # Two channels fill a block of 16; those of an image are read as they are.
    head = forward((2, 16, 10, 10), (2, 16, 1, 1), (2, 2, 10, 10))
    assert copied_bytes(head) == 4 * (3200 + 256 + 3200 - 400)
    first = forward((2, 3, 10, 10), (16, 3, 3, 3), result)
    assert copied_bytes(first) == 4 * 3200


@pytest.mark.parametrize("per_group", [1, 8, 256])
def test_groups_of_channels_do_not_lengthen_the_result(per_group):
    x = (8, 256, 14, 14)
    numel, weight = math.prod(x), 256 * 16 * -(-per_group // 16) * 9
    made = forward(x, (256, per_group, 3, 3), x)
    assert copied_bytes(made) == 4 * (numel + weight)


def test_a_transposed_convolution_has_the_channels_of_its_result():
    made = forward((2, 32, 5, 5), (32, 2, 2, 2), (2, 2, 10, 10))
    assert copied_bytes(made) == 4 * (1600 + 32 * 16 * 4 + 3200 - 400)


def test_backward_of_a_convolution_copies_what_it_reads():
    gradient, x, weight = (2, 32, 10, 10), (2, 16, 10, 10), (32, 16, 3, 3)
    made = 3200 + 4608 + 32
    both = convolution("convolution_backward", made, gradient, x, weight)
    assert copied_bytes(both) == 4 * (6400 + 3200)
    image = convolution("convolution_backward", 896, gradient, (2, 3, 10, 10), (32, 3, 3, 3))
    assert copied_bytes(image) == 4 * (6400 + 32 * 16 * 9 - 864)
    assert copied_bytes(product(2, 2, 2)) == 0


def test_grouped_products_have_the_shapes_that_torch_gives():
    offs = torch.tensor([3, 8], dtype=torch.int32)
    rows, weights = torch.ones(8, 16), torch.ones(2, 16, 32)
    assert grouped_mm(rows, weights, offs).shape == (8, 32)
    assert grouped_mm(rows.t(), torch.ones(8, 32), offs).shape == (2, 16, 32)
    assert torch._grouped_mm(rows, weights, offs).shape == (8, 32)


# Kilobytes by which a process grew in forward, less its output: steps, rows, width of the layer.
WORKSPACES = [
    ((48, 16, 192), 2924),
    ((100, 4, 320), 2532),
    ((64, 8, 384), 3868),
    ((40, 32, 256), 6484),
]


@pytest.mark.parametrize(("shape", "kilobytes"), WORKSPACES)
def test_what_forward_touches_of_the_workspace_of_an_lstm(shape, kilobytes):
    assert lstm_workspace(*shape) / 1024 == pytest.approx(kilobytes, rel=0.02)


def test_routed_groups_leave_as_many_buffers_as_are_the_largest_so_far():
    alike = product(256, 192, 768)
    routed = Operation(
        "_grouped_mm", 0, 0, "float32", -1, "forward", "", ((1024, 192), (4, 192, 768), (4,))
    )
    one = product_buffers([alike], 2)
    # Of n groups of about the same rows 1 + 1/2 + ... + 1/n are larger than all before.
    assert product_buffers([routed], 2) == pytest.approx(
        one * (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.01
    )
    assert product_buffers([routed, product(512, 192, 8000)], 2) > product_buffers([routed], 2)
