"""Models of transformers: datasets with their tokenizers, uptraining, and export back.

The losses and the exported models are compared with transformers' own code.
"""

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from corpora import write
from foreign_tokenizers import MAKERS
from texts import sentences
from trainings import assert_same_training, dev_curve, pair_dataset
from witnesses import MODELS
from writehead.data.batches import Batch, PackedBatches, padded_batches
from writehead.data.dataset import Dataset
from writehead.errors import DataError
from writehead.interop.huggingface import export_model
from writehead.interop.pretrained import load_run
from writehead.training.loss import batch_loss

KINDS = {"marian": "marian", "marian-separate": "marian-two-vocabularies", "t5": "t5"}
KINDS |= {"m2m": "m2m_100", "nllb": "m2m_100", "nllb-legacy": "m2m_100"}
KINDS |= {"gpt2": "gpt2", "llama": "llama", "gemma": "gemma"}
LANGUAGES = {"m2m": ("fr", "de"), "marian": (None, "deu")}
LANGUAGES |= dict.fromkeys(("nllb", "nllb-legacy"), ("fra_Latn", "deu_Latn"))
WRITERS = ("gpt2", "llama", "gemma")
SOURCES = [*sentences(150, seed=1), "the cat 1,234.5 日本 🙂", "Über  straße"]
TARGETS = [*sentences(150, seed=2), "die Katze 3.14 §", "naïve  Œuvre!"]
SETTINGS = {"steps": 5, "rows": 4, "source_length": 37, "target_length": 37, "warmup": 2}
SETTINGS |= {"learning_rate": 0.1, "evaluate_every": 5, "checkpoint_every": 3, "log_every": 2}
OPTIONS = [f"--set=train.{name}={value}" for name, value in SETTINGS.items()]


