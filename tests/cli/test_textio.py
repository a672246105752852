"""Lines from a pipe: in order, in bounded groups, as they arrive."""

import io
import os
import threading
from itertools import chain, islice

import pytest

from writehead.cli import textio
from writehead.cli.textio import LineReader


@pytest.fixture
def pipe(tmp_path):
    """Returns a function that writes parts to a pipe, and the path to read it from."""
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write(*parts: bytes) -> str:
        def work() -> None:
            with path.open("wb", buffering=0) as file:
                for part in parts:
                    file.write(part)

        threading.Thread(target=work, daemon=True).start()
        return str(path)

    return write


def test_parts_of_lines_are_joined_in_order_and_groups_are_bounded(pipe, monkeypatch):
    monkeypatch.setattr(textio, "GROUP_BYTES", 300_000)
    for parts, lines in (
        ([], []),
        ([b"a\n"], ["a"]),
        ([b"a", b"b\nc\n\nd", b"\r\ne"], ["ab", "c", "", "d", "e"]),
        ([b"x" * 200_000, b"y\n" * 9], ["x" * 200_000 + "y", *["y"] * 8]),
        ([b"x" * 200_000 + b"\n"] * 9, ["x" * 200_000] * 9),
    ):
        groups = list(LineReader(pipe(*parts)).groups(3))
        assert [line for group in groups for line in group] == lines
        assert all(1 <= len(group) <= 3 for group in groups)
        assert all(sum(map(len, group)) <= 400_001 for group in groups)


def test_groups_are_decoded_without_waiting_for_the_end_of_each():
    read, written = [], io.BytesIO()

    def answer(lines, first, progress):
        ahead = islice(lines, 5)  # more than a group
        for source in chain(list(ahead), lines):
            read.append(source[0])
            yield f"{first}{source[0]}\n"

    groups = ([(name, "") for name in group] for group in ("ab", "cd", "efg"))
    output = textio.Stream(written)
    textio.decode_lines(groups, answer, output, "-", typed=False, shown=False, continuous=True)
    assert written.getvalue().decode().split() == [f"0{name}" for name in "abcdefg"]
    assert (read, output.done) == ([*"abcdefg"], 7)


@pytest.mark.parametrize(("keeps", "expected"), [(True, "a b  "), (False, "a b")])
def test_an_echoed_prompt_ends_as_its_tokenizer_keeps_it(keeps, expected):
    class Words:
        def encode(self, text):
            return text if keeps else text.split()

        def decode(self, tokens):
            return tokens if keeps else " ".join(tokens)

    assert textio.echo(Words(), "a b  ") == expected
