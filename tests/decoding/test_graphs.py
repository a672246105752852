"""Searches on the device against the plain ones; interpreted where there is no GPU."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers import config, model, tokens
from texts import engine, sentences, tokenizer
from writehead.config import DecodeConfig
from writehead.decoding import Engine, Hypothesis, beam_search
from writehead.errors import ConfigError, SearchError, TokenError
from writehead.kernels import choose
from writehead.model import LanguageModel, TranslationModel

graphs = pytest.importorskip("writehead.decoding.graphs", reason="Triton is not installed")
reading = pytest.importorskip("writehead.decoding.reading", reason="Triton is not installed")
buffers = pytest.importorskip("writehead.decoding.buffers", reason="Triton is not installed")
captures = pytest.importorskip("writehead.decoding.captured", reason="Triton is not installed")
fused = pytest.importorskip("writehead.model.fused", reason="Triton is not installed")
pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # in the kernels minus infinity is a number like others
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
END = 1
SIZES = {"k": 16, "v": 32, "d": 21, "h": 4, "decoder_layers": 1}
Model = TranslationModel | LanguageModel
GREEDY = DecodeConfig(max_length=5)
BEAM = DecodeConfig(max_length=4, beam=2, n_best=2)
ROUND_ROWS = graphs._round_rows

every_task = pytest.mark.parametrize("task", ["translation", "language"])


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    """Graphs of 1, 2, 4, 6, … rows: an interpreter cannot spare those that only fill up."""
    monkeypatch.setattr(graphs, "_round_rows", lambda rows: rows if rows == 1 else rows + rows % 2)
    monkeypatch.setattr(graphs, "SOON", 1)
    if DEVICE == "cpu":
        monkeypatch.setattr(choose, "PART", 64)


@pytest.fixture
def moves(monkeypatch) -> list[int]:
    """How many sentences were moved to a smaller graph, each time that some were."""
    seen = []
    move = graphs.Buffers.move

    def noted(self, chosen, to):
        seen.append(len(chosen))
        move(self, chosen, to)

    monkeypatch.setattr(graphs, "FEWEST", 2)
    monkeypatch.setattr(reading, "LOOK", 1)
    monkeypatch.setattr(graphs.Buffers, "move", noted)
    return seen


@pytest.fixture
def late(monkeypatch) -> None:
    """Has searches read back as on a GPU: a copy arrives when an event behind it is waited for."""
    monkeypatch.setattr(reading, "LOOK", 2)
    if DEVICE == "cuda":
        return
    begin, copy = buffers.Buffers.__init__, torch.Tensor.copy_
    under_way: list[tuple[Tensor, Tensor]] = []

    def mirrored(self, shape, *sizes):
        begin(self, shape, *sizes)
        self.mirror = buffers.Mirror.make(shape.sentences, len(self.written), pinned=False)
        self.mirror.written.fill_(36)  # of which nothing may be read

    def copy_late(self, source, non_blocking=False):
        if not non_blocking:
            return copy(self, source)
        under_way.append((self, source.clone()))
        return self

    class Event:
        def record(self, stream):
            self.stream, self.behind = stream, list(under_way)

        def synchronize(self):
            for to, what in self.behind:
                copy(to, what)
            under_way[:] = under_way[len(self.behind) :]

    monkeypatch.setattr(buffers.Buffers, "__init__", mirrored)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_late)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")


def make(task: str = "translation", **changes: object) -> Model:
    """A model of random weights that ends some of its texts."""
    encoder = {"encoder_layers": 1} if task == "translation" else {}
    made = model(config(task, **(SIZES | encoder | changes)), dtype=torch.float32)
    with torch.no_grad():
        made.tokens.weight[END] *= 2.5
    return made.to(DEVICE)


def read(*lengths: int) -> tuple[Tensor, list[int]]:
    """Sources or prompts of these lengths."""
    return tokens(len(lengths), max(lengths)).clamp(min=2).to(DEVICE), list(lengths)


def room(made: Model, batch: tuple[Tensor, list[int]], options: DecodeConfig) -> int:
    """Positions that a row's cache needs."""
    if isinstance(made, TranslationModel):
        return options.max_length
    return max(batch[1]) + options.max_length - 1


