"""Small tokenizers of other model families, in folders that transformers writes."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import sentencepiece
import tokenizers
import torch
import transformers
from tokenizers import normalizers, pre_tokenizers
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from helpers import config, model
from texts import sentences
from writehead.data.tokenizer import load_tokenizer
from writehead.engine import Engine

SCRIPTS = [
    *("the cat sees 1,234.5 birds", "Über straße naïve Œuvre", "мир и война", "日本語のテキスト"),
    *("العربية", "हिन्दी में", "한국어 문장", "Ελληνικά", "👩🏽\u200d🚀 🇩🇪 🙂🙃", "ﬁ ½ ℃ … „Ja“"),
    *("a  b   c", " leading", "trailing ", "\t", "\u00a0", "\u200b", "\x00", "\x07", "\u2028"),
    *("\r", "\u2581", "_", "<", ">>", "[", "￿ ﷽ \U0010ffff", "0x1F", "3.14", "10^6", "x" * 40),
    *("\ufeff", "e\u0301\u0323", "<0x41>", "<|endoftext|>", ">>deu<< the cat", ">>xy<<"),
    *("</s>", "<unk>", "<s> <eos>", "__de__", "deu_Latn", "<extra_id_0>"),
]


def lines(count: int = 1000) -> list[str]:
    """Lines of mixed scripts, spaces, numbers, emoji and control characters; some are empty."""
    draw, parts = random.Random(7), [*SCRIPTS, *sentences(20, seed=3)]
    found = ["", " ", "  ", *parts]
    while len(found) < count:
        found.append(draw.choice(["", " "]).join(draw.choices(parts, k=draw.randint(1, 5))))
    return found


def corpus() -> list[str]:
    return [*sentences(300), *[text for text in SCRIPTS if text and text.isprintable()] * 3]


def train_spm(
    path: Path, texts: list[str], size: int, kind: str = "unigram", **options: int
) -> list[str]:
    """Trains a sentencepiece model with its default normalization; returns its pieces."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(path.with_suffix("")),
        model_type=kind,
        vocab_size=size,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )
    path.with_suffix(".model").replace(path)
    path.with_suffix(".vocab").unlink()
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(i) for i in range(3, model.vocab_size())]


def save_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def marian(folder: Path, *, separate: bool = False) -> transformers.PreTrainedTokenizerBase:
    texts = corpus()
    source = train_spm(folder / "source.spm", texts, 300)
    target = train_spm(folder / "target.spm", texts[::2], 240)
    ends = ["</s>", "<unk>"]
    if separate:
        own, other = [*ends, *source, "<pad>"], [*ends, *target, "<pad>"]
        save_json(folder / "target_vocab.json", {piece: i for i, piece in enumerate(other)})
    else:
        joint = dict.fromkeys([*source, *target])
        own = [*ends, *joint, ">>deu<<", ">>cmn_Hans<<", "<pad>"]
    save_json(folder / "vocab.json", {piece: i for i, piece in enumerate(own)})
    names = ("source.spm", "target.spm", "vocab.json")
    made = transformers.MarianTokenizer(
        *(str(folder / name) for name in names),
        target_vocab_file=str(folder / "target_vocab.json") if separate else None,
        separate_vocabs=separate,
    )
    made.save_pretrained(folder)
    return made


def m2m(folder: Path) -> transformers.PreTrainedTokenizerBase:
    pieces = train_spm(folder / "sentencepiece.bpe.model", corpus(), 300, "bpe")
    vocab = ["<s>", "<pad>", "</s>", "<unk>", *pieces]
    save_json(folder / "vocab.json", {piece: i for i, piece in enumerate(vocab)})
    made = transformers.M2M100Tokenizer(
        str(folder / "vocab.json"),
        str(folder / "sentencepiece.bpe.model"),
        additional_special_tokens=[f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]],
    )
    made.save_pretrained(folder)
    return made


