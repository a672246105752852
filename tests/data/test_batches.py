from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora import language_dataset, translation_dataset
from writehead.config import ModelConfig
from writehead.data.batches import PackedBatches, padded_batches
from writehead.data.order import epoch_order
from writehead.data.rows import Units
from writehead.errors import ConfigError
from writehead.kernels import Visibility
from writehead.model import Packing, TranslationModel

END, START = 1, 0


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return translation_dataset(tmp_path_factory.mktemp("pairs")).split("train")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return language_dataset(tmp_path_factory.mktemp("text")).split("train")


def packed(split, rows=12, lengths=(120, 130), seed=7, rank=0, world=1):
    task = "translation" if "source" in split.sides else "language"
    source = lengths[0] if task == "translation" else None
    return PackedBatches(split, task, rows, source, lengths[1], seed, rank, world)


def segments(tokens, packing):
    """Each segment's tokens, row by row: read one position at a time."""
    found = []
    for values, numbers, positions in zip(
        tokens.tolist(), packing.segments.tolist(), packing.positions.tolist(), strict=True
    ):
        row: dict[int, list[int]] = {}
        for value, number, position in zip(values, numbers, positions, strict=True):
            if number:
                assert position == len(row.setdefault(number, []))
                row[number].append(value)
            else:
                assert value == position == 0
        assert sorted(row) == list(range(1, len(row) + 1))
        found.append([row[number] for number in sorted(row)])
    return found


def sequences(batch):
    """All (source, target) of a batch as they were before packing, row by row."""
    labels, inputs = segments(batch.labels, batch.packing), segments(batch.inputs, batch.packing)
    sources = segments(batch.source, batch.source_packing)
    rows = []
    for source, fed, wanted in zip(sources, inputs, labels, strict=True):
        for s, i, w in zip(source, fed, wanted, strict=True):
            assert s[-1] == w[-1] == END
            assert i == [START, *w[:-1]]
            rows.append((tuple(s[:-1]), tuple(w[:-1])))
    return rows


def everything(split):
    return [
        (tuple(split.source(i).tolist()), tuple(split.target(i).tolist()))
        for i in range(len(split))
    ]


def same(a, b):
    for name in ("source", "inputs", "labels"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)
    assert torch.equal(a.packing.segments, b.packing.segments)
    assert torch.equal(a.packing.positions, b.packing.positions)
    assert a.tokens == b.tokens


@pytest.mark.parametrize("rows", [1, 12])
def test_over_an_epoch_no_pair_is_lost_and_none_comes_twice(pairs, rows):
    batches, seen = packed(pairs, rows), Counter()
    while batches.epoch < 3:
        seen.update(sequences(next(batches)))
    expected = Counter(everything(pairs))
    assert seen.keys() == expected.keys()
    # what waits is at most an epoch behind, what was drawn last at most one ahead
    waiting = len(batches.state()["carry"])
    total = 3 * len(pairs) + batches.state()["cursor"] - waiting
    assert seen.total() == total
    assert all(2 * expected[pair] <= count <= 4 * expected[pair] for pair, count in seen.items())


def test_the_first_epoch_is_exactly_the_text(pairs):
    batches, seen = packed(pairs), Counter()
    order = epoch_order(7, 0, len(pairs)).tolist()
    while not batches.epoch:
        before = batches.state()
        seen.update(sequences(next(batches)))
    rows = everything(pairs)
    drawn, waiting = order[: before["cursor"]], before["carry"]
    seen.subtract(sequences(restored(pairs, before)))
    assert +seen == Counter(rows[i] for i in drawn) - Counter(rows[i] for i in waiting)


def restored(split, state, **changes):
    batches = packed(split, **changes)
    batches.restore(state)
    return next(batches)


def test_the_fuller_side_is_at_least_95_percent_full(pairs, text):
    for split in (pairs, text):
        batches = list(islice(packed(split, rows=32, lengths=(256, 256)), 12))
        room = sum(batch.labels.numel() for batch in batches)
        filled = [sum(batch.tokens for batch in batches)]
        if split is pairs:
            sources = (int((batch.source_packing.segments != 0).sum()) for batch in batches)
            filled.append(sum(sources))
        assert max(filled) >= 0.95 * room


def test_tokens_are_the_labels_that_count_and_tensors_are_int64(pairs):
    batch = next(packed(pairs))
    assert batch.tokens == int((batch.packing.segments != 0).sum())
    assert (batch.source.shape, batch.labels.shape) == ((12, 120), (12, 130))
    for T in (batch.source, batch.inputs, batch.labels, batch.packing.segments):
        assert T.dtype == torch.int64
        assert T.device.type == "cpu"


