"""Hooks of the timeline on a user's model."""

from torch import nn

from shardwise.model.forward_events import ForwardEvents
from shardwise.timeline import recorder
from shardwise.timeline.recorder import TimelineEvent, TimelineRecorder


class Nowhere:
    """A sink that keeps nothing."""

    def write(self, notes: list[TimelineEvent]) -> None:
        pass

    def close(self) -> None:
        pass


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_hooks_go_with_the_engine_that_was_dropped_without_close() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)))
    recording = TimelineRecorder(Nowhere(), lambda error: None)
    recorder.start(recording)
    try:
        dropped, kept = ForwardEvents([model], None), ForwardEvents([model], None)
        own = hooks(model) // 2
        assert own > 0
        del dropped
        assert hooks(model) == own
    finally:
        recorder.stop(recording)
        recording.stop()
    assert hooks(model) == 0
    kept.close()
