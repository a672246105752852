"""The engine against searches over single lines; its defaults and limits."""

import dataclasses
import itertools
import logging
import unicodedata

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from search_toys import random_toy
from texts import ODD, engine, sentences, tokenizer
from writehead.config import Batching, DecodeConfig, QuantizationConfig
from writehead.data.bpe import normalise
from writehead.data.lines import split_line, split_text
from writehead.engine import Engine, beam_search, greedy
from writehead.errors import BackendError, ConfigError, DataError, OutOfRoom, RunError
from writehead.interop.quantize import quantize_run
from writehead.ops.cpu_weights import why_not_int8
from writehead.runs import save_run
from writehead.util import devices

EOS = 1
GREEDY = DecodeConfig(max_length=9, beam=1)
BEAM = DecodeConfig(max_length=9, beam=3, n_best=3)
SAMPLING = DecodeConfig(max_length=9, temperature=1.0, top_k=40, seed=5)
LINES = [*sentences(6), *ODD, *sentences(6, seed=1)]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def answer(made: Engine, lines, options=None):
    is_translation = made.model.config.task == "translation"
    return (made.translate if is_translation else made.generate)(lines, options)


def texts(outputs) -> list[list[tuple[str, bool]]]:
    return [[(one.text, one.finished) for one in output.hypotheses] for output in outputs]


def scores(outputs) -> list[float]:
    return [one.score for output in outputs for one in output.hypotheses]


def assert_same(some, others) -> None:
    some, others = list(some), list(others)
    assert texts(some) == texts(others)
    assert scores(some) == pytest.approx(scores(others), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
@pytest.mark.parametrize("task", ["translation", "language"])
def test_outputs_equal_a_search_over_each_line_alone(task, options):
    made, lines = engine(task), ["日本", *sentences(8, longest=5)]
    for line, output in zip(lines, answer(made, lines, options), strict=True):
        ids = tokenizer().encode(line)
        ids, before = ([*ids, EOS], []) if task == "translation" else ([0, *ids], ids)
        state = made.model.start(torch.tensor([ids]), len(ids) + 9, beam=options.beam)
        [expected] = beam_search(made.model.step, state, options, eos=EOS)
        for got, right in zip(output.hypotheses, expected, strict=True):
            # a prompt comes before it, so a first space is not lost
            assert tokenizer().decode(before) + got.text == tokenizer().decode(
                [*before, *right.tokens]
            )
            assert got.finished == right.finished
            assert got.score == pytest.approx(right.score, rel=1e-4)
        assert output.pieces == 1


@pytest.mark.parametrize("options", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])
@pytest.mark.parametrize("task", ["translation", "language"])
def test_windows_and_batches_of_any_size_give_the_same(task, options):
    lines = [line for line in LINES if len(tokenizer().encode(line)) < 30]
    expected = list(answer(engine(task, Batching(10**6)), iter(lines), options))
    assert len(set(map(str, texts(expected)))) > len(lines) // 2
    assert_same(answer(engine(task, Batching(400, 7)), iter(lines), options), expected)


def test_only_a_window_of_lines_is_read_ahead_and_progress_counts_pieces():
    read = itertools.count()
    made, lines = engine("translation", Batching(lines=3)), (f"the cat {i}." for i in read)
    outputs = made.translate(lines, GREEDY)
    assert len(list(itertools.islice(outputs, 4))) == 4
    assert next(read) == 9  # two groups more
    made, counts = engine("translation", Batching(tokens=200)), []
    list(made.translate([*LINES, "the cat runs. " * 20], GREEDY, progress=counts.append))
    assert sum(counts) == pytest.approx(len(LINES) + 1)
    assert min(counts) < 0.9


def test_a_long_line_is_translated_in_pieces(translator, caplog):
    long = "The cat sees a small red bird. The dog runs under the big tree. A bird sings."
    got = list(translator.translate(["the cat.", long, "a dog."], BEAM))
    assert [output.pieces for output in got] == [1, 4, 1]
    assert "line 2 is longer than the model's limit of 23" in caplog.text
    pieces = split_text(long, tokenizer().encode, 23)
    alone = list(translator.translate([tokenizer().decode(piece) for piece in pieces], BEAM))
    best = got[1].hypotheses[0]
    assert best.text == " ".join(output.text for output in alone if output.text)
    total = sum(output.hypotheses[0].log_probability for output in alone)
    assert best.log_probability == pytest.approx(total, rel=1e-5)
    assert scores(got[1:2]) == sorted(scores(got[1:2]), reverse=True)


