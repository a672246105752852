"""Reads and writes files of texts as streams: plain lines, JSON Lines or Parquet.

A translated file has the format of its source. A text file has one translation per line; JSON Lines
and Parquet files keep their fields and get new ones. A text with several lines is translated line
by line.
"""

import bz2
import gzip
import json
import lzma
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from writehead.data.lines import decode_line
from writehead.data.parquet import is_text, parquet_file
from writehead.data.sources import OPENERS, LineFile
from writehead.errors import DataError, shown
from writehead.util.extras import requires
from writehead.util.json_files import JsonError, parse_json

JSON_LINES = (".jsonl", ".ndjson")
# text files may have any suffix, such as .en, except these
UNSUPPORTED = {".json", ".csv", ".tsv", ".zip", ".zst", ".tar", ".tgz", ".7z", ".arrow", ".feather"}
BATCH_ROWS = 1024  # rows of a Parquet file to read at once
GROUP_BYTES, GROUP_ROWS = 64 << 20, 1 << 17  # maximum size of a row group that is written

SURROGATES = re.compile("[\ud800-\udfff]")  # code points that UTF-8 cannot encode

Text = str | None  # None: there is nothing to translate
TranslateText = Callable[[Text], list[str]]  # returns one line of output per line of the text


@dataclass(frozen=True)
class RecordFormat:
    """How to read and write files: names of fields, scores, and how to treat invalid UTF-8.

    With `scores`, a line of output is a translation, a tab and its score.
    """

    field: str = "text"
    output_field: str = "translation"
    scores: bool = False
    errors: str = "strict"

    @property
    def score_field(self) -> str:
        """The field with the score."""
        return f"{self.output_field}_score"

    @property
    def new_fields(self) -> list[str]:
        """The fields that are added."""
        return [self.output_field, self.score_field][: 1 + self.scores]

    def values(self, text: Text, lines: Sequence[str]) -> tuple[Any, ...]:
        """Returns the values of the new fields; the score of a text is the mean over its lines."""
        if text is None:
            return (None,) * len(self.new_fields)
        if not self.scores:
            return ("\n".join(lines),)
        pairs = [line.rsplit("\t", 1) for line in lines]
        scores = [float(score) for translation, score in pairs if translation] or [0.0]
        return "\n".join(translation for translation, _ in pairs), math.fsum(scores) / len(scores)


def lines_of(text: Text) -> list[str]:
    """Returns the lines of a text, which are translated one by one."""
    return [] if text is None else [line.removesuffix("\r") for line in text.split("\n")]


class TextRecords:
    """A text file with one text per line, plain or compressed."""

    def __init__(self, path: Path, format: RecordFormat) -> None:
        self.path, self.format = path, format
        self.invalid = 0  # number of texts that were not UTF-8
        self._file = LineFile(path)

    def texts(self, start: int = 0) -> Iterator[tuple[int, Text]]:
        """Yields each text, starting at a position, together with the position after it."""
        for position, _, text in self._records(start):
            yield position, text

    def write(self, file: BinaryIO, translate: TranslateText) -> None:
        """Writes the file with translations, compressed like the source."""
        with compressed(file, self.path.suffix) as output:
            for _, raw, text in self._records(0):
                output.write(self._line(raw, text, translate(text)))

    def close(self) -> None:
        """Closes the file; it can be read again."""
        self._file.close()

    def _records(self, start: int) -> Iterator[tuple[int, bytes, Text]]:
        position = start
        for number, raw in enumerate(self._file.lines(start), start=1):
            position += len(raw)
            try:
                yield position, raw, self._text(raw)
            except ValueError as error:
                raise DataError(f"line {number:,} of {self.path} {_problem(error)}") from error

    def _text(self, raw: bytes) -> Text:
        """Returns the text of a line; raises ValueError if the line is invalid."""
        try:
            return decode_line(raw)
        except UnicodeDecodeError:
            text = decode_line(raw, self.format.errors)
            self.invalid += 1
            return text

    def _line(self, raw: bytes, text: Text, lines: Sequence[str]) -> bytes:
        """Returns a line of output."""
        return f"{lines[0]}\n".encode()


class JsonRecords(TextRecords):
    """A JSON Lines file; blank lines are kept."""

    def _text(self, raw: bytes) -> Text:
        if not raw.strip():
            return None
        try:
            text = self._field(raw.decode())
            if text is not None:
                text.encode()
        except UnicodeError:
            if self.format.errors == "strict":
                raise
            self.invalid += 1
            text = self._field(raw.decode("utf-8", "replace"))
            return SURROGATES.sub("\ufffd", text or "") * (self.format.errors == "replace")
        return text

    def _field(self, line: str) -> Text:
        """Returns the text of a JSON object; raises JsonError if it cannot be translated."""
        record, field = parse_json(line), self.format.field
        if not isinstance(record, dict):
            raise JsonError(f"must be a JSON object, not {type(record).__name__}; correct it")
        if field not in record:
            raise JsonError(
                f"has no field {shown(field)}, only {shown([*record])}; choose another field"
            )
        for name in self.format.new_fields:
            if name in record:
                raise JsonError(f"already has the field {shown(name)}; choose another name")
        text = record[field]
        if not isinstance(text, str | None):
            raise JsonError(f"has {shown(text)} as {shown(field)}, which is not text; correct it")
        return text

    def _line(self, raw: bytes, text: Text, lines: Sequence[str]) -> bytes:
        """Appends fields to a JSON object; all other bytes stay the same."""
        body = raw.rstrip()
        if not body:
            return b"\n"
        values = self.format.values(text, lines)
        pairs = zip(self.format.new_fields, values, strict=True)
        added = json.dumps(dict(pairs), ensure_ascii=False)
        return b"%s, %s\n" % (body[:-1].rstrip(), added[1:].encode())


