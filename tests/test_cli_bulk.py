"""`translate` with an output folder: same output as one file, all formats, resuming, errors."""

import gzip
import json
import lzma
import sys

import pytest

from processes import run_python
from texts import full_disk, names, sentences
from writehead.bulk.worker import Worker

# in float64, printed digits do not depend on the batch
SHORT = ["--max-length=9", "--device=cpu", "--dtype=float64"]
LINES = [*sentences(11), "", *sentences(5, seed=1)]
TEXT = "\n".join(LINES) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a file in it, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.en").write_text(TEXT)
    return tmp_path


@pytest.fixture
def translate(writehead, small_runs):
    """Runs `translate`; returns the exit code and standard error."""

    def run(*arguments: object, options=SHORT) -> tuple[int, str]:
        code, out, err = writehead("translate", small_runs / "translation", *options, *arguments)
        assert out == ""
        return code, err

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--scores", "--beam=2"],
        ["--temperature=2", "--seed=5", "--scores"],
        ["--batch-tokens=40", "--alpha=0"],
    ],
)
@pytest.mark.parametrize("shards", [1, 5])
def test_a_folder_has_the_lines_of_a_single_file(folder, translate, arguments, shards):
    assert translate("--input=a.en", "--output=one", *arguments) == (0, "")
    code, err = translate("--input=a.en", "--output=out", f"--shards={shards}", *arguments)
    assert (code, "translated 17 lines; wrote 1 file to" in err) == (0, True)
    assert (folder / "out" / "a.en").read_bytes() == (folder / "one").read_bytes()
    assert names(folder / "out") == [".writehead", "a.en"]


def test_files_of_all_formats_are_translated(folder, translate, small_runs):
    import pyarrow
    from pyarrow import parquet

    data = folder / "data"
    data.mkdir()
    (data / "a.txt").write_text(TEXT)
    (data / "b.en.xz").write_bytes(lzma.compress(TEXT.encode()))
    with gzip.open(data / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"id": i, "en": line}) + "\n" for i, line in enumerate(LINES))
    parquet.write_table(pyarrow.table({"en": LINES}), data / "d.parquet")
    assert translate("--input=a.en", "--output=one") == (0, "")
    expected = (folder / "one").read_text().splitlines()
    code, err = translate("--input=data", "--output=out", "--field=en", "--output-field=de")
    assert (code, "translated 68 lines; wrote 4 files to" in err) == (0, True)
    out = folder / "out"
    assert (out / "a.txt").read_text().splitlines() == expected
    assert lzma.decompress((out / "b.en.xz").read_bytes()).decode().splitlines() == expected
    with gzip.open(out / "c.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    assert [row["de"] for row in rows] == expected
    assert [(row["id"], row["en"]) for row in rows] == [*enumerate(LINES)]
    assert parquet.read_table(out / "d.parquet").to_pydict() == {"en": LINES, "de": expected}


def test_a_pattern_and_an_existing_folder_make_a_bulk_job(folder, translate):
    (folder / "out").mkdir()
    assert translate("--input=*.en", "--output=other")[0] == 0
    assert translate("--input=a.en", "--output=out")[0] == 0
    assert translate("--input=a.en", "--output=new/")[0] == 0
    for name in ("out", "other", "new"):
        assert (folder / name / "a.en").read_text().count("\n") == 17


def interrupt(monkeypatch, error: BaseException, *, after: int) -> None:
    """Raises an error in the next shard after a number of finished ones."""
    translated, left = Worker.translate, [None] * after

    def fail(self, shard, report):
        if not left:
            raise error
        left.pop()
        return translated(self, shard, report)

    monkeypatch.setattr(Worker, "translate", fail)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(KeyboardInterrupt(), 130), (SystemExit(143), 143), (OSError(28, "No space left"), 2)],
)
def test_an_interrupted_job_resumes(folder, translate, monkeypatch, error, expected):
    with monkeypatch.context() as patch:
        interrupt(patch, error, after=2)
        code, err = translate("--input=a.en", "--output=out", "--shards=5")
    assert code == expected
    assert "2 of 5 shards finished and kept; run the same command again to resume" in err
    assert ("could not be written: No space left" in err) == (expected == 2)
    assert names(folder / "out") == [".writehead"]
    code, err = translate("--input=a.en", "--output=out")
    assert (code, "resuming: 2 of 5 shards finished" in err) == (0, True)
    assert translate("--input=a.en", "--output=one") == (0, "")
    assert (folder / "out" / "a.en").read_bytes() == (folder / "one").read_bytes()
    code, err = translate("--input=a.en", "--output=out")
    assert (code, "out is complete; there is nothing to do" in err) == (0, True)


