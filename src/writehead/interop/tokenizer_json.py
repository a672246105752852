"""Writes our tokenizer as a `tokenizer.json` that gives the same ids in transformers."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from writehead.config import Task
from writehead.data.bpe import BOS, EOS, INVISIBLE, MAX_MARKS, PAD, UNKNOWN, BPETokenizer
from writehead.data.tokenizer import JSON_FILE, SETTINGS, Files

SPACE = "\u2581"
WHITE_SPACE = "[\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"


def tokenizer_json(tokenizer: BPETokenizer, task: Task) -> Files:
    """Returns the files: prompts of a language model start with bos, and sources end with eos."""
    pieces = tokenizer.pieces
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [*_merges({piece for piece, i in vocab.items() if tokenizer.is_plain(i)}, pieces)]
    bpe = models.BPE(vocab, merges, unk_token=pieces[UNKNOWN], byte_fallback=True, fuse_unk=False)
    made: Any = tokenizers.Tokenizer(bpe)
    marks = rf"(?<=\p{{M}}{{{MAX_MARKS}}})\p{{M}}+"
    made.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(SPACE, "_"),
            normalizers.Replace(Regex(INVISIBLE), ""),
            normalizers.Replace(Regex(marks), ""),
            normalizers.NFC(),
            normalizers.Replace(Regex(WHITE_SPACE), " "),
            normalizers.Strip(),
        ]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    first, last = pieces[BOS], pieces[EOS]
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A" if task == "language" else f"$A {last}",
        special_tokens=[(first, BOS), (last, EOS)],
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"pad_token": pieces[PAD], "eos_token": last, "unk_token": pieces[UNKNOWN]},
        "bos_token": first,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # special tokens in a text are plain text
    }
    return {JSON_FILE: made.to_str().encode(), SETTINGS[0]: json.dumps(settings, indent=1).encode()}


def _merges(plain: set[str], pieces: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields all pairs of plain pieces that make another one, in the order of their ids.

    Sentencepiece learned the pieces in this order, and prefers the earlier ones.
    """
    for piece in pieces:
        halves = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        if piece in plain:
            yield from (pair for pair in halves if plain.issuperset(pair))
