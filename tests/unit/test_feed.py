"""Which batch a loss comes from, told by what the loaders gave last."""

import pytest

from shardwise.errors import UsageError
from shardwise.feed import Batch, Feed, Plan

PLAN = Plan(batch_size=4, micro_batches=1, steps_per_epoch=None)
FOUR, TWO, NONE = Batch(samples=4), Batch(samples=2), Batch(samples=0)


def given(*batches, training=True):
    """A feed with one open stream for each of `batches`."""
    feed = Feed()
    for number, batch in enumerate(batches):
        feed.give(feed.open(f"loader {number}", PLAN), batch, training=training)
    return feed


def test_one_training_stream():
    assert given(FOUR).batch_of_loss(weighted=False) is FOUR
    assert given(FOUR).batch_of_loss(weighted=True) is FOUR
    assert given().batch_of_loss(weighted=False) is None


def test_an_evaluation_is_no_training():
    feed = given(FOUR)
    inner = feed.open("evaluation", PLAN)
    feed.give(inner, NONE, training=False)
    assert feed.batch_of_loss(weighted=True) is FOUR
    assert feed.current is NONE
    feed.close(inner)
    assert feed.current is FOUR, "metrics of the training loop go on with its batch"


def test_two_training_streams_need_a_weight():
    with pytest.raises(UsageError, match=r"loader 0 and loader 1.*weight="):
        given(FOUR, TWO).batch_of_loss(weighted=False)
    assert given(FOUR, TWO).batch_of_loss(weighted=True) is TWO


def test_a_stand_in_beside_real_samples_is_ambiguous():
    with pytest.raises(UsageError, match="one has no sample left"):
        given(FOUR, NONE).batch_of_loss(weighted=True)
    assert given(NONE, NONE).batch_of_loss(weighted=True) is NONE


def test_a_share_gives_way_to_the_next_stream():
    feed = Feed()
    feed.give(feed.open("world.share", PLAN, passing=True), FOUR, training=True)
    feed.give(feed.open("loader", PLAN), TWO, training=True)
    assert feed.batch_of_loss(weighted=False) is TWO


class Watcher:
    def __init__(self):
        self.seen = []

    def notice(self, stand_in):
        self.seen.append(stand_in)


def test_watchers_hear_of_every_batch_and_are_not_kept_alive():
    feed, watcher = Feed(), Watcher()
    feed.watch(watcher.notice)
    stream = feed.open("loader", PLAN)
    feed.give(stream, FOUR, training=True)
    feed.give(stream, NONE, training=True)
    assert watcher.seen == [False, True]
    del watcher
    feed.give(stream, FOUR, training=True)
    assert feed._watchers == []
