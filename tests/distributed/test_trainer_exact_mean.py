"""`exact_mean=True` of the Trainer: every label or sample counts once, as in plain PyTorch."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import UsageError
from tests.distributed.test_accelerate import fresh, ranks
from tests.distributed.test_transformers_trainer import STOCK, quietly

pytest.importorskip("accelerate", reason="the accelerate package is not there")
transformers = pytest.importorskip("transformers", reason="the transformers package is not there")

ROWS, LENGTH, WORDS, WINDOW, STEP = 21, 6, 11, 2, 16
"""Steps of 16 rows in two micro-batches, and one step of 5: the last window is short and uneven."""
RATE, NORM = 0.3, 0.4


class Words(nn.Module):
    """Predicts the next word in fp64. Like GPT-2's, the loss divides a sum by the item count."""

    accepts_loss_kwargs = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
        self.net = nn.Sequential(nn.Embedding(WORDS, 6), *blocks, nn.Linear(6, WORDS)).double()

    def forward(self, input_ids, labels, num_items_in_batch=None, **kwargs):
        logits = self.net(input_ids)
        return {"loss": self.loss(logits.flatten(0, 1), labels.flatten(), num_items_in_batch)}

    def loss(self, logits, labels, items):
        if items is None:
            return F.cross_entropy(logits, labels)
        return F.cross_entropy(logits, labels, reduction="sum") / items


class Ignoring(Words):
    """A loss that is a mean regardless of the item count it receives, like BERT's."""

    def loss(self, logits, labels, items):
        return F.cross_entropy(logits, labels)


class Samples(Words):
    """A mean over rows, from a model that does not accept the item count."""

    accepts_loss_kwargs = False

    def forward(self, input_ids, target):
        return {"loss": (self.net(input_ids).mean((1, 2)) - target).square().mean()}


class Padded(Words):
    """A mean over tokens that are not padding, without labels."""

    accepts_loss_kwargs = False

    def forward(self, input_ids, kept):
        each = self.net(input_ids).square().mean(2)
        return {"loss": (each * kept).sum() / kept.sum()}


def rows(kind):
    """Return rows with different numbers of items. Two rows have no items."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=draw)
    for number, row in enumerate(words):
        if issubclass(kind, Samples):
            yield {"input_ids": row, "target": row.double().mean().sin()}
        elif issubclass(kind, Padded):
            yield {"input_ids": row, "kept": (row < row[0] + 2).double()}
        else:
            yield {"input_ids": row, "labels": row.where(row < number % 9 * 2, -100)}


def batch_of(items):
    return {name: torch.stack([row[name] for row in items]) for name in items[0]}


def plain(kind, epochs=2):
    """Train in plain PyTorch with full batches. Return losses, norms and the final model."""
    model, data, seen = kind(), list(rows(kind)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(epochs):
        for first in range(0, ROWS, STEP):
            optimizer.zero_grad()
            loss = model(**batch_of(data[first : first + STEP]))["loss"]
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            seen.append((loss.item(), norm.item()))
    return seen, model


def arguments(folder, each, **options):
    kept = {
        "num_train_epochs": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "max_grad_norm": NORM,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "gradient_accumulation_steps": WINDOW,
        "per_device_train_batch_size": each,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(folder, **kept | options)


def trained(world, kind, folder, zero=0, exact=True, data=None, model=None, resume=None, **options):
    """Train with a Trainer on engines or, if `world` is None, with the stock Trainer."""
    import shardwise.transformers

    quietly()
    fresh()
    size, trainer, settings = 1, transformers.Trainer, {}
    if world is not None:
        size, trainer = world.size, shardwise.transformers.Trainer
        settings = {"zero": zero, "quiet": True, "exact_mean": exact}
    model = kind() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    made = trainer(
        model=model,
        args=arguments(folder, STEP // WINDOW // size, **options),
        train_dataset=list(rows(kind)) if data is None else data,
        optimizers=(optimizer, schedule),
        data_collator=batch_of,
        **settings,
    )
    made.train(resume_from_checkpoint=resume)
    return made


def stock(kind, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        patch.setattr(transformers.TrainingArguments, "_setup_devices", STOCK)
        return trained(None, kind, folder).model


def distance(model, expected):
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def far(trainer, expected):
    """Return the distance of its weights from the weights of `expected`, and release the model."""
    with trainer.accelerator.full_parameters(trainer.model):
        found = distance(trainer.model, expected)
    trainer.accelerator.free_memory()
    return found


def means_case(world, name, zero, folder):
    kind = {each.__name__: each for each in (Words, Ignoring, Samples, Padded)}[name]
    seen, expected = plain(kind)
    exact = (lambda batch: batch["kept"].sum()) if kind is Padded else True
    trainer = trained(world, kind, folder, zero, exact)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    figures = [(log["loss"], log["grad_norm"]) for log in logs]
    assert figures == [pytest.approx(each, rel=1e-6) for each in seen]  # logged in fp32
    if kind in (Words, Ignoring):  # an evaluation has losses if there are labels
        with torch.no_grad():
            whole = expected(**batch_of(list(rows(kind))))["loss"].item()
        assert trainer.evaluate(list(rows(kind)))["eval_loss"] == pytest.approx(whole, rel=1e-10)
    assert far(trainer, expected) < 1e-12
    if world.size > 1:
        assert far(trained(world, kind, folder, zero, exact=False), expected) > 1e-5
    elif kind in (
        Ignoring,
        Padded,
    ):  # a single process is correct if all micro-batches are the same size
        assert distance(stock(kind, folder), expected) > 1e-5


@pytest.mark.parametrize("name", ["Words", "Ignoring", "Samples", "Padded"])
@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 4))])
def test_means_of_plain_pytorch(group, tmp_path, size, name):
    """Of 21 rows, the last micro-batches get 4 and 1, and on four ranks 2, 2, 1 and 0."""
    for zero in (0, 3)[:size]:
        ranks(group, size)(means_case, name, zero, str(tmp_path))


def library_case(world, name, zero, folder):
    """Test GPT-2 and BERT, whose loss functions compute in fp32."""
    quietly()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
    if name == "GPT2LMHeadModel":
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
    else:
        config = transformers.BertConfig(
            vocab_size=WORDS, max_position_embeddings=LENGTH, intermediate_size=8,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes,
        )  # fmt: skip

    def made():
        torch.manual_seed(2)
        return getattr(transformers, name)(config)

    data, expected = list(rows(Words)), made()
    optimizer = torch.optim.SGD(expected.parameters(), lr=RATE)
    seen = []
    for first in range(0, ROWS, STEP):
        optimizer.zero_grad()
        loss = expected(**batch_of(data[first : first + STEP])).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), NORM)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    exact = len_of_predicted if zero and name == "GPT2LMHeadModel" else True
    trainer = trained(world, Words, folder, zero, exact, model=made(), num_train_epochs=1)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [(log["loss"], log["grad_norm"]) for log in logs] == [
        pytest.approx(each, rel=1e-5) for each in seen
    ]
    with torch.no_grad():
        whole = expected(**batch_of(data)).loss.item()
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(whole, rel=1e-5)
    assert far(trainer, expected) < 1e-6


def len_of_predicted(batch):
    return batch["labels"][:, 1:].ne(-100).sum()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_models_of_the_library(group, tmp_path, name):
    for zero in (0, 3):
        ranks(group, 2)(library_case, name, zero, str(tmp_path))


def shifts_case(world):
    """Check that the loss shows whether a model leaves out its first labels."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    from shardwise.transformers.exact_mean import StepItems

    quietly()
    layers = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    sizes = {
        "GPT2LMHeadModel": {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": WORDS},
        "XLNetLMHeadModel": {
            "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8, "vocab_size": WORDS
        },
        "XLMWithLMHeadModel": {"emb_dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": WORDS},
        "BartForCausalLM": {"d_model": 8, "vocab_size": WORDS, **layers, **ends},
    }  # fmt: skip
    for name, how in sizes.items():
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**how)).eval()
        words = torch.arange(2, 8)[None]
        without = words.clone()
        without[:, 0] = -100
        with torch.no_grad():
            seen, left = (model(input_ids=words, labels=each).loss for each in (words, without))
        stock = LOSS_MAPPING.get(model.loss_type) is ForCausalLMLoss
        known = StepItems(SimpleNamespace(model=model, _loss_shifts_labels=stock), None)
        assert known._shifts_labels() is bool(torch.equal(seen, left)), name


