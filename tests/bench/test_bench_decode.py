import copy
import dataclasses

import pytest
import torch

from helpers import config, model
from writehead import cost
from writehead.bench import decode
from writehead.bench.decode import Job, Place, decode_row, lane_search
from writehead.bench.floor import decode_floor
from writehead.bench.peers import Subject
from writehead.bench.plain_torch import PlainDecoder, check_plain
from writehead.bench.plots import markdown_table
from writehead.config import DecodeConfig
from writehead.cost import Setting
from writehead.engine import beam_search
from writehead.engine.search import Options, make_hypotheses
from writehead.errors import BackendError
from writehead.interop.pretrained import load_run
from writehead.ops.cpu_weights import why_not_int8

CPU = torch.device("cpu")
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHIP = cost.Chip("slow", 1e9, 1.0, 1e30, "a byte per second, and operations for nothing")
SMALL = ("--device=cpu", "--batch=3", "--repeats=2", "--no-peers", "--length=6")


def test_a_record_says_what_was_measured_and_adds_up(bench):
    result = bench("decode", *SMALL, "--preset=tiny/multi-head", "--preset=tiny/multi-query")
    assert result["chip"]["bandwidth"] > 0
    assert [row["setting"]["beam"] for row in result["rows"]] == [1, 1, 4, 4]
    for row in result["rows"]:
        assert list(row["measured"]) == ["ours, true lengths", "ours, int8"]
        for found in row["measured"].values():
            if why_not_int8(torch.zeros(0)) and "absent" in found:  # a CPU without int8 products
                continue
            step, encoder = found["step_ms"]["median"], found["encoder_ms"]["median"]
            assert len(found["step_ms"]["repeats"]) == len(found["encoder_ms"]["repeats"]) == 2
            assert found["us_per_token"]["decoder"] == pytest.approx(step * 1e3 / 3)
            assert found["us_per_token"]["encoder"] == pytest.approx(encoder * 1e3 / (3 * 6))
    # a language model is timed at the end of its context
    rows = bench("decode", *SMALL, "--preset=tiny-lm", "--length=300")["rows"]
    assert {row["kind"] for row in rows} == {"multi-head", "multi-query"}
    assert [row["setting"]["target"] for row in rows] == [6, 6, 300, 300]
    for row in rows:
        assert (row["setting"]["source"], row["setting"]["beam"]) == (0, 1)
        found = row["measured"]["ours, true lengths"]
        step = found["step_ms"]["median"]
        assert found["us_per_token"] == {"decoder": pytest.approx(step * 1e3 / 3)}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["tiny", "tiny-lm"])
def test_models_are_measured_beside_their_peers_on_a_gpu(bench, family):
    sizes = ("--batch=5", "--length=40", "--repeats=2")
    for row in bench("decode", f"--preset={family}", *sizes)["rows"]:
        for name, measured in row["measured"].items():
            if name not in ("Hugging Face", "CTranslate2"):
                assert "step_ms" in measured, (row["preset"], name, measured)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [{"g": 6}, {"g": 2, "bias": True, "norm": "layer"}, {"g": 1}, {"g": 1, "window": 4}],
    ids=["multi-head", "grouped-query", "multi-query", "local"],
)
def test_plain_pytorch_finds_our_tokens(changes, beam):
    made = model(config("translation", h=6, tied=False, **changes), dtype=torch.float32)
    made.output.weight.data[made.config.eos] = 0.0  # nothing ends, also not at the last step
    source, n = torch.randint(3, made.config.vocab_size, (4, 7)), 9
    search = DecodeConfig(beam=beam, min_length=n, max_length=n)
    state = made.start(source, n, beam=beam)
    expected = beam_search(made.step, state, search, eos=made.config.eos)
    decoder = PlainDecoder(made, source, n, beam)
    for _ in range(2):  # a decoding does not depend on the one before
        assert decoder.run().tolist() == [list(best.tokens) for [best, *_] in expected]
        decoder.encode(source)


