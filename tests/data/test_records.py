"""Files of texts: read from any position, and written again with translations."""

import bz2
import gzip
import io
import json
import lzma
from itertools import islice

import pyarrow
import pyarrow.parquet
import pytest

from texts import ODD, sentences
from writehead.data.records import RecordFormat, lines_of, open_records
from writehead.errors import DataError

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
UNPACK = {"": bytes, ".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}
TEXTS = [*sentences(9), "", "two\nlines", None, "a\r\nb\n", "é 日本 \U0001f642", '"\\', "\u2028"]


def upper(text):
    return [line.upper() for line in lines_of(text)]


def written(path, **format: object) -> bytes:
    """The content of the translated file."""
    file = io.BytesIO()
    scores = format.get("scores", False)

    def answer(text):
        return [f"{line}\t{len(line)}.5" if scores else line for line in upper(text)]

    open_records(path, RecordFormat(**format)).write(file, answer)
    return file.getvalue()


def assert_readable_from_anywhere(path, texts) -> None:
    records = open_records(path, RecordFormat())
    positions = [0, *(position for position, _ in records.texts())]
    assert len(positions) == len(texts) + 1
    for first in (0, 1, 5, 3, len(texts)):  # forward in an open file, and back
        found = [text for _, text in islice(records.texts(positions[first]), 4)]
        assert found == texts[first : first + 4]
    records.close()


@pytest.mark.parametrize("suffix", PACK)
def test_a_text_file_has_a_text_per_line(tmp_path, suffix):
    path = tmp_path / f"news.en{suffix}"
    lines = [line for line in (*TEXTS, *ODD) if line is not None and not {*"\r\n"} & {*line}]
    path.write_bytes(PACK[suffix]("\r\n".join(lines).encode()))
    assert_readable_from_anywhere(path, lines)
    upper_lines = "".join(f"{line.upper()}\n" for line in lines)
    assert UNPACK[suffix](written(path)).decode() == upper_lines
    assert written(path) == written(path)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("scores", [False, True])
def test_json_lines_keep_their_bytes_and_gain_fields(tmp_path, suffix, scores):
    rows = [{"id": i, "text": text, "é": [1.10, {}]} for i, text in enumerate(TEXTS)]
    lines = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(rows)]
    lines[3] = '\t{"x": 1.10, "big": 12345678901234567890, "text" : "é"  }  '
    lines.insert(5, " ")
    path = tmp_path / f"news.jsonl{suffix}"
    path.write_bytes(PACK[suffix]("\n".join(lines).encode()))
    texts = [*TEXTS[:3], "é", TEXTS[4], None, *TEXTS[5:]]
    assert_readable_from_anywhere(path, [*texts])
    found = UNPACK[suffix](written(path, scores=scores)).decode().split("\n")
    assert found.pop() == ""
    for line, new, text in zip(lines, found, texts, strict=True):
        if not line.strip():
            assert new == ""
            continue
        assert new.startswith(line.rstrip()[:-1].rstrip())
        value = json.loads(new)
        assert value.pop("translation") == (None if text is None else "\n".join(upper(text)))
        if scores:
            lengths = [len(part) + 0.5 for part in lines_of(text) if part]
            expected = sum(lengths) / len(lengths) if lengths else 0.0
            assert value.pop("translation_score") == (None if text is None else expected)
        assert value == json.loads(line)


@pytest.mark.parametrize("scores", [False, True])
def test_parquet_keeps_its_columns_and_gains_some(tmp_path, scores, monkeypatch):
    monkeypatch.setattr("writehead.data.records.BATCH_ROWS", 3)
    monkeypatch.setattr("writehead.data.records.GROUP_ROWS", 7)
    table = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS, "n": [[1]] * len(TEXTS)})
    table = table.replace_schema_metadata({"made": "here"})
    path = tmp_path / "news.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=4)
    assert_readable_from_anywhere(path, TEXTS)
    found = pyarrow.parquet.read_table(io.BytesIO(written(path, scores=scores)))
    translations = [None if text is None else "\n".join(upper(text)) for text in TEXTS]
    assert found["translation"].to_pylist() == translations
    assert found.schema.metadata[b"made"] == b"here"
    names = ["translation", "translation_score"][: 1 + scores]
    assert found.drop_columns(names).equals(table)
    if scores:
        assert found["translation_score"].to_pylist()[:9] == [len(text) + 0.5 for text in TEXTS[:9]]


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_all_parquet_types_of_text_are_translated(tmp_path, kind):
    path = tmp_path / "news.parquet"
    column = pyarrow.array(TEXTS, "string" if kind == "dictionary" else kind)
    column = column.dictionary_encode() if kind == "dictionary" else column
    table = pyarrow.Table.from_arrays([column, column, column], ["n", "text", "n"])
    pyarrow.parquet.write_table(table, path)
    assert_readable_from_anywhere(path, TEXTS)
    found = pyarrow.parquet.ParquetFile(io.BytesIO(written(path))).read()
    assert found.column_names == ["n", "text", "n", "translation"]
    assert found["text"].to_pylist() == TEXTS


