"""Text in, text out: a model and its tokenizer, fed in batches, answering in the order asked."""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from writehead.config import DecodeConfig
from writehead.data.tokenizer import EOS, Tokenizer
from writehead.decoding.batching import (
    EXTRA_TOKENS,
    LINE_TOKENS,
    WORD_CHARACTERS,
    Batching,
    Job,
    split_line,
)
from writehead.decoding.search import Hypothesis, check_options, length_penalty, stream
from writehead.decoding.worker import Progress, Worker
from writehead.errors import ConfigError, DataError, RunError
from writehead.model import LanguageModel, TranslationModel, load_run
from writehead.model.bundled import bundled_run
from writehead.util.devices import find_device, find_dtype
from writehead.util.threads import use_threads

log = logging.getLogger(__name__)

BEAM = 4  # default for translation, as in §4.2


@dataclass(frozen=True)
class ScoredText:
    """One answer; its numbers are those of its `Hypothesis`."""

    text: str
    score: float
    log_probability: float
    finished: bool


@dataclass(frozen=True)
class Output:
    """What became of one line: its hypotheses best first, or its samples as they were drawn.

    `pieces` is how many parts the line was translated in: more than one where it was longer than
    the model can read, none where it was empty.
    """

    hypotheses: tuple[ScoredText, ...]
    pieces: int = 1

    @property
    def text(self) -> str:
        """The first of the texts."""
        return self.hypotheses[0].text


NOTHING = Output((ScoredText("", 0.0, 0.0, True),), pieces=0)


