"""The batch of a loss, from the batches that loaders gave last."""

import pytest

from shardwise.errors import UsageError
from shardwise.world.current_batch import Batch, CurrentBatch, StreamShape

PLAN = StreamShape(batch_size=4, micro_batches=1, steps_per_epoch=None)
FOUR, TWO, NONE = Batch(samples=4), Batch(samples=2), Batch(samples=0)


def given(*batches, training=True):
    """Return a CurrentBatch with one open stream for each of `batches`."""
    feed = CurrentBatch()
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
    assert feed.batch is NONE
    feed.close(inner)
    assert feed.batch is FOUR, "metrics of the training loop go on with its batch"


def test_two_training_streams_need_a_weight():
    with pytest.raises(UsageError, match=r"loader 0 and loader 1.*weight="):
        given(FOUR, TWO).batch_of_loss(weighted=False)
    assert given(FOUR, TWO).batch_of_loss(weighted=True) is TWO


def test_a_stand_in_beside_real_samples_is_ambiguous():
    with pytest.raises(UsageError, match="one has no sample left"):
        given(FOUR, NONE).batch_of_loss(weighted=True)
    assert given(NONE, NONE).batch_of_loss(weighted=True) is NONE


def test_the_next_stream_replaces_a_share():
    feed = CurrentBatch()
    feed.share("world.share", PLAN, FOUR, training=True)
    feed.give(feed.open("loader", PLAN), TWO, training=True)
    assert feed.batch_of_loss(weighted=False) is TWO


def shared(*batches, feed=None):
    """Return a CurrentBatch after `world.share` gave `batches` to train on."""
    feed = feed or CurrentBatch()
    for batch in batches:
        feed.share("world.share", PLAN, batch, training=True)
    return feed


def test_a_share_to_evaluate_on_leaves_that_to_train_on():
    feed = shared(FOUR)
    feed.share("world.share", PLAN, TWO, training=False)
    assert feed.batch_of_loss(weighted=False) is FOUR
    assert feed.batch_of_forward(training=True) is FOUR
    assert feed.batch_of_forward(training=False) is TWO
    inner = feed.open("evaluation", PLAN)
    feed.give(inner, NONE, training=False)
    feed.close(inner)
    assert feed.batch_of_loss(weighted=False) is FOUR
    feed.train()
    assert feed.batch is FOUR


def test_shares_of_other_sizes_need_a_weight_until_a_backward():
    assert shared(FOUR, Batch(samples=4)).batch_of_loss(weighted=False).samples == 4
    feed = shared(FOUR, TWO)
    with pytest.raises(UsageError, match=r"2 and 4 samples .* weight="):
        feed.batch_of_loss(weighted=False)
    assert feed.batch_of_loss(weighted=True) is TWO
    feed.train()
    assert feed.batch_of_loss(weighted=False) is TWO


def test_a_weight_beside_a_stand_in_that_was_shared_out():
    """A loss of a stand-in counts 0, so it must be clear whether it is one."""
    feed = shared(NONE)
    assert feed.batch_of_loss(weighted=True, anew=True) is NONE
    feed.train()
    with pytest.raises(UsageError, match=r"stand-in.* an earlier backward.*same_items=True"):
        feed.batch_of_loss(weighted=True, anew=True)
    assert feed.batch_of_loss(weighted=True) is NONE  # a further loss of it
    assert feed.batch_of_loss(weighted=False) is NONE
    for two in ((TWO, NONE), (NONE, TWO)):
        with pytest.raises(UsageError, match="another batch since the last backward"):
            shared(*two).batch_of_loss(weighted=True, anew=True)


def test_a_share_inside_a_loop_over_a_loader():
    """The batch of the loop counts, whether world.share was called before or after it."""
    feed = given(FOUR)
    assert shared(Batch(samples=4), feed=feed).batch_of_loss(weighted=False) is FOUR
    with pytest.raises(UsageError, match=r"loader 0 and world.share .*4 and 2 samples"):
        shared(TWO, feed=given(FOUR)).batch_of_loss(weighted=False)
    assert shared(TWO, feed=given(FOUR)).batch_of_loss(weighted=True) is FOUR


class Watcher:
    def __init__(self):
        self.seen = []

    def notice(self, stand_in):
        self.seen.append(stand_in)


def test_watchers_get_every_batch_and_are_held_weakly():
    feed, watcher = CurrentBatch(), Watcher()
    feed.watch(watcher.notice)
    stream = feed.open("loader", PLAN)
    feed.give(stream, FOUR, training=True)
    feed.give(stream, NONE, training=True)
    assert watcher.seen == [FOUR, NONE]
    del watcher
    feed.give(stream, FOUR, training=True)
    assert feed._watchers == []
