import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from search_toys import Toy, random_toy
from texts import ODD, engine, sentences, tokenizer
from writehead.config import DecodeConfig
from writehead.decoding import Batching, Engine, beam_search, greedy, sample
from writehead.decoding.batching import Job, batch_cost, split_text, take_batch
from writehead.decoding.devices import find_device, find_dtype
from writehead.decoding.search import stream
from writehead.errors import ConfigError, DataError, RunError, SearchError, ShapeError
from writehead.model import save_run

END = 1
GREEDY = DecodeConfig(beam=1, max_length=9)
BEAM = DecodeConfig(max_length=9, beam=3, n_best=3)
SAMPLING = DecodeConfig(max_length=9, temperature=1.0, top_k=40, seed=5)
LINES = [*sentences(6), *ODD, *sentences(6, seed=1)]


@pytest.fixture(scope="module")
def translator() -> Engine:
    return engine("translation")


@pytest.fixture(scope="module")
def writer() -> Engine:
    return engine("language")


def texts(outputs) -> list[list[tuple[str, bool]]]:
    return [[(one.text, one.finished) for one in output.hypotheses] for output in outputs]


def scores(outputs) -> list[float]:
    return [one.score for output in outputs for one in output.hypotheses]


def assert_same(some, others) -> None:
    some, others = list(some), list(others)
    assert texts(some) == texts(others)
    assert scores(some) == pytest.approx(scores(others))


def slow_greedy(logits, limit: int) -> tuple[list[int], bool]:
    """Greedy search by whole forward passes: logits takes all tokens found so far."""
    found: list[int] = []
    while len(found) < limit:
        token = int(logits(found).argmax())
        if token == END:
            return found, True
        found.append(token)
    return found, False


def slow_translation(engine: Engine, line: str, limit: int) -> tuple[str, bool]:
    source = torch.tensor([[*tokenizer().encode(line), END]])
    found, finished = slow_greedy(
        lambda found: engine.model(source, torch.tensor([[0, *found]]))[0, -1], limit
    )
    return tokenizer().decode(found), finished


def test_greedy_translations_are_those_of_whole_forward_passes(translator):
    lines = [line for line in sentences(15) if len(tokenizer().encode(line)) < 23]
    got = list(translator.translate(lines, GREEDY))
    expected = [slow_translation(translator, line, 9) for line in lines]
    assert [(one.text, one.hypotheses[0].finished) for one in got] == expected
    assert {finished for _, finished in expected} == {True, False}


def test_beams_are_those_of_a_search_over_each_line_alone(translator):
    lines = sentences(10, longest=5)
    got = list(translator.translate(lines, BEAM))
    for line, output in zip(lines, got, strict=True):
        source = torch.tensor([[*tokenizer().encode(line), END]])
        state = translator.model.start(source, 9, beam=3)
        [expected] = beam_search(translator.model.step, state, BEAM, end=END)
        assert texts([output]) == [[(tokenizer().decode(h.tokens), h.finished) for h in expected]]
        assert scores([output]) == pytest.approx([h.score for h in expected])
        assert output.pieces == 1


@pytest.mark.parametrize("options", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])
@pytest.mark.parametrize("task", ["translation", "language"])
def test_windows_and_batches_of_any_size_give_the_same(task, options):
    lines = [line for line in LINES if len(tokenizer().encode(line)) < 30]
    expected = None
    for batching in (Batching(10**6), Batching(1, 1), Batching(400, 7)):
        made = engine(task, batching)
        answer = made.translate if task == "translation" else made.generate
        got = list(answer(iter(lines), options))
        assert len(got) == len(lines)
        expected = expected or got
        assert_same(got, expected)
    assert len(set(map(str, texts(expected)))) > len(lines) // 2


@settings(max_examples=12)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=7))
@example([*ODD, "the cat runs. " * 30])
def test_a_line_alone_is_translated_as_among_others(lines):
    made = engine("translation")
    options = DecodeConfig(max_length=4)
    together = list(made.translate(lines, options))
    alone = [next(made.translate([line], options)) for line in lines]
    assert_same(together, alone)
    for line, output in zip(lines, together, strict=True):
        assert (output.pieces == 0) == (not tokenizer().encode(line))