def plain(
    made: Model, batch, options: DecodeConfig, *, end: int = END, vocabulary: int = 37, **limits
) -> list[list[Hypothesis]]:
    """What the search in PyTorch finds, step by step."""
    name = "source_lengths" if isinstance(made, TranslationModel) else "prompt_lengths"
    lengths = {name: torch.tensor(batch[1], device=DEVICE)}
    state = made.start(batch[0], room(made, batch, options), beam=options.width, **lengths)

    def step(fed: Tensor, state) -> Tensor:
        return made.step(fed, state)[:, :vocabulary]

    return beam_search(step, state, options, end=end, **limits)


def captured(decoder, batch, options: DecodeConfig, **limits) -> list[list[Hypothesis]]:
    """What the kernels find."""
    capacity = room(decoder.model, batch, options)
    return list(decoder.search(*batch, capacity, options, **({"end": END} | limits)))


def assert_same(found: list[list[Hypothesis]], right: list[list[Hypothesis]]) -> None:
    def facts(some):
        return [[(one.tokens, one.finished) for one in hypotheses] for hypotheses in some]

    def numbers(some):
        return [x for row in some for one in row for x in (one.score, one.log_probability)]

    assert facts(found) == facts(right)
    assert numbers(found) == pytest.approx(numbers(right), abs=1e-4, rel=1e-4)


def assert_finds_what_plain_does(made: Model, batch, options: DecodeConfig, **limits):
    right = plain(made, batch, options, **limits)
    assert_same(captured(graphs.GraphDecoder(made), batch, options, **limits), right)
    return right


def ends(found: list[list[Hypothesis]]) -> set[bool]:
    return {one.finished for hypotheses in found for one in hypotheses}


@every_task
def test_greedy_search_finds_what_the_plain_one_does(task):
    right = assert_finds_what_plain_does(make(task), read(5, 2, 4), GREEDY)
    assert ends(right) == {True, False}


@pytest.mark.parametrize("changes", [{"g": 4, "window": 2}, {"norm": "layer", "bias": True}])
def test_greedy_search_of_other_kinds_of_models_is_the_plain_one(changes):
    assert_finds_what_plain_does(make(**changes), read(2, 5), replace(GREEDY, max_length=4))


def test_a_sentence_alone_has_a_graph_of_its_own():
    assert_finds_what_plain_does(make(), read(5), GREEDY)


def test_greedy_search_keeps_to_prefixes_and_lengths():
    limits = {"prefixes": [[5, 9], [], [7]], "max_lengths": [5, 2, 4]}
    options = replace(GREEDY, min_length=2, alpha=1.1)
    right = assert_finds_what_plain_does(make(), read(5, 2, 4), options, **limits)
    assert right[0][0].tokens[:2] == (5, 9)
    assert len(right[1][0].tokens) == 2 - right[1][0].finished


@every_task
def test_beam_search_finds_what_the_plain_one_does(task):
    right = assert_finds_what_plain_does(make(task), read(2, 4), BEAM)
    assert ends(right) == {True, False}
    assert [len(hypotheses) for hypotheses in right] == [2, 2]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (replace(BEAM, alpha=0.0, n_best=1, min_length=3), {"g": 2}),
        (replace(BEAM, alpha=-1.0), {"window": 2}),
        (DecodeConfig(beam=3, n_best=2, max_length=3, alpha=2.0), {}),
    ],
    ids=["no penalty", "negative penalty, local", "three beams"],
)
def test_beam_search_keeps_to_prefixes_and_lengths(options, changes):
    limits = {"prefixes": [[8], []], "max_lengths": [options.max_length, 3]}
    assert_finds_what_plain_does(make(**changes), read(4, 2), options, **limits)


def test_beams_behind_a_prompt_share_it_in_a_ring_too():
    made = make("language", window=3)
    assert_finds_what_plain_does(made, read(5, 2), BEAM)


def test_sentences_that_grow_move_to_smaller_graphs_and_are_found_where_they_stood(moves):
    limits = {"max_lengths": [2, 5, 1, 4], "prefixes": [[], [5, 6, 7], [], [8]]}
    options = replace(GREEDY, min_length=1)
    assert_finds_what_plain_does(make(), read(1, 5, 2, 4), options, **limits)
    assert moves == [2, 1]


