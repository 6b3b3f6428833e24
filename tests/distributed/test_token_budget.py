"""Steps closed by a budget of tokens, against plain PyTorch without padding, shares or a Loader."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import shardwise as sw
from shardwise.data.token_budget import balance
from shardwise.errors import DataError

IGNORED = -100
EPOCHS = 2


def documents(count=24, seed=0):
    """Tensors of token numbers, with log-normal lengths between 2 and 40."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.randn(count, generator=draw).mul(0.8).add(2.2).exp().long().clamp(2, 40)
    return [torch.randint(0, 13, (n,), generator=draw) for n in spread.tolist()]


def collate(samples):
    inputs = pad_sequence([each[:-1] for each in samples], batch_first=True)
    targets = pad_sequence([each[1:] for each in samples], batch_first=True, padding_value=IGNORED)
    return inputs, targets


class Causal(nn.Module):
    """One layer of causal attention. Padding is on the right, so it changes no valid position."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(13, 8)
        self.mix = nn.Linear(8, 24)
        self.head = nn.Linear(8, 13)
        self.double()

    def forward(self, tokens):
        hidden = self.embed(tokens)  # (rows, length, 8)
        q, k, v = self.mix(hidden).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(hidden + attended)


def optimizer_of(model, kind):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.3)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def orders(count):
    """The order of each epoch, as the Loader of a single worker gives it without a budget."""
    loader = sw.Loader(range(count), batch_size=count, shuffle=True)
    return [next(iter(batch for batch in loader)).tolist() for _ in loader.epochs(EPOCHS)]


def plain(world, tokens, kind):
    """Train in one process, one document at a time, and return the losses and the parameters."""
    texts = documents()
    model = Causal()
    optimizer = optimizer_of(model, kind)
    losses = []
    for order in orders(len(texts)):
        while order:
            step = []
            while order and sum(map(len, step)) + len(texts[order[0]]) <= tokens:
                step.append(texts[order.pop(0)])
            valid = sum(len(text) - 1 for text in step)
            total = torch.zeros((), dtype=torch.float64)
            for text in step:
                scores = model(text[None, :-1])[0]
                total = total + nn.functional.cross_entropy(scores, text[1:], reduction="sum")
            optimizer.zero_grad()
            (total / valid).backward()
            optimizer.step()
            losses.append(total.item() / valid)
    return losses, [each.detach().clone() for each in model.parameters()]


def trained(world, tokens, kind, zero, micro, workers=0):
    texts = documents()
    model = Causal()
    engine = sw.Engine(model, optimizer_of(model, kind), zero=zero)
    loader = sw.Loader(
        texts,
        tokens=tokens,
        length=len,
        micro_batch_tokens=micro,
        cost=lambda n: n + n * n / 48,
        shuffle=True,
        collate_fn=collate,
        num_workers=workers,
    )
    losses = []
    for _ in loader.epochs(EPOCHS):
        for step in loader.steps():
            for inputs, targets in step:
                # A row of the collated batch has one token less than its sample.
                padded = len(inputs) * (inputs.shape[1] + 1)
                assert micro is None or padded <= micro
                loss = nn.functional.cross_entropy(
                    model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED
                )
                engine.backward(loss)
            losses.append(engine.step().loss)
    with engine.full_parameters():
        values = [each.detach().clone() for each in model.parameters()]
    engine.close()
    return losses, values


@pytest.mark.parametrize(
    ("size", "kind", "zero", "tokens", "micro"),
    [
        (1, "sgd", 0, 64, 40),
        (2, "sgd", 3, 64, 40),
        (3, "adamw", 0, 160, None),
        (4, "sgd", 3, 40, None),
        (4, "adamw", 0, 160, 48),
    ],
)
def test_trajectory_is_that_of_documents_one_by_one(group, size, kind, zero, tokens, micro):
    losses, values = group(1)(plain, tokens, kind)[0]
    for ours_losses, ours in group(size)(trained, tokens, kind, zero, micro):
        assert ours_losses == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(ours, values, rtol=1e-8, atol=1e-12)


def test_exact_mode_has_the_same_bits_on_other_sizes(group):
    losses, values = group(1, exact=4)(trained, 64, "adamw", 0, None)[0]
    for size, zero in ((2, 3), (4, 0)):
        others, theirs = group(size, exact=4)(trained, 64, "adamw", zero, None)[0]
        assert others == losses
        assert all(map(torch.equal, theirs, values))


def legs(world, state, most):
    """Run at most `most` steps. Return the indices of each step, and the position after them."""
    texts = documents()
    loader = sw.Loader(
        list(enumerate(texts)),
        tokens=90,
        length=lambda sample: len(sample[1]),
        micro_batch_tokens=45,
        shuffle=True,
        collate_fn=lambda rows: [index for index, _ in rows],
    )
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for _ in loader.epochs(EPOCHS):
        for step in loader.steps():
            mine = []
            for rows in step:
                if world.rows:
                    assert len(rows) * max(len(texts[row]) for row in rows) <= 45
                    mine += rows
            seen.append((loader.epoch, step.number, len(step), mine))
            if len(seen) == most:
                return seen, loader.state_dict()
    return seen, None


def steps_of(ranks):
    """Join the ranks' steps, after a check that all ran the same number of micro-batches."""
    joined = []
    for parts in zip(*ranks, strict=True):
        assert len({part[:3] for part in parts}) == 1
        joined.append((*parts[0][:2], sorted(row for part in parts for row in part[3])))
    return joined


