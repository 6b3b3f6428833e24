"""The Loader alone: arguments, iteration, position, randomness, torch's DataLoader underneath."""

import collections
import math
import multiprocessing
import os
import random
import re
import subprocess
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from shardwise import config
from shardwise.data import Loader, batch_schedule, source
from shardwise.data.steps import to_device
from shardwise.engine import Engine
from shardwise.errors import DataError, UsageError
from shardwise.world import generator_states
from shardwise.world import world as worlds

# torch compares num_workers with the cores of this machine, which is not the point here
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(Dataset):
    """0 to length - 1, each with a draw of every generator."""

    def __init__(self, length=11):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, torch.rand(()).item(), random.random(), np.random.rand()


class Stream(IterableDataset):
    """0 to length - 1, each with a draw."""

    def __init__(self, length=11):
        self.length = length

    def __iter__(self):
        for index in range(self.length):
            yield index, torch.rand(()).item()


class Sharding(Stream):
    """A stream that shards itself over the DataLoader's workers."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from range(first, self.length, step)


class Refuses(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise OSError(f"sample {index} is broken")
        return index


def tensors(length=11):
    return TensorDataset(torch.arange(length))


def flat(batches):
    return [row for (rows,) in batches for row in rows.tolist()]


@pytest.fixture(autouse=True)
def before(solo):
    """The processes that are there already: warm groups of other tests. None is added."""
    processes = multiprocessing.active_children()
    yield processes
    assert set(multiprocessing.active_children()) <= set(processes)
    assert solo.current_batch.streams == []


# --- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (tensors(), {}, "needs batch_size"),
        (tensors(), {"batch_size": 0}, "1 or more, not 0"),
        (tensors(), {"batch_size": True}, "not True"),
        (tensors(), {"batch_size": 2.0}, r"not 2\.0"),
        (tensors(0), {"batch_size": 2}, "TensorDataset has length 0"),
        (tensors(), {"batch_size": 12, "drop_last": True}, "drops all 11 samples"),
        (tensors(), {"batch_size": 2, "shuffle": True, "sampler": [1]}, "shuffle and sampler"),
        (tensors(), {"batch_size": 2, "batch_sampler": [[1]]}, "so batch_size cannot"),
        (tensors(), {"shuffle": True, "drop_last": True, "batch_sampler": [[1]]}, "shuffle and dr"),
        (tensors(), {"batch_size": 2, "sharding": "slice"}, "TensorDataset is map-style"),
        (tensors(), {"batch_size": 2, "sharding": "slices"}, "one of auto, slice, dataset"),
        (Stream(), {"batch_size": 2, "shuffle": True}, "Shuffle inside it"),
        (Stream(), {"batch_size": 2, "sampler": [1]}, "no sampler can"),
        (Stream(), {"batch_sampler": [[1]]}, "no batch_sampler can"),
        (iter([1, 2]), {"batch_size": 2}, "read only once"),
        (3, {"batch_size": 2}, "int is not a dataset"),
        (
            tensors(),
            {"batch_size": 2, "sampler": DistributedSampler(tensors(), 2, 0)},
            "the Loader already does that",
        ),
        (
            tensors(),
            {"batch_sampler": BatchSampler(DistributedSampler(tensors(), 2, 0), 2, False)},
            "the Loader already does that",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(solo, dataset, options, message):
    with pytest.raises(DataError, match=message):
        Loader(dataset, **options)


def test_a_batch_smaller_than_the_number_of_workers_is_refused(solo):
    solo.size = 4
    with pytest.raises(DataError, match=r"batch_size=3 is .*cannot be shared by 4"):
        Loader(tensors(), 3)


def test_a_loader_needs_init(monkeypatch):
    monkeypatch.setattr(worlds, "_current", None)
    with pytest.raises(UsageError, match=r"shardwise\.init"):
        Loader(tensors(), 2)


# --- iteration -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_gives_every_sample_once(solo, num_workers, shuffle):
    loader = Loader(tensors(), 4, shuffle=shuffle, num_workers=num_workers)
    batches = list(loader)
    assert [len(rows) for (rows,) in batches] == [4, 4, 3]
    assert sorted(flat(batches)) == list(range(11))
    assert (flat(batches) == list(range(11))) is not shuffle
    assert len(loader) == 3


def test_a_loop_again_is_the_next_epoch(solo):
    loader = Loader(tensors(), 4, shuffle=True)
    first, second = flat(loader), flat(loader)
    assert first != second
    assert flat(Loader(tensors(), 4, shuffle=True)) == first
    assert loader.epoch == 2


def test_drop_last_leaves_the_short_batch_out(solo):
    loader = Loader(tensors(), 4, drop_last=True)
    assert flat(loader) == list(range(8))
    assert len(loader) == 2
    assert loader.state_dict()["samples"] == 8


def test_the_feed_knows_each_batch(solo):
    seen = []
    loader = Loader(tensors(5), 4, shuffle=True, name="train", micro_batch_size=2)
    for step in loader.steps():
        for (rows,) in step:
            (stream,) = solo.current_batch.streams
            batch = solo.current_batch.batch
            assert batch.indices == tuple(rows.tolist())
            seen.append((stream.name, step.number, batch.samples, batch.last, stream.training))
    assert seen == [
        ("train", 0, 2, False, True),
        ("train", 0, 2, True, True),
        ("train", 1, 1, True, True),
    ]
    assert stream.plan.batch_size == 4
    assert (stream.plan.micro_batches, stream.plan.steps_per_epoch) == (2, 2)
    assert solo.current_batch.batch is None


def test_a_loop_without_grad_is_not_training(solo):
    with torch.no_grad():
        for _ in Loader(tensors(5), 4):
            assert not solo.current_batch.streams[0].training


def test_leaving_a_loop_closes_its_stream_and_workers(solo, before):
    for _ in Loader(tensors(), 2, num_workers=2):
        assert len(solo.current_batch.streams) == 1
        break
    assert solo.current_batch.streams == []
    assert set(multiprocessing.active_children()) <= set(before)


KILLED = """
import os, signal, torch, shardwise as sw

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 6:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does if memory runs out
        return torch.tensor(index)

