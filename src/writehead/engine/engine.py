"""The `Engine`: decodes lines of text in batches, and yields the outputs in input order."""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from writehead.config import Batching, DecodeConfig
from writehead.data.lines import EXTRA_TOKENS, split_line
from writehead.data.tokenizer import Frame, Tokenizer, Tokens, load_tokenizer
from writehead.engine.scheduler import Request, Scheduler
from writehead.engine.search import Hypothesis, length_penalty
from writehead.engine.stepwise import check_options
from writehead.errors import ConfigError, DataError, RunError
from writehead.interop.pretrained import load_run
from writehead.model import LanguageModel, TranslationModel
from writehead.runs.bundled import bundled_run
from writehead.schema import check_bounds
from writehead.util.devices import find_device, find_dtype
from writehead.util.pipeline import work_ahead, work_behind
from writehead.util.threads import use_threads

log = logging.getLogger(__name__)

BEAM = 4  # default for translation, as in §4.2

BULK_STEPS = 4  # scheduler steps at a time while more lines wait
SORTED_LINES = {"cpu": 256}  # lines to sort by length, to reduce padding; other devices do not sort

Progress = Callable[[float], None]  # takes finished lines; a piece of a long line is a fraction
T = TypeVar("T")
Line = list[Request]  # the requests for one line of text: pieces or samples


class ScoredText(NamedTuple):
    """A decoded text; see `Hypothesis` for the other fields."""

    text: str
    score: float
    log_probability: float
    finished: bool


class Output(NamedTuple):
    """The output for one line: its hypotheses, best first, or its samples."""

    hypotheses: tuple[ScoredText, ...]
    pieces: int = 1  # more if the line was longer than the model's input, 0 if it was empty

    @property
    def text(self) -> str:
        """The text of the first hypothesis."""
        return self.hypotheses[0].text


EMPTY = Output((ScoredText("", 0.0, 0.0, True),), pieces=0)