def test_lines_that_say_nothing_stay_empty(translator):
    got = list(translator.translate(["", "  \t", "the cat.", "\u200b", "\r"], BEAM))
    assert [output.text == "" for output in got] == [True, True, False, True, True]
    assert [len(output.hypotheses) for output in got] == [1, 1, 3, 1, 1]
    assert list(translator.translate([])) == []


def test_only_a_window_of_lines_is_read_ahead(translator):
    read = 0

    def lines():
        nonlocal read
        while True:
            read += 1
            yield "the cat."

    made = Engine(translator.model, tokenizer(), Batching(lines=3))
    outputs = made.translate(lines(), GREEDY)
    next(outputs)
    assert read == 3
    assert len(list(itertools.islice(outputs, 5))) == 5
    assert read == 6


def test_batches_keep_to_the_budget_and_pad_little(monkeypatch):
    made = engine("translation", Batching(1000))
    seen, start = [], made.model.start

    def watched(source, max_length, *, source_lengths, beam):
        seen.append((len(source) * beam * (source.shape[1] + max_length), source_lengths))
        return start(source, max_length, source_lengths=source_lengths, beam=beam)

    monkeypatch.setattr(made.model, "start", watched)
    lines = sentences(60)
    assert len(list(made.translate(lines, dataclasses.replace(BEAM, beam=4)))) == 60
    assert len(seen) > 3
    assert max(cost for cost, _ in seen) <= 1000
    padding = sum(int((lengths.max() - lengths).sum()) for _, lengths in seen)
    assert padding < 0.2 * sum(int(lengths.sum()) for _, lengths in seen)


def test_progress_counts_every_line_once(translator):
    told = []
    list(translator.translate([*LINES, "the cat runs. " * 20], GREEDY, progress=told.append))
    assert sum(told) == pytest.approx(len(LINES) + 1)


def test_progress_is_told_of_the_pieces_of_a_long_line_as_they_come():
    made, told = engine("translation", Batching(tokens=200)), []
    [output] = made.translate(["the cat runs. " * 20], GREEDY, progress=told.append)
    assert output.pieces == 20
    assert told[0] == 0  # empty lines, of which there are none
    assert 0 < told[1] < 0.9
    assert sum(told) == pytest.approx(1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("the cat", "one text came where a list of texts is read; put it in a list"),
        (b"the cat", "one text came where a list of texts is read"),
        (7, "int came where a list of texts is read; give a list"),
        (["the cat", None], "line 2 is NoneType, not text; give it as a str"),
        ([b"the cat"], "line 1 is bytes, not text"),
        (["\udcff"], r"line 1 is not UTF-8 \(its character 1\); convert it"),
    ],
)
def test_lines_that_are_not_text_are_said_to_be_none(translator, writer, given, words):
    with pytest.raises(DataError, match=words):
        list(translator.translate(given, GREEDY))
    with pytest.raises(DataError, match=words.replace("line", "prefix")):
        list(translator.translate(["the cat", "a dog"], GREEDY, prefixes=given))
    with pytest.raises(DataError, match=words.replace("line", "prompt")):
        list(writer.generate(given))


@pytest.mark.parametrize("given", [{"beam": 1}, {}, 4])
def test_options_that_are_no_decode_config_are_said_to_be_none(translator, writer, given):
    asked = (
        lambda: translator.translate(["the cat"], given),
        lambda: writer.generate(["the cat"], given),
        lambda: writer.stream("the cat", given),
    )
    for ask in asked:
        with pytest.raises(ConfigError, match="give a DecodeConfig, such as"):
            list(ask())


def test_a_prompt_that_is_not_text_is_not_streamed(writer):
    with pytest.raises(DataError, match="prompt 1 is NoneType, not text"):
        writer.stream(None)


def test_a_line_longer_than_the_model_reads_is_translated_in_pieces(translator, caplog):
    long = "The cat sees a small red bird. The dog runs under the big tree. A bird sings."
    got = list(translator.translate(["the cat.", long, "a dog."], BEAM))
    assert [output.pieces for output in got] == [1, 4, 1]
    assert "line 2 is longer than the 23 tokens that the model reads" in caplog.text
    assert "4 pieces" in caplog.text
    pieces = split_text(long, tokenizer().encode, 23)
    alone = list(translator.translate([tokenizer().decode(piece) for piece in pieces], BEAM))
    best = got[1].hypotheses[0]
    assert best.text == " ".join(output.text for output in alone if output.text)
    assert best.log_probability == pytest.approx(
        sum(output.hypotheses[0].log_probability for output in alone)
    )
    assert len(got[1].hypotheses) == 3
    ranked = scores(got[1:2])
    assert ranked == sorted(ranked, reverse=True)


