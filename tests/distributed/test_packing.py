"""Packed documents, against plain PyTorch without packing, padding, shares or a Loader."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise import config
from shardwise.bridging import joining
from shardwise.data.packing.collate import PackedCollate
from shardwise.data.packing.rows import close_steps, pack_rows
from shardwise.errors import DataError, UsageError

IGNORED = -100
ROW = 40
EPOCHS = 2


def documents(count=24, seed=0):
    """Dicts with log-normal numbers of tokens between 1 and 40, and labels without the prompt."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.randn(count, generator=draw).mul(0.8).add(2.2).exp().long().clamp(1, ROW)
    texts = [torch.randint(0, 13, (n,), generator=draw) for n in spread.tolist()]
    return [
        {"input_ids": text, "labels": torch.where(torch.arange(len(text)) < 2, IGNORED, text)}
        for text in texts
    ]


def length(sample):
    return len(sample["input_ids"])


class Causal(nn.Module):
    """Learned positions and one layer of attention. Without a mask, attention is causal."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(13, 8)
        self.places = nn.Embedding(ROW, 8)
        self.mix = nn.Linear(8, 24)
        self.head = nn.Linear(8, 13)
        self.double()

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        hidden = self.embed(input_ids) + self.places(position_ids)  # (rows, length, 8)
        q, k, v = self.mix(hidden)[:, None].chunk(3, dim=-1)  # one head
        attended = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None
        )
        return self.head(hidden + attended[:, 0])


class ByLengths(Causal):
    """Computes the attention of each document on its own, like a kernel for varying lengths."""

    def forward(self, input_ids, position_ids, cu_seqlens, max_seqlen):
        hidden = self.embed(input_ids) + self.places(position_ids)
        q, k, v = self.mix(hidden).flatten(0, 1).chunk(3, dim=-1)
        sizes = cu_seqlens.diff().tolist()
        assert max(sizes) == max_seqlen
        attended = torch.cat(
            [
                nn.functional.scaled_dot_product_attention(*each, is_causal=True)
                for each in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
            ]
        )
        return self.head(hidden + attended.view(hidden.shape))


class Transformer(nn.Module):
    """A causal language model of Transformers, called like the models above."""

    def __init__(self, kind):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(3)
        sizes = {"vocab_size": 13, "max_position_embeddings": ROW, "num_hidden_layers": 2}
        if kind == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=13, n_embd=8, n_layer=2, n_head=2, n_positions=ROW
            )
            config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
        else:
            make = {"llama": transformers.LlamaConfig, "qwen": transformers.Qwen2Config}[kind]
            sizes |= {"hidden_size": 8, "intermediate_size": 16, "num_key_value_heads": 2}
            config = make(num_attention_heads=2, **sizes)
        self.inner = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa"
        )
        # The norms of Transformers compute in fp32, also in a model in fp64.
        for path, module in list(self.named_modules()):
            if type(module).__name__.endswith("RMSNorm"):
                parent, _, name = path.rpartition(".")
                norm = nn.RMSNorm(8, eps=module.variance_epsilon)
                setattr(self.get_submodule(parent), name, norm)
        self.double()

    def forward(self, **batch):
        return self.inner(**batch).logits


def model_of(kind):
    kinds = {"own": Causal, "lengths": ByLengths}
    return kinds[kind]() if kind in kinds else Transformer(kind)


def optimizer_of(model, kind):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(scores, labels, reduction):
    return nn.functional.cross_entropy(
        scores[:, :-1].flatten(0, 1),
        labels[:, 1:].flatten(),
        ignore_index=IGNORED,
        reduction=reduction,
    )


def plain(world, kind, optimizer_kind, steps):
    """Train in one process, one document at a time, and return the losses and the parameters."""
    texts = documents()
    model = Causal() if kind == "lengths" else model_of(kind)
    optimizer = optimizer_of(model, optimizer_kind)
    losses = []
    for step in steps:
        total, valid = torch.zeros((), dtype=torch.float64), 0
        for index in step:
            labels = texts[index]["labels"][None]
            scores = model(input_ids=texts[index]["input_ids"][None])
            total = total + loss_of(scores, labels, "sum")
            valid += int((labels[:, 1:] != IGNORED).sum())
        optimizer.zero_grad()
        (total / valid).backward()
        optimizer.step()
        losses.append(total.item() / valid)
    return losses, [each.detach().clone() for each in model.parameters()]


def trained(world, kind, optimizer_kind, zero, tokens, micro, workers=0):
    """Train on packed rows. Return losses, parameters, and the documents that this rank used."""
    texts = documents()
    model = model_of(kind)
    attention = "cu_seqlens" if kind == "lengths" else "mask"
    call = None
    if kind == "lengths":
        call = lambda model, batch: model(  # noqa: E731
            *(batch[key] for key in ("input_ids", "position_ids", "cu_seqlens", "max_seqlen"))
        )
    packing = sw.Packing(model, row=ROW, attention=attention, call=call)
    engine = sw.Engine(model, optimizer_of(model, optimizer_kind), zero=zero)
    # Numbers start at 1, because free positions have the number 0.
    numbered = [
        text | {"number": torch.full((length(text),), i)} for i, text in enumerate(texts, 1)
    ]
    loader = sw.Loader(
        numbered,
        tokens=tokens,
        length=length,
        micro_batch_tokens=micro,
        pack=packing,
        shuffle=True,
        num_workers=workers,
    )
    losses, used, all_tokens = [], [], 0
    for _ in loader.epochs(EPOCHS):
        for step in loader.steps():
            used.append(set())
            for batch in step:
                labels, number = batch.pop("labels"), batch.pop("number")
                assert labels.shape[1] == ROW
                assert micro is None or labels.numel() <= micro
                if world.rows:
                    used[-1] |= set(number.flatten().tolist()) - {0}
                engine.backward(loss_of(model(**batch), labels, "mean"))
            stats = engine.step()
            losses.append(stats.loss)
            all_tokens += stats.tokens
            assert 0 <= stats.padding < 1
    assert all_tokens == EPOCHS * sum(map(length, texts))
    assert stats.tokens_per_second > 0
    with engine.full_parameters():
        values = [each.detach().clone() for each in model.parameters()]
    engine.close()
    return losses, values, used


def steps_of(ranks):
    """Return the documents of each step, from those that each rank used."""
    by_step = zip(*(used for *_, used in ranks), strict=True)
    return [sorted(number - 1 for number in set().union(*parts)) for parts in by_step]


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("own", [(1, 0, 80, 40), (2, 3, 80, 40), (4, 0, 160, None)]),
        ("lengths", [(2, 0, 120, 80)]),
        ("llama", [(2, 3, 120, 80)]),
        pytest.param(
            "llama", [(1, 0, 120, 80), (4, 3, 120, 40)], marks=pytest.mark.full, id="llama_more"
        ),
        pytest.param("qwen", [(1, 3, 80, 40), (2, 0, 80, None)], marks=pytest.mark.full),
        pytest.param("gpt2", [(1, 3, 80, 40), (4, 0, 80, None)], marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.full)])
def test_trajectory_is_that_of_documents_one_by_one(group, kind, cases, optimizer):
    expected: dict[int, tuple] = {}
    for size, zero, tokens, micro in cases:
        ranks = group(size)(trained, kind, optimizer, zero, tokens, micro)
        steps = steps_of(ranks)
        epochs = len(documents()) * EPOCHS
        assert sum(map(len, steps)) == epochs
        if tokens not in expected:
            expected[tokens] = steps, group(1)(plain, kind, optimizer, steps)[0]
        # Steps, losses and parameters do not depend on the number of workers.
        assert steps == expected[tokens][0]
        losses, values = expected[tokens][1]
        for ours_losses, ours, _ in ranks:
            assert ours_losses == pytest.approx(losses, rel=1e-8)
            torch.testing.assert_close(ours, values, rtol=1e-8, atol=1e-10)


def test_exact_mode_has_the_same_bits_on_other_sizes(group):
    losses, values, _ = group(1, exact=4)(trained, "own", "adamw", 0, 160, None)[0]
    for size, zero in ((2, 3), (4, 0)):
        others, theirs, _ = group(size, exact=4)(trained, "own", "adamw", zero, 160, None)[0]
        assert others == losses
        assert all(map(torch.equal, theirs, values))


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.integers(1, 6))
def test_rows_hold_every_item_once(lengths, count):
    steps = list(close_steps(range(len(lengths)), lengths, 16, count))
    assert list(itertools.chain(*steps)) == list(range(len(lengths)))
    for step in steps:
        rows = pack_rows([lengths[index] for index in step], 16, count)
        assert len(rows) <= count
        assert sorted(itertools.chain(*rows)) == list(range(len(step)))
        assert all(sum(lengths[step[item]] for item in row) <= 16 for row in rows)
        assert all(rows)


def test_rows_are_packed_from_the_longest_if_the_order_does_not_fit():
    # In order, 5 and 3 share a row, then 4 and 2, and 6 has no row left.
    assert pack_rows([5, 3, 2, 6], 8, 2) == [[0, 1], [2, 3]]
    assert pack_rows([3, 2, 6, 5], 8, 2) == [[0, 3], [1, 2]]
    assert list(close_steps(range(5), [5, 3, 4, 2, 6], 8, 2)) == [[0, 1, 2, 3], [4]]


def test_batch_has_positions_mask_and_labels():
    texts = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    batch = PackedCollate(7, "mask")([[(text, len(text["input_ids"])) for text in texts]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, -100]]
    blocks = [torch.ones(size, size, dtype=torch.bool).tril() for size in (3, 2, 2)]
    assert torch.equal(batch["attention_mask"][0, 0], torch.block_diag(*blocks).bool())
    batch = PackedCollate(7, "cu_seqlens")([[(text, len(text["input_ids"])) for text in texts]])
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 7]
    assert batch["max_seqlen"] == 3
    shifted = {"input_ids": [1, 2], "shift_labels": [2, -100], "number": [7, 8]}
    batch = PackedCollate(4, "positions")([[(shifted, 2)]])
    assert batch["shift_labels"].tolist() == [[2, -100, -100, -100]]
    assert batch["number"].tolist() == [[7, 8, 0, 0]]


class WithoutMask(Causal):
    def forward(self, input_ids, position_ids=None, attention_mask=None):
        return super().forward(input_ids, position_ids)


class RequiresAll(Causal):
    def forward(self, input_ids, position_ids, attention_mask):
        return super().forward(input_ids, position_ids, attention_mask)


class RequiresAllWithoutMask(Causal):
    def forward(self, input_ids, position_ids, attention_mask):
        return super().forward(input_ids, position_ids)


class OwnPositions(Causal):
    def forward(self, input_ids, position_ids=None, attention_mask=None):
        return super().forward(input_ids, None, attention_mask)


class Recurrent(Causal):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(13, 13, batch_first=True).double()

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        return self.rnn(super().forward(input_ids, position_ids, attention_mask))[0]


class Normalised(Causal):
    """Its statistics are those of the batch, which include other documents and padding."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(13).double()

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        scores = super().forward(input_ids, position_ids, attention_mask)
        return self.norm(scores.transpose(1, 2)).transpose(1, 2)


