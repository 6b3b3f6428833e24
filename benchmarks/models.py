"""The models, in plain PyTorch, and their data. Every contender trains exactly these."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import llama
import resnet
from workloads import Gpt, Llama, ResNet, Workload

POOL = 4
"""Batches that the steps go round: few enough for the loss to fall, so that a contender which
loses a gradient shows it in the loss."""


class Block(nn.Module):
    """Attention and MLP behind pre-norms: (rows, sequence, width) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.qkv(self.norm_1(x))))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def _attend(self, qkv: Tensor) -> Tensor:
        rows, sequence, _ = qkv.shape
        q, k, v = qkv.view(rows, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(rows, sequence, -1)


class GptModel(nn.Module):
    """Tokens (rows, sequence), int64, to logits (rows, sequence, vocabulary), fp32."""

    def __init__(self, size: Gpt) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.head_count) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def recompute(model: nn.Module) -> None:
    """Have each block drop its activations until backward."""
    for block in blocks(model):
        forward = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)


Model = GptModel | llama.LlamaModel | resnet.ResNetModel


def build(workload: Workload) -> Model:
    """The model, with the same weights in every process whose default device is of this kind."""
    # The same numbers on every rank: nobody has to broadcast weights, and losses are comparable.
    torch.manual_seed(0)
    if isinstance(workload, ResNet):
        return resnet.ResNetModel(workload)
    return llama.LlamaModel(workload) if isinstance(workload, Llama) else GptModel(workload)


def batches(workload: Workload, rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's rows of each batch of the pool: inputs and int64 targets."""
    # Each rank draws whole batches and takes its rows: data do not depend on the number of ranks.
    generator = torch.Generator().manual_seed(1)
    share = workload.batch // size
    rows = slice(rank * share, (rank + 1) * share)
    pool = [_batch(workload, generator) for _ in range(POOL)]
    return [(inputs[rows].contiguous(), targets[rows].contiguous()) for inputs, targets in pool]


def _batch(workload: Workload, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One batch of all ranks; of a GPT each token and the one after it, (rows, sequence)."""
    if isinstance(workload, ResNet):
        return resnet.batch(workload, generator)
    shape = (workload.batch, workload.sequence + 1)
    whole = torch.randint(workload.vocabulary, shape, generator=generator)
    return whole[:, :-1], whole[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over the tokens, or images, of these rows."""
    return cross_entropy(model(inputs), targets)


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """The same of the scores that the model gave, in fp32."""
    return F.cross_entropy(scores.flatten(0, -2).float(), targets.flatten())


def blocks(model: Model) -> list[nn.Module]:
    """Return the units of sharding for peers that must know them."""
    return list(model.blocks)
