"""The Loader on real ranks: the same order and every sample once, for any number of ranks."""

import os
import random
import signal
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, RandomSampler, TensorDataset

import shardwise as sw
from shardwise.data import Loader
from tests.tables import each_value

SIZES = (1, 2, 3, 4)


class Drawing(Dataset):
    """A sample is its index and a draw of every generator."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, torch.rand(()).item() + random.random() + np.random.rand()


class Stream(IterableDataset):
    """first, first + stride, ... below `end`, shuffled in a small buffer."""

    def __init__(self, end, first=0, stride=1):
        self.numbers = range(first, end, stride)

    def __iter__(self):
        for start in range(0, len(self.numbers), 3):
            buffer = list(self.numbers[start : start + 3])
            for place in torch.randperm(len(buffer)).tolist():
                yield buffer[place], torch.rand(()).item()


class Sharded(Stream):
    """A stream that can be sharded, like Hugging Face's."""

    def __init__(self, end, first=0, stride=1, num_shards=4):
        super().__init__(end, first, stride)
        self.end, self.num_shards = end, num_shards

    def shard(self, num_shards, index):
        return Sharded(self.end, index, num_shards, self.num_shards // num_shards)


def _record(world, loader, epochs=1, most=None):
    """[epoch, step, part, samples, last, [row, ...]] of this rank's micro-batches."""
    seen = []
    for epoch in loader.epochs(epochs):
        for step in loader.steps():
            for part, batch in enumerate(step):
                now = world.current_batch.batch
                columns = [x.tolist() for x in batch]
                rows = list(zip(*columns, strict=True))
                seen.append((epoch, step.number, part, now.samples, now.last, rows))
            if len(seen) == most:
                return seen
    return seen


def _run(world, dataset, batch, options, epochs=1):
    return _record(world, Loader(dataset, batch, **options), epochs)


def _total(ranks, epoch=0):
    """Return the steps of an epoch as lists of rows for all ranks, without stand-ins."""
    assert len({tuple(record[:3] for record in records) for records in ranks}) == 1
    steps = {}
    for records in ranks:
        for number, step, _, samples, _, rows in records:
            if number == epoch:
                assert samples in (0, len(rows))
                steps.setdefault(step, []).extend(rows if samples else [])
    return [steps[step] for step in sorted(steps)]


# --- map-style -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "micro"),
    [
        (0, None),
        (0, 1),
        (0, 2),
        (2, 1),
        *(pytest.param(2, m, marks=pytest.mark.full) for m in (None, 2)),
    ],
)
def test_order_and_draws_do_not_depend_on_ranks_or_workers(group, num_workers, micro):
    plain = group(1)(_run, Drawing(13), 4, {"shuffle": True}, 2)
    options = {"shuffle": True, "num_workers": num_workers, "micro_batch_size": micro}
    for size in SIZES:
        ranks = group(size)(_run, Drawing(13), 4, options, 2)
        for epoch in (0, 1):
            steps = _total(ranks, epoch)
            assert steps == _total(plain, epoch)
            assert sorted(int(row[0]) for step in steps for row in step) == list(range(13))


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(2, 4), st.integers(1, 25), st.integers(4, 9), st.none() | st.integers(1, 3))
@example(4, 5, 4, None)  # one row left for four ranks
@example(4, 1, 4, 1)
def test_every_sample_comes_once_and_each_step_is_as_long_on_all_ranks(
    group, size, length, batch, micro
):
    options = {"shuffle": True, "micro_batch_size": micro}
    ranks = group(size)(_run, Drawing(length), batch, options)
    assert sorted(row[0] for step in _total(ranks) for row in step) == list(range(length))
    for records in ranks:
        assert all(rows for *_, rows in records)  # a stand-in is a real sample
        assert all(micro is None or len(rows) <= micro for *_, rows in records)


def test_a_stand_in_is_the_first_row_of_the_step(group):
    ranks = group(3)(_run, Drawing(4), 3, {"shuffle": True})
    last = [records[-1] for records in ranks]
    assert [record[3] for record in last] == [0, 0, 1]
    assert last[0][-1] == last[1][-1] == last[2][-1] * 2, "twice, for BatchNorm's sake"


def _shares(world):
    return [rows.tolist() for (rows,) in Loader(TensorDataset(torch.arange(7)), 5)]


def test_shares_are_contiguous_blocks(group):
    assert group(2)(_shares) == [[[0, 1], [5]], [[2, 3, 4], [6]]]


def _interrupted(world, dataset, batch, options, stop):
    first = Loader(dataset, batch, **options)
    seen = _record(world, first, 3, stop)
    return seen, first.state_dict()