class Pooled(Causal):
    def forward(self, input_ids, position_ids=None, attention_mask=None):
        return super().forward(input_ids, position_ids, attention_mask).mean(1)


class Unaware(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(13, 8), nn.Linear(8, 13))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WithoutMask, "Packing changes the result of WithoutMask"),
        (RequiresAllWithoutMask, "Packing changes the result of RequiresAllWithoutMask"),
        (OwnPositions, "Packing changes the result of OwnPositions"),
        (Recurrent, r"rnn \(GRU\)"),
        (Normalised, "Packing changes the result of Normalised"),
        (Pooled, "no scores per token"),
        (Unaware, "does not accept input_ids.* Add the arguments, or .* if they have other names"),
    ],
)
def test_trial_names_the_module_that_packing_changes(solo, kind, words):
    model = kind()
    before = torch.get_rng_state()
    with pytest.raises(DataError, match=words):
        sw.Packing(model, row=ROW)
    assert torch.equal(torch.get_rng_state(), before)


def test_trial_passes_the_fields_that_forward_requires(solo):
    sw.Packing(RequiresAll(), row=ROW)


def test_trial_of_transformers_finds_windows_caches_and_eager_attention(solo):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 13,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    window = transformers.MistralForCausalLM(
        transformers.MistralConfig(**sizes, sliding_window=32, use_cache=False)
    )
    # A mask of four dims replaces the mask with the window.
    with pytest.raises(DataError, match=r"self_attn \(MistralAttention\)"):
        sw.Packing(window, row=ROW)
    sw.Packing(window, row=ROW, attention="positions")
    window.config.use_cache = True
    with pytest.raises(DataError, match="use_cache = False"):
        sw.Packing(window, row=ROW, attention="positions")
    assert window.config.sliding_window == 32
    eager = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, attn_implementation="eager")
    )
    with pytest.raises(DataError, match="sdpa"):  # it adds the mask to the scores
        sw.Packing(eager, row=ROW)
    eager.config.use_cache = False
    sw.Packing(eager, row=ROW, attention="positions")


