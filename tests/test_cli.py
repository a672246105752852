import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from writehead.cli import app, main
from writehead.model import make_model, save_run
from writehead.paper.presets import preset, preset_names


def test_explain_shows_211m_parameters_and_the_floor(writehead):
    code, out, _ = writehead("explain", "wmt14/multi-query")
    assert code == 0
    assert "211M parameters" in out
    assert "518 µs" in out
    assert "gain" in out


def test_explain_json_is_exact_and_complete(writehead):
    code, out, _ = writehead("explain", "wmt14/multi-query", "--json", "--position", "0")
    answer = json.loads(out)
    assert code == 0
    assert answer["parameters"]["total"] == sum(answer["parameters"]["parts"].values())
    assert answer["decoder_step"]["position"] == 0
    for key in ("training_step", "encoder", "decoder_step", "decoder_sequence"):
        work = answer[key]
        assert work["operations"] == sum(part["operations"] for part in work["parts"])
        assert work["bytes"] == sum(part["bytes"] for part in work["parts"])
        assert work["floor_us"] == pytest.approx(sum(p["floor_us"] for p in work["parts"]))
    assert [ratio["section"] for ratio in answer["ratios"]] == ["§2.3.1", "§2.4.1", "§3.1"]
    assert answer["comparison"]["multi-head"]["f"] == 4096
    assert answer["comparison"]["gain"] > 1
    assert answer["largest_batch"] == answer["comparison"]["multi-query"]["largest_batch"]


def test_explain_takes_another_chip_or_the_users_own_figures(writehead):
    floors = []
    for options in (["--bandwidth", "1e12", "--flops", "1e30"], ["--bandwidth", "2e12"]):
        arguments = ("explain", "lm1b/multi-head", "--json", "--flops", "1e30", *options)
        floors.append(json.loads(writehead(*arguments)[1])["decoder_step"]["floor_us"])
    assert floors[0] == pytest.approx(2 * floors[1])


def test_explain_reads_the_config_of_a_run(writehead, tmp_path):
    save_run(tmp_path / "run", make_model(preset("tiny/multi-query")))
    code, out, _ = writehead("explain", str(tmp_path / "run"), "--json")
    assert code == 0
    assert json.loads(out)["config"] == preset("tiny/multi-query").to_json()


def test_a_language_model_is_explained_without_a_source(writehead):
    code, out, _ = writehead("explain", "lm1b/multi-query")
    assert code == 0
    assert "192M parameters" in out
    assert "source" not in out


def test_presets_are_listed(writehead):
    code, out, _ = writehead("presets")
    assert code == 0
    heading, *rows, note = out.splitlines()
    assert " ".join(heading.split()) == "preset layers d h g k,v d_ff window parameters steps"
    assert [row.split()[0] for row in rows] == preset_names()
    row = "wmt14/multi-query 6+6 1024 8 1 128 5440 210,796,544 100000"
    assert " ".join(rows[1].split()) == row
    assert "g write-heads" in note
    assert max(map(len, out.splitlines())) <= 80


def test_explain_changes_sizes_as_asked(writehead):
    grouped = preset("wmt14/multi-head").with_write_heads(2)
    command = ("explain", "wmt14/multi-head", "--set=model.g=2", f"--set=model.f={grouped.f}")
    answer = json.loads(writehead(*command, "--json")[1])
    assert answer["config"] == grouped.to_json()
    assert answer["kind"] == "grouped-query"
    assert answer["parameters"]["total"] == 210_796_544
    kv = {kind: answer["comparison"][kind]["kv_bytes"] for kind in ("multi-head", "multi-query")}
    assert kv["multi-head"] == 4 * answer["comparison"]["grouped-query"]["kv_bytes"]
    assert kv["multi-head"] == 8 * kv["multi-query"]
    assert "grouped-query  5248" in writehead(*command)[1]
    assert f"--set model.g=2 --set model.f={grouped.f}" in writehead("explain", "--help")[1]


def test_explain_says_which_batch_fits(writehead):
    command = ("explain", "wmt14/multi-head", "--chip=l4", "--json")
    answer = json.loads(writehead(*command, "--batch=9999")[1])
    largest = answer["largest_batch"]
    assert answer["fits"] is False
    for batch, fits in ((largest, True), (largest + 1, False)):
        one = json.loads(writehead(*command, f"--batch={batch}")[1])
        assert one["fits"] is fits
        assert (one["memory_bytes"] <= 24e9) is fits
    page = " ".join(
        writehead("explain", "wmt14/multi-head", "--chip=l4", "--batch=9999")[1].split()
    )
    assert f"9,999 sentences do not fit; the largest batch that does is {largest:,}" in page
    assert "largest batch: the most sentences of these lengths whose K and V" in page
    tight = " ".join(writehead("explain", "wmt14/multi-head", "--memory=1e6")[1].split())
    assert "there are 1MB: not even one sentence fits" in tight