def test_models_that_leave_the_first_label_out(group):
    ranks(group, 1)(shifts_case)


def unprepared_case(world, folder):
    """Check that an evaluation with a plain loader in the last step of an epoch cuts nothing."""
    trainer = trained(world, Words, folder, max_steps=1)
    data = list(rows(Words))
    given = torch.utils.data.DataLoader(data, batch_size=8, collate_fn=batch_of)
    trainer.get_eval_dataloader = lambda *_: given
    held = trainer.get_train_dataloader()
    seen = [trainer.evaluate()["eval_loss"] for _ in held][-1]
    model = Words()
    with trainer.accelerator.full_parameters(trainer.model):
        model.load_state_dict(trainer.model.state_dict())
    with torch.no_grad():
        whole = model(**batch_of(data))["loss"].item()
    assert seen == pytest.approx(whole, rel=1e-10)
    trainer.accelerator.free_memory()


def test_an_evaluation_by_a_plain_loader(group, tmp_path):
    ranks(group, 2)(unprepared_case, str(tmp_path))


def saves_case(world, folder):
    trainer = trained(world, Words, folder, 3, save_strategy="steps", save_steps=1)
    trainer.accelerator.free_memory()


def resumes_case(world, folder):
    _, expected = plain(Words)
    trainer = trained(world, Words, folder, 1, resume=f"{folder}/checkpoint-1")
    assert trainer.state.global_step == 4
    assert far(trainer, expected) < 1e-12


def test_resumed_in_mid_epoch_on_another_number_of_workers(group, tmp_path):
    """The remaining batches have repeated samples too, which the skipping loader yields."""
    for before, after in ((2, 1), (1, 2)):
        folder = str(tmp_path / str(before))
        ranks(group, before)(saves_case, folder)
        ranks(group, after)(resumes_case, folder)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows(Words))


def stream_case(world, zero, folder):
    """Rank 0 reads the stream, and repeats a sample so that all ranks get the same number."""
    _, expected = plain(Words, epochs=1)
    sizes = {"per_device_train_batch_size": STEP // 2, "gradient_accumulation_steps": 1}
    trainer = trained(world, Words, folder, zero, data=Stream(), max_steps=2, **sizes)
    assert far(trainer, expected) < 1e-12


def test_data_without_a_length(group, tmp_path):
    for zero in (0, 3):
        ranks(group, 2)(stream_case, zero, str(tmp_path))


def unknown_case(world, folder):
    trainer = trained(world, Words, folder, max_steps=1)
    other = batch_of(list(rows(Words))[:2])
    with pytest.raises(UsageError, match="a batch that get_batch_samples has not"):
        trainer.training_step(trainer.model, other)
    trainer.accelerator.free_memory()


def test_a_batch_of_nowhere_is_refused(group, tmp_path):
    ranks(group, 1)(unknown_case, str(tmp_path))