@pytest.mark.parametrize(
    ("text", "encode", "pieces"),
    [
        ("a b. c d! (e f?) g h", str.split, [["a", "b."], ["c", "d!"], ["(e", "f?)"], ["g", "h"]]),
        ("a b c d e", str.split, [["a", "b"], ["c", "d", "e"]]),
        ("一二。三四", list, [["一", "二", "。"], ["三", "四"]]),
        ("x", lambda text: [1, 2, 3, 4, 5], [[1, 2, 3], [4, 5]]),
    ],
)
def test_long_lines_are_split_into_sentences(text, encode, pieces):
    assert split_text(text, encode, 3) == pieces


@settings(max_examples=30)
@given(TEXT, st.integers(1, 9))
@example("the cat " * 200, 7)
@example("x" * 2000, 3)
@example("﷽" * 5, 2)
def test_pieces_lose_nothing_and_fit(text, limit):
    encode, decode = tokenizer().encode, tokenizer().decode
    pieces = split_text(text, encode, limit)
    assert all(1 <= len(piece) <= limit for piece in pieces)
    if all(len(encode(character)) <= limit for character in text):
        # combining characters that normalise together may be cut apart, but nothing more
        joined = encode("".join(map(decode, pieces)).replace(" ", ""))
        assert decode(joined) == decode(encode(decode(encode(text)).replace(" ", "")))


def test_min_length_and_the_default_max_length(monkeypatch):
    made = engine("translation", target_positions=60)
    for output in made.translate(sentences(3), DecodeConfig(beam=2, min_length=30)):
        assert len(output.text) > 10

    def never_ending(tokens, *rest):
        return torch.nn.functional.one_hot(torch.full_like(tokens, 3 + ord("+")), 300) * 9.0

    monkeypatch.setattr(made.model, "decode", never_ending)
    [short, long] = made.translate(["a", "the cat sees a small red bird"], DecodeConfig(beam=1))
    assert len(short.text) == len(tokenizer().encode("a")) + 50
    assert len(long.text) == 60  # the model's positions
    assert not short.hypotheses[0].finished


def test_lines_before_one_that_fails_are_translated():
    made = engine("translation", Batching(lines=100))
    lines, got = [*sentences(250), None], []
    with pytest.raises(DataError, match="line 251"):
        for output in made.translate(lines, GREEDY):
            got.append(output.text)
    assert got == [output.text for output in made.translate(lines[: len(got)], GREEDY)]
    assert len(got) >= 100
    assert not made.scheduler.step()  # nothing is left to do


def test_running_out_of_memory_is_an_error_and_later_calls_work(monkeypatch):
    made, lines = engine("translation"), sentences(4)
    expected = list(made.translate(lines, BEAM))

    def no_memory(source, **options):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(made.model, "encode", no_memory)
        with pytest.raises(OutOfRoom, match=r"ran out of memory.*use a smaller beam"):
            list(made.translate(lines, BEAM))
    assert_same(made.translate(lines, BEAM), expected)


@pytest.mark.parametrize("options", [GREEDY, DecodeConfig(temperature=1.5, seed=3)], ids=str)
def test_streamed_pieces_make_the_generated_text(writer, options):
    prompts = ["", "the cat", "日本 the", "a\ufffd"]
    for prompt in prompts:
        [output] = writer.generate([prompt], options)
        pieces = list(writer.stream(prompt, options))
        assert "".join(pieces) == output.text
        assert all(pieces)
    together = [""] * len(prompts)
    for i, piece in writer.stream_all(prompts, options):
        together[i] += piece
    assert together == [output.text for output in writer.generate(prompts, options)]


@settings(max_examples=40)
@given(st.lists(st.integers(2, 299), max_size=12), st.sampled_from(["", "a", "日", "the cat"]))
@example([3 + byte for byte in "日🙂é".encode()], "the cat")
def test_any_tokens_are_streamed_as_they_decode(ids, prompt):
    made, said = engine("language"), iter([*ids, EOS])
    made.model.decode = lambda tokens, *rest: (
        torch.nn.functional.one_hot(torch.tensor([next(said)]), 300) * 9.0
    )
    pieces, before = list(made.stream(prompt)), tokenizer().encode(prompt)
    whole = tokenizer().decode([*before, *ids])[len(tokenizer().decode(before)) :]
    assert "".join(pieces) == whole
    if "日🙂é" in whole:  # each character has several tokens
        assert pieces == ["日", "🙂", "é"]


