"""Functions for fake tensors return results with the shapes of torch's own operators."""

import torch

from shardwise.tools.plan.fake_operators import grouped_mm, rnn_layer


def test_grouped_products_have_torchs_shapes():
    offs = torch.tensor([3, 8], dtype=torch.int32)
    rows, weights = torch.ones(8, 16), torch.ones(2, 16, 32)
    assert grouped_mm(rows, weights, offs).shape == (8, 32)
    assert grouped_mm(rows.t(), torch.ones(8, 32), offs).shape == (2, 16, 32)
    assert torch._grouped_mm(rows, weights, offs).shape == (8, 32)


def test_an_lstm_layer_saves_four_gates_and_the_cell_of_each_step():
    hidden = torch.ones(1, 3, 5)
    made = rnn_layer(torch.ones(7, 3, 4), *[hidden] * 4, hidden, hidden, False, [], 2, 5)
    assert [tuple(each.shape) for each in made[:3]] == [(7, 3, 5), (1, 3, 5), (1, 3, 5)]
    assert made[3].nbytes == 4 * (7 * 4 + 7 + 1) * 3 * 5
