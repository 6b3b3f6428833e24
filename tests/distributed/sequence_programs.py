"""Random programs of units whose activations are split by tokens (--sequence-parallel).

Each program is a model of two blocks. A block chains random pieces of code around split layers.
"""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

WIDTH = 6
LONGEST = 9
PLAN = {
    "blocks.*.gate": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.wide": "colwise_rep",
}
SHAPES = [(3, 5), (2, 8), (3, 9), (3, 3), (2, 2), (2, 1)]
"""Rows and tokens of each step. The last steps have fewer tokens than 2 or 3 ranks."""


class Doubled(torch.autograd.Function):
    """A function whose gradient is not the derivative, so that only its own backward is right."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 3 * weight * grad, (3 * x * grad).flatten(0, -2).sum(0)


def region(b, x):
    return x + b.down(b.up(x).tanh())


def gated(b, x):
    return x + b.down(F.silu(b.gate(b.norm(x))) * b.up(b.norm(x)))


def shared_gated(b, x):
    h = b.norm(x)
    return x + b.down(F.silu(b.gate(h)) * b.up(h))


def stopped_gate(b, x):
    with torch.no_grad():
        gate = b.gate(x).sigmoid()
    return x + b.down(b.up(x) * gate.detach())


def used_inside(b, x):
    """Use the split value while a region is open."""
    h = b.up(b.norm(x))
    doubled = x * 2
    return doubled + b.down(h.relu())


def gathering_inside(b, x):
    """Run another layer while a region is open."""
    h, w = b.up(x), b.wide(x)
    return x + b.down(h * x.detach().mean(-1, keepdim=True)) + w


def nested(b, x):
    h = b.up(x)
    y = x + b.down(b.gate(x.tanh()))
    return y + b.down(h * y.detach().mean(-1, keepdim=True))


def written_inside(b, x):
    """Write a value from inside a region to a tensor from outside, and use its views."""
    h = b.up(x)
    full = torch.zeros(h.shape, dtype=h.dtype)
    view = full[..., :]
    full += h.detach()
    return x + b.down(h + x.detach().mean(-1, keepdim=True) * view)


def reads_weights(b, x):
    """Read sizes and dtypes of split weights, as T5 does."""
    h = b.up(x).reshape(-1, b.up.weight.shape[0]).to(b.down.weight.dtype)
    return x + b.down(h.tanh()).view(x.shape)


def gathering(b, x):
    return x + b.wide(x).tanh() * b.scale


def checkpointed(b, x):
    return checkpoint(region, b, x, use_reentrant=False)


def partly_checkpointed(b, x):
    return x + checkpoint(lambda x: (x * b.scale).tanh(), x, use_reentrant=False)


def without_grad(b, x):
    with torch.no_grad():
        s = (x * b.scale).mean(1, keepdim=True)
        t = x.sigmoid()
    return x * t + s + x.mean(1, keepdim=True)


def gathered_without_grad_first(b, x):
    with torch.no_grad():
        s = x.cumsum(1)
    return x + s.tanh() + 0.1 * x.cumsum(1)


def grad_inside(b, x):
    with torch.no_grad():
        s = x * b.scale
        with torch.enable_grad():
            t = x * b.row
    return s + t


def detached(b, x):
    return x + (x * b.scale).detach() + x.detach().mean(1, keepdim=True)


def reversed_gradient(b, x):
    return x - (x * 2).detach() + x * b.row


def own_function(b, x):
    return x + Doubled.apply(x, b.scale)


def own_function_in_branch(b, x):
    h = b.norm(x)
    return x + b.down(b.up(Doubled.apply(h, b.scale)).tanh()) + Doubled.apply(h, b.scale)


def in_place(b, x):
    h = x * 1
    h += b.scale
    h.mul_(x.sigmoid())
    return h + x


def in_place_after_region(b, x):
    h = b.down(b.up(x).relu())
    h += x
    return h


def in_place_full(b, x):
    h = x.cumsum(1)
    h[:, 0] = b.scale
    h += x
    return h.tanh()


def view_written(b, x):
    h = x * 1
    h.view(-1, WIDTH).add_(b.scale)
    return h


def token_written(b, x):
    h = x * 1
    h[:, 0] = b.scale
    return h + x


def view_taken_before(b, x):
    h = x * 1
    flat = h.flatten(0, 1)
    h += 1
    return h + flat.sum(0)


def into(b, x):
    h = x * 1
    with torch.no_grad():
        torch.add(x, 1, out=h)
    return h + x


def input_written(b, x):
    x += b.scale
    return x * 2


def contiguous_written(b, x):
    h = (x * 1).contiguous()
    h += b.scale
    return h


def reversed_in_place(b, x):
    """Write to a result whose first operand is no split tensor."""
    h, t = b.scale * x, b.table[: x.shape[1]] - x
    h += x
    t *= 2
    return h + t


def scaled(b, x):
    return b.scale * x + b.row - x / (2 + b.scale.square())


def with_table(b, x):
    return x + b.table[: x.shape[1]]


def with_column(b, x):
    return x * b.table[: x.shape[1], :1].tanh()


def over_tokens(b, x):
    return x + x.mean(1, keepdim=True) - x.softmax(1)


def shifted(b, x):
    return x + x.roll(1, 1) * b.scale + F.pad(x, (0, 0, 1, 0))[:, :-1]


def first_token(b, x):
    return x - x[:, :1] + x[:, -1].unsqueeze(1)


def concatenated(b, x):
    return torch.cat([x[:, :1] * 2, x[:, 1:]], dim=1)


def reads_shape(b, x):
    rows, tokens, width = x.shape
    return x * (tokens / 7) + torch.full((rows, 1, width), 0.1, dtype=x.dtype) + x.size(1) * 0.01


def reshaped(b, x):
    return x + (x.reshape(-1, WIDTH) * b.scale).view(x.shape)


def transposed(b, x):
    return x + x.transpose(1, 2).cumsum(-1).transpose(1, 2).tanh()


def norm_by_hand(b, x):
    return b.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def normed(b, x):
    return x + F.rms_norm(b.norm(x), (WIDTH,), b.scale) + F.layer_norm(x, (WIDTH,))


def normed_over_all(b, x):
    return x + F.layer_norm(x, x.shape[1:])


def clamped(b, x):
    return torch.where(x > 0, x, b.row) + x.clamp(-1, 1) + 2 / (x.square() + 3) + 1.1 ** x.tanh()


def cast(b, x):
    return x + (x * b.scale).to(torch.float32).double() + x.type_as(b.scale) + b.row.to(x)


def cloned(b, x):
    return x.contiguous() + x.clone() * 0.5 + torch.zeros_like(x)


def dropped(b, x):
    return x + F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False)


def multiplied(b, x):
    scores = (x @ x.transpose(1, 2)).softmax(-1)
    return x + scores @ x


def chosen(b, x):
    return x + torch.einsum("btc,c->bt", x, b.scale).unsqueeze(-1)


def split_by_features(b, x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first, second.tanh()], dim=-1)


def counted(b, x):
    """Write to a buffer of the module."""
    with torch.no_grad():
        b.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
    return x + b.mean


def hooked(b, x):
    h = x * b.scale
    h.register_hook(lambda grad: grad * 2)
    return h


def input_hooked(b, x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    return x * b.scale


def full_used_inside(b, x):
    h = b.up(x)
    return x + b.down(h * x.cumsum(1).mean(-1, keepdim=True))


def ends_on_tokens(b, x):
    """Give a row-wise layer no value of this rank's features."""
    return x + b.down(x.mean(-1, keepdim=True) * b.mean.new_ones(b.down.in_features))