def resume_at_random(group, seed):
    """Run two epochs in legs of random length at random sizes."""
    draw = torch.Generator().manual_seed(seed)
    found, state = [], None
    while True:
        size, most = (int(torch.randint(1, 5, (), generator=draw)) for _ in range(2))
        ranks = group(size)(legs, state, most)
        found += steps_of([seen for seen, _ in ranks])
        state = ranks[0][1]
        if state is None:
            return found


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 200), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_resumes_at_other_sizes_use_every_sample_once(group, seeds):
    expected = steps_of([seen for seen, _ in group(1)(legs, None, None)])
    for epoch in range(EPOCHS):
        rows = [row for number, _, rows in expected if number == epoch for row in rows]
        assert sorted(rows) == list(range(24))
    for seed in seeds:
        assert resume_at_random(group, seed) == expected, f"seed {seed}"


def test_shares_have_about_the_same_work():
    draw = torch.Generator().manual_seed(1)
    works = torch.randn(200, generator=draw).exp().tolist()
    for bins in (2, 4, 7):
        shares = balance(works, bins)
        assert sorted(item for share in shares for item in share) == list(range(200))
        loads = [math.fsum(works[item] for item in share) for share in shares]
        # Longest first leaves a difference of at most the smallest items.
        assert max(loads) - min(loads) <= 0.05 * max(loads)


def invalid(world, options):
    texts = documents()
    loader = sw.Loader(texts, **{"tokens": 64, "length": len, "collate_fn": collate} | options)
    next(iter(loader.steps()))


def raised(world, kind):
    texts = documents()
    longest = max(range(len(texts)), key=lambda index: len(texts[index]))
    lengths = list(map(len, texts))
    options, words = {
        "long": ({"tokens": len(texts[longest]) - 1}, f"Sample {longest} has"),
        "micro": ({"micro_batch_tokens": 3}, "micro_batch_tokens=3"),
        "empty": ({"length": [0, *lengths[1:]]}, "sample 0 is 0"),
        "few": ({"length": lengths[1:]}, f"holds {len(texts) - 1} lengths"),
        "fails": ({"length": lambda sample: sample.missing}, "failed on the samples"),
        "differs": ({"length": [2 + world.rank, *lengths[1:]]}, "and other lengths"),
        "costs": ({"cost": lambda tokens: tokens ** (1 + world.rank)}, "and other costs"),
        "rows": ({"batch_size": 8}, "tokens decides the batches"),
        "stream": ({"length": None}, "length=lambda"),
        "alone": ({"tokens": None, "batch_size": 8}, "applies only"),
    }[kind]
    with pytest.raises(DataError, match=words):
        invalid(world, options)
    return True


@pytest.mark.parametrize(
    "kind",
    ["long", "micro", "empty", "few", "fails", "differs", "costs", "rows", "stream", "alone"],
)
def test_rejects_bad_arguments_on_all_ranks(group, kind):
    assert group(2)(raised, kind) == [True, True]


class Counted:
    """A dataset that counts how many samples were read."""

    def __init__(self, texts):
        self.texts, self.reads = texts, 0

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        self.reads += 1
        return self.texts[index]


def reads_with_cache(world, folder, change):
    """Return the number of samples read for the lengths, and the steps."""
    texts = documents(200)
    if change:
        texts[0] = texts[0].repeat(2)[: len(texts[0]) + 1]
    dataset = Counted(texts)
    file = folder / "sub" / "lengths.json"
    loader = sw.Loader(dataset, tokens=90, length=len, length_cache=file, collate_fn=list)
    requests = [micro.indices for micro in loader.requests()]
    return dataset.reads, requests


def test_lengths_are_read_once_and_kept_in_a_file(group, tmp_path):
    first = group(2)(reads_with_cache, tmp_path, False)
    again = group(2)(reads_with_cache, tmp_path, False)
    # The fingerprint reads a few samples on rank 0.
    assert [reads for reads, _ in first] == [116, 100]
    assert [reads for reads, _ in again] == [16, 0]
    assert [requests for _, requests in again] == [requests for _, requests in first]
    (file,) = (tmp_path / "sub").iterdir()
    changed = group(2)(reads_with_cache, tmp_path, True)
    assert changed[1][0] == 100
    file.write_text("[]")
    with pytest.raises(AssertionError, match="not a file of lengths"):
        group(2)(reads_with_cache, tmp_path, False)