def test_samples_of_a_prompt_differ_and_can_be_reproduced(writer):
    options = DecodeConfig(temperature=1.0, max_length=8, seed=11)
    first = list(writer.generate(["the cat", "a dog"], options, samples=5))
    assert [len({one.text for one in output.hypotheses}) for output in first] == [5, 5]
    assert_same(writer.generate(["the cat", "a dog"], options, samples=5), first)
    # sample j of prompt i is that of seed + 5i + j
    [alone] = writer.generate(["a dog"], dataclasses.replace(options, seed=11 + 5 + 2))
    assert alone.text == first[1].hypotheses[2].text


def test_a_prompt_can_fill_all_positions_but_one(writer):
    prompt = " ".join(["the"] * 39)
    [output] = writer.generate([prompt])
    assert len(output.text) <= 10
    with pytest.raises(DataError, match="prompt 2 has 40 tokens"):
        list(writer.generate(["the", prompt + " the"]))
    with pytest.raises(DataError, match="positions for 35; shorten it"):
        writer.stream(prompt, DecodeConfig(min_length=5))


def test_ids_beyond_the_tokenizer_are_never_chosen():
    made, lines = engine("translation", vocab_size=317), sentences(6)
    with torch.no_grad():
        made.model.tokens.weight[300:] *= 20.0
    got = list(made.translate(lines, BEAM))
    with torch.no_grad():
        made.model.tokens.weight[300:] = 0.0
    assert_same(made.translate(lines, BEAM), got)


def test_an_engine_is_loaded_from_a_run(tmp_path, translator):
    tokenizer().save(tmp_path / "tokenizer")
    save_run(tmp_path / "run", translator.model, tokenizer=tmp_path / "tokenizer")
    loaded = Engine.load(tmp_path / "run", device="cpu", dtype="float64")
    assert_same(loaded.translate(LINES[:4]), translator.translate(LINES[:4]))
    assert Engine.load(tmp_path / "run", device="cpu").model.dtype == torch.float32
    (tmp_path / "run/tokenizer.model").unlink()
    with pytest.raises(RunError, match="has no tokenizer"):
        Engine.load(tmp_path / "run")
    with pytest.raises(ConfigError, match="int"):
        Engine.load(3)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda t, w: w.translate(["a"]), "use generate"),
        (lambda t, w: t.generate(["a"]), "use translate"),
        (lambda t, w: w.stream("a", BEAM), "use beam=1"),
        (lambda t, w: t.translate(["a"], {"beam": 1}), "must be a DecodeConfig"),
        (lambda t, w: w.generate("the cat"), "a list of texts, not str"),
        (lambda t, w: list(t.translate(["a", None])), "2 must be a str, not NoneType"),
        (lambda t, w: list(w.generate(["\udcff"])), "1 is not UTF-8"),
        (lambda t, w: w.generate(["a"], samples=2), "set a temperature"),
        (lambda t, w: w.generate(["a"], DecodeConfig(max_length=41)), "41 must be at most 40"),
        (lambda t, w: t.translate(["a"], DecodeConfig(min_length=41)), "41 must be at most 40"),
        (lambda t, w: t.translate(["a"], DecodeConfig(beam=301)), "301 must be at most 300"),
        (lambda t, w: list(t.translate(["a"], prefixes=[])), "one prefix per line"),
        (lambda t, w: list(t.translate(["a"], prefixes=["b", "c"])), "one prefix per line"),
        (lambda t, w: list(t.translate(["a"], prefixes=["the " * 50])), "prefix of line 1 has 50"),
        (lambda t, w: Batching(tokens=0), "tokens=0 must be at least 1"),
        (lambda t, w: engine("language", vocab_size=299), "300 tokens, eos=1.*299 tokens"),
        (lambda t, w: engine("translation", source_positions=1).translate([]), "no room for text"),
    ],
)
def test_invalid_requests_are_errors(translator, writer, ask, words):
    with pytest.raises((ConfigError, DataError), match=words):
        ask(translator, writer)


@pytest.mark.parametrize(
    ("given", "beam"), [({}, 4), ({"max_length": 20}, 4), ({"temperature": 0.8, "seed": 2}, 1)]
)
def test_translate_uses_beam_search_unless_sampling(translator, given, beam):
    got = list(translator.translate(LINES, DecodeConfig(**given)))
    assert got == list(translator.translate(LINES, DecodeConfig(**given, beam=beam)))
    assert got != list(translator.translate(LINES, DecodeConfig(beam=1)))
    with pytest.raises(ConfigError, match=r"n_best=5 .* beam=4"):
        translator.translate(LINES, DecodeConfig(n_best=5, max_length=9))


