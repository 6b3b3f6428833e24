"""The blocks of random models. Each returns the shape (..., WIDTH) of its input.

A model sets the attribute `now` of its blocks to the number of the step, as scripts do.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

WIDTH = 6
"""Number of features between stem and head."""


class Block(nn.Module):
    """A block that may use the number of the step."""

    now = 0


class Linear(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Residual(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Hooked(Block):
    """A block with an activation module, whose output a hook keeps for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.act = nn.GELU()
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Gated(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8, bias=False)
        self.up = nn.Linear(WIDTH, 8, bias=False)
        self.down = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class Groups(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lin(x).reshape(-1, WIDTH)).reshape(x.shape)


class OwnBatchNorm(nn.BatchNorm1d):
    """A subclass, as in model libraries."""

    def __init__(self, features: int) -> None:
        super().__init__(features, momentum=0.3)


class BatchNorm(Block):
    def __init__(self, kind: type[nn.BatchNorm1d] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, bias=False)  # its gradient would be nothing but rounding
        self.norm = kind(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.lin(x).reshape(-1, WIDTH)).reshape(x.shape)


class FixedBatchNorm(BatchNorm):
    """BatchNorm that stays in evaluation mode, as in detectors."""

    def train(self, mode: bool = True) -> "FixedBatchNorm":
        super().train(mode)
        self.norm.eval()
        return self


class Twice(Block):
    """One module used twice, one parameter used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.lin(torch.tanh(self.lin(x)))) + x * self.scale


class Unused(Block):
    """A layer and a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, 3)
        self.alone = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(x)


class Late(Block):
    """A block that joins in a later step."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) if self.now >= self.first else x


class Skipped(Block):
    """One branch in even steps, another in odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.branches[self.now % 2](x))


class InTraining(Block):
    """A block that looks across its features in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.training:
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-2)
        return x + self.down(h)


class Experts(Block):
    """A mixture of experts. Each gets the rows that chose it, and is skipped without rows."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        chances = self.router(flat).softmax(-1)
        chosen = chances.argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * chances[rows, number, None])
        return x + out.reshape(x.shape)


class Tied(Block):
    """A layer and its transpose that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.there = nn.Linear(WIDTH, WIDTH, bias=False)
        self.back = nn.Linear(WIDTH, WIDTH)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.tanh(self.there(x)))


class Scalars(Block):
    """Parameters with zero dimensions, and with one dimension and one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Complex(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex128) @ self.weight
        return x + 0.5 * y.real + 0.2 * y.imag


class Single(Block):
    """A part of the model in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x.float())).to(x.dtype)


class Transposed(Block):
    """A parameter whose memory is not in the order of its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(8, WIDTH).t())
        self.out = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(x @ self.weight))


class Counting(Block):
    """A block that counts its training forward passes in a Python attribute and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return x + torch.sin(self.lin(x) * (1 + 0.1 * self.count))


class Tally(Block):
    """A block that counts its forward passes in a buffer and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return x + torch.sin(self.lin(x) * (1 + 0.1 * self.count))


class Adapter(Block):
    """A frozen layer plus a low-rank one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Detached(Block):
    """A layer whose input is detached from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x.detach()))


class Listed(Block):
    """Parameters in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([0.4 * torch.randn(WIDTH, WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": torch.zeros(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x + self.named["shift"]


class Nested(Block):
    """Keyword arguments in, a dict out, blocks inside a block."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, *, x: Tensor) -> dict[str, Tensor]:
            y = self.lin(x)
            return {"y": torch.tanh(y), "size": y.square().mean(-1, keepdim=True)}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": self.Inner(), "b": self.Inner()})

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner["a"](x=x), self.inner["b"](x=x)
        return x + a["y"] * b["size"] + b["y"]


def normalised() -> nn.Module:
    """A layer whose weight is computed from direction and length."""
    block = Linear()
    parametrizations.weight_norm(block.lin)
    return block


class Attention(Block):
    """Hand-written attention with the usual names, over (rows, time, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, time, _ = x.shape
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.view(rows, time, self.num_heads, -1).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).reshape(rows, time, -1))


class MultiHead(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attend(h, h, h, need_weights=False)[0]


class Encoder(Block):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Decoder(Block):
    """A decoder layer whose memory is its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(1))


class Recurrent(Block):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cells(x)[0]


class Positions(Block):
    """Learned positions, and a fixed part in a buffer that is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(1, 16, WIDTH))
        fixed = torch.sin(torch.arange(16.0)[:, None] + torch.arange(WIDTH))
        self.register_buffer("fixed", fixed.unsqueeze(0).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        return x + self.learned[:, :time] + self.fixed[:time].transpose(0, 1)


class Spectral(Block):
    """A layer with spectral normalisation, whose buffers change at each training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x))


class InPlace(Block):
    """A block that starts with an in-place operation on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.LeakyReLU(0.2, inplace=True)
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.act(x))


ANY: dict[str, Callable[[], nn.Module]] = {
    "linear": Linear,
    "residual": Residual,
    "hooked": Hooked,
    "gated": Gated,
    "groups": Groups,
    "batch_norm": BatchNorm,
    "batch_norm_own": lambda: BatchNorm(OwnBatchNorm),
    "fixed_batch_norm": FixedBatchNorm,
    "twice": Twice,
    "unused": Unused,
    "late:2": lambda: Late(2),
    "late:4": lambda: Late(4),
    "skipped": Skipped,
    "in_training": InTraining,
    "experts:3": lambda: Experts(3),
    "experts:5": lambda: Experts(5),
    "tied": Tied,
    "scalars": Scalars,
    "complex": Complex,
    "single": Single,
    "transposed": Transposed,
    "counting": Counting,
    "tally": Tally,
    "adapter": Adapter,
    "detached": Detached,
    "listed": Listed,
    "nested": Nested,
    "normalised": normalised,
}
"""Blocks for every model, by name."""

OVER_TIME: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "multi_head": MultiHead,
    "encoder": Encoder,
    "decoder": Decoder,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "positions": Positions,
}
"""Blocks for models of sequences."""

FURTHER: dict[str, Callable[[], nn.Module]] = {"spectral": Spectral, "in_place": InPlace}
"""Blocks that further.py adds. In ANY they would change the program of every seed."""

COUNT_FORWARDS = {"counting", "tally", "spectral"}
"""Blocks that depend on the number of forward passes."""

ACROSS_ROWS = {"batch_norm", "batch_norm_own"}
"""Blocks that look at all rows of a forward."""

KNOW_STEPS = {"late:2", "late:4", "skipped"}
"""Blocks that do not do the same in each step."""

ZERO_GRADIENTS = {"multi_head", "encoder", "decoder", "attention"}
"""Blocks with gradients that are only rounding: no optimizer may look at their sign."""