def test_pieces_end_with_sentences_where_they_can():
    encode = str.split  # a word a token
    assert split_text("a b. c d! (e f?) g h", encode, 3) == [
        ["a", "b."],
        ["c", "d!"],
        ["(e", "f?)"],
        ["g", "h"],
    ]
    assert split_text("a. b. c d.", encode, 3) == [["a."], ["b."], ["c", "d."]]  # one each
    assert split_text("a. b. c.", encode, 3) == [["a.", "b.", "c."]]
    assert split_text("a b c d e", encode, 3) == [["a", "b"], ["c", "d", "e"]]
    assert split_text("一二。三四", list, 3) == [["一", "二", "。"], ["三", "四"]]
    assert split_text("abcdefg", list, 3) == [["a", "b", "c"], ["d", "e"], ["f", "g"]]
    assert split_text("  ", encode, 3) == []
    assert split_text("x", lambda text: [1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


@settings(max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 9))
@example("the cat " * 500, 7)
@example("x" * 5000, 3)
@example("." * 5000, 3)
@example("﷽" * 5, 2)
def test_pieces_lose_nothing_and_fit(text, limit):
    encode, decode = tokenizer().encode, tokenizer().decode
    pieces = split_text(text, encode, limit)
    assert all(1 <= len(piece) <= limit for piece in pieces)
    if all(len(encode(character)) <= limit for character in text):
        # combining characters that normalise together may be cut apart, but nothing more
        joined = encode("".join(map(decode, pieces)).replace(" ", ""))
        assert decode(joined) == decode(encode(decode(encode(text)).replace(" ", "")))


def test_a_batch_is_the_most_jobs_that_fit_and_at_least_one():
    jobs = [Job([0] * n, 10) for n in (50, 40, 40, 7, 1)]
    for budget in range(1, 400, 7):
        count = take_batch(jobs, lambda some, budget=budget: batch_cost(some, 1) <= budget)
        fitting = [n for n in range(1, 6) if n * 60 <= budget]
        assert count == max(fitting, default=1)


def test_a_forced_prefix_begins_the_translation(translator):
    lines, prefixes = ["the cat.", "", "a dog runs.", "now."], ["the dog", "a", "", "日本"]
    got = [o.text for o in translator.translate(lines, GREEDY, prefixes=iter(prefixes))]
    free = [o.text for o in translator.translate(lines, GREEDY)]
    assert got[0].startswith("the dog")
    assert got[1] == ""
    assert got[2] == free[2]
    assert got[3].startswith("日本")


def test_without_a_limit_a_translation_may_be_50_tokens_longer(monkeypatch):
    made = engine("translation", target_positions=60)
    monkeypatch.setattr(made.model, "step", lambda tokens, state: never_ending(tokens))
    [short, long] = made.translate(["a", "the cat sees a small red bird"], DecodeConfig())
    assert len(short.text) == len(tokenizer().encode("a")) + 50
    assert len(long.text) == 60  # the model's positions
    assert not short.hypotheses[0].finished


def never_ending(tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a model that says + for ever."""
    logits = torch.zeros(len(tokens), 300)
    logits[:, 3 + ord("+")] = 9.0
    return logits


def test_the_least_length_is_kept(translator):
    for output in translator.translate(sentences(6), DecodeConfig(beam=2, min_length=30)):
        assert len(output.text) > 10


def test_a_batch_that_runs_out_of_memory_is_tried_in_halves(monkeypatch, caplog):
    made = engine("translation")
    lines = sentences(20, longest=4)
    expected = list(made.translate(lines, BEAM))
    start = made.model.start

    def small_memory(source, max_length, *, source_lengths, beam):
        if len(source) > 3:
            raise torch.OutOfMemoryError("no memory")
        return start(source, max_length, source_lengths=source_lengths, beam=beam)

    monkeypatch.setattr(made.model, "start", small_memory)
    assert_same(made.translate(lines, BEAM), expected)
    assert caplog.text.count("memory does not hold a batch") == 1


def test_a_line_that_no_memory_holds_is_an_error(monkeypatch):
    made = engine("language")

    def no_memory(*arguments, prompt_lengths, beam):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(made.model, "start", no_memory)
    with pytest.raises(SearchError, match="does not hold one line of 3 tokens with beam=2"):
        list(made.generate(["the cat"], DecodeConfig(beam=2)))


def test_greedy_texts_are_those_of_whole_forward_passes(writer):
    prompts = ["", "the", "the small cat", "a dog sees the house under", "日本"]
    got = list(writer.generate(prompts))
    for prompt, output in zip(prompts, got, strict=True):
        ids = tokenizer().encode(prompt)
        found, finished = slow_greedy(
            lambda found, ids=ids: writer.model(torch.tensor([[0, *ids, *found]]))[0, -1],
            40 - len(ids),
        )
        # the prompt stands before it, so a first space is not lost
        assert prompt + output.text == tokenizer().decode([*ids, *found])
        assert output.hypotheses[0].finished == finished


@pytest.mark.parametrize(
    "options",
    [None, DecodeConfig(temperature=1.5, seed=3), DecodeConfig(max_length=5, min_length=5)],
    ids=["greedy", "sampling", "short"],
)
def test_streamed_pieces_make_the_generated_text(writer, options):
    for prompt in ("", "the cat", "日本 the", "a\ufffd"):
        [output] = writer.generate([prompt], options)
        pieces = list(writer.stream(prompt, options))
        assert "".join(pieces) == output.text
        assert all(pieces)


def scripted(made: Engine, ids: list[int], monkeypatch) -> None:
    """Makes a language model say these ids and end, whatever it is asked."""
    said = iter([*ids, END])

    def step(tokens, state):
        return torch.nn.functional.one_hot(torch.tensor([next(said)]), 300) * 9.0

    monkeypatch.setattr(made.model, "step", step)


def test_a_character_of_several_tokens_is_streamed_whole(monkeypatch):
    made = engine("language")
    text = "日🙂é"
    ids = [3 + byte for byte in text.encode()]
    scripted(made, ids, monkeypatch)
    assert list(made.stream("the cat")) == ["日", "🙂", "é"]
    scripted(made, ids[:5], monkeypatch)  # cut within a character
    assert "".join(made.stream("the cat")) == "日\ufffd\ufffd"


@settings(max_examples=60)
@given(st.lists(st.integers(0, 299), max_size=12), st.integers(0, 3))
def test_any_tokens_at_all_stream_as_they_decode(ids, before):
    made, prompt = engine("language"), ids[:before]
    pieces = list(made._pieces(prompt, iter(ids[before:])))
    assert "".join(pieces) == tokenizer().decode(ids)[len(tokenizer().decode(prompt)) :]


def test_samples_of_a_prompt_differ_and_come_again(writer):
    options = DecodeConfig(temperature=1.0, max_length=8, seed=11)
    first = list(writer.generate(["the cat", "a dog"], options, samples=5))
    assert [len(output.hypotheses) for output in first] == [5, 5]
    assert len({one.text for one in first[0].hypotheses}) == 5
    assert_same(writer.generate(["the cat", "a dog"], options, samples=5), first)
    # sample j of prompt i is that of seed + 5i + j
    later = dataclasses.replace(options, seed=11 + 5 + 2)
    [alone] = writer.generate(["a dog"], later)
    assert alone.hypotheses[0].text == first[1].hypotheses[2].text


def test_a_prompt_may_fill_all_positions_but_one(writer):
    prompt = " ".join(["the"] * 39)
    assert len(tokenizer().encode(prompt)) == 39
    [output] = writer.generate([prompt, "the"][:1])
    assert len(output.text) <= 10
    with pytest.raises(DataError, match="prompt 2 has 40 tokens, and the model's 40 positions"):
        list(writer.generate(["the", prompt + " the"]))
    with pytest.raises(DataError, match="leave room for 35; shorten it"):
        writer.stream(prompt, DecodeConfig(min_length=5))


def test_ids_without_text_are_never_chosen():
    made = engine("translation", vocabulary=317)
    with torch.no_grad():
        made.model.tokens.weight[300:] *= 20.0
    lines = sentences(6)
    got = list(made.translate(lines, BEAM))
    with torch.no_grad():
        made.model.tokens.weight[300:] = 0.0
    assert_same(made.translate(lines, BEAM), got)


def test_an_engine_is_loaded_from_a_run(tmp_path, translator):
    tokenizer().save(tmp_path / "tokenizer")
    save_run(tmp_path / "run", translator.model, tokenizer=tmp_path / "tokenizer")
    loaded = Engine.load(tmp_path / "run", device="cpu", dtype="float64")
    lines = sentences(4)
    assert_same(loaded.translate(lines), translator.translate(lines))
    assert Engine.load(tmp_path / "run", device="cpu").model.dtype == torch.float32
    save_run(tmp_path / "mute", translator.model)
    with pytest.raises(RunError, match=r"has no tokenizer\.model"):
        Engine.load(tmp_path / "mute")
    with pytest.raises(ConfigError, match="run must be a path, not int"):
        Engine.load(3)


def test_devices_and_types_are_found_by_name():
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert find_device(torch.device("cpu")) == torch.device("cpu")
    assert find_dtype(None, torch.device("cuda")) == torch.bfloat16
    assert find_dtype(torch.float16, torch.device("cpu")) == torch.float16
    with pytest.raises(ConfigError, match="did you mean 'cuda'"):
        find_device("cuba")
    with pytest.raises(ConfigError, match="'cuda:99' is not here"):
        find_device("cuda:99")
    with pytest.raises(ConfigError, match="'cpu:7' is not here; use auto or cpu"):
        find_device("cpu:7")
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        find_dtype("bfloat", torch.device("cpu"))


def test_what_cannot_be_meant_is_an_error(translator, writer):
    cases = [
        (lambda: writer.translate(["a"]), "language model does not translate"),
        (lambda: translator.generate(["a"]), "continues no prompts"),
        (lambda: translator.stream("a"), "continues no prompts"),
        (lambda: translator.translate("a"), "put it in a list"),
        (lambda: writer.generate("a"), "put it in a list"),
        (lambda: writer.stream("a", BEAM), "stream with beam=1"),
        (lambda: writer.generate(["a"], samples=0), "samples=0 must be at least 1"),
        (lambda: writer.generate(["a"], samples=2), "set a temperature"),
        (lambda: writer.generate(["a"], DecodeConfig(max_length=41)), "max_length=41 is past"),
        (lambda: translator.translate(["a"], DecodeConfig(min_length=41)), "min_length=41 is past"),
        (lambda: list(translator.translate(["a"], prefixes=[])), "there is no prefix 1"),
        (lambda: list(translator.translate(["a"], prefixes=["b", "c"])), "there is no line 2"),
        (
            lambda: list(translator.translate(["a"], prefixes=["the " * 50])),
            "prefix of line 1 has 50 tokens",
        ),
        (lambda: Batching(tokens=0), "0 tokens a batch are too few"),
        (lambda: Batching(lines=0), "0 lines a batch are too few"),
        (lambda: engine("language", vocabulary=299), "tokenizer has 300 tokens and the model 299"),
        (lambda: engine("language", end=5), "ends with token 5"),
        (lambda: engine("translation", source_positions=1).translate([]), "can read no text"),
    ]
    for wrong, message in cases:
        with pytest.raises((ConfigError, DataError), match=message):
            wrong()


@pytest.mark.parametrize("temperature", [None, 0.9])
def test_streamed_tokens_are_those_of_the_search(temperature):
    for seed in range(8):
        toy = random_toy(seed=seed, end=-0.5)
        config = DecodeConfig(max_length=9, temperature=temperature, seed=seed)
        search = greedy if temperature is None else sample
        [expected] = search(toy.step, toy.start(seed), config, end=toy.end)
        steps = toy.calls
        tokens = stream(toy.step, toy.start(seed), config, end=toy.end)
        assert tuple(tokens) == expected.tokens
        assert toy.calls == 2 * steps


def test_a_stream_comes_token_by_token_and_only_from_one_row():
    toy = random_toy(end=-9.0)
    tokens = stream(toy.step, toy.start(0), DecodeConfig(max_length=9), end=toy.end)
    next(tokens)
    assert toy.calls == 1
    with pytest.raises(ShapeError, match="2 rows; only one can be streamed"):
        stream(toy.step, toy.start(0, 1), DecodeConfig(max_length=9), end=toy.end)
    with pytest.raises(ConfigError, match="nothing says when to stop"):
        stream(toy.step, toy.start(0), DecodeConfig(), end=toy.end)
    broken = Toy(3, lambda history: [math.nan] * 3)
    with pytest.raises(SearchError, match="look for NaN"):
        list(stream(broken.step, broken.start(0), DecodeConfig(max_length=3), end=0))
