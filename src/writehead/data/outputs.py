"""The texts that an engine returns for a line or a prompt."""

from typing import NamedTuple


class ScoredText(NamedTuple):
    """A decoded text; `Hypothesis` describes the other fields."""

    text: str
    score: float
    log_probability: float
    finished: bool


class Output(NamedTuple):
    """The output for one line: its hypotheses, best first, or its samples."""

    hypotheses: tuple[ScoredText, ...]
    pieces: int = 1  # more if the line was too long for the model, 0 if it was empty

    @property
    def text(self) -> str:
        """The text of the first hypothesis."""
        return self.hypotheses[0].text


EMPTY = Output((ScoredText("", 0.0, 0.0, True),), pieces=0)
