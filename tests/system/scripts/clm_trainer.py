"""A language model by the stock Trainer, in the manner of transformers' run_clm.py: arguments by
HfArgumentParser, embeddings resized, accuracy, resume, perplexity."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class Files:
    """Paths of the text, the tokenizer and the model config."""

    folder: str


def blocks(tokenizer, path, length):
    """The words of a text in rows of one length."""
    words = tokenizer(Path(path).read_text(), verbose=False)["input_ids"]
    rows = [words[i : i + length] for i in range(0, len(words) - length + 1, length)]
    return [{"input_ids": row, "labels": list(row)} for row in rows]


def accuracy(predicted):
    """The share of next words that are right."""
    right = predicted.predictions[:, :-1] == predicted.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


def main():
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    files, arguments = HfArgumentParser((Files, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(files.folder))
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=blocks(tokenizer, f"{files.folder}/train.txt", 8),
        eval_dataset=blocks(tokenizer, f"{files.folder}/valid.txt", 8),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.save_state()
    if trainer.is_world_process_zero():
        loaded = AutoModelForCausalLM.from_pretrained(arguments.output_dir)
        print("words", loaded.get_input_embeddings().weight.shape[0], len(tokenizer))
        print("perplexity", f"{math.exp(metrics['eval_loss']):.3f}")
        print("accuracy", f"{metrics['eval_accuracy']:.4f}")
        print("ranks", arguments.world_size, type(trainer).__mro__[1].__name__)


if __name__ == "__main__":
    main()