def test_packing_is_what_the_model_makes_of_the_segments(pairs):
    batch = next(packed(pairs))
    for packing in (batch.packing, batch.source_packing):
        made = Packing.from_segments(packing.segments)
        real = packing.segments != 0
        assert torch.equal(made.positions[real], packing.positions[real])


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_batch_that_one_would_have(pairs, text, world):
    for split in (pairs, text):
        alone = packed(split)
        together = [packed(split, rank=rank, world=world) for rank in range(world)]
        for _ in range(6):
            whole, parts = next(alone), [next(batches) for batches in together]
            for rank, part in enumerate(parts):
                assert torch.equal(part.labels, whole.labels[rank::world])
                assert torch.equal(part.inputs, whole.inputs[rank::world])
                assert torch.equal(part.packing.segments, whole.packing.segments[rank::world])
                if whole.source is not None:
                    assert torch.equal(part.source, whole.source[rank::world])
            assert sum(part.tokens for part in parts) == whole.tokens
            assert all(batches.state() == alone.state() for batches in together)


@settings(max_examples=15)
@given(stop=st.integers(0, 40), world=st.sampled_from([1, 2, 3, 4]), seed=st.integers(0, 3))
def test_restored_anywhere_by_any_world_the_batches_are_the_same(pairs, stop, world, seed):
    uninterrupted = packed(pairs, seed=seed)
    for _ in range(stop):
        next(uninterrupted)
    state = uninterrupted.state()
    rank = stop % world
    again = packed(pairs, seed=seed, rank=rank, world=world)
    next(again)  # where it stood before does not matter
    again.restore(state)
    for _ in range(3):
        whole, part = next(uninterrupted), next(again)
        assert torch.equal(part.labels, whole.labels[rank::world])
        assert torch.equal(part.source, whole.source[rank::world])


def test_a_state_is_not_changed_by_going_on_and_is_plain(pairs):
    batches = packed(pairs)
    next(batches)
    state = batches.state()
    copy = {name: list(v) if isinstance(v, list) else v for name, v in state.items()}
    first = next(batches)
    assert state == copy
    assert all(type(v) is int or all(type(i) is int for i in v) for v in state.values())
    same(first, restored(pairs, state))


def test_a_state_of_other_batches_is_refused(pairs):
    state = packed(pairs).state()
    with pytest.raises(ConfigError, match="rows=12 and these have 24"):
        packed(pairs, rows=24).restore(state)
    with pytest.raises(ConfigError, match="seed=7"):
        packed(pairs, seed=8).restore(state)


def test_seeds_and_epochs_have_orders_of_their_own(pairs):
    assert not torch.equal(next(packed(pairs)).labels, next(packed(pairs, seed=8)).labels)
    orders = [epoch_order(seed, epoch, 50).tolist() for seed in (0, 1, -1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6


def test_an_order_mixes_well():
    """Where an index goes says nothing about where its neighbours go."""
    places = np.argsort(epoch_order(3, 5, 20_000)) / 20_000
    assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(places, np.arange(20_000))[0, 1]) < 0.03


def slow_order(seed, epoch, count):
    """The same in plain integers."""
    mask = (1 << 64) - 1

    def mix(z):
        z = (z * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    key = mix(mix(seed & mask) ^ (epoch * 0x9E3779B97F4A7C15 & mask))
    return sorted(range(count), key=lambda i: mix(i ^ key))


def test_an_order_is_pinned_down_so_that_no_release_shuffles_a_resumed_run_anew():
    assert epoch_order(3, 2, 100).tolist() == slow_order(3, 2, 100)


@pytest.mark.parametrize("length", [5, 16, 130])
def test_long_text_is_cut_into_pieces_and_no_label_is_lost(text, length):
    batches, seen = packed(text, rows=12, lengths=(0, length)), Counter()
    drawn = Counter()
    for _ in range(20):
        batch = next(batches)
        assert batch.source is None
        fed = segments(batch.inputs, batch.packing)
        for row, row_fed in zip(segments(batch.labels, batch.packing), fed, strict=True):
            for labels, inputs in zip(row, row_fed, strict=True):
                assert inputs[1:] == labels[:-1]
                drawn[tuple(inputs[:1]), tuple(labels)] += 1
    for i in range(len(text)):
        ids = text.target(i).tolist()
        labels, inputs = [*ids, END], [START, *ids]
        for at in range(0, len(labels), length):
            seen[(inputs[at],), tuple(labels[at : at + length])] += 1
    assert drawn.keys() <= seen.keys()
    if batches.epoch:
        missing = seen - drawn
        assert missing.total() <= len(batches.state()["carry"])


def test_pairs_longer_than_a_row_are_counted_and_left_out(pairs):
    batches = packed(pairs, lengths=(40, 40))
    long = [i for i in range(len(pairs)) if len(pairs.source(i)) > 39 or len(pairs.target(i)) > 39]
    assert 0 < batches.skipped == len(long) < len(pairs)
    rows = everything(pairs)
    refused = {rows[i] for i in long}
    while batches.epoch < 2:
        assert not refused & set(sequences(next(batches)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 12, "world": 5}, "rows=12 cannot be shared by 5 processes"),
        ({"rank": 2, "world": 2}, "rank=2 is not one of 2"),
        ({"lengths": (2, 2)}, "none of 400 sequences fits"),
        ({"lengths": (0, 9)}, "give source_length"),
    ],
)
def test_sizes_that_cannot_be_meant_are_refused(pairs, changes, words):
    with pytest.raises(ConfigError, match=words):
        packed(pairs, **changes)