def gpt2(folder: Path) -> transformers.PreTrainedTokenizerBase:
    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _train(plain, 400, [], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = _parts(plain)
    vocab["<|endoftext|>"] = len(vocab)
    return _saved(transformers.GPT2Tokenizer(vocab=vocab, merges=merges), folder)


def llama(folder: Path) -> transformers.PreTrainedTokenizerBase:
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    byte_pieces = [f"<0x{i:02X}>" for i in range(256)]
    _train(plain, 600, ["<unk>", "<s>", "</s>", *byte_pieces])
    vocab, merges = _parts(plain)
    made = transformers.LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
    return _saved(made, folder)


def gemma(folder: Path) -> transformers.PreTrainedTokenizerBase:
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    plain.normalizer = normalizers.Replace(" ", "\u2581")
    byte_pieces = [f"<0x{i:02X}>" for i in range(256)]
    _train(plain, 600, ["<pad>", "<eos>", "<bos>", "<unk>", *byte_pieces])
    vocab, merges = _parts(plain)
    made = transformers.GemmaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
    return _saved(made, folder)


def nllb(folder: Path, *, legacy: bool = False) -> transformers.PreTrainedTokenizerBase:
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    _train(plain, 400, ["<s>", "<pad>", "</s>", "<unk>"])
    vocab, merges = _parts(plain)
    return _saved(
        transformers.NllbTokenizer(vocab=vocab, merges=merges, legacy_behaviour=legacy), folder
    )


def t5(folder: Path) -> transformers.PreTrainedTokenizerBase:
    pieces = train_spm(folder / "spiece.model", corpus(), 300)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    scored = [(piece, model.get_score(i)) for i, piece in enumerate(pieces, start=3)]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scored]
    return _saved(transformers.T5Tokenizer(vocab=vocab, extra_ids=5), folder)


def spiece(folder: Path) -> transformers.PreTrainedTokenizerBase:
    """T5's sentencepiece model, as in repositories without a tokenizer.json."""
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    train_spm(folder / "spiece.model", corpus(), 300, **ids)
    save_json(folder / "tokenizer_config.json", {"extra_ids": 5})
    return transformers.T5Tokenizer.from_pretrained(folder)


def _train(made: tokenizers.Tokenizer, size: int, special: list[str], **options: object) -> None:
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, show_progress=False, **options
    )
    made.train_from_iterator(corpus(), trainer)


def _parts(made: tokenizers.Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(made.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _saved(
    made: transformers.PreTrainedTokenizerBase, folder: Path
) -> transformers.PreTrainedTokenizerBase:
    made.save_pretrained(folder)
    return made


MAKERS: dict[str, Callable[[Path], transformers.PreTrainedTokenizerBase]] = {
    **{one.__name__: one for one in (marian, m2m, gpt2, llama, gemma, nllb, t5, spiece)},
    "nllb-legacy": lambda folder: nllb(folder, legacy=True),
    "marian-separate": lambda folder: marian(folder, separate=True),
}


def foreign_engine(
    folder: Path, name: str, task: str, **changes: object
) -> tuple[Engine, transformers.PreTrainedTokenizerBase]:
    """An engine with random weights, and transformers' tokenizer."""
    folder.mkdir()
    theirs = MAKERS[name](folder)
    ours = load_tokenizer(folder)
    sizes = {"vocab_size": ours.target.vocab_size + 3, "target_positions": 40, "decoder_layers": 1}
    if task == "translation":
        sizes |= {"source_positions": 41, "encoder_layers": 1}
        if ours.target is not ours:
            sizes["source_vocab_size"] = ours.vocab_size
    bos = max(ours.suppressed, default=theirs.bos_token_id or theirs.pad_token_id)
    sizes |= {"bos": bos, "eos": theirs.eos_token_id, "logit_scale": 0.2}
    torch.manual_seed(3)
    made = model(config(task, **(sizes | changes)))
    with torch.no_grad():
        made.tokens.weight[made.config.eos] *= 3.0  # the end token
    return Engine(made, ours), theirs
