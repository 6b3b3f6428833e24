"""Trains a transformers model, built from its config.json, on random tokens.

`shardwise plan --hf config.json` predicts this script. To measure a real run of it:

    shardwise run -n 2 --zero 3 -m shardwise.tools.plan.hf_model config.json --batch-size 8
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardwise as sw

KINDS = (
    ("ForCausalLM", "AutoModelForCausalLM"),
    ("ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
    ("ForMaskedLM", "AutoModelForMaskedLM"),
)
"""Pairs of an architecture's suffix and the auto class that builds it (the first by default)."""


def main() -> None:
    args = _arguments()
    world = sw.init(seed=0)
    config, build = _config(args.config)
    # The parameters use no memory until sw.Engine shards them, so the model may be larger than one
    # device.
    with sw.on_meta():
        model = build(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = sw.Engine(model, optimizer)
    loader = sw.Loader(_Tokens(config.vocab_size, args.length), batch_size=args.batch_size)
    steps = 0
    for _ in loader.epochs(args.steps):
        for step in loader.steps():
            for tokens in step:
                engine.forward_backward(
                    lambda rows: model(input_ids=rows, labels=rows).loss, tokens
                )
            stats = engine.step()
            world.print(f"step {steps}: loss {stats.loss:.4f}")
            steps += 1
            if steps == args.steps:
                return


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="a config.json of transformers")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step, in total")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def _config(path: Path) -> tuple[Any, Any]:
    """Return the model config that `path` contains, and the function that builds the model."""
    # transformers is an optional dependency, so importing this module must not import it.
    transformers: Any = __import__("transformers")
    content = json.loads(path.read_text())
    config = transformers.AutoConfig.for_model(**content)
    names = " ".join(content.get("architectures") or [])
    kind = next((each for end, each in KINDS if end in names), KINDS[0][1])
    return config, getattr(transformers, kind).from_config


class _Tokens(torch.utils.data.Dataset[Tensor]):
    """Random token sequences of shape (length,), identical on all ranks."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self._vocabulary = vocabulary
        self._length = length

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        # The index is the seed, so every rank generates the same sequence for it.
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self._vocabulary, (self._length,), generator=generator)


if __name__ == "__main__":
    main()