class Engine:
    """Translates or generates text. The output for a line does not depend on other lines."""

    def __init__(
        self,
        model: TranslationModel | LanguageModel,
        tokenizer: Tokenizer,
        batching: Batching | None = None,
        *,
        graphs: bool = True,
    ) -> None:
        """With `graphs`, decoding on a GPU uses CUDA graphs where possible."""
        config = model.config
        tokenizer.check_fits(config)
        self.model = model
        self.tokenizer = tokenizer
        self.batching = batching or Batching()
        self.scheduler = Scheduler(
            model,
            vocab_size=tokenizer.target.vocab_size,
            eos=config.eos,
            suppressed=tokenizer.suppressed,
            batch_tokens=self.batching.tokens,
            graphs=graphs,
        )

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
        """Loads a run; the default is the bundled model, which translates English to German.

        `run` may also be the folder of a Hugging Face model, or its name on the hub. The default
        dtype is bfloat16 on a GPU and float32 elsewhere. Choosing a `backend` disables CUDA graphs.
        `threads` sets the CPU threads of the process, by default one per core.
        """
        use_threads(threads)
        run, place = bundled_run() if run is None else run, find_device(device)
        if not isinstance(run, str | Path):
            raise ConfigError(f"run must be a path, not {type(run).__name__}")
        loaded = load_run(run, device=place, dtype=find_dtype(dtype, place), backend=backend)
        if loaded.tokenizer is None:
            raise RunError(f"{run} has no tokenizer; save the run with its tokenizer")
        graphs = graphs and backend == "auto"
        return cls(loaded.model, load_tokenizer(loaded.tokenizer), batching, graphs=graphs)

    def translate(
        self,
        lines: Iterable[str],
        options: DecodeConfig | None = None,
        *,
        prefixes: Iterable[str] | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
        progress: Progress | None = None,
        first: int = 0,
    ) -> Iterator[Output]:
        """Translates lines and yields outputs in order; the default is beam search with beam=4.

        `lines` may be infinite. Translation i starts with prefixes[i]; without a max_length, it may
        be 50 tokens longer than its source. Models of several languages need their codes, listed in
        `tokenizer.target_languages`. Lines are numbered from `first`; line i uses seed + i.
        """
        options, frame = self._checked_translating(options, source_lang, target_lang)
        encode = partial(self._encode_lines, options=options, frame=frame)
        done = self._decode(enumerate(_pairs(lines, prefixes), first), encode, progress)
        return work_behind(done, self._translations)

    def generate(
        self,
        prompts: Iterable[str],
        options: DecodeConfig | None = None,
        *,
        samples: int = 1,
        progress: Progress | None = None,
        first: int = 0,
    ) -> Iterator[Output]:
        """Continues prompts, by default by greedy search; yields outputs in order, without prompts.

        Without a max_length, a text ends with eos or at the last position of the model. Prompts are
        numbered from `first`; sample j of prompt i uses seed + i × samples + j.
        """
        options = self._checked_prompting(options, samples)
        encode = partial(self._encode_prompts, options=options, samples=samples)
        done = self._decode(enumerate(_texts(prompts, "prompt"), first), encode, progress)
        return work_behind(done, self._continuations)

    def requests(
        self,
        texts: Iterable[str],
        options: DecodeConfig | None = None,
        *,
        prefixes: Iterable[str] | None = None,
        samples: int = 1,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> list[Line]:
        """Returns the requests with which `translate` or `generate` would decode each text.

        This is for callers that submit requests to `scheduler` and step it themselves, as a server
        does; they pass finished requests to `outputs`.
        """
        if isinstance(self.model, TranslationModel):
            lines = [*enumerate(_pairs(texts, prefixes))]
            return self._encode_lines(
                lines, *self._checked_translating(options, source_lang, target_lang)
            )
        options = self._checked_prompting(options, samples)
        return self._encode_prompts([*enumerate(_texts(texts, "prompt"))], options, samples)

    def outputs(self, lines: Sequence[Line]) -> list[Output]:
        """Returns the output of each text from its finished requests; see `requests`."""
        if isinstance(self.model, TranslationModel):
            return self._translations(lines)
        return self._continuations(lines)

    def streamed_text(self, request: Request) -> "StreamedText":
        """Returns the text of a request that grows with the tokens that it is given."""
        prompt = [] if isinstance(self.model, TranslationModel) else [*request.tokens]
        return StreamedText(self.tokenizer, prompt)

    def stream(self, prompt: str, options: DecodeConfig | None = None) -> Iterator[str]:
        """Yields the text that `generate` would return, piece by piece, in whole characters."""
        return (piece for _, piece in self.stream_all([prompt], options))

    def stream_all(
        self, prompts: Iterable[str], options: DecodeConfig | None = None
    ) -> Iterator[tuple[int, str]]:
        """Streams continuations of several prompts at once; yields (prompt index, piece) pairs."""
        options, texts = self._checked_prompting(options), [*_texts(prompts, "prompt")]
        if options.width > 1:
            raise ConfigError("beam search cannot stream text; use beam=1")
        lines = enumerate(self.tokenizer.encode_all(texts))
        requests = [self._prompt_requests(i, tokens, options, 1)[0] for i, tokens in lines]
        return self._stream(requests)

    def _stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, str]]:
        """Submits requests; yields pieces of their text as tokens are decoded."""
        arrived: deque[tuple[int, list[int]]] = deque()
        texts = [*map(self.streamed_text, requests)]
        for i, request in enumerate(requests):
            request.on_tokens = lambda tokens, i=i: arrived.append((i, tokens))
        self.scheduler.submit(requests)
        try:
            is_done = False
            while not is_done:
                is_done = all(request.is_done for request in requests)
                if not is_done:
                    self.scheduler.step()
                while arrived:
                    i, tokens = arrived.popleft()
                    if piece := texts[i].add(tokens):
                        yield i, piece
            for i, request in enumerate(requests):
                request.result()  # raises the error, if any
                if piece := texts[i].rest():
                    yield i, piece
        finally:
            for request in requests:
                self.scheduler.cancel(request)

    def _decode(
        self,
        texts: Iterator[T],
        encode: Callable[[list[T]], list[Line]],
        progress: Progress | None,
    ) -> Generator[list[Line]]:
        """Yields groups of lines whose requests are done, in the order of the texts.

        Another thread tokenizes the next group of texts while this group is decoded.
        """
        report = progress or (lambda count: None)
        pending: deque[Line] = deque()
        finished: deque[float] = deque()  # for each finished request, its fraction of a line
        waiting = 0  # unfinished requests
        try:
            for lines in work_ahead(texts, encode, self.batching.lines):
                report(sum(not line for line in lines))  # empty lines have no requests
                waiting += self._submit(lines, finished.append)
                pending.extend(lines)
                while waiting > self.batching.lines // 2:
                    self.scheduler.step(BULK_STEPS)
                    waiting -= _drain(finished, report)
                    if done := _take_done(pending):
                        yield done
            while pending:
                if done := _take_done(pending):
                    yield done
                    continue
                self.scheduler.step()
                waiting -= _drain(finished, report)
        finally:
            for request in chain.from_iterable(pending):
                self.scheduler.cancel(request)

    def _submit(self, lines: Sequence[Line], finished: Callable[[float], None]) -> int:
        """Submits requests; returns how many.

        Sorting requests by length reduces padding. Requests are sorted within blocks only, so that
        the first lines are still done first.
        """
        whole = partial(finished, 1.0)
        for line in lines:
            for request in line:
                request.on_done = whole if len(line) == 1 else partial(finished, 1 / len(line))
        requests = [*chain.from_iterable(lines)]
        if size := SORTED_LINES.get(self.model.device.type):
            blocks = (requests[first : first + size] for first in range(0, len(requests), size))
            requests = [one for block in blocks for one in sorted(block, key=_length, reverse=True)]
        self.scheduler.submit(requests)
        return len(requests)

    def _checked(self, options: DecodeConfig | None, beam: int) -> DecodeConfig:
        """Returns the options with the default `beam`; raises if the model does not allow them."""
        options = check_options(DecodeConfig() if options is None else options, beam)
        check_bounds(options, "max_length", "min_length", le=self.model.config.target_positions)
        check_bounds(options, "beam", le=self.tokenizer.target.vocab_size)
        return options

    def _checked_translating(
        self, options: DecodeConfig | None, source_lang: str | None, target_lang: str | None
    ) -> tuple[DecodeConfig, Frame]:
        """Returns the options with their defaults, and the tokens around a source."""
        if not isinstance(self.model, TranslationModel):
            raise ConfigError("a language model cannot translate; use generate")
        frame = self.tokenizer.frame(source_lang, target_lang)
        if self.model.config.source_positions <= len(frame.before) + len(frame.after):
            raise ConfigError(
                f"source_positions={self.model.config.source_positions} has no room for text; use "
                f"a model with more"
            )
        before, after = (np.array(part, np.int32) for part in frame[:2])
        options = _with_forced(self._checked(options, BEAM), len(frame.forced))
        return options, frame._replace(before=before, after=after)  # faster than tuples

    def _checked_prompting(self, options: DecodeConfig | None, samples: int = 1) -> DecodeConfig:
        if not isinstance(self.model, LanguageModel):
            raise ConfigError("a translation model cannot continue prompts; use translate")
        options = self._checked(options, beam=1)
        if samples < 1:
            raise ConfigError(f"samples={samples} must be at least 1")
        if samples > 1 and options.temperature is None:
            raise ConfigError(f"all {samples} samples would be the same; set a temperature")
        return options

    def _encode_lines(
        self, group: list[tuple[int, tuple[str, str]]], options: DecodeConfig, frame: Frame
    ) -> list[Line]:
        encoded = self.tokenizer.encode_all([text for _, (text, _) in group])
        return [
            self._translation_requests(i, text, prefix, tokens, frame, options)
            for (i, (text, prefix)), tokens in zip(group, encoded, strict=True)
        ]

    def _encode_prompts(
        self, group: list[tuple[int, str]], options: DecodeConfig, samples: int
    ) -> list[Line]:
        encoded = self.tokenizer.encode_all([text for _, text in group])
        return [
            self._prompt_requests(i, tokens, options, samples)
            for (i, _), tokens in zip(group, encoded, strict=True)
        ]

    def _translation_requests(
        self,
        line: int,
        text: str,
        prefix: str,
        tokens: NDArray[np.int32],
        frame: Frame,
        options: DecodeConfig,
    ) -> Line:
        """Returns a request per piece of a line; the prefix belongs to the first."""
        limit = self.model.config.source_positions - len(frame.before) - len(frame.after)
        pieces: list[Tokens] = [tokens] if len(tokens) else []
        if len(tokens) > limit:
            split, is_cut = split_line(text, self.tokenizer.encode, limit)
            pieces = [*split]
            rest = ", without the rest of long words and of the line" if is_cut else ""
            log.warning(
                "line %d is longer than the model's limit of %d source tokens; translating %d "
                "pieces%s",
                *(line + 1, limit, len(pieces), rest),
            )
        forced = tuple(self.tokenizer.target.encode(prefix)) if pieces and prefix else ()
        hidden, requests = len(frame.forced), []
        for piece in pieces:
            length = options.max_length or hidden + len(forced) + len(piece) + EXTRA_TOKENS
            length = min(max(length, options.min_length), self.model.config.target_positions)
            if len(forced) > length - hidden:
                raise DataError(
                    f"the prefix of line {line + 1} has {len(forced)} tokens, more than "
                    f"max_length={length - hidden}; shorten it"
                )
            source = np.concatenate((frame.before, piece, frame.after))
            prefix_tokens = (*frame.forced, *forced)
            requests.append(Request(options, length, prefix_tokens, options.seed + line, source))
            forced = ()
        return requests

    def _prompt_requests(
        self, line: int, tokens: Tokens, options: DecodeConfig, samples: int
    ) -> Line:
        """Returns a request per sample of a prompt."""
        positions, least = self.model.config.target_positions, max(1, options.min_length)
        start = self.tokenizer.prompt_start
        tokens = [*start, *map(int, tokens)] or [self.model.config.bos]
        room = positions - len(tokens) + 1  # the last generated token is not fed
        if room < least:
            raise DataError(
                f"prompt {line + 1} has {len(tokens) - len(start)} tokens, but the model has "
                f"positions for {positions - least + 1 - len(start)}; shorten it"
            )
        length, seed = min(options.max_length or room, room), options.seed + line * samples
        return [Request(options, length, (), seed + j, tokens) for j in range(samples)]

    def _continuations(self, lines: Sequence[Line]) -> list[Output]:
        """Returns the samples or hypotheses of each prompt, without the prompt."""
        results = [[one for request in line for one in _hypotheses(request)] for line in lines]
        scored = self._scored(results, [line[0].tokens for line in lines])
        return [Output(tuple(some)) for some in scored]

    def _translations(self, lines: Sequence[Line]) -> list[Output]:
        """Returns the translation of each line."""
        results = [[*map(_hypotheses, line)] for line in lines]
        scored = iter(self._scored([*chain.from_iterable(results)]))
        alpha = next((line[0].config.alpha for line in lines if line), 0.0)  # the same for all
        return [_join_pieces(line, [next(scored) for _ in line], alpha) for line in results]

    def _scored(
        self,
        results: Sequence[Sequence[Hypothesis]],
        prompts: Sequence[Tokens] | None = None,
    ) -> list[list[ScoredText]]:
        """Detokenizes hypotheses; with `prompts`, those of results[i] continue prompts[i]."""
        decode_all, skipped = self.tokenizer.decode_all, [0] * len(results)
        tokens = [one.tokens for some in results for one in some]
        if prompts is not None:
            skipped = [len(text) for text in decode_all(prompts)]
            pairs = zip(prompts, results, strict=True)
            tokens = [(*prompt, *one.tokens) for prompt, some in pairs for one in some]
        texts = iter(decode_all(tokens))
        return [
            [ScoredText(next(texts)[skip:], *one[1:]) for one in some]
            for some, skip in zip(results, skipped, strict=True)
        ]