class Engine:
    """A model that speaks text. What becomes of a line does not depend on the lines around it."""

    def __init__(
        self,
        model: TranslationModel | LanguageModel,
        tokenizer: Tokenizer,
        batching: Batching | None = None,
        *,
        graphs: bool = True,
    ) -> None:
        """`graphs` lets a GPU decode by captured steps, where it can; without, step by step."""
        _check_partners(model, tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        batching = batching or Batching()
        self._worker = Worker(model, tokenizer.vocab_size, batching, graphs=graphs)

    @classmethod
    def load(
        cls,
        run: Path | str | None = None,
        device: torch.device | str = "auto",
        dtype: torch.dtype | str | None = None,
        backend: str = "auto",
        batching: Batching | None = None,
        *,
        graphs: bool = True,
        threads: int | None = None,
    ) -> "Engine":
        """The engine of a run's folder: on a GPU in bfloat16 where there is one, else float32.

        Without a run, loads the bundled model, which translates English to German. A `backend`
        applies to uncaptured steps only, so naming one turns captured graphs off. `threads` sets
        the CPU threads of the whole process, by default one per available core.
        """
        use_threads(threads)
        if run is None:
            try:
                return cls.load(
                    bundled_run(), device, dtype, backend, batching, graphs=graphs, threads=threads
                )
            except (RunError, DataError) as error:
                raise RunError(f"the bundled model: {error}; or install writehead again") from error
        if not isinstance(run, str | Path):
            raise ConfigError(f"run must be a path, not {type(run).__name__}")
        graphs = graphs and backend == "auto"
        place = find_device(device)
        loaded = load_run(run, device=place, dtype=find_dtype(dtype, place), backend=backend)
        if loaded.tokenizer is None:
            raise RunError(
                f"{run} has no tokenizer.model, so it knows no text; save it with its tokenizer"
            )
        return cls(loaded.model, Tokenizer.load(loaded.tokenizer), batching, graphs=graphs)

    def translate(
        self,
        lines: Iterable[str],
        options: DecodeConfig | None = None,
        *,
        prefixes: Iterable[str] | None = None,
        progress: Progress | None = None,
        first: int = 0,
    ) -> Iterator[Output]:
        """Translates each line, in order, by beam search with 4 beams unless `options` set another.

        `lines` may be infinite: they are read one window at a time. Each translation starts with
        its prefix in `prefixes`. Without a max_length, a translation may have 50 tokens more than
        its source. Line i is sampled with seed + i; `first` is the index of the first line.
        """
        if not isinstance(self.model, TranslationModel):
            raise ConfigError("a language model does not translate; ask it to generate")
        if self.model.config.source_positions < 2:
            raise ConfigError("a model of one source position can read no text; train with more")
        options = self._checked(options, BEAM)
        begun = None if prefixes is None else _texts(prefixes, "prefix")
        pairs = _paired(_texts(lines, "line"), begun)
        jobs = (
            self._translation_jobs(i, line, prefix, options)
            for i, (line, prefix) in enumerate(pairs, first)
        )
        return (
            self._translated(found, options.alpha)
            for _, found in self._worker.work(jobs, options, progress)
        )

    def generate(
        self,
        prompts: Iterable[str],
        options: DecodeConfig | None = None,
        *,
        samples: int = 1,
        progress: Progress | None = None,
        first: int = 0,
    ) -> Iterator[Output]:
        """How each prompt goes on, in order and without the prompt itself; greedy unless told.

        Without a max_length, a text goes on until it ends or the model's positions do. Sample j
        of prompt i uses seed + i × samples + j; `first` is the index of the first prompt.
        """
        options, texts = self._checked_prompting(options), _texts(prompts, "prompt")
        if samples < 1:
            raise ConfigError(f"samples={samples} must be at least 1")
        if samples > 1 and options.temperature is None:
            raise ConfigError(f"{samples} samples would all be alike; set a temperature")
        jobs = (self._prompt_jobs(i, one, options, samples) for i, one in enumerate(texts, first))
        work = self._worker.work(jobs, options, progress)
        return (
            Output(tuple(self._scored(one, line[0].tokens[1:]) for row in found for one in row))
            for line, found in work
        )

    def stream(self, prompt: str, options: DecodeConfig | None = None) -> Iterator[str]:
        """The text that `generate` would answer with, in pieces as they come.

        A character of several byte tokens comes whole.
        """
        options, [prompt] = self._checked_prompting(options), _texts([prompt], "prompt")
        if options.width > 1:
            raise ConfigError("a beam knows its text only at the end; stream with beam=1")
        [job] = self._prompt_jobs(0, prompt, options, samples=1)
        config = dataclasses.replace(options, max_length=job.max_length)
        tokens = stream(self._worker.step, self._worker.start([job], beam=1), config, eos=EOS)
        return self._pieces(job.tokens[1:], tokens)

    def _pieces(self, prompt: list[int], tokens: Iterator[int]) -> Iterator[str]:
        """What each token adds to the text, once later tokens cannot change it."""
        seen = list(prompt)
        said = len(self.tokenizer.decode(seen))
        for token in tokens:
            seen.append(token)
            # bytes that may yet become a character read as this one until they do
            text = self.tokenizer.decode(seen).rstrip("\N{REPLACEMENT CHARACTER}")
            if len(text) > said:
                yield text[said:]
                said = len(text)
        if rest := self.tokenizer.decode(seen)[said:]:
            yield rest

    def _checked(self, options: DecodeConfig | None, beam: int) -> DecodeConfig:
        """Returns the options with the default `beam`; raises if the model does not allow them."""
        options = check_options(DecodeConfig() if options is None else options, beam)
        if options.width > self.tokenizer.vocab_size:
            raise ConfigError(
                f"beam={options.width} is past the {self.tokenizer.vocab_size} tokens of the "
                f"vocabulary, of which a beam has one each at first; ask for fewer"
            )
        positions = self.model.config.target_positions
        for name in ("max_length", "min_length"):
            if (getattr(options, name) or 0) > positions:
                raise ConfigError(
                    f"{name}={getattr(options, name)} is past the model's {positions} positions; "
                    f"ask for at most that"
                )
        return options

    def _checked_prompting(self, options: DecodeConfig | None) -> DecodeConfig:
        if not isinstance(self.model, LanguageModel):
            raise ConfigError("a translation model continues no prompts; ask it to translate")
        return self._checked(options, beam=1)

    def _translation_jobs(
        self, line: int, text: str, prefix: str, options: DecodeConfig
    ) -> list[Job]:
        """A job for each piece of a line; the forced prefix begins the first."""
        limit = self.model.config.source_positions - 1  # the end token takes one
        pieces, shortened = split_line(text, self.tokenizer.encode, limit)
        if shortened:
            log.warning(
                "line %d is shortened to words of at most %d characters and %d tokens in total; "
                "it is translated in %d pieces",
                line + 1,
                WORD_CHARACTERS,
                max(limit, LINE_TOKENS),
                len(pieces),
            )
        elif len(pieces) > 1:
            log.warning(
                "line %d is longer than the %d tokens that the model reads; it is translated in "
                "%d pieces",
                line + 1,
                limit,
                len(pieces),
            )
        forced = tuple(self.tokenizer.encode(prefix)) if pieces else ()
        jobs = []
        for tokens in pieces:
            length = options.max_length or len(forced) + len(tokens) + EXTRA_TOKENS
            length = min(max(length, options.min_length), self.model.config.target_positions)
            if len(forced) > length:
                raise DataError(
                    f"the prefix of line {line + 1} has {len(forced)} tokens and its translation "
                    f"may have {length}; shorten it"
                )
            jobs.append(
                Job([*tokens, EOS], length, options.seed + line, forced, share=1 / len(pieces))
            )
            forced = ()
        return jobs

    def _prompt_jobs(
        self, line: int, prompt: str, options: DecodeConfig, samples: int
    ) -> list[Job]:
        """A job for each sample of a prompt."""
        positions, least = self.model.config.target_positions, max(1, options.min_length)
        tokens = [self.model.config.bos, *self.tokenizer.encode(prompt)]
        room = positions - len(tokens) + 1  # the last token found is not fed
        if room < least:
            raise DataError(
                f"prompt {line + 1} has {len(tokens) - 1} tokens, and the model's {positions} "
                f"positions leave room for {positions - least}; shorten it"
            )
        length = min(options.max_length or room, room)
        return [
            Job(tokens, length, options.seed + line * samples + j, share=1 / samples)
            for j in range(samples)
        ]

    def _scored(self, found: Hypothesis, prompt: Sequence[int] = ()) -> ScoredText:
        """A hypothesis as text, as it reads after the prompt."""
        said = len(self.tokenizer.decode(prompt))
        text = self.tokenizer.decode([*prompt, *found.tokens])[said:]
        return ScoredText(text, found.score, found.log_probability, found.finished)

    def _translated(self, pieces: list[list[Hypothesis]], alpha: float) -> Output:
        """The output of a line from its pieces' hypotheses: the best with the best, and so on."""
        if not pieces:
            return NOTHING
        if len(pieces) == 1:
            return Output(tuple(self._scored(one) for one in pieces[0]))
        joined = []
        for rank in range(max(map(len, pieces))):
            parts = [piece[min(rank, len(piece) - 1)] for piece in pieces]
            texts = [self._scored(part).text for part in parts]
            total = sum(part.log_probability for part in parts)
            length = sum(len(part.tokens) + part.finished for part in parts)
            joined.append(
                ScoredText(
                    " ".join(text for text in texts if text),
                    total / float(length_penalty(length, alpha)),
                    total,
                    all(part.finished for part in parts),
                )
            )
        joined.sort(key=lambda one: one.score, reverse=True)
        return Output(tuple(joined), len(pieces))


def _check_partners(model: TranslationModel | LanguageModel, tokenizer: Tokenizer) -> None:
    """Raises where a tokenizer cannot be the model's."""
    config = model.config
    if tokenizer.vocab_size > config.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {config.vocab_size}; "
            f"use the tokenizer that the model was trained with"
        )
    if config.eos != EOS:
        raise DataError(
            f"the model ends with token {config.eos} and the tokenizer with {EOS}; use the "
            f"tokenizer that the model was trained with"
        )


def _texts(given: Iterable[str], what: str) -> Iterator[str]:
    """The texts of a list or the like, each checked to be one when it is read."""
    if isinstance(given, str | bytes):
        raise DataError("one text came where a list of texts is read; put it in a list")
    if not isinstance(given, Iterable):
        raise DataError(f"{type(given).__name__} came where a list of texts is read; give a list")
    return (_text(one, f"{what} {i + 1}") for i, one in enumerate(given))


def _text(given: str, what: str) -> str:
    """What is given, if it is text that can be written as UTF-8."""
    if not isinstance(given, str):
        raise DataError(f"{what} is {type(given).__name__}, not text; give it as a str")
    try:
        given.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} is not UTF-8 (its character {error.start + 1}); convert it"
        ) from error
    return given


def _paired(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    """Each line with its prefix, which is empty where none are given."""
    if prefixes is None:
        yield from ((line, "") for line in lines)
        return
    for i, (line, prefix) in enumerate(zip_longest(lines, prefixes)):
        if line is None or prefix is None:
            lacking = "line" if line is None else "prefix"
            raise DataError(f"there is no {lacking} {i + 1}; give one prefix for each line")
        yield line, prefix