def test_the_verbs_are_told_in_the_order_in_which_they_are_used():
    told = CliRunner().invoke(app, ["--help"]).output.partition("Commands")[2]
    verbs = re.findall(r"^\W+([a-z]+)\s+[A-Z]", told, re.MULTILINE)
    order = "demo presets explain prepare train average quantize evaluate translate generate"
    assert " ".join(verbs) == f"{order} bench reproduce report"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "tiny/multi-head", "--target=257"], "target=257 tokens are more than the 256"),
        (["explain", "tiny/multi-head", "--source=300"], "or set model.source_positions=300"),
        (["explain", "tiny-lm/multi-head", "--target=300"], "ask for 256 or fewer"),
        (["explain", "tiny/multi-head", "--set=model.g=3"], "choose g from 1, 2, 4, 8"),
        (["explain", "tiny/multi-head", "--set=model.g=two"], "g='two' is not a whole number"),
        (["explain", "tiny/multi-head", "--set=train.steps=2"], "is not model.NAME=VALUE"),
        (
            ["train", "data", "--preset=tiny/multi-query", "--set=model.vocabulary=9"],
            "the vocabulary is the dataset's",
        ),
        (["explain", "wmt14/multiquery"], "did you mean 'wmt14/multi-query'?"),
        (["explain", "nothing-like-it"], "known: "),
        (["explain", "tiny/multi-head", "--batch", "0"], "batch=0 must be at least 1"),
        (["explain", "tiny/multi-head", "--position", "128"], "from 0 to 127"),
        (["explain", "tiny/multi-head", "--chip", "h2000"], "did you mean 'h200'?"),
        (["explain", "tiny/multi-head", "--flops", "-1"], "flops=-1.0 must be above 0"),
        (["explain", "."], "has no config.json"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    writehead, monkeypatch, tmp_path, arguments, words
):
    monkeypatch.chdir(tmp_path)
    code, out, err = writehead(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_every_verb_answers_help_with_an_example():
    verbs = get_command(app).commands
    assert {"explain", "presets"} <= verbs.keys()
    for verb in verbs:
        result = CliRunner().invoke(app, [verb, "--help"])
        assert result.exit_code == 0
        assert f"Example: writehead {verb}" in " ".join(result.output.split())


def test_a_reader_who_leaves_early_is_no_error():
    command = f"{sys.executable} -m writehead explain wmt14/multi-query | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_the_command_line_answers_before_pytorch_has_loaded():
    code = "import sys; import writehead.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_with_no_multi_head_twin_is_explained_without_it(writehead, tmp_path):
    config = dataclasses.replace(preset("tiny/multi-query"), f=8)
    save_run(tmp_path / "run", make_model(config))
    code, out, _ = writehead("explain", str(tmp_path / "run"))
    assert code == 0
    assert "Work and its floor" in out
    assert "parameters equal" not in out


def test_a_local_model_has_the_papers_ratios_too(writehead):
    local, whole = (
        json.loads(writehead("explain", f"wmt14/multi-query{suffix}", "--json")[1])["ratios"]
        for suffix in ("-local", "")
    )
    assert local == whole


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", "wmt14"), "'wmt14' is a family; choose one of its presets: wmt14/multi-head"),
        (("generate", "run", "Once", "--input", "prompts"), "not both"),
        (("bench", "decode", "--preset", "tiny", "--context", "64"), "is for language models"),
        (
            ("explain", "lm1b/multi-query", "--source", "128"),
            "--source is for translation, and lm1b/multi-query is a language model",
        ),
    ],
)
def test_what_would_be_ignored_or_misread_is_refused(arguments, said, writehead):
    code, _, err = writehead(*arguments)
    assert code == 2
    assert said in err


@pytest.mark.parametrize("name", ["tiny/multi-query", "tiny-lm/multi-query"])
def test_a_training_bench_needs_no_dataset_whatever_the_task(name, writehead):
    sizes = ("rows=2", "source_length=48", "target_length=48")
    settings = [word for size in sizes for word in ("--set", f"train.{size}")]
    steps = ("--steps", 1, "--warmup", 0)
    code, out, err = writehead("bench", "train", "--preset", name, *steps, *settings)
    assert code == 0, err
    assert "µs a token" in out + err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_standard_output_without_room_is_one_sentence():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "writehead", "presets"],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    words = "standard output could not be written: No space left on device"
    assert (done.returncode, done.stderr) == (2, f"error: {words}\n")


def test_evaluate_says_that_it_cannot_write_before_it_scores(writehead, tmp_path):
    text = tmp_path / "news.en"
    text.write_text("a cat\n")
    scoring = ("--source", text, "--reference", text, "--output", tmp_path)
    code, out, err = writehead("evaluate", tmp_path / "no run", *scoring)
    assert (code, out) == (2, "")
    assert err == f"error: {tmp_path} could not be written: Is a directory\n"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 9 bytes"),
    ],
    ids=str,
)
def test_memory_that_runs_out_is_one_line(writehead, monkeypatch, error):
    def too_much(*given, **named):
        raise error

    monkeypatch.setattr(sys.modules[main.__module__], "app", too_much)
    code, out, err = writehead("presets")
    assert (code, out) == (2, "")
    assert err == "error: the memory does not hold what was asked for; ask for less at a time\n"


def test_other_errors_of_the_runtime_stay_what_they_are(writehead, monkeypatch):
    def fail(*given, **named):
        raise RuntimeError("a bug")

    monkeypatch.setattr(sys.modules[main.__module__], "app", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        writehead("presets")