def _with_forced(options: DecodeConfig, count: int) -> DecodeConfig:
    """Returns the options of a search whose limits also count `count` forced tokens."""
    most, least = options.max_length, options.min_length
    return dataclasses.replace(
        options, max_length=most and most + count, min_length=least and least + count
    )


class StreamedText:
    """The text of a growing sequence of tokens, without the prompt that it continues."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._tokens = tokenizer, list(prompt)
        self._length = len(tokenizer.decode(prompt))  # characters of the prompt, and returned

    def add(self, tokens: Sequence[int]) -> str:
        """Appends tokens; returns the new text that later tokens cannot change."""
        self._tokens += tokens
        end = len(self._tokens)
        while end and self._tokens[end - 1] in self._tokenizer.unsettled:
            end -= 1
        # the bytes of an incomplete character are decoded as replacement characters
        text = self._tokenizer.decode(self._tokens[:end])
        return self._next(text.rstrip("\N{REPLACEMENT CHARACTER}"))

    def rest(self) -> str:
        """Returns the remaining text after the last token."""
        return self._next(self._tokenizer.decode(self._tokens))

    def _next(self, text: str) -> str:
        piece, self._length = text[self._length :], max(self._length, len(text))
        return piece


def _join_pieces(
    pieces: Sequence[Sequence[Hypothesis]], texts: Sequence[Sequence[ScoredText]], alpha: float
) -> Output:
    """Joins the hypotheses of a line's pieces by rank: best with best, and so on."""
    if not pieces:
        return EMPTY
    if len(pieces) == 1:
        return Output(tuple(texts[0]))
    joined = []
    # a piece may have fewer hypotheses than another
    for row, parts in zip(zip(*pieces, strict=False), zip(*texts, strict=False), strict=True):
        total = sum(piece.log_probability for piece in row)
        length = sum(len(piece.tokens) + piece.finished for piece in row)
        text = " ".join(part.text for part in parts if part.text)
        score = total / float(length_penalty(length, alpha))
        joined.append(ScoredText(text, score, total, all(piece.finished for piece in row)))
    joined.sort(key=lambda scored: scored.score, reverse=True)
    return Output(tuple(joined), len(pieces))