@every_task
def test_beams_that_grow_move_to_smaller_graphs(task, moves):
    options = replace(BEAM, max_length=5)
    limits = {"max_lengths": [2, 5], "prefixes": [[], [5]]}
    right = assert_finds_what_plain_does(make(task), read(2, 4), options, **limits)
    assert moves == [1]
    lengths = [len(one.tokens) + one.finished for one in right[1]]
    assert max(lengths) > 2  # one grew after it had moved
    assert task == "language" or min(lengths) == 2  # and one had ended before


@pytest.mark.parametrize("fails", ["_capture", "move"])
def test_sentences_stay_where_they_are_if_the_memory_has_no_room_to_move_them(monkeypatch, fails):
    monkeypatch.setattr(graphs, "FEWEST", 2)
    monkeypatch.setattr(reading, "LOOK", 1)
    made, batch = make(), read(3, 5, 2, 4, 5, 3)
    options, limits = DecodeConfig(max_length=9), {"max_lengths": [9, 2, 3, 1, 7, 2]}
    decoder, tried = graphs.GraphDecoder(made), []
    owner = decoder if fails == "_capture" else graphs.Buffers
    as_usual = getattr(owner, fails)

    def without_room(first, *rest):
        if fails == "_capture" and first.sentences == 6:
            return as_usual(first, *rest)
        tried.append(first)
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(owner, fails, without_room)
    assert_same(captured(decoder, batch, options, **limits), plain(made, batch, options, **limits))
    assert len(tried) == 1
    assert {shape.sentences for shape in decoder._captured} == {6}


@pytest.mark.parametrize("beam", [1, 2])
def test_what_is_read_while_the_search_goes_on_is_what_it_finds(beam, late, monkeypatch):
    monkeypatch.setattr(graphs, "FEWEST", 2)
    made, batch = make(), read(3, 5, 2, 4, 5, 3)
    options = DecodeConfig(max_length=11, beam=beam)
    limits = {"max_lengths": [11, 2, 3, 1, 7, 2]}  # so that some move to a smaller graph on the way
    decoder = graphs.GraphDecoder(made)
    for _ in range(2):  # the second time over what the first has left
        found = captured(decoder, batch, options, **limits)
        assert_same(found, plain(made, batch, options, **limits))
    assert len(decoder._captured) > 1


def test_what_is_read_late_is_right_where_sentences_move_twice_and_leave_places_free(
    late, moves, monkeypatch
):
    monkeypatch.setattr(reading, "LOOK", 2)
    made, batch = make(), read(3, 5, 2, 4, 5, 3, 2, 4, 3, 5)
    never = {"end": 12, "max_lengths": [2, 7, 1, 7, 2, 13, 2, 1, 2, 2]}  # they end by these
    options = DecodeConfig(max_length=13)
    found = captured(graphs.GraphDecoder(made), batch, options, **never)
    right = plain(made, batch, options, **never)
    assert_same(found, right)
    assert not any(one.finished for (one,) in right)
    assert moves == [3, 1]


@pytest.mark.skipif(DEVICE == "cuda", reason="the event and the device are made up")
def test_a_look_waits_for_the_device_that_the_model_is_on(late):
    decoder, batch = graphs.GraphDecoder(make()), read(3, 5)
    options = DecodeConfig(max_length=5)
    constraints = graphs.Constraints.make(options, END, None, None, 2, torch.device("cpu"))
    captured = decoder.start(*batch, 5, options, constraints)
    watch = reading.Watch(captured.buffers, 2)
    captured.step()
    watch.look()
    assert watch._event.stream == "the stream of cpu"


def test_what_follows_beams_back_is_launched_on_the_models_device(monkeypatch):
    inside, seen = [], []
    follow = reading.trace_back

    @contextmanager
    def launching(device):
        inside.append(device)
        yield
        inside.pop()

    def noted(*given):
        seen.append(list(inside))
        return follow(*given)

    made = make()
    monkeypatch.setattr(graphs, "launching_on", launching)
    monkeypatch.setattr(reading, "trace_back", noted)
    captured(graphs.GraphDecoder(made), read(2, 5), BEAM)
    assert seen == [[made.device]]


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_the_same_buffers_serve_another_batch(options):
    made = make()
    decoder = graphs.GraphDecoder(made)
    first, second = read(5, 2), read(2, 4)
    shorter = replace(options, max_length=3)
    found = [captured(decoder, first, options, prefixes=[[3, 4], [5]])]
    shapes = list(decoder._captured)
    found.append(captured(decoder, second, shorter))
    assert list(decoder._captured) == shapes
    assert len(shapes) == 1
    assert_same(found[0], plain(made, first, options, prefixes=[[3, 4], [5]]))
    assert_same(found[1], plain(made, second, shorter))