@pytest.mark.gpu
@pytest.mark.parametrize("beam", [1, 3])
def test_compiled_pytorch_finds_the_tokens_of_a_cpu(beam):
    made = model(config("translation", h=4, g=1, k=16, v=16), dtype=torch.float32)
    source = torch.randint(3, made.config.vocab_size, (4, 7))
    expected = PlainDecoder(made, source, 9, beam).run()
    decoder = PlainDecoder(made.cuda(), source.cuda(), 9, beam)
    for _ in range(2):
        assert torch.equal(decoder.run(), expected)


@pytest.mark.usefixtures("interpreted")
# in the kernels minus infinity is a number like others
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(
    ("task", "beam", "padded"),
    [("translation", 1, False), ("translation", 2, True), ("language", 1, False)],
)
def test_a_timed_decoding_finds_what_beam_search_finds(task, beam, padded):
    sizes = {"k": 16, "v": 32, "d": 21, "h": 4, "decoder_layers": 1}
    made = model(config(task, **sizes), dtype=torch.float32).to(GPU)
    exact = copy.deepcopy(made).double()
    setting = Setting(batch=2, source=4 if task == "translation" else 0, target=3, beam=beam)
    options = DecodeConfig(beam=beam, min_length=3, max_length=3)
    torch.manual_seed(1)
    start, run = lane_search(made, setting, padded=padded)
    torch.manual_seed(1)
    state = exact.start(decode.random_tokens(exact, setting), setting.target, beam=setting.beam)
    expected = beam_search(exact.step, state, options, eos=made.config.eos)
    start()
    given = [Options(DecodeConfig(), 3)] * setting.batch
    for _ in range(2):  # a decoding leaves nothing behind for the next
        tokens = [tuple(best.tokens) for [best] in make_hypotheses(run(), given)]
        if setting.source:
            assert tokens == [best.tokens for best, *_ in expected]
        else:  # after random numbers in the cache
            assert [len(one) for one in tokens] == [2, 2]


def test_libraries_are_timed_with_our_sizes():
    pytest.importorskip("transformers")
    pytest.importorskip("ctranslate2")
    place = Place(CHIP, CPU, torch.float32, 2, decode.PEERS, lambda text: None, int8=True)
    sizes = config("translation", d=12, h=6, g=6, k=2, v=2)
    measured = decode_row(Job("x", Subject(sizes), Setting(2, 7, 5, beam=3)), place)["measured"]
    for label in ("CTranslate2", "Hugging Face", "CTranslate2, int8"):
        calls = ("call_ms", "one_token_call_ms")
        whole, first = (measured[label][name]["median"] for name in calls)
        assert len(measured[label]["step_ms"]["repeats"]) == 2
        assert measured[label]["step_ms"]["median"] == pytest.approx((whole - first) / 4)
    assert "GPU" in measured["PyTorch, torch.compile"]["absent"]
    for changes, words in (
        ({"g": 1}, {"Hugging Face": "multi-head"}),
        ({"window": 3}, {"Hugging Face": "without a window"}),
        ({"d": 14}, {"Hugging Face": "h × k = d"}),
    ):
        other = dataclasses.replace(sizes, **changes)
        job = Job("x", Subject(other), Setting(2, 3, 4))
        measured = decode_row(job, place, ("true",))["measured"]
        for label in ("Hugging Face", "CTranslate2"):
            assert words.get(label, "") in measured[label].get("absent", "")
            assert ("step_ms" in measured[label]) == (label not in words)