def tiny(kind, **options):
    """Return a small causal model of Transformers, as if it was loaded with flash attention."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
        **options,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    # Loading it with this argument would require the kernels, which need a GPU.
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [("Llama", {}), ("Mistral", {"sliding_window": 32}), ("Gemma2", {"head_dim": 4})],
)
def test_a_model_on_flash_attention_is_tested_by_its_arguments(solo, kind, options):
    model = tiny(kind, **options)
    sw.Packing(model, row=ROW, attention="flash")
    assert model.config._attn_implementation == "flash_attention_2"
    for attention in ("mask", "positions"):
        with pytest.raises(DataError, match=r'write Packing\(\.\.\., attention="flash"\)'):
            sw.Packing(model, row=ROW, attention=attention)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(DataError, match="only flash attention reads"):
        sw.Packing(model, row=ROW, attention="flash")


def test_a_model_that_drops_the_arguments_of_flash_attention_is_refused(solo):
    model = tiny("Llama")
    inner = type(model.model)

    class Dropping(inner):
        def forward(self, input_ids, position_ids=None, **others):
            return super().forward(input_ids, position_ids=position_ids)

    model.model.__class__ = Dropping
    with pytest.raises(DataError, match=r"self_attn \(LlamaAttention\).*pass cu_seq_lens_q"):
        sw.Packing(model, row=ROW, attention="flash")


def test_arguments_of_flash_attention_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    texts = [torch.arange(1, 4), torch.arange(4, 6)]
    ours = PackedCollate(5, "flash")([[(text, len(text)) for text in texts]])
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    theirs = collator([{"input_ids": text.tolist()} for text in texts])
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key
    batch = PackedCollate(7, "flash")([[(texts[0], 3)], [(texts[1], 2), (texts[0], 3)]])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7, 9, 12, 14]  # with free positions
    assert batch["max_length_k"] == 4


def passes_after_the_engine(world):
    """Return whether the trial accepts a model whose parameters an engine has sharded."""
    model = Causal()
    engine = sw.Engine(model, optimizer_of(model, "adamw"), zero=3)
    sw.Packing(model, row=ROW)
    texts = documents()
    loader = sw.Loader(texts, tokens=80, length=length, pack=sw.Packing(model, row=ROW))
    for batch in loader:
        labels = batch.pop("labels")
        engine.backward(loss_of(model(**batch), labels, "mean"))
        engine.step()
    engine.close()
    model = WithoutMask()
    engine = sw.Engine(model, optimizer_of(model, "adamw"), zero=3)
    with pytest.raises(DataError, match="Packing changes the result of WithoutMask"):
        sw.Packing(model, row=ROW)
    engine.close()
    return True


def test_trial_works_on_sharded_parameters(group):
    assert group(2)(passes_after_the_engine) == [True, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 90}, "tokens=80"),
        ({"micro_batch_tokens": 30}, "micro_batch_tokens=40"),
        ({"collate_fn": list}, "collate_fn cannot be combined"),
        ({"pack": True}, "pack=sw.Packing"),
        ({"tokens": None, "length": None, "batch_size": 4}, "pack applies only"),
        ({"length": lambda sample: 1}, "length= returned 1"),
        ({"length": lambda sample: 41}, "more than row=40"),
    ],
)
def test_rejects_bad_arguments(solo, options, words):
    defaults = {"tokens": 80, "length": length, "pack": sw.Packing(False, row=ROW)}
    with pytest.raises(DataError, match=words):
        next(iter(next(iter(sw.Loader(documents(), **defaults | options).steps()))))


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "hides tokens"),
        ({"input_ids": [1, 2], "position_ids": [0, 1]}, "position_ids"),
        ({"input_ids": [1, 2], "label": 3}, "field label"),
        ({"input_ids": [1, 2], "text": "ab"}, "field text"),
        ({"input_ids": [[1, 2]]}, "one dim"),
        ({"tokens": [1, 2]}, "needs input_ids"),
    ],
)
def test_rejects_samples_that_cannot_be_packed(sample, words):
    with pytest.raises(DataError, match=words):
        PackedCollate(8, "mask")([[(sample, 2)]])


def test_the_run_may_decide_the_tokens_of_a_micro_batch(solo, monkeypatch):
    options = {"tokens": 120, "length": length, "pack": sw.Packing(False, row=ROW)}
    solo.settings = config.Settings(micro_batch_tokens=80)
    loader = sw.Loader(documents(), **options)
    assert {len(batch["input_ids"]) for step in loader.steps() for batch in step} == {2, 1}
    monkeypatch.setenv("SHARDWISE_MICRO_BATCH_TOKENS", "40")
    loader = sw.Loader(documents(), micro_batch_tokens=120, **options)
    assert {len(batch["input_ids"]) for step in loader.steps() for batch in step} == {1}


def test_the_run_may_decide_the_tokens_of_a_step(solo, capsys):
    solo.settings = config.Settings(step_tokens=80)
    options = {"length": length, "pack": sw.Packing(False, row=ROW)}
    for tokens in ({}, {"tokens": 80}, {"tokens": 120}):
        batches = list(sw.Loader(documents(), **options, **tokens))
        assert max(len(batch["input_ids"]) for batch in batches) == 2
    assert len(list(sw.Loader(list(range(4)), 2))) == 2  # an evaluation by samples
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "shardwise: --step-tokens 80 replaces tokens=120 in the script",
        "shardwise: --step-tokens 80 does not apply to a Loader without length=",
    ]


@pytest.mark.parametrize("name", ["step_tokens", "micro_batch_tokens"])
def test_bridges_refuse_token_budgets(solo, name):
    solo.settings = config.Settings(**{name: 80})
    flag = f"--{name.replace('_', '-')} 80"
    with pytest.raises(UsageError, match=rf"Trainer cannot be combined with {flag}.*group_by"):
        joining.join({}, "Trainer")