@dataclass
class Made:
    """A folder with a random model and a tokenizer of transformers, and a dataset of its tokens."""

    folder: Path
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    name: str
    data: Path

    def ids(self, source: str, target: str) -> tuple[list[int], list[int]]:
        """The input and the labels of a pair, as transformers makes them."""
        texts, end = self.tokenizer, [self.tokenizer.eos_token_id]
        if self.name in WRITERS:
            return [], [*texts(target).input_ids, *end]
        if self.name == "marian":
            return texts(f">>deu<<{source}").input_ids, texts(text_target=target).input_ids
        if self.name in LANGUAGES:
            texts.src_lang, texts.tgt_lang = LANGUAGES[self.name]
        labels = texts(text_target=target).input_ids
        if self.name == "nllb-legacy":  # but generation begins with the language in any case
            labels = [labels[-1], *labels[:-2], *end]
        return texts(source).input_ids, labels

    @torch.no_grad()
    def nll(self, source: list[int], labels: list[int]) -> float:
        given = torch.tensor([source or labels])
        loss = self.model(input_ids=given, labels=torch.tensor([labels])).loss
        return float(loss) * (len(labels) - (not source))


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes models, each once."""
    made: dict[str, Made] = {}

    def one(name: str) -> Made:
        if name not in made:
            made[name] = _make(tmp_path_factory.mktemp(name), name)
        return made[name]

    return one


def _make(root: Path, name: str) -> Made:
    folder = root / "theirs"
    folder.mkdir()
    tokenizer = MAKERS[name](folder)
    kind, sizes = MODELS[KINDS[name]]
    count = len(tokenizer) + 3
    tokens = {"vocab_size": count, "eos_token_id": tokenizer.eos_token_id}
    tokens |= {"pad_token_id": tokenizer.pad_token_id or 0, "bos_token_id": tokenizer.bos_token_id}
    if name.startswith("marian"):
        start = tokenizer.pad_token_id
        if name == "marian-separate":
            vocab = json.loads((folder / "target_vocab.json").read_text())
            start, tokens["decoder_vocab_size"] = vocab["<pad>"], len(vocab) + 1
            assert len(vocab) < len(tokenizer)
        tokens |= {"decoder_start_token_id": start, "pad_token_id": start}
    config = transformers.AutoConfig.for_model(kind, **(sizes | tokens))
    auto = "AutoModelForCausalLM" if name in WRITERS else "AutoModelForSeq2SeqLM"
    torch.manual_seed(4)
    model = getattr(transformers, auto).from_config(config).eval()
    model.save_pretrained(folder)
    return Made(folder, model, tokenizer, name, root / "data")


@pytest.fixture
def prepared(make, tmp_path, writehead):
    """Makes a model, and a dataset of its tokens."""

    def one(name: str) -> Made:
        made = make(name)
        if not made.data.exists():
            a, b = write(tmp_path / "a", SOURCES), write(tmp_path / "b", TARGETS)
            text = [f"--text={b}"] if name in WRITERS else [f"--source={a}", f"--target={b}"]
            codes = zip(("source", "target"), LANGUAGES.get(name, (None, None)), strict=True)
            text += [f"--{side}-lang={code}" for side, code in codes if code]
            text += ["--tokenizer", made.folder, "--max-ratio=9", "--threads=1"]
            results = [writehead("prepare", made.data, *text) for _ in range(2)]
            assert [code for code, _, _ in results] == [0, 0], results
            assert "already prepared" in results[1][2]
        return made

    return one


def pairs(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The source and the labels of each segment; a text begins with what is read first."""
    found = []
    for row in range(len(batch.labels)):
        numbers = batch.packing.segments[row]
        for number in range(1, int(numbers.max()) + 1):
            labels, source = batch.labels[row][numbers == number].tolist(), []
            if batch.source is not None:
                seen = batch.source_packing.segments[row] == number
                source = batch.source[row][seen].tolist()
            else:
                labels.insert(0, int(batch.inputs[row][numbers == number][0]))
            found.append((tuple(source), tuple(labels)))
    return found


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_is_that_of_transformers(prepared, name):
    made = prepared(name)
    data, model = Dataset.open(made.data), load_run(made.folder).model
    expected = {
        (tuple(source), tuple(labels)): made.nll(source, labels)
        for source, labels in map(made.ids, SOURCES, TARGETS)
    }
    train, held_out = (data.split(split) for split in ("train", "dev"))
    padded = [*padded_batches(train, 900), *padded_batches(held_out, 900)]
    seen = [pair for batch in padded for pair in pairs(batch)]
    assert sorted(seen) == sorted(expected)
    packed = PackedBatches(train, 3, 37, 37, seed=0)
    for batch in (padded[0], padded[-1], next(packed), next(packed)):
        with torch.no_grad():
            found = batch_loss(model, batch, label_smoothing=0.0, z_loss=0.0).nll
        total = sum(expected[pair] for pair in pairs(batch))
        assert float(found) / batch.tokens == pytest.approx(total / batch.tokens, abs=1e-4)


