"""The `Engine`: decodes lines of text in batches, and yields the outputs in input order."""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from writehead.config import Batching, DecodeConfig, check_options
from writehead.data.continuations import StreamedText, decode_groups
from writehead.data.lines import EXTRA_TOKENS, checked_texts, encoded_pieces, paired_texts
from writehead.data.outputs import EMPTY, Output, ScoredText
from writehead.data.tokenizer import Frame, Tokenizer, Tokens, load_tokenizer
from writehead.engine.scheduler import Request, Scheduler
from writehead.engine.search import Hypothesis, Targets, length_penalty
from writehead.errors import ConfigError, DataError, RunError, nearest, shown
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
QUANTIZE = ("auto", "int8", "none")
SORTED_LINES = {"cpu": 256}  # lines to sort by length, to reduce padding; other devices do not sort

Progress = Callable[[float], None]  # takes finished lines; a piece of a long line is a fraction
Line = list[Request]  # the requests for one line of text: pieces or samples
Numbered = tuple[int, tuple[str, ...]]  # the number of a line, and (line, prefix) or (prompt,)
Encoder = Callable[[list[Numbered]], list[Line]]


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
        tokenizer.check_fits(model.config)
        self.model, self.tokenizer, self.batching = model, tokenizer, batching or Batching()
        vocab_size, suppressed = tokenizer.target.vocab_size, tokenizer.suppressed
        targets = Targets(vocab_size, model.config.eos, suppressed, tokenizer.ends)
        self.scheduler = Scheduler(model, targets, self.batching.tokens, graphs)

    @classmethod
    def load(
        cls,
        run: Path | str | None = None,
        device: torch.device | str = "auto",
        dtype: torch.dtype | str | None = None,
        backend: str = "auto",
        batching: Batching | None = None,
        *,
        quantize: str = "auto",
        graphs: bool = True,
        threads: int | None = None,
    ) -> "Engine":
        """Loads a run; the default is the bundled model, which translates English to German.

        `run` may also be the folder of a Hugging Face model, or its name on the hub. The default
        dtype is bfloat16 on a GPU and float32 elsewhere. Choosing a `backend` disables CUDA graphs.
        `threads` sets the CPU threads of the process, by default one per core.

        quantize: "int8" converts the weights to int8, which needs a CPU; "none" does not. "auto"
        converts them if the run is quantized, the device is a CPU and no `dtype` is given.
        """
        use_threads(threads)
        run, place = bundled_run() if run is None else run, find_device(device)
        if not isinstance(run, str | Path):
            raise ConfigError(f"run must be a path, not {type(run).__name__}")
        if quantize not in QUANTIZE:
            known = nearest(str(quantize), QUANTIZE)
            raise ConfigError(f"unknown quantization {shown(quantize)}; {known}")
        loaded = load_run(run, device=place, dtype=find_dtype(dtype, place), backend=backend)
        if loaded.tokenizer is None:
            raise RunError(f"{run} has no tokenizer; add the files of its tokenizer")
        if quantize == "auto" and loaded.is_quantized and dtype is None and place.type == "cpu":
            if reason := loaded.model.why_not_int8():
                log.warning("decoding in float32, which is slower than int8: %s", reason)
            else:
                quantize = "int8"
        if quantize == "int8":
            loaded.model.pack(int8=True)
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
        be 50 tokens longer than its source. Multilingual models need language codes, listed in
        `tokenizer.target_languages`. Lines are numbered from `first`; line i uses seed + i.
        """
        encode = self._line_encoder(options, source_lang, target_lang)
        done = self._decode(enumerate(paired_texts(lines, prefixes), first), encode, progress)
        return work_behind(done, self.outputs)

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
        encode = self._prompt_encoder(options, samples)
        done = self._decode(enumerate(_checked_prompts(prompts), first), encode, progress)
        return work_behind(done, self.outputs)

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

        Callers submit them to `scheduler`, step it, and pass finished requests to `outputs`.
        """
        if isinstance(self.model, TranslationModel):
            encode = self._line_encoder(options, source_lang, target_lang)
            return encode([*enumerate(paired_texts(texts, prefixes))])
        return self._prompt_encoder(options, samples)([*enumerate(_checked_prompts(texts))])

    def outputs(self, lines: Sequence[Line]) -> list[Output]:
        """Returns the output of each text from its finished requests; see `requests`."""
        if isinstance(self.model, LanguageModel):
            found = [[one for request in line for one in request.result()] for line in lines]
            scored = self._scored(found, [line[0].tokens for line in lines])
            return [Output(tuple(some)) for some in scored]
        results = [[request.result() for request in line] for line in lines]
        pieces = iter(self._scored([*chain.from_iterable(results)]))
        alpha = next((line[0].config.alpha for line in lines if line), 0.0)  # the same for all
        return [_join_pieces(line, [next(pieces) for _ in line], alpha) for line in results]

    def streamed_text(self, request: Request) -> StreamedText:
        """Returns a decoder of the tokens that a request generates, as they arrive."""
        prompt = [] if isinstance(self.model, TranslationModel) else [*request.tokens]
        return StreamedText(self.tokenizer, prompt)

    def stream(self, prompt: str, options: DecodeConfig | None = None) -> Iterator[str]:
        """Yields the text that `generate` would return, piece by piece, in whole characters."""
        return (piece for _, piece in self.stream_all([prompt], options))

    def stream_all(
        self, prompts: Iterable[str], options: DecodeConfig | None = None
    ) -> Iterator[tuple[int, str]]:
        """Streams continuations of several prompts at once; yields (prompt index, piece) pairs."""
        lines = self._prompt_encoder(options)([*enumerate(_checked_prompts(prompts))])
        requests = [*chain.from_iterable(lines)]
        if any(request.config.width > 1 for request in requests):
            raise ConfigError("beam search cannot stream text; use beam=1")
        return self._stream(requests)

    def _stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, str]]:
        """Submits requests; yields pieces of their text as tokens are decoded."""
        arrived: deque[tuple[int, list[int]]] = deque()
        texts = [*map(self.streamed_text, requests)]
        for i, request in enumerate(requests):
            request.on_tokens = lambda tokens, i=i: arrived.append((i, tokens))
        self.scheduler.submit(requests)
        try:
            remains = True
            while remains:
                if remains := not all(request.is_done for request in requests):
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
        self, texts: Iterator[Numbered], encode: Encoder, progress: Progress | None
    ) -> Generator[list[Line]]:
        """Yields groups of lines whose requests are done, in the order of the texts."""
        report = progress or (lambda count: None)
        pending: deque[Line] = deque()
        finished: deque[float] = deque()  # for each finished request, its fraction of a line
        unfinished = 0  # requests
        try:
            # another thread tokenizes the next group while this one is decoded
            for lines in chain(work_ahead(texts, encode, self.batching.lines), [[]]):
                report(sum(not line for line in lines))  # empty lines have no requests
                unfinished += self._submit(lines, finished.append)
                pending.extend(lines)
                most, steps = (self.batching.lines // 2, BULK_STEPS) if lines else (0, 1)
                while unfinished > most:
                    self.scheduler.step(steps)
                    while finished:  # other threads may add more meanwhile
                        report(finished.popleft())
                        unfinished -= 1
                    if done := _take_done(pending):
                        yield done
            while done := _take_done(pending):
                yield done
        finally:
            for request in chain.from_iterable(pending):
                self.scheduler.cancel(request)

    def _submit(self, lines: Sequence[Line], finished: Callable[[float], None]) -> int:
        """Submits requests; returns how many."""
        for line in lines:
            for request in line:
                request.on_done = partial(finished, 1 / len(line))
        requests = [*chain.from_iterable(lines)]
        # sorting by length reduces padding; within blocks, so that the first lines are done first
        if size := SORTED_LINES.get(self.model.device.type):
            for first in range(0, len(requests), size):
                block = requests[first : first + size]
                block.sort(key=lambda one: (len(one.tokens), one.max_length), reverse=True)
                requests[first : first + size] = block
        self.scheduler.submit(requests)
        return len(requests)

    def _checked(self, options: DecodeConfig | None, beam: int) -> DecodeConfig:
        """Returns the options with the default `beam`; raises if the model does not allow them."""
        options = check_options(DecodeConfig() if options is None else options, beam)
        check_bounds(options, "max_length", "min_length", le=self.model.config.target_positions)
        check_bounds(options, "beam", le=self.tokenizer.target.vocab_size)
        return options

    def _line_encoder(
        self, options: DecodeConfig | None, source_lang: str | None, target_lang: str | None
    ) -> Encoder:
        """Returns the function that encodes lines and their prefixes."""
        if not isinstance(self.model, TranslationModel):
            raise ConfigError("a language model cannot translate; use generate")
        frame = self.tokenizer.frame(source_lang, target_lang)
        m = self.model.config.source_positions
        if m <= len(frame.before) + len(frame.after):
            raise ConfigError(f"source_positions={m} has no room for text; use a model with more")
        options, hidden = self._checked(options, BEAM), len(frame.forced)
        most, least = options.max_length, options.min_length  # the search also counts forced tokens
        options = dataclasses.replace(
            options, max_length=most and most + hidden, min_length=least and least + hidden
        )
        before, after = (np.array(part, np.int32) for part in frame[:2])  # faster than tuples
        frame = frame._replace(before=before, after=after)
        make = partial(self._translation_requests, frame=frame, options=options)
        return partial(self._encode, make)

    def _prompt_encoder(self, options: DecodeConfig | None, samples: int = 1) -> Encoder:
        """Returns the function that encodes prompts."""
        if not isinstance(self.model, LanguageModel):
            raise ConfigError("a translation model cannot continue prompts; use translate")
        options = self._checked(options, beam=1)
        if samples < 1:
            raise ConfigError(f"samples={samples} must be at least 1")
        if samples > 1 and options.temperature is None:
            raise ConfigError(f"all {samples} samples would be the same; set a temperature")
        make = partial(self._prompt_requests, options=options, samples=samples)
        return partial(self._encode, make)

    def _encode(self, make: Callable[..., Line], texts: list[Numbered]) -> list[Line]:
        """Tokenizes texts, and makes their requests."""
        encoded = self.tokenizer.encode_all([text for _, (text, *_) in texts])
        pairs = zip(texts, encoded, strict=True)
        return [make(number, tokens, *given) for (number, given), tokens in pairs]

    def _translation_requests(
        self, line: int, tokens: Tokens, text: str, prefix: str, frame: Frame, options: DecodeConfig
    ) -> Line:
        """Returns a request per piece of a line; the prefix belongs to the first."""
        limit = self.model.config.source_positions - len(frame.before) - len(frame.after)
        pieces = encoded_pieces(line + 1, text, tokens, self.tokenizer.encode, limit)
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
        self, line: int, tokens: Tokens, _text: str, options: DecodeConfig, samples: int
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

    def _scored(
        self, results: Sequence[Sequence[Hypothesis]], prompts: Sequence[Tokens] | None = None
    ) -> list[list[ScoredText]]:
        """Detokenizes hypotheses; with `prompts`, those of results[i] continue prompts[i]."""
        tokens = [[one.tokens for one in some] for some in results]
        texts = decode_groups(self.tokenizer, tokens, prompts)
        return [[ScoredText(next(texts), *one[1:]) for one in some] for some in results]


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


def _checked_prompts(prompts: Iterable[str]) -> Iterator[tuple[str]]:
    return zip(checked_texts(prompts, "prompt"), strict=True)


def _take_done(pending: deque[Line]) -> list[Line]:
    """Removes and returns the leading lines that are done; a line that failed comes alone."""
    done: list[Line] = []
    while pending and all(request.is_done for request in pending[0]):
        if any(request.error for request in pending[0]):
            return done or [pending.popleft()]
        done.append(pending.popleft())
    return done