def _resumed(world, dataset, batch, options, state):
    loader = Loader(dataset, batch, **options)
    loader.load_state_dict(state)
    return _record(world, loader, 3)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 4)])
def test_an_interrupted_run_goes_on_at_any_size(group, before, after):
    options = {"shuffle": True}
    plain = group(1)(_run, Drawing(11), 4, options, 3)
    first = group(before)(_interrupted, Drawing(11), 4, options, 4)
    states = [state for _, state in first]
    assert states == [{"samples": 15, "epoch": 1}] * before
    then = group(after)(_resumed, Drawing(11), 4, options, states[0])
    for epoch in range(3):
        parts = [_total(ranks, epoch) for ranks in ([seen for seen, _ in first], then)]
        assert parts[0] + parts[1] == _total(plain, epoch)


def _generators_untouched(world, num_workers):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = states()
    for dataset in (Drawing(9), Stream(9), Sharded(9)):
        for _ in Loader(dataset, 4, num_workers=num_workers):
            assert states() == before
    return states() == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_generators_of_a_rank_are_left_alone(group, num_workers):
    assert group(2)(_generators_untouched, num_workers) == [True, True]


# --- samplers ------------------------------------------------------------------------------


def _sampled(world, length):
    torch.manual_seed(world.rank)  # users' own seeds differ, the order must not
    loader = Loader(Drawing(length), 4, sampler=RandomSampler(range(length)))
    return _record(world, loader, 2)


def test_a_random_sampler_is_the_same_on_all_ranks_and_sizes(group):
    plain = group(1)(_sampled, 10)
    ranks = group(3)(_sampled, 10)
    for epoch in (0, 1):
        assert _total(ranks, epoch) == _total(plain, epoch)
    assert _total(plain, 0) != _total(plain, 1)


def test_a_batch_sampler_gives_total_batches(group):
    options = {"batch_sampler": [[4, 3, 2, 1], [0], [5, 6]]}
    for size in SIZES:
        steps = _total(group(size)(_run, Drawing(7), None, options))
        assert [[row[0] for row in step] for step in steps] == options["batch_sampler"]


def _own_orders(world, kind):
    order = [0, 1, 2, 3] if world.rank < 2 else [3, 2, 1, 0]
    options = {"sampler": order, "batch_size": 4}
    if kind == "batch_sampler":
        options = {"batch_sampler": [order]}
    list(Loader(Drawing(4), **options))


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_ranks_with_different_orders_are_named_on_all_ranks(group, kind):
    errors = group(4).errors(_own_orders, kind)
    assert len(set(errors)) == 1
    name, message = errors[0]
    assert name == "DataError"
    assert f"The {kind} gave rank 0 a different order than rank(s) 2, 3 in epoch 0" in message


def _too_small(world):
    Loader(Drawing(9), 2)


def test_a_batch_smaller_than_the_number_of_workers(group):
    errors = group(3).errors(_too_small)
    assert all(name == "DataError" and "cannot be shared by 3 workers" in m for name, m in errors)


# --- streams -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "micro"),
    [(0, None), (0, 2), (2, None), pytest.param(2, 2, marks=pytest.mark.full)],
)
def test_a_sliced_stream_is_the_same_for_any_ranks_and_workers(group, num_workers, micro):
    plain = group(1)(_run, Stream(14), 5, {}, 2)
    assert sorted(row[0] for step in _total(plain) for row in step) == list(range(14))
    options = {"num_workers": num_workers, "micro_batch_size": micro}
    for size in SIZES:
        ranks = group(size)(_run, Stream(14), 5, options, 2)
        assert [_total(ranks, epoch) for epoch in (0, 1)] == [_total(plain, e) for e in (0, 1)]