@pytest.mark.parametrize("name", ["marian-separate", "nllb", "gpt2", "llama"])
def test_an_imported_model_is_trained_on_and_exported_again(
    prepared, tmp_path, writehead, signal_at, name
):
    made = prepared(name)
    start = made.folder
    if name != "nllb":  # which is trained from the folder of transformers
        start = tmp_path / "start"
        assert writehead("import", made.folder, start)[0] == 0
    if name == "llama":
        assert writehead("convert", start, tmp_path / "converted", "--write-heads=1")[0] == 0
        start = tmp_path / "converted"
    origin = ("--init", start, "--teacher", made.folder)
    command = ("train", made.data, *origin, *OPTIONS, "--device=cpu", "--run")
    code, _, err = writehead(*command, tmp_path / "whole")
    assert code == 0, err
    run = tmp_path / "run"
    signal_at(signal.SIGTERM, 1)
    assert [writehead(*command, run)[0] for _ in range(2)] == [128 + signal.SIGTERM, 0]
    assert_same_training(run, tmp_path / "whole")

    code, out, err = writehead("average", run, tmp_path / "average", "--last=2")
    assert code == 0, err
    score = ("evaluate", run, "--dataset", made.data, "--split=dev", "--search=greedy")
    code, out, err = writehead(*score, "--device=cpu", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["ln_ppl"] == pytest.approx(dev_curve(run)[5], abs=1e-5)
    assert name in WRITERS or 0.0 <= found["bleu"]["greedy"]["intl"] <= 100.0

    for exported in (run, tmp_path / "average", run / "checkpoints" / "step-00000003"):
        export_model(exported, tmp_path / "again", overwrite=True)
        for file in made.folder.glob("*"):
            if file.name not in ("config.json", "model.safetensors"):
                assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    export_model(run, tmp_path / "again", overwrite=True)
    trained = type(made.model).from_pretrained(tmp_path / "again").eval()
    assert trained.config.model_type == made.model.config.model_type
    after = Made(tmp_path / "again", trained, made.tokenizer, name, made.data)
    held_out = Dataset.open(made.data).split("dev")
    texts = [pair for batch in padded_batches(held_out, 900) for pair in pairs(batch)]
    total = sum(after.nll([*source], [*labels]) for source, labels in texts)
    assert total / found["tokens"] == pytest.approx(found["ln_ppl"], abs=1e-4)
    assert total < 0.97 * sum(made.nll([*source], [*labels]) for source, labels in texts)


def test_a_preset_takes_the_special_tokens_and_sizes_of_the_dataset(prepared, tmp_path, writehead):
    made = prepared("marian-separate")
    sizes = {"d": 12, "f": 20, "h": 2, "k": 5, "v": 7, "encoder_layers": 1, "decoder_layers": 1}
    options = [f"--set=model.{name}={value}" for name, value in sizes.items()]
    run = ("--preset=tiny/multi-query", "--device=cpu", "--run", tmp_path / "run")
    code, _, err = writehead("train", made.data, *run, *options, *OPTIONS)
    assert code == 0, err
    ours, theirs = (load_run(folder).model.config for folder in (tmp_path / "run", made.folder))
    for name in ("vocab_size", "source_vocab_size", "pad", "bos", "eos"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_what_does_not_fit_is_refused(prepared, make, tmp_path, refused):
    made, own = prepared("nllb"), pair_dataset(tmp_path / "own")
    text = write(tmp_path / "text", TARGETS)
    pair = (f"--source={write(tmp_path / 'source', SOURCES)}", f"--target={text}")
    train = ("--run", tmp_path / "run", *OPTIONS, "--device=cpu")
    gpt2 = make("gpt2").folder
    for command, words in (
        (("train", own, "--init", made.folder, *train), "another tokenizer than .*own"),
        (("train", made.data, "--init", gpt2, *train), f"prepare the text again with .* {gpt2}"),
        (("prepare", made.data, *pair), "another .*vocabulary"),
        (("prepare", tmp_path / "new", *pair, "--tokenizer", gpt2), "language model"),
        (("prepare", tmp_path / "new", *pair, "--tokenizer", made.folder), "set target_lang"),
        (("prepare", tmp_path / "new", *pair, "--tokenizer", tmp_path), "no run|not a run"),
        (("prepare", tmp_path / "new", *pair, "--source-lang=en"), "require --tokenizer"),
        (
            ("prepare", tmp_path / "new", *pair, "--tokenizer", gpt2, "--vocab-size=400"),
            "leave --vocab-size out",
        ),
    ):
        error = refused(*command)
        assert re.search(words, error), error
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocabulary": None}, "vocabulary"),
        ({"vocabulary": {"vocab_size": 5, "eos": 7}}, "eos=7 must be below 5"),
        ({"vocabulary": {"vocab_size": 900, "target_lang": "eng"}}, "target_lang='eng'"),
        ({"tokenizer": "0" * 16}, "does not describe"),
    ],
)
def test_a_damaged_dataset_is_refused(prepared, changes, words):
    info = prepared("nllb").data / "dataset.json"
    before = info.read_text()
    try:
        info.write_text(json.dumps(json.loads(before) | changes))
        with pytest.raises(DataError, match=words):
            Dataset.open(info.parent)
    finally:
        info.write_text(before)
