import json
import math

import pytest
import torch

from helpers import config
from texts import engine, sentences, tokenizer
from writehead.bench import tokens as bench
from writehead.bench.ties import BeamJudge, Moment, Parting, judge_greedy, moments, said
from writehead.config import DecodeConfig
from writehead.data.tokenizer import END
from writehead.decoding import Hypothesis, beam_search
from writehead.errors import DataError
from writehead.model import LanguageModel, TranslationModel, save_run

LINES = sentences(30)
EPSILON = 2.0**-8


def make() -> TranslationModel:
    """A model as training begins with it, which ends some of its texts."""
    torch.manual_seed(3)
    sizes = {"vocabulary": 300, "source_positions": 40, "target_positions": 20}
    sizes |= {"d": 32, "f": 48, "h": 4, "k": 16, "v": 16, "decoder_layers": 2}
    made = TranslationModel(config("translation", **sizes)).eval()
    with torch.no_grad():
        made.tokens.weight[END] *= 2.0
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tokenizer().save(folder / "tokenizer")
    save_run(folder / "run", make(), tokenizer=folder / "tokenizer")
    language = LanguageModel(config("language", vocabulary=300))
    save_run(folder / "language", language, tokenizer=folder / "tokenizer")
    (folder / "text").write_text("\n".join(["", *LINES, "the cat " * 40]))
    (folder / "blank").write_text("\n \n")
    (folder / "long").write_text("the cat " * 40)
    return folder


@pytest.fixture
def compare(writehead, folder, tmp_path):
    """Runs the verb: exit code, what was printed, and the JSON."""

    def run(*options):
        path = tmp_path / "tokens.json"
        code, out, err = writehead(
            *("bench", "tokens", folder / "run", "--input", folder / "text", "--device=cpu"),
            *("--output", path, *options),
        )
        assert path.exists(), err
        return code, out, json.loads(path.read_text())

    return run


def test_float32_finds_the_references_tokens_in_every_batch(compare, folder):
    code, out, result = compare("--beam=1", "--beam=3")
    assert code == 0
    assert "partial" not in result
    assert result["sentences"] == len(LINES)
    assert result["left_out"] == [len(LINES) + 2]
    assert result["environment"]["command"].startswith("writehead bench tokens")
    assert [(row["dtype"], row["beam"]) for row in result["rows"]] == [
        ("float32", 1),
        ("float32", 3),
    ]
    for row in result["rows"]:
        assert row["same"] + len(row["near_ties"]) == len(LINES)
        assert row["same"] >= len(LINES) - 2
        assert set(row["batches"]) == {"one at a time", "shuffled"}
        assert not any(found["others"] for found in row["batches"].values())
    assert "Lines longer than the model reads, left out: 1." in out
    assert result["empty"] == [1]
    assert "Empty lines, passed over: 1." in out


def test_only_the_empty_lines_before_the_last_that_is_compared_are_passed_over(
    writehead, folder, tmp_path
):
    path, text = tmp_path / "tokens.json", tmp_path / "gaps"
    text.write_text("\n".join([LINES[0], "", " ", LINES[1], "", LINES[2]]))
    options = ("--lines=2", "--beam=1", "--device=cpu", "--output", path)
    code, out, err = writehead("bench", "tokens", folder / "run", "--input", text, *options)
    assert code == 0, err
    result = json.loads(path.read_text())
    assert (result["sentences"], result["empty"]) == (2, [2, 3])
    assert "Empty lines, passed over: 2." in out


def test_rounding_is_told_from_errors(compare):
    code, out, result = compare("--dtype=bfloat16")
    assert code == 0, out
    assert result["others"] == 0
    greedy, beam = result["rows"]
    for row in (greedy, beam):
        assert row["same"] + len(row["near_ties"]) + len(row["unproved"]) == len(LINES)
        assert row["near_ties"], "rounding to 8 bits should change a sentence in thirty"
        for one in row["near_ties"]:
            assert 0 <= one["difference"] <= one["tolerance"]
            assert 2 <= one["line"] <= len(LINES) + 1
            assert one["step"] >= 1
    assert {one["kind"] for one in greedy["near_ties"]} == {"token"}
    assert {one["kind"] for one in beam["near_ties"]} <= {"beam", "final"}
    assert greedy["unproved"] == []
    assert {one["kind"] for one in beam["unproved"]} <= {"earlier"}