def part_stored(b, x):
    """Keep a value from between two split layers."""
    h = b.up(x)
    b.kept = h
    return x + b.down(h.tanh())


def part_in_buffer(b, x):
    h = b.up(x)
    with torch.no_grad():
        b.mean.add_(h.mean())
    return x + b.down(h.tanh())


def stored(b, x):
    b.kept = x
    return x * 2


def recalled(b, x):
    """Read what the block before has stored."""
    b.kept = x * 2
    return x + b.before[0].kept if b.before else x


def recalled_from_object(b, x):
    """Read a split tensor from an object that is no container."""
    b.kept = Kept(x * 2)
    return x + b.before[0].kept.value if b.before else x


class Kept:
    def __init__(self, value):
        self.value = value


def differentiated(b, x):
    h = x.detach().requires_grad_()
    return x + h * b.scale


REGIONS = [
    region, gated, shared_gated, used_inside, stopped_gate, in_place_after_region, gathering,
    gathering_inside, nested, written_inside, reads_weights,
]  # fmt: skip
PIECES = [
    without_grad, gathered_without_grad_first, grad_inside, detached, reversed_gradient,
    own_function, own_function_in_branch, in_place, in_place_full, reversed_in_place, scaled,
    with_table, with_column, over_tokens, shifted, first_token, concatenated, reads_shape, reshaped,
    transposed, norm_by_hand, normed, normed_over_all, clamped, cast, cloned, dropped, multiplied,
    chosen, split_by_features, counted, partly_checkpointed,
]  # fmt: skip
ALIKE = [
    gated, without_grad, own_function_in_branch, in_place, with_table, shifted, reads_shape, scaled,
    detached, counted, used_inside, norm_by_hand,
]  # fmt: skip
"""Pieces of one program with many kinds of operations."""