BAD_COLUMNS = {
    "must be of type string, not list": pyarrow.array([["a"]]),
    "must be of type string, not struct": pyarrow.array([{"a": "b"}]),
    "must be of type string, not map": pyarrow.array(
        [[("a", "b")]], pyarrow.map_("string", "string")
    ),
    "has several columns 'text'": pyarrow.array(["a"]),
}


@pytest.mark.parametrize("words", BAD_COLUMNS)
def test_other_parquet_columns_are_refused(tmp_path, words):
    path, column = tmp_path / "a.parquet", BAD_COLUMNS[words]
    columns = [column] * (2 if "several" in words else 1)
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, ["text"] * len(columns)), path)
    with pytest.raises(DataError, match=words):
        list(open_records(path, RecordFormat()).texts())


def test_an_empty_parquet_file_gains_columns_too(tmp_path):
    path = tmp_path / "news.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), path)
    found = pyarrow.parquet.read_table(io.BytesIO(written(path)))
    assert (found.column_names, len(found)) == (["text", "translation"], 0)


JSON = {
    "[1]": "must be a JSON object, not list",
    '{"texts": ""}': "has no field 'text', only .*texts.*; choose another field",
    '{"text": 5}': "has 5 as 'text', which is not text",
    '{"text": "a", "translation": ""}': "already has the field 'translation'",
    '{"text": "a"': "is not JSON",
    "nonsense": "is not JSON",
    '{"text": "a", "n": NaN}': "",
    '{"text": "\\ud800"}': "half of a character",
    "[" * 100_000: "nested",
    '{"text": "a", "n": ' + "9" * 99 + "}": "number of 99 digits",
}


@pytest.mark.parametrize("line", JSON)
def test_bad_json_is_an_error_that_names_the_line(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(DataError, match=f"line 2 of .*a.jsonl .*{JSON[line]}"):
        list(open_records(path, RecordFormat()).texts())


@pytest.mark.parametrize("errors", ["strict", "replace", "skip"])
def test_invalid_utf8_is_handled_as_requested(tmp_path, errors):
    text, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_bytes(b"fine\nsch\xf6n\n")
    rows.write_bytes(b'{"text": "sch\xf6n"}\n{"text": "sch\\udc80n"}\n')
    for path in (text, rows):
        records = open_records(path, RecordFormat(errors=errors))
        if errors == "strict":
            with pytest.raises(DataError, match=r"line [12] of .* is not UTF-8"):
                list(records.texts())
            continue
        found = [found for _, found in records.texts()]
        bad = "sch\ufffdn" if errors == "replace" else ""
        assert found == (["fine", bad] if path == text else [bad, bad])
        assert records.invalid == (1 if path == text else 2)
    if errors == "replace":
        assert b'{"text": "sch\xf6n", "translation": "SCH' in written(rows, errors=errors)


def test_unsupported_files_are_refused(tmp_path):
    for name in ("a.json", "a.csv", "a.tsv.gz", "a.ZIP"):
        with pytest.raises(DataError, match="is not supported; convert it"):
            open_records(tmp_path / name, RecordFormat())
    path = tmp_path / "a.parquet"
    tables = {
        "has no column 'text', only": {"texts": ["a"]},
        "column 'text' .* must be of type string, not int64": {"text": [1]},
        "already has the column 'translation'": {"text": ["a"], "translation": ["b"]},
    }
    for words, columns in tables.items():
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(DataError, match=words):
            list(open_records(path, RecordFormat()).texts())
    for content in (b"", b"PAR1 nonsense PAR1"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not a Parquet file"):
            list(open_records(path, RecordFormat()).texts())
    for name, content in (("cut.gz", gzip.compress(b"a\n" * 999)[:-9]), ("no.xz", b"plain")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            list(open_records(tmp_path / name, RecordFormat()).texts())
