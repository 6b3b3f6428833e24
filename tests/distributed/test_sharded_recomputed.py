"""Sharded parameters with the user's own activation checkpointing."""

from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.distributed.sharded import Block, Stack, agree, by_turns, on


class Recomputed(Stack):
    """Recomputes each block in backward."""

    reentrant = False

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class RecomputedReentrant(Recomputed):
    reentrant = True


class InSegments(Stack):
    """Two segments, the first over several units."""

    reentrant = False

    def forward(self, x):
        x = checkpoint_sequential(self.blocks, 2, self.stem(x), use_reentrant=self.reentrant)
        return self.head(x)


class InSegmentsReentrant(InSegments):
    reentrant = True


class InsideOfABlock(Block):
    """Recomputes a part of the unit."""

    def forward(self, x):
        return x + checkpoint(self.inner, self.norm(x), use_reentrant=False)

    def inner(self, x):
        return self.down(self.up(x).tanh())


class PartsRecomputed(Stack):
    def __init__(self):
        super().__init__(block=InsideOfABlock)


class TwiceRecomputed(Stack):
    """Segments inside a segment."""

    def forward(self, x):
        return self.head(checkpoint(self.all_blocks, self.stem(x), use_reentrant=False))

    def all_blocks(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@by_turns(
    make=[
        Recomputed,
        RecomputedReentrant,
        InSegments,
        InSegmentsReentrant,
        PartsRecomputed,
        TwiceRecomputed,
    ]
)
def test_checkpointing(group, ranks, make):
    on(group, ranks)(agree, make)