sw.init()
list(sw.Loader(Samples(), 2, num_workers=1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
def test_a_killed_worker_is_named_and_leaves_no_temporary_folder(tmp_path):
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", KILLED]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    # torch raises the error, unless a read from the worker fails before torch checks the worker.
    assert re.search(r"worker.* \(pid(\(s\))? \d+\)", run.stderr.splitlines()[-1]), run.stderr
    assert list(tmp_path.glob("pymp-*")) == []


def test_an_exception_in_the_body_closes_the_stream(solo):
    def body():
        for _ in Loader(tensors(), 2):
            raise KeyError

    with pytest.raises(KeyError):
        body()


def test_a_newer_loop_supersedes_an_older_one(solo):
    loader = Loader(tensors(), 2)
    older = iter(loader)
    next(older)
    next(older)
    newer = iter(loader)
    next(newer)
    assert len(solo.current_batch.streams) == 1
    with pytest.raises(UsageError, match="A newer loop over"):
        next(older)
    newer.close()


def test_an_error_of_the_dataset_comes_through(solo):
    with pytest.raises(OSError, match="sample 2 is broken"):
        list(Loader(Refuses(), 2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_persistent_workers_serve_all_epochs(solo, num_workers):
    kept = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = Loader(tensors(), 4, shuffle=True, **kept)
    plain = Loader(tensors(), 4, shuffle=True)
    for _ in loader:
        break
    assert [flat(loader) for _ in range(3)] == [flat(plain) for _ in range(3)]


def test_a_worker_shows_the_users_dataset(solo):
    loader = Loader(Numbers(4), 2, num_workers=1, worker_init_fn=_lengthen, collate_fn=_lengths)
    assert list(loader) == [[1000, 1000]] * 2


def _lengthen(worker):
    get_worker_info().dataset.length = 1000


def _lengths(rows):
    return [get_worker_info().dataset.length for _ in rows]


# --- steps ---------------------------------------------------------------------------------


def test_plain_iteration_over_several_micro_batches_says_what_to_write(solo):
    loader = Loader(tensors(), 4, micro_batch_size=3)
    with pytest.raises(UsageError, match=r"2 micro-batches. Write `for step in loader\.steps\(\)"):
        next(iter(loader))
    with torch.no_grad():
        assert [len(rows) for (rows,) in Loader(tensors(), 4, micro_batch_size=3)] == [
            3,
            1,
            3,
            1,
            3,
        ]


def test_steps_hold_their_micro_batches(solo):
    steps = [(step.number, len(step), [len(x) for (x,) in step]) for step in _steps()]
    assert steps == [(0, 2, [3, 1]), (1, 2, [3, 1]), (2, 1, [3])]


def _steps():
    return Loader(tensors(), 4, micro_batch_size=3).steps()


def test_the_run_may_decide_the_micro_batch_size(solo, monkeypatch):
    solo.settings = config.Settings(micro_batch_size=1)
    assert [len(step) for step in Loader(tensors(), 4).steps()] == [4, 4, 3]
    monkeypatch.setenv("SHARDWISE_MICRO_BATCH_SIZE", "2")
    assert [len(step) for step in Loader(tensors(), 4, micro_batch_size=4).steps()] == [2, 2, 2]


def test_a_step_can_be_left_out_whole_but_not_in_part(solo):
    loader = Loader(tensors(), 4, micro_batch_size=2)
    seen = [
        row for step in loader.steps() if step.number != 1 for (x,) in step for row in x.tolist()
    ]
    assert seen == [0, 1, 2, 3, 8, 9, 10]
    assert loader.state_dict() == {"samples": 11, "epoch": 1}
    steps = Loader(tensors(), 4, micro_batch_size=2).steps()
    next(iter(next(steps)))
    with pytest.raises(UsageError, match="has 2 micro-batches, but the loop took only 1"):
        next(steps)


def test_a_step_is_iterated_once_and_inside_its_loop(solo):
    steps = Loader(tensors(), 4).steps()
    step, later = next(steps), None
    assert len(list(step)) == 1
    with pytest.raises(UsageError, match="already iterated over"):
        list(step)
    later = next(steps)
    steps.close()
    with pytest.raises(UsageError, match="loop over the Loader that has ended"):
        list(later)


# --- the position --------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 9), st.booleans())
def test_a_run_goes_on_where_it_was_interrupted(solo, length, batch, stop, shuffle):
    def run(loader, most=None):
        seen = []
        for epoch in loader.epochs(3):
            for (rows,) in loader:
                seen.append((epoch, rows.tolist()))
                if len(seen) == most:
                    return seen
        return seen

    whole = run(Loader(tensors(length), batch, shuffle=shuffle))
    first = Loader(tensors(length), batch, shuffle=shuffle)
    seen = run(first, stop) if stop else []
    second = Loader(tensors(length), batch, shuffle=shuffle)
    second.load_state_dict(first.state_dict())
    assert seen + run(second) == whole


def test_epochs_counts_all_epochs_since_the_beginning(solo):
    loader = Loader(tensors(), 4)
    assert [(epoch, len(flat(loader))) for epoch in loader.epochs(2)] == [(0, 11), (1, 11)]
    assert list(loader.epochs(2)) == []
    assert list(loader.epochs(4)) == [2, 3]
    with pytest.raises(DataError, match="not -1"):
        next(loader.epochs(-1))


def test_a_run_that_resumes_behind_the_last_epoch_is_told(solo, capsys):
    whole = Loader(tensors(), 4)
    assert [len(flat(whole)) for _ in whole.epochs(2)] == [11, 11]
    assert list(whole.epochs(2)) == []
    assert capsys.readouterr().out == ""
    later = Loader(tensors(), 4, name="data")
    later.load_state_dict(whole.state_dict())
    assert list(later.epochs(2)) == []
    said = "shardwise: all 2 epochs of data are over at the resumed position: none is left\n"
    assert capsys.readouterr().out == said
    assert list(later.epochs(3)) == [2]
    assert capsys.readouterr().out == ""


def test_an_epoch_left_early_is_over_but_a_look_is_not(solo):
    loader = Loader(tensors(), 4, shuffle=True)
    plain = Loader(tensors(), 4, shuffle=True)
    first, second = flat(plain), flat(plain)
    next(iter(loader))
    assert loader.epoch == 0
    for step in loader.steps():
        if step.number == 2:
            break
        list(step)
    assert loader.state_dict()["samples"] == 8
    assert flat(loader) == second
    assert first != second


@pytest.mark.parametrize("direct", [False, True], ids=["break", "next(iter())"])
def test_a_first_batch_that_was_trained_on_is_no_look(solo, direct):
    model = torch.nn.Linear(1, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1e-6), quiet=True)
    loader, plain = (Loader(tensors(), 4, shuffle=True) for _ in range(2))
    seen = []
    for _ in range(3):
        if direct:
            (rows,) = next(iter(loader))
            engine.backward(model(rows.float()[:, None]).mean())
        for (rows,) in [] if direct else loader:
            engine.backward(model(rows.float()[:, None]).mean())
            break
        engine.step()
        seen.append(rows.tolist())
    assert seen == [flat(plain)[:4] for _ in range(3)]
    engine.close()


def test_a_look_after_a_resume_changes_nothing(solo):
    loader = Loader(tensors(), 4)
    loader.load_state_dict({"samples": 4})
    next(iter(loader))
    assert [(epoch, flat(loader)) for epoch in loader.epochs(1)] == [(0, list(range(4, 11)))]


def test_a_resume_from_the_last_step_of_an_epoch_ends_that_epoch_first(solo):
    loader = Loader(tensors(), 4, shuffle=True)
    for step in loader.steps():
        list(step)
        state = loader.state_dict()
    again = Loader(tensors(), 4, shuffle=True)
    again.load_state_dict(state)
    seen = [(epoch, flat(again)) for epoch in again.epochs(2)]
    assert seen == [(0, []), (1, flat(loader))]


def test_the_numbers_of_steps_go_on_after_a_resume(solo):
    loader = Loader(tensors(), 4)
    loader.load_state_dict({"samples": 11 + 4})
    assert [(loader.epoch, step.number) for step in loader.steps()] == [(1, 1), (1, 2)]


def test_a_state_is_not_loaded_inside_a_loop(solo):
    loader = Loader(tensors(), 4)
    batches = iter(loader)
    next(batches)
    with pytest.raises(UsageError, match="load its state before the loop"):
        loader.load_state_dict({"samples": 4})
    batches.close()
    loader.load_state_dict({"samples": 4})


# --- samplers ------------------------------------------------------------------------------


def test_a_sampler_without_end_is_read_as_it_is_needed(solo):
    data = tensors()
    huge = RandomSampler(data, replacement=True, num_samples=int(1e10))
    first = [batch for batch, _ in zip(Loader(data, 3, sampler=huge), range(4), strict=False)]
    again = [batch for batch, _ in zip(Loader(data, 3, sampler=huge), range(4), strict=False)]
    assert str(first) == str(again)

    class Endless(Dataset):
        def __iter__(self):
            while True:
                yield from (3, 1)

    (rows,) = next(iter(Loader(data, 3, sampler=Endless())))
    assert len(rows) == 3
    (rows,) = next(iter(Loader(data, batch_sampler=BatchSampler(Endless(), 2, False))))
    assert len(rows) == 2


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_order_does_not_depend_on_how_much_is_drawn_at_a_time(solo, monkeypatch, drop_last):
    """Uses a sampler that draws lazily, while the loop draws too."""

    class Drawing:
        def __iter__(self):
            for _ in range(11):
                yield int(torch.randint(6, ()))

    def order():
        batches = []
        for (rows,) in Loader(tensors(), 4, sampler=Drawing(), drop_last=drop_last):
            batches.append(rows.tolist())
            torch.rand(3)
        return batches

    whole = order()
    assert [len(batch) for batch in whole] == ([4, 4] if drop_last else [4, 4, 3])
    monkeypatch.setattr(batch_schedule, "BLOCK", 2)
    assert order() == whole


def test_a_sampler_gives_the_order(solo):
    loader = Loader(tensors(), 3, sampler=[5, 1, 5, np.int64(2)])
    assert [rows.tolist() for (rows,) in loader] == [[5, 1, 5], [2]]
    assert len(loader) == 2


def test_a_random_sampler_is_drawn_anew_each_epoch_and_after_a_resume(solo):
    def make():
        return Loader(tensors(), 4, sampler=RandomSampler(tensors()))

    before = torch.get_rng_state()
    loader = make()
    first, second = flat(loader), flat(loader)
    assert sorted(first) == sorted(second) == list(range(11))
    assert first != second
    assert torch.equal(before, torch.get_rng_state())
    interrupted = make()
    flat(interrupted)
    passed = iter(interrupted)
    next(passed), next(passed)
    resumed = make()
    resumed.load_state_dict(interrupted.state_dict())
    passed.close()
    assert flat(resumed) == second[8:]


def test_set_epoch_is_called(solo):
    class Told(list):
        def set_epoch(self, epoch):
            self[:] = [epoch]

    loader = Loader(tensors(), 3, sampler=Told([0]))
    assert [flat(loader) for _ in range(3)] == [[0], [1], [2]]


def test_a_batch_sampler_gives_total_batches_of_any_size(solo):
    lists = [[0, 1, 2], [3], [4, 5]]
    loader = Loader(tensors(), batch_sampler=lists, micro_batch_size=2)
    sizes = [[len(x) for (x,) in step] for step in loader.steps()]
    assert sizes == [[2, 1], [1], [2]]
    assert len(loader) == 3
    assert loader.state_dict() == {"samples": 6, "epoch": 1, "offset": 0, "steps": 0}
    again = Loader(tensors(), batch_sampler=lists)
    again.load_state_dict({"samples": 3, "epoch": 0, "offset": 3, "steps": 1})
    assert flat(again) == [3, 4, 5]


def test_an_empty_batch_of_a_batch_sampler_is_refused(solo):
    with pytest.raises(DataError, match=r"empty batch \(number 1 of epoch 0\)"):
        list(Loader(tensors(), batch_sampler=[[0], []]))


# --- streams -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_a_stream_is_the_same_for_any_number_of_workers(solo, num_workers):
    def epochs(**options):
        loader = Loader(Stream(), 4, micro_batch_size=2, **options)
        return [
            [[x.tolist() for x in batch] for step in loader.steps() for batch in step] for _ in "ab"
        ]

    before = torch.get_rng_state()
    expected = epochs()
    assert torch.equal(before, torch.get_rng_state())
    assert [row for batch in expected[0] for row in batch[0]] == list(range(11))
    assert expected[0] != expected[1]  # the draws are of the epoch
    kept = num_workers > 0
    assert epochs(num_workers=num_workers, persistent_workers=kept) == expected


def _lists(loader):
    return [[x.tolist() for x in batch] for step in loader.steps() for batch in step]


def test_a_stream_resumes_in_mid_epoch_with_its_draws(solo):
    def rows(loader):
        return [pair for x, d in loader for pair in zip(x.tolist(), d.tolist(), strict=True)]

    whole = Loader(Stream(), 4)
    rows(whole)
    second = rows(whole)
    resumed = Loader(Stream(), 4)
    resumed.load_state_dict({"samples": 15, "epoch": 1, "offset": 4, "steps": 1})
    assert rows(resumed) == second[4:]
    assert resumed.state_dict()["samples"] == 22


def test_a_stream_that_shards_itself_over_workers_loses_nothing(solo):
    seen = [row for batch in Loader(Sharding(), 4, num_workers=2) for row in batch.tolist()]
    assert seen == list(range(11))


def test_a_stream_drops_its_short_batch_when_asked(solo):
    assert [len(x) for x, _ in Loader(Stream(), 4, drop_last=True)] == [4, 4]


def test_the_length_of_a_stream(solo):
    class Long(Stream):
        def __len__(self):
            return self.length

    assert len(Loader(Long(), 4)) == 3
    with pytest.raises(TypeError, match="does not know how many steps"):
        len(Loader(Stream(), 4))


def test_an_empty_stream_is_refused(solo):
    with pytest.raises(DataError, match="yielded no sample in epoch 0"):
        list(Loader(Stream(0), 4))


def test_set_epoch_of_a_stream_is_called(solo):
    class Told(Stream):
        def set_epoch(self, epoch):
            self.length = epoch + 1

    loader = Loader(Told(), 4)
    assert [sum(len(x) for x, _ in loader) for _ in range(3)] == [1, 2, 3]


# --- randomness ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_draws_of_a_dataset_are_of_seed_epoch_and_index(solo, num_workers):
    def draws(batch, **options):
        loader = Loader(Numbers(), batch, **options)
        return [_by_index(loader) for _ in range(2)]

    expected = draws(11)
    assert draws(3, shuffle=True, num_workers=num_workers) == expected
    assert expected[0] != expected[1]
    assert len({pair for row in expected[0].values() for pair in row}) == 33


def _by_index(loader):
    rows = {}
    for index, *draws in loader:
        columns = [column.tolist() for column in draws]
        rows |= dict(zip(index.tolist(), zip(*columns, strict=True), strict=True))
    return rows


def _states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers(), Stream(), tensors()])
def test_the_generators_of_the_main_process_are_left_alone(solo, dataset, num_workers):
    before = _states()
    for _ in Loader(dataset, 4, num_workers=num_workers):
        assert _states() == before
    assert _states() == before


def test_draws_in_between_do_not_disturb_a_stream(solo):
    plain = [d.tolist() for _, d in Loader(Stream(), 4)]
    disturbed = []
    for _, d in Loader(Stream(), 4):
        torch.rand(5)
        disturbed.append(d.tolist())
    assert disturbed == plain


@pytest.mark.parametrize("num_workers", [0, 2])
def test_draws_of_collate_are_of_the_first_index(solo, num_workers):
    def run(workers):
        loader = Loader(tensors(), 4, collate_fn=_noisy, num_workers=workers)
        return [list(loader) for _ in range(2)]

    before = _states()
    assert run(num_workers) == run(0)
    assert _states() == before
    assert len({draw for epoch in run(0) for draw in epoch}) == 6


def _noisy(rows):
    return torch.rand(()).item()


class Batched(Numbers):
    calls = 0

    def __getitems__(self, indices):
        self.calls += 1
        return [self[index] for index in indices]


def test_a_batched_fetch_is_kept_without_seeding_of_samples(solo):
    seeded, batched = Batched(), Batched()
    list(Loader(seeded, 4))
    first = [_by_index(Loader(batched, 4, seed_samples=False)) for _ in range(2)]
    assert (seeded.calls, batched.calls) == (0, 6)
    assert first[0] == first[1]


class Rarely(Dataset):
    """Draws in two samples of ten. Counts the reads of each sample."""

    def __init__(self, draw):
        self.draw, self.reads = draw, collections.Counter()

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.reads[index] += 1
        return index, torch.tensor(self.draw() if index in (5, 8) else 0.0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("draw", [random.random, np.random.randn, lambda: torch.randn(()).item()])
def test_a_dataset_that_draws_later_gets_the_same_draws(solo, draw, num_workers):
    expected = _by_index(Loader(Rarely(draw), 10, seed_samples=True))
    before = _states()
    loader = Loader(Rarely(draw), 2, num_workers=num_workers)
    found = []
    for _ in range(2):
        np.random.randn()  # keeps a second normal number, which the dataset must not get
        random.gauss(0, 1)
        before = _states()
        found.append(_by_index(loader))
        assert _states() == before
    assert found[0] == expected
    assert found[1] != expected


def _forked():
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


@pytest.mark.parametrize(
    "draw", [_forked, lambda: random.Random(torch.initial_seed()).random()], ids=["fork", "seed"]
)
def test_a_dataset_that_draws_without_a_trace_is_seeded(solo, draw):
    class Hidden(Rarely):
        def __getitem__(self, index):
            return index, torch.tensor(self.draw())

    expected = _by_index(Loader(Hidden(draw), 10, seed_samples=True))
    assert _by_index(Loader(Hidden(draw), 2)) == expected
    assert len(set(expected.values())) == 10


@pytest.fixture
def seeds(monkeypatch):
    """The seeds of samples and collations, in place of seeding."""
    found = []
    for module in (source, generator_states):
        monkeypatch.setattr(module, "seed_cpu", found.append)
    return found


def test_samples_are_seeded_only_until_the_dataset_is_known(solo, monkeypatch, seeds):
    monkeypatch.setattr(source, "SLOW", math.inf)
    quiet = Rarely(lambda: 0.0)
    loader = Loader(quiet, 2)
    for _ in range(2):
        list(loader)
    assert len(seeds) == 2 + 16  # two samples, which are then read again with other seeds
    assert dict(quiet.reads) == {**dict.fromkeys(range(10), 2), 0: 10, 1: 10}


def test_a_micro_batch_that_draws_is_read_again_unless_samples_are_seeded(solo, monkeypatch):
    monkeypatch.setattr(source, "SLOW", math.inf)
    late, seeded = Rarely(random.random), Rarely(random.random)
    list(Loader(late, 2))
    list(Loader(seeded, 2, seed_samples=True))
    assert dict(late.reads) == {**dict.fromkeys(range(10), 1), 0: 9, 1: 9, 4: 2, 5: 2}
    assert set(seeded.reads.values()) == {1}


def test_samples_that_take_long_to_read_are_seeded_and_read_once(solo, monkeypatch):
    monkeypatch.setattr(source, "SLOW", 0.0)
    slow = Rarely(random.random)
    assert _by_index(Loader(slow, 2)) == _by_index(Loader(Rarely(random.random), 10))
    assert set(slow.reads.values()) == {1}


class Coin(Rarely):
    """Draws a coin for each sample, and leaves the generators unchanged."""

    def __getitem__(self, index):
        return index, torch.tensor(self.draw() < 0.5)


@pytest.mark.parametrize("seed", range(8))
def test_coins_without_a_trace_are_noticed(solo, monkeypatch, seed):
    monkeypatch.setattr(source, "SLOW", math.inf)
    solo.seed = seed
    expected = _by_index(Loader(Coin(_forked), 10, seed_samples=True))
    assert _by_index(Loader(Coin(_forked), 2)) == expected


class Noisy(TensorDataset):
    def __getitem__(self, index):
        return index, super().__getitem__(index)[0] + torch.rand(())


@pytest.mark.parametrize("seed_samples", [None, True])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(10))])
@pytest.mark.parametrize("options", [{}, {"collate_fn": default_collate}])
def test_a_class_derived_from_one_that_never_draws_is_seeded(solo, seed_samples, wrap, options):
    data = wrap(Noisy(torch.zeros(10)))
    expected = _by_index(Loader(data, 10, seed_samples=True))
    assert len(set(expected.values())) == 10
    assert _by_index(Loader(data, 4, seed_samples=seed_samples, **options)) == expected