def test_a_near_tie_is_what_whole_passes_over_the_sentence_say(compare, folder):
    """The figures of greedy near-ties, by a loop over single sentences."""
    _, _, result = compare("--dtype=bfloat16", "--beam=1")
    model = make()
    for one in result["rows"][0]["near_ties"]:
        source = torch.tensor([[*tokenizer().encode(LINES[one["line"] - 2]), END]])
        fed = [model.config.start]
        for _ in range(one["step"]):
            with torch.no_grad():
                logits = model(source, torch.tensor([fed]))[0, -1]
            fed.append(int(logits.argmax()))
        assert fed[-1] == one["reference"]
        log_p = torch.log_softmax(logits, dim=0)
        gap = float(log_p[one["reference"]] - log_p[one["ours"]])
        assert one["difference"] == pytest.approx(gap, abs=1e-5)
        assert one["tolerance"] == pytest.approx(4 * EPSILON * float(logits.abs().max()), rel=1e-4)


@pytest.mark.parametrize(("search", "dtype"), [(1, "float32"), (4, "float32"), (4, "bfloat16")])
def test_a_wrong_token_is_no_near_tie_and_makes_exit_code_1(compare, monkeypatch, search, dtype):
    decode = bench.decode

    def swapped(worker, jobs, beam):
        found = decode(worker, jobs, beam)
        found[6] = Hypothesis((250, *found[6].tokens[1:]), 0.0, 0.0, found[6].finished)
        return found

    monkeypatch.setattr(bench, "decode", swapped)
    code, out, result = compare(f"--beam={search}", f"--dtype={dtype}")
    assert code == 1
    [row] = result["rows"]
    assert 8 in [one["line"] for one in row["others"]]
    [wrong] = [one for one in row["others"] if one["line"] == 8]
    assert (wrong["step"], wrong["ours"]) == (1, 250)
    assert wrong["difference"] > wrong["tolerance"]
    assert "no near-tie explains line 8" in out


def test_sentences_that_change_with_their_batch_are_counted_and_are_no_failure(
    compare, monkeypatch
):
    decode = bench.decode

    def swapped(worker, jobs, beam):
        found = decode(worker, jobs, beam)
        if worker.batching.tokens == 1:
            found[0] = Hypothesis((250, 251), 0.0, 0.0, True)
        return found

    monkeypatch.setattr(bench, "decode", swapped)
    code, out, result = compare("--beam=1")
    assert code == 0
    assert result["rows"][0]["batches"]["one at a time"]["changed"] == 1
    assert len(result["rows"][0]["batches"]["one at a time"]["others"]) == 1
    assert result["rows"][0]["batches"]["shuffled"]["changed"] == 0
    assert "1 (1)" in out


@pytest.fixture
def stopped(writehead, folder, tmp_path, monkeypatch):
    """Runs the verb until it decodes for the n-th time, when it is interrupted or fails."""
    decode, path = bench.decode, tmp_path / "tokens.json"

    def run(asked, error, *options):
        left = [asked]

        def struck(worker, jobs, beam):  # three times for each search
            left[0] -= 1
            if not left[0]:
                raise error
            return decode(worker, jobs, beam)

        monkeypatch.setattr(bench, "decode", struck)
        text = ("--input", folder / "text", "--lines=4", "--beam=1", "--beam=3", "--device=cpu")
        return writehead(
            *("bench", "tokens", folder / "run", *text, "--output", path, *options)
        ), path

    return run


def test_an_interrupted_run_keeps_what_was_counted_and_says_that_it_is_partial(stopped):
    (code, out, err), path = stopped(5, KeyboardInterrupt())
    assert (code, out) == (130, "")
    assert f"interrupted; {path} has what there is so far, marked as partial" in err
    result = json.loads(path.read_text())
    assert result["partial"] is True
    assert result["sentences"] == 4
    assert [row["beam"] for row in result["rows"]] == [1, 3]
    assert set(result["rows"][0]["batches"]) == {"one at a time", "shuffled"}
    assert list(result["rows"][1]["batches"]) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DataError("no more")], ids=["^C", "error"])
def test_where_nothing_was_counted_nothing_is_written(stopped, error):
    (code, out, err), path = stopped(1, error)
    assert (code, out) == (130 if isinstance(error, KeyboardInterrupt) else 2, "")
    assert not path.exists()
    if isinstance(error, KeyboardInterrupt):
        assert f"interrupted; there is no result yet, and {path} was not made" in err
    path.write_text("a whole result")
    (_, _, err), path = stopped(1, error, "--force")
    assert path.read_text() == "a whole result"
    if isinstance(error, KeyboardInterrupt):
        assert f"interrupted; there is no result yet, and {path} is left as it was" in err


