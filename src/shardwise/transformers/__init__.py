"""Trains with the Hugging Face Trainer on Shardwise engines.

`from shardwise.transformers import Trainer` imports the Trainer.
`SFT = shardwise.transformers.on(SFTTrainer)` converts another trainer class, and
`prepare_trainer(trainer)` converts a trainer object. Once this package has been imported, creating
TrainingArguments joins the run.
"""

from shardwise.transformers.deepspeed_argument import take_json
from shardwise.transformers.joining import join_with_arguments
from shardwise.transformers.trainer import Seq2SeqTrainer, Trainer, on, prepare_trainer

__all__ = ["Seq2SeqTrainer", "Trainer", "on", "prepare_trainer"]

join_with_arguments()
take_json()
