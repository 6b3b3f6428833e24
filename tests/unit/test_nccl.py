"""NCCL calls, as far as they can be tested without a device."""

from shardwise.comm.nccl import _Working


class Work:
    """A call on a device, which has made it once `done` is set."""

    done = False

    def is_completed(self):
        return self.done


def test_a_call_is_there_when_the_device_has_made_it_though_nobody_has_waited():
    work, waited = Work(), []
    handle = _Working(work, lambda: waited.append(True))
    assert not handle.is_there()
    work.done = True
    assert handle.is_there()
    assert not waited
    handle.wait()
    assert waited == [True]
    work.done = False
    assert handle.is_there()
