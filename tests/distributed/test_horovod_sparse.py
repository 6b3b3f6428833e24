"""Sparse tensors and gradients on all ranks, compared with a single process."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise.horovod as hvd
from tests.distributed.horovod import initialized


def rows_of(rank, dtype=torch.float64):
    """Return a (10, 2) tensor with some repeated rows. On rank 1 it is empty."""
    used = [[3, 7, 3], [], [0, 7]][rank % 3]
    values = torch.arange(1.0, 2 * len(used) + 1).view(-1, 2).to(dtype) * (rank + 1)
    return torch.sparse_coo_tensor([used], values, (10, 2), check_invariants=True)


def _allreduce(world):
    with initialized(), torch.sparse.check_sparse_tensor_invariants():
        everyone = [rows_of(rank) for rank in range(world.size)]
        total = sum(one.to_dense() for one in everyone)
        for op, expected in ((hvd.Sum, total), (hvd.Average, total / world.size)):
            handle = hvd.sparse_allreduce_async(everyone[world.rank], name=f"s{op}", op=op)
            found = handle()
            assert hvd.poll(handle)
            assert hvd.synchronize(handle) is found
            assert found.is_coalesced()
            torch.testing.assert_close(found.to_dense(), expected)
        halves = torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float16)
        many = torch.sparse_coo_tensor([[2, 2, 2]], halves, (4,), check_invariants=True)
        exact = hvd.sparse_allreduce_async(many)()
        assert exact.to_dense()[2] == 2050  # in 16 bits each 1 would be lost
        whole = torch.sparse_coo_tensor([[world.rank, 0]], [5, 2], (9,), check_invariants=True)
        mean = hvd.sparse_allreduce_async(whole)().to_dense()
        assert (mean.dtype, mean[1].item()) == (torch.int64, 5 // world.size)
        some = hvd.add_process_set([0, world.size - 1])
        if some.included():
            found = hvd.sparse_allreduce_async(everyone[world.rank], None, hvd.Sum, some)()
            expected = everyone[0].to_dense() + everyone[-1].to_dense()
            torch.testing.assert_close(found.to_dense(), expected)
        _check_refused(world, everyone[world.rank])
        if world.rank == 0:  # which has no more data, and gives no rows
            hvd.join()
        else:
            found = hvd.sparse_allreduce_async(everyone[world.rank], op=hvd.Sum)()
            torch.testing.assert_close(found.to_dense(), total - everyone[0].to_dense())
            hvd.join()


def _check_refused(world, mine):
    for words, call in (
        ("use hvd.allreduce", lambda: hvd.sparse_allreduce_async(torch.ones(2))),
        ("not Max", lambda: hvd.sparse_allreduce_async(mine, op=hvd.Max)),
        ("hvd.sparse_allreduce_async", lambda: hvd.allreduce(mine)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    shape = (10 + world.rank, 2)
    odd = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), shape, check_invariants=True)
    words = r"'odd' is sparse_allreduce of a tensor of shape \(10, 2\) on rank 0 and"
    with pytest.raises(hvd.HorovodInternalError, match=words):
        hvd.sparse_allreduce_async(odd, name="odd")()


def test_sparse_tensors(group):
    group(3)(_allreduce)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 3, sparse=True)
        self.bag = nn.EmbeddingBag(12, 3, sparse=True)
        self.out = nn.Linear(3, 2)

    def forward(self, words):
        found = self.table(words)
        if len(words) > 2:  # a rank may have rows for one table alone
            found = found + self.bag(words.view(1, -1))
        return self.out(found)


def words_of(step, turn, rank):
    draw = torch.Generator().manual_seed(100 * step + 10 * turn + rank)
    return torch.randint(0, 12, (2 + rank,), generator=draw)


def train(world, how, make, passes=1):
    """Return the largest difference from a plain process after some steps."""
    torch.manual_seed(0)
    model = Words().double()
    plain = copy.deepcopy(model)
    optimizers = [hvd.DistributedOptimizer(one, **how) for one in make(model)]
    expected = make(plain)
    for optimizer in optimizers:
        optimizer.set_backward_passes_per_step(passes)
    for step in range(3):
        for one in [*optimizers, *expected]:
            one.zero_grad()
        for turn in range(passes):
            model(words_of(step, turn, world.rank)).square().sum().backward()
            for rank in range(world.size):
                (plain(words_of(step, turn, rank)).square().sum() / world.size).backward()
        for one in [*optimizers, *expected]:
            one.step()
        assert model.table.weight.grad.layout == torch.sparse_coo
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def sparse_adam(model):
    tables = [model.table.weight, model.bag.weight]
    dense = torch.optim.Adam(model.out.parameters(), lr=0.1)
    return [torch.optim.SparseAdam(tables, lr=0.1), dense]


def adagrad(model):
    return [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def momentum(model):
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


class Halved(hvd.Compression.none):
    @staticmethod
    def compress(tensor):
        return tensor / 2, 2

    @staticmethod
    def decompress(tensor, ctx):
        return tensor * ctx


def _trained(world):
    with initialized(), torch.sparse.check_sparse_tensor_invariants():
        for make in (sparse_adam, adagrad, momentum):
            for how in ({}, {"sparse_as_dense": True}):
                assert train(world, how, make) < 1e-12, (make, how)
        assert train(world, {"groups": 2}, momentum, passes=2) < 1e-12
        for dense in (False, True):
            how = {"compression": Halved, "sparse_as_dense": dense}
            assert train(world, how, adagrad) < 1e-12


@pytest.mark.parametrize("size", [1, 2, 3])
def test_embeddings_train_as_in_one_process(group, size):
    group(size)(_trained)


def _shared(world):
    """A weight that a dense layer uses too has a dense gradient, with any optimizer."""
    with initialized(), torch.sparse.check_sparse_tensor_invariants():
        torch.manual_seed(0)
        table = nn.Embedding(5, 5, sparse=True).double()
        plain = copy.deepcopy(table)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(table.parameters(), lr=0.1))
        expected = torch.optim.Adam(plain.parameters(), lr=0.1)
        functional.linear(table(torch.tensor([world.rank])), table.weight).sum().backward()
        for rank in range(world.size):
            loss = functional.linear(plain(torch.tensor([rank])), plain.weight).sum()
            (loss / world.size).backward()
        optimizer.step()
        expected.step()
        torch.testing.assert_close(table.weight, plain.weight)


def test_a_weight_that_is_also_a_dense_layers(group):
    group(2)(_shared)


def _unknown(world):
    """No embedding has this weight, so a rank that does not use it would not know."""
    with initialized():
        weight = nn.Parameter(torch.zeros(10, 2))

        def backward(**how):
            optimizer = torch.optim.SGD([weight], lr=1.0)
            optimizer = hvd.DistributedOptimizer(optimizer, **how)
            mine = torch.tensor([world.rank])
            functional.embedding(mine, weight, sparse=True).sum().backward()
            return optimizer

        with pytest.raises(ValueError, match=r"noname\.0 is sparse.*sparse_as_dense=True"):
            backward()
        weight.grad = None
        backward(sparse_as_dense=True).step()
        assert weight.grad.layout == torch.sparse_coo
        return weight[:, 0].tolist()


def test_sparse_gradients_that_ranks_cannot_know_of(group):
    assert group(2)(_unknown) == [[-0.5, -0.5] + [0.0] * 8] * 2
