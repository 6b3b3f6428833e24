"""Views of a bucket: each gradient is written once, to the buffer or to the separate memory."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.layout.bucket_layout import Spec, lay_out
from shardwise.states.gradients.bucket_views import BucketViews
from shardwise.states.parameters.named_parameters import NamedParameter


def form(sizes):
    value = torch.zeros(sizes)
    if len(sizes) == 4:
        value = value.contiguous(memory_format=torch.channels_last)
    return NamedParameter("p", nn.Parameter(value))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 40)),
            st.tuples(*[st.integers(1, 5)] * 2),
            st.tuples(*[st.integers(1, 4)] * 4),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
    st.data(),
)
def test_gradients_are_written_to_their_elements(shapes, ranks, data):
    named = [form(shape) for shape in shapes]
    specs = [Spec(name="p", numel=t.parameter.numel(), itemsize=4, key=0) for t in named]
    (bucket,) = lay_out(specs, ranks=ranks, capacity=10**6)
    named = [named[slot.parameter] for slot in bucket.slots]
    apart = bucket.interval(data.draw(st.integers(0, ranks - 1)))
    buffer, own = torch.full((bucket.numel,), -1.0), torch.full((apart[1] - apart[0],), -1.0)
    views = BucketViews(bucket, named, buffer, apart, own)

    expected = torch.full((bucket.numel,), -2.0)
    for place, (slot, each) in enumerate(zip(bucket.slots, named, strict=True)):
        value = torch.randn(each.shape)  # as autograd may make it, with other strides
        each.view(expected, slot.start).copy_(value)
        parts = views.parts(place, value)
        for target, part in zip(views.targets[place], parts, strict=True):
            target.copy_(part)
    for gap in views.gaps:
        gap.fill_(-2.0)

    inside = slice(*apart)
    assert torch.equal(own, expected[inside])
    assert (buffer[inside] == -1.0).all()
    buffer[inside] = own
    assert torch.equal(buffer, expected)
