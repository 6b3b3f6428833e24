"""Fine-tunes a small language model with TRL's SFTTrainer, correctly or with one mistake.

torchrun --nproc-per-node 2 stock_trl.py MISTAKE
"""

import sys
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

mistake = sys.argv[1]


class Trainer(SFTTrainer):
    """Makes the mistake in the methods that scripts override."""

    def get_train_dataloader(self) -> Any:
        if mistake != "same_data":
            return super().get_train_dataloader()
        # Without accelerator.prepare, every rank reads the whole dataset.
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if mistake == "mean_of_means":  # over this rank's tokens of this micro-batch
            labels = inputs.pop("labels")
            scores = model(**inputs).logits[:, :-1].flatten(0, 1)
            loss = cross_entropy(scores, labels[:, 1:].flatten())
            return loss / self.current_gradient_accumulation_steps
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * self.accelerator.num_processes if mistake == "summed" else loss


torch.manual_seed(0)
words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(50))]
vocabulary = {word: number for number, word in enumerate(words)}
inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
draws = torch.Generator().manual_seed(1)
texts = []
for _ in range(64):
    length = int(torch.randint(4, 20, (1,), generator=draws))
    numbers = torch.randint(0, 50, (length,), generator=draws)
    texts.append(" ".join(f"w{number}" for number in numbers.tolist()))
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
tokens = {"vocab_size": 53, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_attention_heads=4))
arguments = SFTConfig(
    output_dir="trained",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=6,
    max_length=32,
    learning_rate=1e-3,
    optim="adamw_torch",
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=True,
    save_strategy="no",
    report_to=[],
)
data = Dataset.from_dict({"text": texts})
Trainer(model, args=arguments, train_dataset=data, processing_class=tokenizer).train()