def test_parts_are_translated_by_different_processes(folder, translate):
    job = ("--input=a.en", "--output=out", "--shards=5")
    code, err = translate(*job, "--shard=1/2")
    assert (code, "finished 3 shards; 2 of 5 are left for other processes" in err) == (0, True)
    code, err = translate(*job, "--shard=2/2")
    assert (code, "translated 17 lines" in err) == (0, True)
    assert (folder / "out" / "a.en").read_text().count("\n") == 17


def test_two_processes_translate_a_job(folder, small_runs, translate):
    run = small_runs / "translation"
    arguments = [str(run), "--max-length=9", "--dtype=float64", "--input=a.en", "--devices=cpu,cpu"]
    code = "import sys; from writehead.cli import main; main()"
    done, _, err = run_python(code, "translate", *arguments, "--output=out", "--shards=6")
    assert (done, "translated 17 lines" in err) == (0, True), err
    assert translate("--input=a.en", "--output=one") == (0, "")
    assert (folder / "out" / "a.en").read_bytes() == (folder / "one").read_bytes()


def test_a_changed_job_is_refused_and_kept_unless_forced(folder, translate, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, KeyboardInterrupt(), after=2)
        translate("--input=a.en", "--output=out", "--shards=5")
    for arguments, words in (
        (["--beam=2"], "was started with beam=4, not 2"),
        (["--scores"], "was started with scores=False, not True"),
        (["--shards=7"], "was started with 5 shards, not 7"),
        (["--dtype=float32"], "was started with float64 weights, not float32"),
        (["--errors=skip"], "was started with errors='strict', not 'skip'"),
    ):
        code, err = translate("--input=a.en", "--output=out", *arguments)
        *_, line = err.splitlines()
        assert (code, words in line) == (2, True), err
        assert line.endswith("choose another folder, or start over with --force")
    (folder / "a.en").write_text(TEXT.upper())
    code, err = translate("--input=a.en", "--output=out")
    assert (code, "a.en has changed since the job" in err) == (2, True)
    assert translate("--input=a.en", "--output=out", "--force")[0] == 0
    (folder / "out" / "a.en").write_text("mine")
    code, err = translate("--input=a.en", "--output=out", "--beam=2")
    assert (code, (folder / "out" / "a.en").read_text()) == (2, "mine")
    assert translate("--input=a.en", "--output=out", "--beam=2", "--force")[0] == 0
    assert translate("--input=a.en", "--output=one", "--beam=2") == (0, "")
    assert (folder / "out" / "a.en").read_bytes() == (folder / "one").read_bytes()