class ParquetRecords:
    """A Parquet file with a column of texts; positions are row numbers."""

    def __init__(self, path: Path, format: RecordFormat) -> None:
        self.path, self.format, self.invalid = path, format, 0

    def texts(self, start: int = 0) -> Iterator[tuple[int, Text]]:
        """Yields each text, starting at a row, together with the number of the row after it."""
        for first, batch in self._batches(start, [self.format.field]):
            texts = batch.column(0).to_pylist()
            yield from enumerate(texts[max(0, start - first) :], start=max(first, start) + 1)

    def write(self, file: BinaryIO, translate: TranslateText) -> None:
        """Writes the file with a new column, or two with scores."""
        with requires("hub"):
            import pyarrow  # type: ignore[import-untyped]
            from pyarrow.parquet import ParquetWriter  # type: ignore[import-untyped]
        with parquet_file(self.path) as source:
            schema = source.schema_arrow
        kinds = (pyarrow.string(), pyarrow.float64())
        new = [*map(pyarrow.field, self.format.new_fields, kinds)]
        schema = pyarrow.schema([*schema, *new], schema.metadata)
        with ParquetWriter(file, schema, compression="zstd") as writer:
            for group in _grouped(batch for _, batch in self._batches(0)):
                table = pyarrow.Table.from_batches(group)
                texts = table.column(self.format.field).to_pylist()
                rows = [self.format.values(text, translate(text)) for text in texts]
                for field, column in zip(new, zip(*rows, strict=True), strict=True):
                    table = table.append_column(field, pyarrow.array(column, field.type))
                writer.write_table(table)

    def close(self) -> None:
        """Does nothing, because the file is not kept open."""

    def _batches(self, start: int, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
        """Yields the first row and the rows of each batch; skips row groups before `start`."""
        with parquet_file(self.path) as file:
            self._check(file.schema_arrow)
            first = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if first + rows <= start:
                    first += rows
                    continue
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
                    if first + len(batch) > start:
                        yield first, batch
                    first += len(batch)

    def _check(self, schema: Any) -> None:
        """Raises DataError if the column of texts is missing, or a new column already exists."""
        kinds = {column.name: column.type for column in schema}
        field = self.format.field
        if field not in kinds:
            raise DataError(
                f"{self.path} has no column {shown(field)}, only {shown([*kinds])}; choose another "
                f"column"
            )
        if schema.names.count(field) > 1:
            raise DataError(
                f"{self.path} has several columns {shown(field)}; rename all but one of them"
            )
        if not is_text(kinds[field]):
            raise DataError(
                f"column {shown(field)} of {self.path} must be of type string, not "
                f"{kinds[field]}; choose another column"
            )
        for name in self.format.new_fields:
            if name in kinds:
                raise DataError(
                    f"{self.path} already has the column {shown(name)}; choose another name"
                )


Records = TextRecords | ParquetRecords


def open_records(path: Path, format: RecordFormat) -> Records:
    """Opens the records of a file; the suffix of its name determines the format."""
    kind = (path.with_suffix("") if path.suffix in OPENERS else path).suffix.lower()
    if kind in UNSUPPORTED:
        raise DataError(
            f"the format of {path} is not supported; convert it to text or .jsonl (plain or as "
            f".gz, .xz or .bz2), or to .parquet"
        )
    if path.suffix.lower() == ".parquet":
        return ParquetRecords(path, format)
    return (JsonRecords if kind in JSON_LINES else TextRecords)(path, format)


def compressed(file: BinaryIO, suffix: str) -> AbstractContextManager[Any]:
    """Wraps a file to compress what is written, by suffix; equal content gives equal bytes."""
    if suffix == ".gz":
        return gzip.GzipFile("", "wb", 6, file, mtime=0)
    if suffix == ".xz":
        return lzma.LZMAFile(file, "wb", preset=2)  # the default takes three times as long
    if suffix == ".bz2":
        return bz2.BZ2File(file, "wb")
    return nullcontext(file)


def _problem(error: ValueError) -> str:
    """Returns what is wrong with a line, as the end of a sentence."""
    if isinstance(error, JsonError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 (at byte {error.start + 1}); convert it, or replace or skip errors"
    if isinstance(error, UnicodeEncodeError):
        return "has half of a character (a surrogate); correct it, or replace or skip errors"
    return f"is not JSON ({error}); correct it"


def _grouped(batches: Iterator[Any]) -> Iterator[list[Any]]:
    """Groups batches into lists of about GROUP_BYTES or GROUP_ROWS."""
    group: list[Any] = []
    size = rows = 0
    for batch in batches:
        group.append(batch)
        size, rows = size + batch.nbytes, rows + len(batch)
        if size >= GROUP_BYTES or rows >= GROUP_ROWS:
            yield group
            group, size, rows = [], 0, 0
    if group:
        yield group