def _hypotheses(request: Request) -> Sequence[Hypothesis]:
    """Returns the hypotheses of a request; raises its error, if any."""
    if request.error is not None:
        raise request.error
    return request.hypotheses


def _drain(finished: deque[float], report: Progress) -> int:
    """Reports the lines of finished requests; returns the number of requests."""
    count = 0
    while finished:  # other threads may add more meanwhile
        report(finished.popleft())
        count += 1
    return count


def _take_done(pending: deque[Line]) -> list[Line]:
    """Removes and returns the leading lines that are done; a line that failed comes alone."""
    done: list[Line] = []
    while pending and all(request.is_done for request in pending[0]):
        failed = any(request.error for request in pending[0])
        if failed and done:
            break
        done.append(pending.popleft())
        if failed:
            break
    return done


def _length(request: Request) -> tuple[int, int]:
    return len(request.tokens), request.max_length


def _texts(texts: Iterable[str], kind: str) -> Iterator[str]:
    """Yields the texts; raises DataError if one is not a str or cannot be encoded as UTF-8."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise DataError(f"pass a list of texts, not {type(texts).__name__}")
    return (_text(text, kind, i) for i, text in enumerate(texts, start=1))


def _text(text: str, kind: str, i: int) -> str:
    if not isinstance(text, str):
        raise DataError(f"{kind} {i} must be a str, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        place = error.start + 1
        raise DataError(f"{kind} {i} is not UTF-8 (character {place}); convert it") from error
    return text


def _pairs(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    """Yields each line with its prefix, by default an empty one; checks both."""
    checked = None if prefixes is None else _texts(prefixes, "prefix")
    return _paired(_texts(lines, "line"), checked)


def _paired(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    if prefixes is None:
        yield from ((line, "") for line in lines)
        return
    for i, (line, prefix) in enumerate(zip_longest(lines, prefixes), start=1):
        if line is None or prefix is None:
            raise DataError(f"line {i} or its prefix is missing; pass one prefix per line")
        yield line, prefix