def test_a_run_is_timed_with_its_weights(bench, writehead, tmp_path):
    witnesses = pytest.importorskip("witnesses", reason="needs transformers")
    pytest.importorskip("ctranslate2")
    folder, converted, run = (tmp_path / name for name in ("opus", "opus-multi-query", "run"))
    for name in ("marian", "marian-two-vocabularies"):
        theirs = witnesses.saved(folder, name, dtype=torch.float32)
        assert writehead("convert", folder, converted, "--write-heads=1", "--force")[0] == 0
        assert writehead("import", folder, run, "--force")[0] == 0
        sizes = ("--device=cpu", "--repeats=1", "--length=6", "--batch=2", "--beam=2")
        runs = [f"--run={one}" for one in (folder, converted, run)]
        rows = bench("decode", *sizes, *runs)["rows"]
        assert [row["preset"] for row in rows] == ["opus", "opus-multi-query", "run"]
        assert [row["model"]["g"] for row in rows] == [4, 1, 4]
        assert [row["run"] for row in rows] == [str(one) for one in (folder, converted, run)]
        for row in rows:
            found = row["measured"]
            assert "step_ms" in found["ours, true lengths"]
            assert "step_ms" in found["CTranslate2"]
            assert ("step_ms" in found["Hugging Face"]) == (row["preset"] != "opus-multi-query")
            assert "GPU" in found["PyTorch, torch.compile"]["absent"]
        table = markdown_table({"rows": rows})
        assert "| CTranslate2, opus-multi-query |" in table
        assert "| Hugging Face, opus |" in table
        assert "multi-head" not in table
        ours = Subject(load_run(folder).model.config, folder).load(CPU, torch.float32)
        tokens = torch.randint(3, 50, (2, 5))
        with torch.no_grad():
            logits = theirs(input_ids=tokens, decoder_input_ids=tokens).logits
            assert torch.allclose(ours(tokens, tokens), logits, atol=1e-4)
    other = tmp_path / "other" / "opus"
    witnesses.saved(other, "m2m_100")
    code, _, err = writehead("bench", "decode", f"--run={folder}", f"--run={other}")
    assert (code, "two models are named opus" in err) == (2, True)
    code, _, err = writehead("bench", "decode", f"--run={folder}", "--length=100")
    assert (code, "fewer positions than 100" in err) == (2, True)


@pytest.mark.parametrize("changes", [{"norm_place": "post"}, {"embedding_scale": 2.0}])
def test_the_plain_decoder_refuses_what_it_does_not_compute(changes):
    with pytest.raises(BackendError, match=next(iter(changes))):
        check_plain(config("translation", **changes))


def test_the_floor_of_a_small_model_is_what_one_counts_by_hand():
    sizes = {"d": 8, "f": 16, "h": 2, "k": 4, "v": 4, "encoder_layers": 1, "decoder_layers": 1}
    small = config("translation", vocab_size=32, **sizes)
    found = decode_floor(small, Setting(batch=3, source=5, target=2, element=2), CHIP)
    weights = 8 * (8 + 4 + 4 + 8) + 8 * (8 + 8) + 2 * 8 * 16 + 32 * 8
    source = 3 * 5 * (4 + 4)
    padded, true = 3 * 2 * (4 + 4), 3 * 1.5 * (4 + 4)  # the mean of one position and two
    assert found["step_ms"]["padded"] == pytest.approx(2 * (weights + source + padded) * 1e3)
    assert found["step_ms"]["true"] == pytest.approx(2 * (weights + source + true) * 1e3)
    encoder = 8 * (8 + 4 + 4 + 8) + 2 * 8 * 16 + 8 * (4 + 4)
    assert found["encoder_ms"] == pytest.approx(2 * encoder * 1e3)
    sizes = sizes | {"encoder_layers": 0}
    small = config("language", vocab_size=32, **sizes)
    found = decode_floor(small, Setting(batch=3, source=0, target=4, element=2), CHIP)
    weights, read = 8 * (8 + 4 + 4 + 8) + 2 * 8 * 16 + 32 * 8, 3 * 3.5 * (4 + 4)  # steps 3 and 4
    assert found["step_ms"]["true"] == pytest.approx(2 * (weights + read) * 1e3)
