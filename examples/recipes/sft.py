"""Fine-tune a Llama on prompts and answers of real text, packed into rows of 128 tokens.

    shardwise run -n 2 examples/recipes/sft.py --data FOLDER

FOLDER has train.txt and valid.txt with one paragraph per line, words split by spaces. The first
sentence of a paragraph is the prompt, and the rest is the answer. Without --data, the text is
generated. The Llama has random weights, so that the program runs offline. Prints the loss per
answer token, and writes the model to sft.safetensors.
"""

import argparse
import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

ROW, VOCABULARY, IGNORED = 128, 1000, -100


def read(folder: Path | None, name: str) -> list[list[str]]:
    """Return the words of each paragraph. Headings, which are short, are left out."""
    if folder is not None:
        lines = (folder / f"{name}.txt").read_text().splitlines()
    else:
        draw = random.Random(name)
        counts = [draw.randrange(5, 60) for _ in range(60 if name == "train" else 12)]
        lines = [
            " ".join(["."] * 3 + [f"w{n}" for n in sorted(draw.choices(range(40), k=count))])
            for count in counts
        ]
    return [words for line in lines if len(words := line.split()) > 6]


def samples_of(paragraphs: list[list[str]], numbers: dict[str, int]) -> list[dict[str, Any]]:
    """Return the tokens of each paragraph, and the labels of its answer."""
    samples = []
    for words in paragraphs:
        tokens = torch.tensor([numbers.get(word, 0) for word in words[:ROW]])
        prompt = words.index(".") + 1 if "." in words[: ROW // 2] else ROW // 8
        labels = tokens.clone()
        labels[:prompt] = IGNORED
        if (labels != IGNORED).any():
            samples.append({"input_ids": tokens, "labels": labels})
    return samples


parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, help="folder of train.txt and valid.txt")
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()

world = sw.init(seed=0)
text = {name: read(options.data, name) for name in ("train", "valid")}
frequent = Counter(word for words in text["train"] for word in words).most_common(VOCABULARY - 1)
numbers = {word: number for number, (word, _) in enumerate(frequent, 1)}  # 0: any other word
samples = {name: samples_of(paragraphs, numbers) for name, paragraphs in text.items()}

# For a real model: LlamaForCausalLM.from_pretrained(..., attn_implementation="sdpa"), and its
# tokenizer in samples_of. On GPUs: "flash_attention_2", and Packing(..., attention="flash").
config = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=ROW,
)  # fmt: skip
model = LlamaForCausalLM(config)
packing = sw.Packing(model, row=ROW)  # tests that packing does not change the results
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
loaders = {
    name: sw.Loader(
        samples[name],
        tokens=8 * ROW,  # eight rows per step, on all workers together
        length=lambda sample: len(sample["input_ids"]),
        pack=packing,
        micro_batch_tokens=2 * ROW,  # two rows per forward pass on one worker
        shuffle=name == "train",
    )
    for name in samples
}


def validate() -> float:
    """Return the loss per answer token of the validation set, the same on every worker."""
    metrics = sw.Metrics()
    model.eval()
    with torch.no_grad():
        for step in loaders["valid"].steps():
            for batch in step:
                answers = int((batch["labels"] != IGNORED).sum())
                metrics.add(loss=model(**batch).loss, n=answers)
    model.train()
    return metrics.compute()["loss"]


for epoch in loaders["train"].epochs(options.epochs):
    loss_sum, answers = 0.0, 0.0
    for step in loaders["train"].steps():
        for batch in step:
            engine.backward(model(**batch).loss)  # weighted by its number of answer tokens
        stats = engine.step(max_norm=1.0)
        loss_sum, answers = loss_sum + stats.loss * stats.weight, answers + stats.weight
    world.print(
        f"epoch {epoch}: {loss_sum / answers:.4f} per answer token, "
        f"{validate():.4f} in validation, {answers:.0f} tokens"
    )
engine.export("sft.safetensors")