def test_a_sliced_stream_resumes_at_another_size(group):
    plain = group(1)(_run, Stream(14), 5, {}, 3)
    first = group(2)(_interrupted, Stream(14), 5, {}, 5)
    assert {str(state) for _, state in first} == {
        str(
            {"samples": 24, "epoch": 1, "offset": 10, "steps": 2}
            | {"parts": 0, "part_batch": 0, "joined": 0}
        )
    }
    then = group(3)(_resumed, Stream(14), 5, {}, first[0][1])
    assert _total(then, 1) == _total(plain, 1)[2:]
    assert _total(then, 2) == _total(plain, 2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_stream_with_shards_goes_on_until_all_have_finished(group, size, num_workers):
    options = {"num_workers": num_workers}
    ranks = group(size)(_run, Sharded(14), 5, options, 2)
    for epoch in (0, 1):
        steps = _total(ranks, epoch)
        assert sorted(row[0] for step in steps for row in step) == list(range(14))
    assert all(rows for records in ranks for *_, rows in records)
    again = group(size)(_run, Sharded(14), 5, {"micro_batch_size": 1}, 1)
    assert _total(again) == _total(ranks)


def test_a_stream_with_too_few_shards_is_sliced(group):
    few = Sharded(8, num_shards=2)
    assert _total(group(3)(_run, few, 4, {})) == _total(group(1)(_run, Stream(8), 4, {}))


def _own_part(world, lengths, options, epochs=1):
    first = 100 * world.rank
    loader = Loader(Stream(first + lengths[world.rank], first), 4, sharding="dataset", **options)
    return _record(world, loader, epochs), loader.state_dict()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_parts_of_different_length(group, num_workers):
    said = group(2)(_own_part, [7, 2], {"num_workers": num_workers})
    ranks = [records for records, _ in said]
    assert [[record[3] for record in records] for records in ranks] == [[2, 2, 2, 1], [2, 0, 0, 0]]
    assert [len(step) for step in _total(ranks)] == [4, 2, 2, 1]
    assert [state["samples"] for _, state in said] == [9, 9]
    stand_ins = [record[-1] for record in ranks[1][1:]]
    assert all(len(rows) <= 2 and rows[0][0] in (100, 101) for rows in stand_ins)


def test_parts_drop_a_short_last_batch_when_asked(group):
    said = group(2)(_own_part, [7, 5], {"drop_last": True})
    assert [len(step) for step in _total([records for records, _ in said])] == [4, 4]


def _resumed_part(world, lengths, state):
    first = 100 * world.rank
    loader = Loader(Stream(first + lengths[world.rank], first), 4, sharding="dataset")
    loader.load_state_dict(state)
    return _record(world, loader, 1)


def test_parts_resume_at_the_same_size(group):
    lengths = [9, 2]
    ranks = [records for records, _ in group(2)(_own_part, lengths, {})]
    state = {"samples": 8, "epoch": 0, "offset": 8, "steps": 3}
    resumed = group(2)(_resumed_part, lengths, state)
    assert _total(resumed) == _total(ranks)[3:]
    assert [[record[3] for record in records] for records in resumed] == [[2, 1], [0, 0]]


class UnevenShards(IterableDataset):
    """Shards of different lengths, each shuffled by torch's generator. Samples carry a draw."""

    def __init__(self, shards):
        self.shards, self.num_shards = shards, len(shards)

    def shard(self, num_shards, index):
        return UnevenShards(self.shards[index::num_shards])

    def __iter__(self):
        for shard in self.shards:
            for place in torch.randperm(len(shard)).tolist():
                yield shard[place], torch.rand(()).item()


UNEVEN = UnevenShards([range(9), range(9, 23), range(23, 28), range(28, 39), range(39, 50)])


def _some_steps(world, dataset, batch, options, state, most):
    loader = Loader(dataset, batch, **options)
    if state is not None:
        loader.load_state_dict(state)
    return _record(world, loader, 2, most), loader.state_dict()


def _in_legs(group, dataset, legs, options):
    """Train an epoch in `legs` of (ranks, batch, steps). Return its rows and final state."""
    rows, state = [], None
    for size, batch, steps in legs:
        said = group(size)(_some_steps, dataset, batch, options, state, steps)
        ranks = [records for records, _ in said]
        rows += [row for step in _total(ranks) for row in step]
        state = said[0][1]
        assert all(theirs == state for _, theirs in said)
    return rows, state


@each_value(
    legs=[
        [(2, 8, 3), (3, 8, None)],
        [(3, 8, 4), (1, 8, None)],
        [(1, 8, 2), (4, 8, None)],
        [(2, 8, 3), (2, 6, None)],  # other shares of each part
        [(4, 8, 2), (2, 6, 1), (4, 8, 2), (3, 8, None)],
        [(2, 8, 6), (3, 8, None)],  # after a part has ended
    ],
    num_workers=[0, 2],
)
def test_parts_resumed_at_other_sizes_give_every_sample_once(group, legs, num_workers):
    options = {"num_workers": num_workers}
    rows, _ = _in_legs(group, UNEVEN, legs, options)
    assert sorted(number for number, _ in rows) == list(range(50))
    size, batch, _ = legs[0]
    whole, _ = _in_legs(group, UNEVEN, [(size, batch, None)], options)
    assert sorted(rows) == sorted(whole)  # the draws too


LEGS = st.lists(st.tuples(st.integers(1, 4), st.integers(4, 9), st.integers(1, 4)), max_size=4)


@pytest.mark.slow
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lengths=st.lists(st.integers(1, 15), min_size=4, max_size=7), legs=LEGS, micro=st.booleans())
def test_any_legs_of_an_epoch_give_every_sample_once(group, lengths, legs, micro):
    ends = np.cumsum([0, *lengths]).tolist()
    stream = UnevenShards([range(a, b) for a, b in pairwise(ends)])
    options = {"micro_batch_size": 1} if micro else {}
    if micro:  # a record is a micro-batch: leave legs at the end of a step
        legs = [(size, batch, steps * -(-batch // size)) for size, batch, steps in legs]
    rows, _ = _in_legs(group, stream, [*legs, (2, 8, None)], options)
    assert sorted(number for number, _ in rows) == list(range(ends[-1]))


def test_total_batches_of_parts_do_not_depend_on_the_size_of_a_resume(group):
    rows, _ = _in_legs(group, UNEVEN, [(2, 8, 1), (3, 8, 2), (4, 8, None)], {})
    whole, _ = _in_legs(group, UNEVEN, [(2, 8, None)], {})
    assert rows[:32] == whole[:32]  # until a part ends


def test_the_epoch_after_a_resume_at_another_size_has_parts_of_its_own(group):
    state = group(2)(_some_steps, UNEVEN, 8, {}, None, 3)[0][1]
    assert (state["parts"], state["joined"]) == (2, 0)
    said = group(3)(_some_steps, UNEVEN, 8, {}, state, None)
    fresh = group(3)(_some_steps, UNEVEN, 8, {}, None, None)
    assert _total([records for records, _ in said], 1) == _total([r for r, _ in fresh], 1)
    middle = group(3)(_some_steps, UNEVEN, 8, {}, state, 2)[0][1]
    assert (middle["parts"], middle["part_batch"], middle["joined"]) == (2, 8, 1)


def test_a_sliced_epoch_ends_sliced_where_there_are_shards_enough(group):
    few = UnevenShards([range(9), range(9, 23)])
    rows, _ = _in_legs(group, few, [(3, 6, 2), (2, 6, None)], {})
    assert sorted(number for number, _ in rows) == list(range(23))


def test_parts_that_only_their_ranks_can_read_are_not_resumed_at_another_size(group):
    state = {"samples": 8, "epoch": 0, "offset": 8, "steps": 2}
    state |= {"parts": 2, "part_batch": 4, "joined": 0}
    for size, batch in ((3, 4), (2, 6)):
        errors = group(size).errors(_some_steps, Stream(9), batch, PARTS, state, None)
        assert {kind for kind, _ in errors} == {"DataError"}
        assert "2 workers each read a part of Stream, in total batches of 4" in errors[0][1]


PARTS = {"sharding": "dataset"}


def test_a_part_without_samples_is_named_on_all_ranks(group):
    errors = group(3).errors(_own_part, [3, 0, 3], {})
    assert len(set(errors)) == 1
    assert errors[0][0] == "DataError"
    assert "on rank(s) 1 of 3 has no samples" in errors[0][1]


def rows_case(world):
    return [batch.tolist() for batch in sw.Loader(torch.arange(8), batch_size=4)]


def test_a_tensor_is_a_dataset(group):
    assert group(2)(rows_case) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def _kill_parent_before_first_sample(folder, worker):
    (folder / "worker").write_text(f"{os.getpid()}")
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)


class KillsParent(Dataset):
    """Its last sample kills the process that reads the batches."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            (self.folder / "worker").write_text(f"{os.getpid()}")
            os.kill(os.getppid(), signal.SIGKILL)
        return b"more than a pipe holds" * 10_000


def _lose_rank_before_first_sample(world, folder):
    init = partial(_kill_parent_before_first_sample, folder)
    next(iter(sw.Loader(range(8), 4, num_workers=1, worker_init_fn=init)))


def _lose_rank_with_unread_batches(world, folder):
    loader = sw.Loader(
        KillsParent(folder), 1, num_workers=1, prefetch_factor=4, collate_fn=list, seed_samples=True
    )
    iterator = loader._items()  # starts the worker
    next(iterator)
    time.sleep(60)


def _is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("lose", [_lose_rank_before_first_sample, _lose_rank_with_unread_batches])
def test_worker_process_ends_with_its_killed_rank(group, tmp_path, lose):
    (outcome,) = group(1).outcomes(lose, tmp_path)
    assert outcome.error == ("Died", "exit code -9")
    worker, deadline = int((tmp_path / "worker").read_text()), time.monotonic() + 20
    while _is_running(worker):
        assert time.monotonic() < deadline, f"worker {worker} is still running"
        time.sleep(0.1)