def test_samples_without_a_value_to_compare_are_seeded(solo, seeds):
    class Objects(Rarely):
        def __getitem__(self, index):
            return object()

    list(Loader(Objects(None), 2, collate_fn=len))
    assert len(seeds) == 10 + 1 + 5  # each sample, one of them again, and each collation


def test_an_error_of_a_later_sample_is_raised_once(solo):
    class Broken(Rarely):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            if index == 4:
                raise ValueError("no sample 4")
            return sample

    broken = Broken(random.random)
    with pytest.raises(ValueError, match="no sample 4"):
        list(Loader(broken, 2))
    assert broken.reads[4] == 1


def test_which_datasets_may_draw():
    face = types.SimpleNamespace
    assert source.may_draw(Numbers())
    assert source.may_draw(Subset(Numbers(), [0]))
    assert source.may_draw(ConcatDataset([tensors(), Numbers()]))
    assert source.may_draw(face(format={"type": "custom"}))
    assert not source.may_draw(face(format={"type": None}))
    assert not source.may_draw(Subset(tensors(), [0]))
    assert not source.may_draw(ConcatDataset([tensors(), [1, 2]]))


# --- the device ----------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "x y")


@dataclass
class Registered:
    x: Tensor
    label: str


torch.utils._pytree.register_dataclass(Registered)