def test_a_batch_splits_into_parts_that_make_it_up(pairs):
    batch = next(packed(pairs))
    parts = batch.split(3)
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    assert torch.equal(torch.cat([part.source for part in parts]), batch.source)
    assert sum(part.tokens for part in parts) == batch.tokens
    with pytest.raises(ConfigError, match="12 rows cannot be split into 5"):
        batch.split(5)


@pytest.mark.parametrize("window", [None, 3])
def test_visible_pairs_are_those_of_the_masks(pairs, text, window):
    for split in (pairs, text):
        batch = next(packed(split))

        def count(of, to, n, m, **limits):
            seen = Visibility(query_segments=of.segments, memory_segments=to.segments, **limits)
            return int(seen.mask(n, m, torch.device("cpu")).sum())

        target, found = batch.packing, batch.visible_pairs(window)
        assert found.self == count(target, target, 130, 130, causal=True, window=window)
        if batch.source is None:
            assert (found.encoder, found.cross) == (0, 0)
        else:
            source = batch.source_packing
            assert found.encoder == count(source, source, 120, 120)
            assert found.cross == count(target, source, 130, 120)


def test_padded_batches_have_every_sequence_once_within_the_budget(pairs):
    rows, seen = everything(pairs), []
    for batch in padded_batches(pairs, max_tokens=600):
        assert max(batch.labels.numel(), batch.source.numel()) <= 600 or len(batch.labels) == 1
        found = sequences(batch)
        assert found == [rows[i] for i in batch.indices.tolist()]
        assert batch.tokens == sum(len(target) + 1 for _, target in found)
        seen += batch.indices.tolist()
    assert sorted(seen) == list(range(len(pairs)))
    first = [i for batch in padded_batches(pairs, 600, limit=33) for i in batch.indices.tolist()]
    assert sorted(first) == list(range(33))


def test_padded_rows_are_of_like_length(pairs):
    batches = list(padded_batches(pairs, max_tokens=1000))
    filled = sum(batch.tokens for batch in batches)
    assert filled > 0.9 * sum(batch.labels.numel() for batch in batches)


def test_padded_text_is_cut_where_rows_are_short(text):
    labels = Counter()
    for batch in padded_batches(text, 400, target_length=20):
        assert batch.labels.shape[1] <= 20
        for (row,), index in zip(
            segments(batch.labels, batch.packing), batch.indices.tolist(), strict=True
        ):
            labels.update((index, token) for token in row)
    expected = Counter()
    for i in range(len(text)):
        expected.update((i, token) for token in [*text.target(i).tolist(), END])
    assert labels == expected


def test_padded_pairs_that_do_not_fit_are_as_many_as_said(pairs):
    units = Units(pairs, "translation", 40, 40)
    batches = padded_batches(pairs, 600, source_length=40, target_length=40)
    assert sum(len(batch.labels) for batch in batches) == len(pairs) - units.skipped


def test_a_model_says_the_same_of_a_pair_packed_and_alone(pairs):
    """The whole way: packing, padding and visibility, by the logits of real sequences."""
    config = ModelConfig(
        task="translation",
        vocabulary=400,
        d=12,
        f=20,
        h=2,
        g=1,
        k=6,
        v=5,
        encoder_layers=1,
        decoder_layers=1,
        source_positions=130,
        target_positions=130,
        dropout=0.0,
    )
    model = TranslationModel(config).double().eval()
    batch = next(packed(pairs, rows=2))
    logits = model(
        batch.source,
        batch.inputs,
        source_packing=batch.source_packing,
        target_packing=batch.packing,
    )
    at = batch.packing.segments[1] == 2
    here = batch.source_packing.segments[1] == 2
    alone = model(batch.source[1, here].unsqueeze(0), batch.inputs[1, at].unsqueeze(0))
    torch.testing.assert_close(logits[1, at], alone[0])