REFUSED = {
    "--input=- --output=out/": "an output folder needs files to read",
    "--input=a.en --shards=2": "--shards needs an output folder",
    "--input=data": "an input of several files needs an output folder",
    "--input=a.en --output=out/ --n-best=2": "--n-best needs an output file",
    "--input=a.en --output=out/ --prefix-file=a.en": "omit --prefix-file",
    "--input=a.en --output=out/ --shard=0/2": "--shard 0/2 must be I/N",
    "--input=a.en --output=out/ --shard=3/2": "--shard 3/2 must be I/N",
    "--input=a.en --output=out/ --shard=1": "--shard 1 must be I/N",
    "--input=a.en --output=out/ --devices=cpu --device=cpu": "omit --device",
    "--input=a.en --output=out/ --devices=cpu --cluster=ray": "omit --devices",
    "--input=a.en --output=out/ --devices=tpu": "unknown device 'tpu'",
    "--input=a.en --output=out/ --cluster=slurm": "--cluster slurm must be ray",
    "--input=none --output=out/": "none does not exist",
    "--input=*.gz --output=out/": "there are no files to translate in",
    "--input=a.en --output=.": "is also the input",
    "--input=a.en --output=a.en/": "a.en",
    "--input=a.en.gz --output=b": "a.en.gz is not plain text; pass a folder",
    "--input=bad.jsonl --output=b.jsonl": "bad.jsonl is not plain text; pass a folder",
    "--input=a.NDJSON": "a.NDJSON is not plain text; pass a folder",
    "--input=a.en --output=b.jsonl --field=text": "but b.jsonl is the name of a file",
    "--input=data --output=b.txt": "needs an output folder, but b.txt is the name of a file",
    "--input=a.en --output=out/ --target-lang=de": "target_lang='de'",
    "--input=a.en --output=out/ --max-length=999": "max_length=999",
    "--input=bad.jsonl --output=out/": "line 1 of",
    "--input=bad.txt --output=out/": "is not UTF-8",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_wrong_input_is_a_one_line_error(folder, small_runs, refused, arguments):
    (folder / "data").mkdir()
    (folder / "bad.jsonl").write_text("nonsense\n")
    (folder / "bad.txt").write_bytes(b"\xff\n")
    line = refused("translate", small_runs / "translation", *arguments.split())
    assert REFUSED[arguments] in line
    assert not (folder / "out").exists()


def test_a_full_disk_is_a_one_line_error_and_keeps_shards(folder, small_runs, refused, translate):
    lines = [f"{line} {i}" for i, line in enumerate(sentences(40))]
    (folder / "a.en").write_text("\n".join(lines))
    job = ("translate", small_runs / "translation", *SHORT, "--input=a.en", "--output=out/")
    with full_disk(100):
        assert "could not be written: File too large" in refused(*job)
    assert names(folder / "out") == [".writehead"]
    code, err = translate("--input=a.en", "--output=out")
    assert (code, "translated 40 lines" in err) == (0, True)


def test_an_unwritable_folder_is_a_one_line_error(folder, small_runs, refused):
    (folder / "file").touch()
    job = ("translate", small_runs / "translation", *SHORT, "--input=a.en")
    assert "file/out/.writehead could not be written: Not a dir" in refused(*job, "-o", "file/out/")


def test_invalid_lines_are_counted(folder, translate):
    (folder / "a.en").write_bytes(b"the cat\n\xff\n")
    code, err = translate("--input=a.en", "--output=out/", "--errors=skip")
    assert (code, "1 line with invalid UTF-8" in err) == (0, True)
    assert (folder / "out" / "a.en").read_bytes().endswith(b"\n\n")


def test_long_lines_are_counted(folder, translate, capsys):
    (folder / "a.en").write_text("the cat small_runs. " * 20 + "\nthe cat\n")
    code, err = translate("--input=a.en", "--output=out/")
    assert (code, "1 line longer than the model's limit" in err) == (0, True)
    assert "limit of" not in err  # no warning for each


def test_without_ray_the_extra_is_named(folder, small_runs, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    job = ("--input=a.en", "--output=out/", "--cluster=ray")
    line = refused("translate", small_runs / "translation", *job)
    assert line == "error: ray is not installed; install it with pip install 'writehead[ray]'"
    assert names(folder) == ["a.en"]


def test_progress_shows_lines_per_second_and_the_time_left(folder, translate, monkeypatch):
    monkeypatch.setattr("writehead.util.progress.LOG_SECONDS", 0.0)
    code, err = translate("--input=a.en", "--output=out/", "--shards=3")
    assert code == 0
    assert "17 of 17 lines, " in err
    assert " lines/s, 0:00:00 left" in err
    monkeypatch.setenv("FORCE_COLOR", "1")  # as at a terminal
    code, err = translate("--input=a.en", "--output=out/", "--shards=3", "--force")
    assert (code, "17 of 17 lines" in err) == (0, True)