def test_generate_stream_and_the_searches_are_greedy_by_default(writer):
    options, narrow = DecodeConfig(max_length=9), DecodeConfig(max_length=9, beam=1)
    lines = sentences(8)
    assert list(writer.generate(lines, options)) == list(writer.generate(lines, narrow))
    [text] = writer.generate(lines[:1], narrow)
    assert "".join(writer.stream(lines[0], options)) == text.text
    toy = random_toy(6, seed=1)
    expected = greedy(toy.step, toy.start(1), narrow, eos=0)
    assert beam_search(toy.step, toy.start(1), options, eos=0) == [expected]


@pytest.mark.parametrize(
    ("flags", "warns"),
    [("flags\t: fpu avx2 avx512f\n", True), ("Features\t: fp asimd bf16\n", False), (None, False)],
)
def test_emulated_bfloat16_warns_once(monkeypatch, tmp_path, caplog, flags, warns):
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}")
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    devices.warn_if_emulated.cache_clear()
    cpu = torch.device("cpu")
    with caplog.at_level(logging.WARNING):
        for name in ("bfloat16", torch.bfloat16, "float32", None):
            devices.find_dtype(name, cpu)
        devices.find_dtype("bfloat16", torch.device("cuda"))
    devices.warn_if_emulated.cache_clear()
    assert ["bfloat16" in message for message in caplog.messages] == [True] * warns


MARKS = [chr(code) for code in range(0x110000) if unicodedata.combining(chr(code))]


@given(st.lists(st.sampled_from([*MARKS[::7], "\u0344", "e", "ä", "\u09c7", "\u09be", " "])))
def test_runs_of_combining_marks_are_bounded_and_others_untouched(characters):
    text = normalise("".join(character * 9 for character in characters))
    assert normalise(text) == text
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.combining(character) else 0
        assert marks <= 30
    short = "e" + "".join(characters[:20])
    assert normalise(short) == " ".join(unicodedata.normalize("NFC", short).split())


def test_only_extreme_lines_are_shortened_with_a_warning(translator, caplog):
    encode = tokenizer().encode
    for line in ("e" + "".join(MARKS) * 400, "x" * 400_000, "a.b," * 100_000, "a. " * 100_000):
        pieces, shortened = split_line(line, encode, 255)
        assert shortened
        assert 1 <= max(map(len, pieces)) <= 255
        assert sum(map(len, pieces)) <= 32_768
    long = " ".join(sentences(400))
    pieces, shortened = split_line(long, encode, 255)
    assert not shortened
    assert tokenizer().decode(itertools.chain.from_iterable(pieces)) == long
    options = DecodeConfig(beam=1, max_length=2)
    word, text, _ = translator.translate(["x" * 2000, "the cat.", long], options)
    assert word.pieces < 1100 / 23 * 2
    assert text.pieces == 1
    named = [one.split(" is ")[0] for one in caplog.messages if "do not fit" in one]
    assert named == ["line 1"]
    assert not split_line("the cat. " * 2_000, encode, 255)[1]


@pytest.mark.skipif(why_not_int8(torch.zeros(1)) is not None, reason="needs fbgemm")
def test_quantized_runs_have_int8_weights_on_a_cpu_by_default(small_runs, tmp_path):
    run, small = small_runs / "translation", tmp_path / "small"
    quantize_run(run, small, QuantizationConfig(bits=8))
    lines = sentences(4)
    for path, options, expected in (
        (run, {}, False),
        (run, {"quantize": "int8"}, True),
        (small, {}, True),
        (small, {"quantize": "none"}, False),
        (small, {"dtype": "float32"}, False),
        (small, {"dtype": "float32", "quantize": "int8"}, True),
    ):
        made = Engine.load(path, device="cpu", **options)
        assert made.model.is_int8 == expected
        assert len(list(made.translate(lines, GREEDY))) == 4
    with pytest.raises(ConfigError, match=r"unknown quantization 'int4'.*int8"):
        Engine.load(run, quantize="int4")
    with pytest.raises(BackendError, match="float32 weights on a CPU"):
        Engine.load(run, device="cpu", dtype="bfloat16", quantize="int8")