def test_an_encoder_whose_sources_are_padded_fills_memories_as_one_whose_are_not():
    made, bad = make(), 9
    with torch.no_grad():
        made.tokens.weight[bad] = torch.nan
    decoder = fused.FusedDecoder(made)
    sizes, layers = decoder.config.encoder_attention, decoder.config.decoder_layers

    def room_for(b: int, m: int) -> fused.Memories:
        return fused.Memories.make(sizes, layers, b, m, torch.float32, torch.device(DEVICE))

    padded = room_for(3, 8)
    encoder = captures.CapturedEncoder(decoder, padded)
    encoder.encode(torch.full((3, 8), bad, device=DEVICE), None)
    for source, lengths in (read(5, 2, 4), read(7, 3), read(2)):  # each over what the last left
        source[source == bad] = 8
        b, m = source.shape
        known = torch.tensor(lengths, device=DEVICE) if b > 1 else None
        alone = room_for(b, m)
        decoder.encode(source, known, alone)
        encoder.encode(source, known)
        assert padded.lengths.tolist() == lengths + [1] * (3 - b)
        for i, n in enumerate(lengths):
            for found, right in ((padded.K, alone.K), (padded.V, alone.V)):
                assert_close(found[:, i, :, :n], right[:, i, :, :n], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_the_same_buffers_serve_other_least_lengths(options):
    made, batch = make(), read(3, 2)
    decoder = graphs.GraphDecoder(made)
    for least in (4, 0):
        asked = replace(options, min_length=least)
        assert_same(captured(decoder, batch, asked), plain(made, batch, asked))
    assert len(decoder._captured) == 1


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_what_is_found_is_a_sequence_that_a_later_search_leaves_as_it_is(options):
    made, batch = make(), read(3, 5, 2)
    decoder, capacity = graphs.GraphDecoder(made), room(made, batch, options)
    found = decoder.search(*batch, capacity, options, end=END)
    decoder.search(*read(4, 4, 4), capacity, replace(options, max_length=2), end=END)
    right = plain(made, batch, options)
    assert len(found) == 3
    assert_same(found, right)
    assert found[1:] == [found[1], found[2]]
    assert found[-1] == found[2]
    with pytest.raises(IndexError):
        found[3]


def test_fewer_hypotheses_than_asked_for_are_found_after_a_longer_search_too():
    made = make()
    decoder = graphs.GraphDecoder(made)
    captured(decoder, read(5, 2), BEAM)
    batch, short = read(2, 4), replace(BEAM, max_length=2)
    limits = {"prefixes": [[7, 8], [9, 3]]}  # all of it is forced, so that there is one of each
    right = plain(made, batch, short, **limits)
    assert [len(hypotheses) for hypotheses in right] == [1, 1]
    assert_same(captured(decoder, batch, short, **limits), right)


def test_rows_that_only_fill_up_a_graph_change_nothing(monkeypatch):
    monkeypatch.setattr(graphs, "_round_rows", ROUND_ROWS)
    options = replace(GREEDY, max_length=3)
    assert_finds_what_plain_does(make(), read(2, 5), options)


def test_few_sizes_of_graphs_serve_all_batches_and_little_is_added():
    sizes = [ROUND_ROWS(rows) for rows in range(1, 2000)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert sizes[0] == 1
    assert all(size <= 1.34 * rows for rows, size in enumerate(sizes, 1) if rows >= 16)
    assert len(set(sizes)) < 40
    assert graphs._round_up(65, 500) == 128
    assert graphs._round_up(65, 100) == 100


def test_a_padded_decoder_finds_the_same():
    made, batch = make(), read(2, 4)
    decoder = graphs.GraphDecoder(made, padded=True)
    options = replace(GREEDY, max_length=3)
    assert_same(captured(decoder, batch, options), plain(made, batch, options))


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_ids_that_the_tokenizer_has_no_text_for_are_never_chosen(options):
    made, batch = make(), read(2, 4)
    options = replace(options, max_length=3)
    right = plain(made, batch, options, vocabulary=19)
    assert_same(captured(graphs.GraphDecoder(made, 19), batch, options), right)
    assert right != plain(made, batch, options)


@pytest.mark.parametrize(("options", "padded"), [(GREEDY, False), (GREEDY, True), (BEAM, False)])
def test_a_batch_that_is_no_number_raises_and_leaves_nothing_behind(options, padded):
    made = make(tied=False)
    with torch.no_grad():
        made.tokens.weight[9] = torch.nan
    decoder = graphs.GraphDecoder(made, padded=padded)
    options = replace(options, max_length=2)
    source, lengths = read(4, 5)
    source[source == 9] = 8
    bad = source.clone()
    bad[1, 4] = 9
    with pytest.raises(SearchError, match="look for NaN"):
        captured(decoder, (bad, lengths), options)
    short = source[:, :3], [3, 2]
    assert_same(captured(decoder, short, options), plain(made, short, options))


def test_tokens_outside_the_vocabulary_are_refused():
    decoder, batch = graphs.GraphDecoder(make(), 30), read(2, 4)
    with pytest.raises(TokenError, match="token 30 is outside the vocabulary of 30"):
        captured(decoder, batch, GREEDY, prefixes=[[4], [29, 30]])
    with pytest.raises(TokenError, match="token 33 is outside the vocabulary of 30"):
        decoder.search(*batch, 5, GREEDY, end=33)
    with pytest.raises(TokenError, match="other than the end"):
        captured(decoder, batch, GREEDY, prefixes=[[END], []])


def test_another_end_is_another_graph():
    made, batch = make("language"), read(2, 4)
    decoder = graphs.GraphDecoder(made)
    first = captured(decoder, batch, GREEDY)
    other = next(token for [one] in first for token in one.tokens)
    found = decoder.search(*batch, room(made, batch, GREEDY), GREEDY, end=other)
    assert_same(found, plain(made, batch, GREEDY, end=other))
    assert True in ends(found)


def test_graphs_that_were_not_used_the_longest_give_way(monkeypatch):
    decoder = graphs.GraphDecoder(make("language"))

    def kept_after(count: int) -> list[int]:
        captured(decoder, read(*[1] * count), DecodeConfig(max_length=1))
        return [shape.sentences for shape in decoder._captured]

    assert [kept_after(count)[-1] for count in (1, 2, 4)] == [1, 2, 4]
    assert kept_after(1) == [2, 4, 1]
    held = {shape.sentences: one.buffers.nbytes for shape, one in decoder._captured.items()}
    assert held[4] == 2 * held[2] == 4 * held[1]
    decoder._budget = 8 * held[1]
    assert kept_after(2) == [4, 1, 2]
    assert kept_after(6) == [2, 6]
    decoder._budget = held[1]  # alone, one may be larger
    assert kept_after(4) == [4]
    decoder._budget = 99 * held[4]
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    assert kept_after(2) == [4, 2]
    assert kept_after(1) == [2, 1]


def test_what_was_not_learned_is_refused():
    made = make()
    decoder, positions = graphs.GraphDecoder(made), made.config.source_positions
    with pytest.raises(ConfigError, match=f"{positions + 1} tokens is past the {positions}"):
        captured(decoder, read(3, positions + 1), GREEDY)
    with pytest.raises(ConfigError, match="24 positions are past the 23"):
        captured(decoder, read(3, 2), DecodeConfig(max_length=24))


@every_task
def test_on_a_cpu_an_engine_goes_step_by_step(task, monkeypatch):
    monkeypatch.setattr(graphs, "GraphDecoder", None)  # whoever makes one fails
    made = engine(task, k=16, v=16)
    assert made.model.device.type == "cpu"
    answer = made.translate if task == "translation" else made.generate
    lines, options = sentences(3), DecodeConfig(max_length=4)
    without = Engine(made.model, tokenizer(), graphs=False)
    answer_without = without.translate if task == "translation" else without.generate
    assert list(answer(lines, options)) == list(answer_without(lines, options))