def test_a_partial_result_is_replaced_by_the_same_command_and_a_whole_one_when_told_to(stopped):
    stopped(2, KeyboardInterrupt())
    (code, _, err), path = stopped(-1, None)
    assert code == 0, err
    assert "partial" not in json.loads(path.read_text())
    (code, _, err), _ = stopped(-1, None)
    assert (code, "exists; choose another place, or pass --force" in err) == (2, True)
    (code, _, _), _ = stopped(2, KeyboardInterrupt(), "--force")
    assert (code, json.loads(path.read_text())["partial"]) == (130, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--input": "nowhere"}, "cannot be read"),
        ({"--input": "blank"}, "there is no line to translate"),
        ({"--input": "long"}, "none of 1 lines has from 1 to 39 tokens"),
        ({"--lines": "0"}, "--lines 0 compares nothing"),
        ({"--beam": "0"}, "beam=0"),
        ({"--beam": "9000"}, "--beam 9000 is past the"),
        ({"--dtype": "bfloat61"}, "did you mean 'bfloat16'?"),
        ({"--output": "."}, "could not be written"),
        ({"RUN": "nowhere"}, "nowhere"),
        ({"RUN": "language"}, "is a language model"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    writehead, folder, monkeypatch, changes, words
):
    monkeypatch.chdir(folder)
    given = {"RUN": "run", "--input": "text", "--device": "cpu", **changes}
    place = given.pop("RUN")
    options = [part for pair in given.items() for part in pair]
    code, out, err = writehead("bench", "tokens", place, *options)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_greedy_searches_part_at_their_first_different_token():
    logits = torch.zeros(3, 6)
    logits[1, 2], logits[1, 4], logits[1, 5] = 8.0, 7.9, -10.0
    reference, ours = Hypothesis((3, 2), -1.0, -1.0, True), Hypothesis((3, 4, 5), -1.0, -1.0, True)
    found = judge_greedy(reference, ours, logits, EPSILON)
    assert found == Parting("token", 2, 2, 4, pytest.approx(0.1), pytest.approx(40 * EPSILON))
    assert found.is_near
    assert not judge_greedy(reference, ours, logits, EPSILON / 2).is_near
    stopped = Hypothesis((3,), -1.0, -1.0, True)
    assert judge_greedy(reference, stopped, logits, EPSILON).ours == END


def test_a_text_that_stops_short_without_its_end_is_no_near_tie():
    logits = torch.zeros(3, 6)
    logits[:, 2] = 8.0
    whole, short = Hypothesis((3, 2, 4), -1.0, -1.0, True), Hypothesis((3, 2), -1.0, -1.0, False)
    for one, other in ((whole, short), (short, whole)):
        found = judge_greedy(one, other, logits[: len(said(one))], EPSILON)
        assert (found.step, -1 in (found.reference, found.ours)) == (3, True)
        assert not found.is_near
    assert judged((4,), [-1.0], 0.01).kind == "final"
    assert not judged((4,), [-1.0], 0.01).is_near


@pytest.mark.parametrize("place", [1, 2, 3])
def test_what_a_search_should_not_have_taken_is_no_near_tie_unless_it_scores_alike(place):
    made, beam = engine("translation"), 4
    jobs = [bench.Job([*made.tokenizer.encode(line), END], 12) for line in LINES[:8]]
    reference = bench.Reference(made.model, made.tokenizer.vocabulary, jobs, beam)
    wrong = []
    for job in jobs:
        state = made.model.start(torch.tensor([job.tokens]), 12, beam=beam)
        options = DecodeConfig(beam=beam, alpha=0.6, n_best=beam, max_length=12)
        wrong.append(beam_search(made.model.step, state, options, end=END)[0][place])
    parted = reference.partings(wrong, torch.bfloat16)
    assert len(parted) == len(jobs)
    for i, one in parted.items():
        gap = reference.found[i].score - wrong[i].score
        assert not one.is_near or (one.kind == "final" and gap <= one.tolerance + 1e-5)


def moment(*candidates, cut=False, largest=1.0) -> Moment:
    """A step of a search that chose from these (score, tokens), best first."""
    scores, tokens = zip(*candidates, strict=True)
    ended = [one[-1] == END for one in tokens]
    return Moment(list(scores), list(tokens), ended, cut, largest)


# with a beam of 2: (4,) and (3,) live on, then (4, 2) and (4, 5); (4, 2) ends, and is the best
STEPS = [
    moment((-1.0, (4,)), (-1.5, (3,)), (-1.6, (5,)), (-4.0, (END,))),
    moment((-1.1, (4, 2)), (-2.0, (4, 5)), (-2.5, (3, 6)), (-9.0, (4, END))),
    moment((-1.2, (4, 2, END)), (-3.0, (4, 5, 5)), (-4.0, (4, 5, 6)), (-5.0, (4, 2, 7))),
]
BEST = Hypothesis((4, 2), -1.2, -1.2, True)


def judged(ours: tuple[int, ...], totals: list[float], epsilon: float, **changes) -> Parting:
    """What is said of `ours`, to which both searches gave the same log-probability."""
    log_p = changes.pop("log_p", totals[-1])
    finished = ours[-1] == END
    found = Hypothesis(ours[:-1] if finished else ours, log_p, log_p, finished)
    return BeamJudge(BEST, STEPS, beam=2, alpha=0.0, epsilon=epsilon).judge(found, totals)


def test_a_hypothesis_is_held_against_the_last_that_was_kept_when_it_was_dropped():
    # four times epsilon for the one token in which (5,) is not (3,)
    found = judged((5, 2, END), [-1.6, -1.7, -1.8], 0.026)
    assert found == Parting("beam", 1, 3, 5, pytest.approx(0.1), pytest.approx(0.104))
    assert found.is_near
    assert not judged((5, 2, END), [-1.6, -1.7, -1.8], 0.024).is_near


def test_the_tolerance_counts_the_tokens_since_two_hypotheses_parted():
    found = judged((3, 6, END), [-1.5, -2.5, -2.6], 0.1)
    # against (4, 5): two tokens of it are other ones
    assert found == Parting("beam", 2, 5, 6, pytest.approx(0.5), pytest.approx(2**0.5 * 0.4))


def test_a_hypothesis_that_was_never_dropped_is_held_against_the_best_at_its_end():
    found = judged((4, 5, 5, END), [-1.0, -2.0, -3.0, -3.2], 0.5)
    assert found == Parting("final", 2, 2, 5, pytest.approx(2.0), pytest.approx(3**0.5 * 2))


def test_beams_that_may_have_parted_earlier_are_unproved_where_the_score_is_right():
    ours, totals = (4, 5, 5, END), [-1.0, -2.0, -3.0, -3.2]
    # too far from the best at the end; but (5,) and not (3,) might have lived on
    found = judged(ours, totals, 0.026)
    assert found == Parting("earlier", 1, 3, 5, pytest.approx(0.1), pytest.approx(0.104))
    assert (found.is_unproved, found.is_near) == (True, False)
    assert judged(ours, totals, 0.024).kind == "final"
    wrong = judged(ours, totals, 0.026, log_p=-1.0)
    assert (wrong.kind, wrong.is_near) == ("final", False)


def test_what_ends_must_be_among_the_best_of_all():
    found = judged((4, END), [-1.0, -9.0], 0.01)
    assert (found.kind, found.step, found.is_near) == ("beam", 2, False)
    assert found.difference == pytest.approx(7.0)


def test_the_edges_of_a_step_are_those_of_what_grows_and_of_what_ends():
    ends = moment((-1.0, (4,)), (-2.0, (END,)), (-3.0, (3,)), (-4.0, (5,)))
    assert ends.edges(2) == [(2, 3), (1, 2)]
    assert ends.living(2) == [0, 2]
    cut = moment((-1.0, (4,)), (-2.0, (6,)), (-3.0, (3,)), cut=True)
    assert (cut.edges(2), cut.living(2)) == ([(1, 2)], [])


def test_a_beam_search_tells_what_it_chose_from_at_every_step():
    made = engine("translation")
    model, beam = made.model, 3
    source = torch.randint(2, 300, (4, 7))
    steps = []
    options = DecodeConfig(beam=beam, max_length=9, alpha=0.6)
    state = model.start(source, 9, beam=beam)
    limits = [9, 4, 6, 9]
    found = beam_search(
        model.step, state, options, end=END, max_lengths=limits, observe=steps.append
    )
    for row, [best, *_] in enumerate(found):
        taken = moments(steps, row)
        assert len(taken) <= limits[row]
        for t, step in enumerate(taken):
            assert step.scores == sorted(step.scores, reverse=True)
            assert step.cut == (t + 1 == limits[row])
            for score, hypothesis in zip(step.scores, step.tokens, strict=True):
                fed = torch.tensor([[model.config.start, *hypothesis[:-1]]])
                with torch.no_grad():
                    logits = model(source[row : row + 1], fed)[0]
                log_p = torch.log_softmax(logits, dim=1)[range(t + 1), hypothesis].sum()
                assert score == pytest.approx(float(log_p), abs=1e-4)
                assert step.largest >= float(logits[-1].abs().max()) - 1e-4
        for t in range(len(said(best)) - 1):
            kept = [taken[t].tokens[i] for i in taken[t].living(beam)]
            assert said(best)[: t + 1] in kept
        last = taken[len(said(best)) - 1]
        score = last.scores[last.tokens.index(said(best))]
        assert math.isclose(score, best.log_probability, abs_tol=1e-6)
