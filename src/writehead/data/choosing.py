"""Which text a user meant: files, a hub dataset, or the embedded corpus; one of them."""

from dataclasses import dataclass
from pathlib import Path

from writehead.data.hub import hub_inputs
from writehead.data.sources import Inputs, embedded, parallel_files, text_files
from writehead.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The options of `writehead prepare` that name text."""

    source: tuple[Path, ...] = ()
    target: tuple[Path, ...] = ()
    dev_source: tuple[Path, ...] = ()
    dev_target: tuple[Path, ...] = ()
    text: tuple[Path, ...] = ()
    dev_text: tuple[Path, ...] = ()
    hub: str | None = None
    pair: str | None = None
    embedded: bool = False
    pairs: int = 0
    max_words: int | None = None

    def inputs(self) -> Inputs:
        """The one kind of text that was named; none, or several, is an error."""
        named = {
            "--source and --target": bool(self.source or self.target),
            "--text": bool(self.text),
            "--hub": self.hub is not None,
            "--embedded": self.embedded,
        }
        chosen = [name for name, given in named.items() if given]
        if len(chosen) != 1:
            came = f"both {' and '.join(chosen)}" if chosen else "no text"
            raise DataError(f"{came} given; give one of {', '.join(named)}")
        self._check_company(chosen[0])
        if self.hub is not None:
            return hub_inputs(self.hub, self.pair)
        if self.embedded:
            if self.pairs < 1:
                raise DataError(f"--pairs {self.pairs} must be at least 1")
            return embedded(self.pairs, max_words=self.max_words)
        if self.text:
            return text_files(self.text, self.dev_text)
        return parallel_files(self.source, self.target, self.dev_source, self.dev_target)

    def _check_company(self, chosen: str) -> None:
        """Raises where an option belongs to a kind of text that was not chosen."""
        belongs = {
            "--dev-source and --dev-target": (
                self.dev_source or self.dev_target,
                "--source and --target",
            ),
            "--dev-text": (self.dev_text, "--text"),
            "--pair": (self.pair, "--hub"),
            "--max-words": (self.max_words, "--embedded"),
        }
        for name, (given, kind) in belongs.items():
            if given and kind != chosen:
                raise DataError(f"{name} goes with {kind}, not with {chosen}; leave it out")