def plain(x, extra):
    return x


def with_parts(x, extra):
    return {"x": x, "extra": [x * 2, (x.mean(1), extra)]}


def with_view(x, extra):
    return x, x[:, 0].clone(), None, 3


def with_input(x, extra):
    return (x.tanh(), extra)


def with_whole_view(x, extra):
    return x, x[:, 0]


@dataclass
class Found:
    """A result that torch does not search for tensors."""

    x: torch.Tensor
    given: torch.Tensor


def with_object(x, extra):
    return Found(x.tanh(), extra)


def with_alias(x, extra):
    return x, extra.detach()


OUTPUTS = [plain, with_parts, with_view, with_input, with_object]


class Block(nn.Module):
    def __init__(self, pieces, output):
        super().__init__()
        self.pieces, self.output = pieces, output
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.down, self.wide = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.table = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.before = ()

    def forward(self, x, extra=None):
        given = x
        for piece in self.pieces:
            x = piece(self, x)
        if extra is not None:
            x = x + 0.1 * extra
        return self.output(x * 0.5, given)


class Model(nn.Module):
    def __init__(self, pieces, output):
        super().__init__()
        # Blocks that differ in whether they get an argument have different graphs.
        self.passes_extra = output is not plain
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(pieces, output) for _ in range(2))
        self.blocks[1].before = (self.blocks[0],)

    def forward(self, x):
        x, terms = self.embed(x), []
        extra = x if self.passes_extra else None
        for block in self.blocks:
            found = block(x) if extra is None else block(x, extra=extra)
            found = vars(found) if isinstance(found, Found) else found
            tensors = [each for each in pytree.tree_leaves(found) if torch.is_tensor(each)]
            x = tensors[0]
            terms += [each.square().mean() for each in tensors[1:]]
            if self.passes_extra:
                extra = x * 2
        return x, sum(terms)


def build(seed):
    """Return a random model, and the names of its pieces."""
    draw = random.Random(seed)
    pieces = [draw.choice(REGIONS), *draw.sample(PIECES, draw.randint(1, 4))]
    if draw.random() < 0.5:
        pieces.append(draw.choice(REGIONS))
    draw.shuffle(pieces)
    return make(pieces, draw.choice(OUTPUTS))


def make(pieces, output=plain):
    """Return a model of two blocks that chain `pieces`."""
    torch.manual_seed(0)
    return Model(pieces, output).double()
