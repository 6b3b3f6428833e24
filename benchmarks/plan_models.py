"""Small trainings of well-known models: `benchmarks/plan.py` predicts and measures their memory.

shardwise run -n 1 benchmarks/plan_models.py NAME      # trains one for two steps
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shardwise as sw


class UNet(nn.Module):
    """A U-Net (Ronneberger et al., 2015) with two levels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels
        self.down = nn.ModuleList([_convs(3, c), _convs(c, 2 * c)])
        self.middle = _convs(2 * c, 4 * c)
        self.ups = nn.ModuleList(
            [nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(2 * c, c, 2, 2)]
        )
        self.back = nn.ModuleList([_convs(4 * c, 2 * c), _convs(2 * c, c)])
        self.head = nn.Conv2d(c, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, block in zip(self.ups, self.back, strict=True):
            x = block(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def _convs(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
    )  # fmt: skip


class Words(nn.Module):
    """An LSTM over words, as in PyTorch's word_language_model."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def train(model: nn.Module, loss_of: Callable[..., Tensor], *columns: Tensor, batch: int) -> None:
    """The plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = sw.Engine(model, optimizer)
    loader = sw.Loader(TensorDataset(*columns), batch_size=batch)
    for _ in loader.epochs(2):
        for rows in loader:
            engine.backward(loss_of(*rows))
            engine.step()


def mlp() -> None:
    model = nn.Sequential(
        nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 10)
    )
    x, y = torch.randn(512, 512), torch.randint(10, (512,))
    train(model, lambda x, y: F.cross_entropy(model(x), y), x, y, batch=256)


def unet() -> None:
    model = UNet(16)
    x, y = torch.randn(8, 3, 96, 96), torch.randint(2, (8, 96, 96))
    train(model, lambda x, y: F.cross_entropy(model(x), y), x, y, batch=4)


def lstm() -> None:
    model = Words(8000, 256)
    x = torch.randint(8000, (16, 65))
    loss = lambda x: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())  # noqa: E731
    train(model, loss, x, batch=8)


def gan() -> None:
    """The GAN of PyTorch's examples in small: two engines, each stepped once per batch."""
    generator = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 3072), nn.Tanh())
    critic = nn.Sequential(nn.Linear(3072, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1))
    loader = sw.Loader(TensorDataset(torch.randn(512, 3072)), batch_size=256)
    g = sw.Engine(generator, torch.optim.Adam(generator.parameters()))
    d = sw.Engine(critic, torch.optim.Adam(critic.parameters()))
    for (real,) in loader:
        fake = generator(torch.randn(len(real), 64))
        judged = torch.cat([critic(real), critic(fake.detach())])
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        d.backward(F.binary_cross_entropy_with_logits(judged, truth))
        d.step()
        again = critic(fake)
        g.backward(F.binary_cross_entropy_with_logits(again, torch.ones_like(again)))
        g.step()


class Digits(nn.Module):
    """The network of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.wide, self.head = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2), 0.25)
        return self.head(F.dropout(F.relu(self.wide(x.flatten(1))), 0.5))


def mnist() -> None:
    model = Digits()
    x, y = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))
    train(model, lambda x, y: F.cross_entropy(model(x), y), x, y, batch=64)


class Autoencoder(nn.Module):
    """The variational autoencoder of PyTorch's examples (Kingma and Welling, 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.both = nn.Linear(784, 400), nn.Linear(400, 40)
        self.outward = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.both(F.relu(self.inward(x))).chunk(2, -1)
        drawn = self.outward(mean + torch.randn_like(mean) * (0.5 * log).exp())
        apart = -0.5 * (1 + log - mean.square() - log.exp()).sum()
        return F.binary_cross_entropy_with_logits(drawn, x, reduction="sum") + apart


def vae() -> None:
    model = Autoencoder()
    train(model, model, torch.rand(4096, 784), batch=2048)


class Encoder(nn.Module):
    """The language model of PyTorch's tutorial on nn.TransformerEncoder."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(self.embedding(x), mask=mask, is_causal=True))


def encoder() -> None:
    model = Encoder(6000, 256)
    x = torch.randint(6000, (32, 36))
    loss = lambda x: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())  # noqa: E731
    train(model, loss, x, batch=16)


def _text(name: str, kind: str, length: int = 128, batch: int = 4, **options: Any) -> None:
    """A language model of transformers."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **options)
    model = getattr(transformers, kind).from_config(config)
    model.train()
    x = torch.randint(config.vocab_size, (2 * batch, length))
    train(model, lambda x: model(input_ids=x, labels=x).loss, x, batch=batch)


def gpt2() -> None:
    _text("gpt2", "AutoModelForCausalLM", vocab_size=8000, n_embd=256, n_layer=4, n_head=4)


def bert() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    _text("bert", "AutoModelForMaskedLM", vocab_size=8000, num_attention_heads=4, **sizes)


def llama() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    _text("llama", "AutoModelForCausalLM", vocab_size=8000, num_attention_heads=4, **sizes)


def t5() -> None:
    sizes = {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_layers": 3, "num_heads": 4}
    start = {"decoder_start_token_id": 0}
    _text("t5", "AutoModelForSeq2SeqLM", vocab_size=8000, **sizes, **start)


def mixtral() -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4}
    _text("mixtral", "AutoModelForCausalLM", vocab_size=8000, **sizes, **heads)


def vit() -> None:
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    config = transformers.AutoConfig.for_model("vit", image_size=96, num_attention_heads=4, **sizes)
    model = transformers.AutoModelForImageClassification.from_config(config)
    x, y = torch.randn(32, 3, 96, 96), torch.randint(2, (32,))
    train(model, lambda x, y: model(pixel_values=x, labels=y).loss, x, y, batch=16)


def whisper() -> None:
    import transformers

    layers = {"encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 200}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 256}
    config = transformers.AutoConfig.for_model(
        "whisper", vocab_size=8000, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, encoder_ffn_dim=1024, decoder_ffn_dim=1024, **layers, **heads,
    )  # fmt: skip
    model = transformers.AutoModelForSpeechSeq2Seq.from_config(config)
    model.train()
    x, y = torch.randn(8, 80, 400), torch.randint(3, 8000, (8, 64))
    train(model, lambda x, y: model(input_features=x, labels=y).loss, x, y, batch=4)


MODELS = (
    *(mlp, unet, lstm, gan, mnist, vae, encoder),
    *(gpt2, bert, llama, t5, mixtral, vit, whisper),
)


def main() -> None:
    """Train the model that the command line names."""
    sw.init(seed=0)
    {each.__name__: each for each in MODELS}[sys.argv[1]]()


if __name__ == "__main__":
    main()
