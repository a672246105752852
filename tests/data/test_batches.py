"""Packed and padded batches against loops over single positions and sequences."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora import language_dataset, translation_dataset
from writehead.data.batches import PackedBatches, epoch_order, padded_batches
from writehead.errors import ConfigError
from writehead.ops.visibility import Visibility

EOS, BOS = 1, 0


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return translation_dataset(tmp_path_factory.mktemp("pairs")).split("train")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return language_dataset(tmp_path_factory.mktemp("text")).split("train")


def packed(split, rows=12, lengths=(120, 130), seed=7, rank=0, world=1):
    return PackedBatches(split, rows, *lengths, seed, rank, world)


def segments(tokens, packing):
    """The tokens of each segment, row by row, read one position at a time."""
    found = []
    for row_of in zip(tokens, packing.segments, packing.positions, strict=True):
        row: dict[int, list[int]] = {}
        for value, number, position in zip(*(T.tolist() for T in row_of), strict=True):
            if number:
                assert position == len(row.setdefault(number, []))
                row[number].append(value)
            else:
                assert value == position == 0
        assert sorted(row) == list(range(1, len(row) + 1))
        found.append([row[number] for number in sorted(row)])
    return found


def sequences(batch):
    """Every (source, target) of a batch as it was before packing, row by row."""
    labels, inputs = segments(batch.labels, batch.packing), segments(batch.inputs, batch.packing)
    sources = segments(batch.source, batch.source_packing)
    found = []
    for row in zip(sources, inputs, labels, strict=True):
        for source, fed, wanted in zip(*row, strict=True):
            assert source[-1] == wanted[-1] == EOS
            assert fed == [BOS, *wanted[:-1]]
            found.append((tuple(source[:-1]), tuple(wanted[:-1])))
    return found


def everything(split):
    sides = (split.source, split.target)
    return [tuple(tuple(side[i].tolist()) for side in sides) for i in range(len(split))]


@pytest.mark.parametrize("rows", [1, 12])
def test_every_pair_comes_once_per_epoch(pairs, rows):
    batches, seen, expected = packed(pairs, rows), Counter(), Counter(everything(pairs))
    while batches.epoch < 3:
        seen.update(sequences(next(batches)))
    assert seen.keys() == expected.keys()
    state = batches.state()
    assert seen.total() == 3 * len(pairs) + state["cursor"] - len(state["carry"])
    # a pair may be held back for one epoch, or drawn early in the next
    assert all(2 * expected[pair] <= count <= 4 * expected[pair] for pair, count in seen.items())


@pytest.mark.parametrize("name", ["pairs", "text"])
def test_a_batch_has_the_shape_asked_for_and_is_nearly_full(request, name):
    batches = packed(request.getfixturevalue(name), rows=32, lengths=(240, 256))
    filled = Counter()
    for batch in islice(batches, 12):
        assert batch.labels.shape == batch.inputs.shape == (32, 256)
        assert batch.source is None or batch.source.shape == (32, 240)
        assert batch.tokens == int((batch.packing.segments != 0).sum())
        filled["target"] += batch.tokens / (32 * 256)
        if batch.source is not None:
            filled["source"] += float((batch.source_packing.segments != 0).float().mean())
        parts = batch.split(4)
        assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
        assert sum(part.tokens for part in parts) == batch.tokens
    assert max(filled.values()) >= 0.95 * 12


@settings(max_examples=15)
@given(stop=st.integers(0, 40), world=st.sampled_from([1, 2, 3, 4]), seed=st.integers(0, 3))
def test_any_number_of_processes_resumes_from_any_state(pairs, text, stop, world, seed):
    split = (pairs, text)[seed % 2]
    alone = packed(split, seed=seed)
    for _ in range(stop):
        next(alone)
    state = alone.state()
    ahead = list(islice(alone, 3))  # which leaves the state as it was
    together = [packed(split, seed=seed, rank=rank, world=world) for rank in range(world)]
    for batches in together:
        next(batches)  # its own position is forgotten
        batches.restore(json.loads(json.dumps(state)))
    for whole in ahead:
        parts = [next(batches) for batches in together]
        assert sum(part.tokens for part in parts) == whole.tokens
        for name in ("source", "inputs", "labels"):
            if getattr(whole, name) is not None:
                for rank, part in enumerate(parts):
                    assert torch.equal(getattr(part, name), getattr(whole, name)[rank::world])
    assert all(batches.state() == alone.state() for batches in together)


def test_epochs_have_well_mixed_orders_of_their_own_which_no_release_changes():
    orders = [epoch_order(seed, epoch, 50).tolist() for seed in (0, 1, -1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 6
    assert epoch_order(3, 2, 9).tolist() == [1, 2, 7, 5, 3, 4, 0, 6, 8]
    places = np.argsort(epoch_order(3, 5, 20_000))
    assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("length", [5, 130])
def test_long_text_is_cut_into_pieces_and_no_label_is_lost(text, length):
    batches, drawn, expected = packed(text, lengths=(0, length)), Counter(), Counter()
    while not batches.epoch:
        batch = next(batches)
        assert batch.source is None
        rows = (segments(T, batch.packing) for T in (batch.labels, batch.inputs))
        for row in zip(*rows, strict=True):
            for labels, inputs in zip(*row, strict=True):
                assert inputs[1:] == labels[:-1]
                drawn[inputs[0], tuple(labels)] += 1
    for i in range(len(text)):
        ids = text.target[i].tolist()
        labels, inputs = [*ids, EOS], [BOS, *ids]
        for at in range(0, len(labels), length):
            expected[inputs[at], tuple(labels[at : at + length])] += 1
    assert drawn.keys() <= expected.keys()
    assert (expected - drawn).total() <= len(batches.state()["carry"])


def test_pairs_longer_than_a_row_are_counted_and_left_out(pairs):
    batches, rows = packed(pairs, lengths=(40, 40)), everything(pairs)
    long = {row for row in rows if max(map(len, row)) > 39}
    assert 0 < batches.skipped == sum(row in long for row in rows) < len(rows)
    while batches.epoch < 1:
        assert not long & set(sequences(next(batches)))
    padded = padded_batches(pairs, 600, source_length=40, target_length=40)
    assert sum(len(batch.labels) for batch in padded) == len(pairs) - batches.skipped


def test_impossible_sizes_are_refused(pairs):
    for act, words in (
        (lambda: packed(pairs, world=5), "rows=12 .*5 processes"),
        (lambda: packed(pairs, lengths=(2, 2)), "none of 400 sequences"),
        (lambda: packed(pairs, rows=24).restore(packed(pairs).state()), "rows=12.*24"),
        (lambda: next(packed(pairs)).split(5), "12 rows .*5"),
    ):
        with pytest.raises(ConfigError, match=words):
            act()


@pytest.mark.parametrize("window", [None, 3])
def test_visible_pairs_are_counted_as_the_attention_masks_have_them(pairs, text, window):
    def count(of, to, n, m, **limits):
        seen = Visibility(query_segments=of.segments, memory_segments=to.segments, **limits)
        return int(seen.mask(n, m, torch.device("cpu")).sum())

    for split in (pairs, text):
        batch = next(packed(split))
        target, source, found = batch.packing, batch.source_packing, batch.visible_pairs(window)
        assert found.self == count(target, target, 130, 130, causal=True, window=window)
        if batch.source is None:
            assert (found.encoder, found.cross) == (0, 0)
        else:
            assert found.encoder == count(source, source, 120, 120)
            assert found.cross == count(target, source, 130, 120)


def test_padded_batches_hold_every_sequence_once_within_the_budget_and_little_padding(pairs):
    rows, seen, room = everything(pairs), Counter(), 0
    for batch in padded_batches(pairs, max_tokens=600):
        assert max(batch.labels.numel(), batch.source.numel()) <= 600 or len(batch.labels) == 1
        found = sequences(batch)
        assert batch.tokens == sum(len(target) + 1 for _, target in found)
        seen.update(found)
        room += batch.labels.numel()
    assert seen == Counter(rows)
    assert sum(len(target) + 1 for _, target in rows) > 0.9 * room
    first = [row for batch in padded_batches(pairs, 600, limit=33) for row in sequences(batch)]
    assert Counter(first) == Counter(rows[:33])
