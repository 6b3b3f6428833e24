"""Writes what the scripts of language models read into a folder: a text, a tokenizer of its words
and the configuration of a tiny GPT-2. Argument: the folder."""

import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, PreTrainedTokenizerFast

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
draw = random.Random(1)  # 64 rows of 8 words to train on, so that no batch is short
words = [f"w{number}" for number in range(30)]
lines = [" ".join(draw.choices(words, range(1, 31), k=9)) for _ in range(77)]
(folder / "train.txt").write_text("\n".join(lines[:57]) + "\n")
(folder / "valid.txt").write_text("\n".join(lines[57:]) + "\n")
tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=["<unk>", "<eos>"]))
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", model_max_length=16
).save_pretrained(folder)
GPT2Config(
    vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
).save_pretrained(folder)  # fmt: skip
