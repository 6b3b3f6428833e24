"""Streams that continue from their own state, and streams that are read from their start again."""

import random

import pytest
import torch
from torch.utils.data import IterableDataset

import shardwise as sw
from shardwise.data.source import can_continue

LENGTH = 41


class Positioned(IterableDataset):
    """A stream with a state. Samples are (number, samples read before it in this pass)."""

    def __init__(self, draws=False):
        self.at, self.first, self.draws, self.epoch = 0, 0, draws, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        assert state["epoch"] == self.epoch
        self.first = state["at"]

    def __iter__(self):
        first, self.first = self.first, 0
        order = torch.randperm(LENGTH).tolist() if self.draws else range(LENGTH)
        for self.at in range(first + 1, LENGTH + 1):
            yield order[self.at - 1], self.at - 1 - first


def run(world, draws, batch, state, most, workers):
    """Run at most `most` steps. Return the samples of each step on this rank, and the position."""
    dataset = Positioned(draws)
    loader = sw.Loader(dataset, batch, num_workers=workers, collate_fn=list)
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for epoch in loader.epochs(2):
        for batch in loader:
            seen.append((epoch, list(batch) if world.rows else []))
            if len(seen) == most:
                return seen, loader.state_dict()
    return seen, None


@pytest.mark.parametrize("draws", [False, True])
def test_resumes_at_other_sizes_read_every_sample_once(group, draws, capfd):
    generator = random.Random(int(draws))
    state, log, starts = None, [], []
    while True:
        size, most = generator.randint(1, 3), generator.randint(1, 4)
        workers = generator.choice([0, 0, 1])
        ranks = group(size)(run, draws, generator.choice([5, 7]), state, most, workers)
        rows = [row for parts in zip(*(r for r, _ in ranks), strict=True) for row in parts]
        log += [(epoch, number) for epoch, samples in rows for number, _ in samples]
        if state is not None and state["offset"] < LENGTH:
            starts.append(rows[0][1][0][1])
            # A stream that draws random numbers is read again, one with a state is not.
            assert starts[-1] == (state["offset"] if draws else 0)
            assert ("stream" in state) != draws
        if (state := ranks[0][1]) is None:
            break
        assert all(theirs == state for _, theirs in ranks)
    assert len(starts) > 2
    expected = [(epoch, number) for epoch in range(2) for number in range(LENGTH)]
    assert sorted(log) == expected
    assert (log == expected) != draws


def test_a_pass_after_a_resume_starts_from_the_users_object(solo):
    dataset = Positioned()
    loader = sw.Loader(dataset, 4, collate_fn=list)
    loader.load_state_dict(
        {"samples": 8, "epoch": 0, "offset": 8, "steps": 2, "stream": {"at": 8, "epoch": 0}}
    )
    assert next(iter(loader))[0] == (8, 0)
    assert dataset.first == 0
    for _ in loader:
        pass
    assert next(iter(loader))[0] == (0, 0)


def test_a_stream_without_a_state_reports_what_it_skips(solo, capsys, monkeypatch):
    monkeypatch.setattr("shardwise.data.source.REPORT_SECONDS", 0)
    loader = sw.Loader(Positioned(draws=True), 4, collate_fn=list)
    loader.load_state_dict({"samples": 8, "epoch": 0, "offset": 8, "steps": 2})
    next(iter(loader))
    said = capsys.readouterr().err
    assert "Positioned is read from its start: every worker skips 8 samples" in said
    assert "skipped 7 of 8 samples of Positioned" in said


class Holder:
    def __init__(self, **fields):
        self.__dict__ |= fields


def test_a_shuffle_buffer_makes_a_state_incomplete():
    def hugging_face(examples):
        return Holder(_ex_iterable=examples, state_dict=dict, load_state_dict=print)

    assert can_continue(hugging_face(Holder(ex_iterable=Holder())))
    assert not can_continue(hugging_face(Holder(ex_iterable=Holder(buffer_size=100))))
    assert not can_continue(hugging_face(Holder(ex_iterables=[Holder(), Holder(buffer_size=9)])))
    assert not can_continue(Holder(state_dict=dict))