def test_batches_of_any_nesting_move():
    meta = torch.device("meta")
    x = torch.zeros(2)
    batch = {
        "pair": Pair(x, [x, "text"]),
        "registered": Registered(x, "a"),
        "packed": pack_sequence([x]),
        "n": 3,
    }
    moved = to_device(batch, torch.device("cpu"), non_blocking=False)
    assert type(moved["pair"]) is Pair
    assert moved["packed"].data.tolist() == [0.0, 0.0]
    del batch["packed"]
    moved = to_device(batch, meta, non_blocking=False)
    assert moved["pair"].x.device == moved["pair"].y[0].device == meta
    assert moved["registered"].x.device == meta
    assert (moved["pair"].y[1], moved["registered"].label, moved["n"]) == ("text", "a", 3)


class Rows(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(8, 4))


def mask(rows):
    x = torch.stack(rows)
    return x.masked_fill(torch.rand(x.shape) < 0.5, 0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [list(torch.ones(8, 4)), Rows()])
def test_tells_that_batches_depend_on_micro_batches_if_collate_draws(
    solo, capsys, dataset, workers
):
    options = {"micro_batch_size": 2, "num_workers": workers}
    for collate, is_told in ((torch.stack, False), (mask, True)):
        for _ in range(2):  # told once
            for step in Loader(dataset, 4, collate_fn=collate, **options).steps():
                list(step)
        told = capsys.readouterr().err
        assert told.count("collate_fn draws random numbers once per micro-batch") == is_told


def test_says_nothing_of_collate_if_a_step_has_one_batch(solo, capsys):
    list(Loader(list(torch.ones(8, 4)), 4, collate_fn=mask))
    assert "collate_fn" not in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"tokens": 16, "length": len}])
def test_samples_of_different_lengths_without_collate_fn_are_refused(solo, options):
    data = [torch.ones(3), torch.ones(5)]
    with pytest.raises(DataError, match=r"different sizes \(.*\)\. Pass a collate_fn that pads"):
        list(Loader(data, **options))
