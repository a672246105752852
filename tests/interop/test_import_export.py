"""Import and export of whole folders: the command line, models of ours, and bad input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import witnesses
from helpers import config, model, tokens
from texts import sentences, tokenizer
from writehead import Engine, convert, export_model, import_model, load_run, save_run
from writehead.config import DecodeConfig
from writehead.errors import ConfigError, RunError, WriteheadError
from writehead.interop.hub import find_folder

LINES = sentences(5, seed=4)


@pytest.fixture(scope="module")
def marian(tmp_path_factory) -> Path:
    """A Marian folder with a tokenizer, as on the hub."""
    folder = tmp_path_factory.mktemp("hub") / "marian"
    pieces = tokenizer().pieces[3:]
    vocab = {"</s>": 0, "<unk>": 1, **{piece: i for i, piece in enumerate(pieces, 2)}}
    vocab["<pad>"] = pad = len(vocab)
    kind, sizes = witnesses.MODELS["marian"]
    start = {"decoder_start_token_id": pad, "pad_token_id": pad, "vocab_size": pad + 1}
    name = "marian-with-tokenizer"
    witnesses.MODELS[name] = (kind, sizes | start | {"bad_words_ids": [[pad]]})
    made = witnesses.witness(name, dtype=torch.float32)
    del witnesses.MODELS[name]
    with torch.no_grad():
        made.final_logits_bias[0, 0] += 1.0  # the end token
        for layer in made.model.decoder.layers:  # outputs differ between sources
            layer.encoder_attn.out_proj.weight *= 8.0
            layer.self_attn.out_proj.weight *= 4.0
    made.generation_config.bad_words_ids = [[pad]]
    made.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"source_lang": "eng", "target_lang": "deu", "model_max_length": 512})
    )
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(tokenizer().files["tokenizer.model"])
    return folder


@pytest.fixture
def llama(tmp_path) -> Path:
    witnesses.saved(tmp_path / "llama", "llama", dtype=torch.float32)
    return tmp_path / "llama"


def translations(engine: Engine, **options) -> list[str]:
    config = DecodeConfig(max_length=20, alpha=0.0, **options)
    return [output.text for output in engine.translate(LINES, config)]


def test_an_engine_translates_a_folder_an_imported_run_and_its_quantized_copy(
    tmp_path, marian, writehead
):
    theirs = transformers.MarianMTModel.from_pretrained(marian).eval()
    texts = transformers.MarianTokenizer.from_pretrained(marian)
    given = texts(LINES, return_tensors="pt", padding=True)
    code, _, err = writehead("import", marian, tmp_path / "run")
    assert (code, "multi-head translation model" in err) == (0, True), err
    for beam in (1, 4):
        search = {"num_beams": beam, "max_new_tokens": 20, "length_penalty": 0.0}
        search |= {"early_stopping": "never"} if beam > 1 else {}
        expected = texts.batch_decode(theirs.generate(**given, **search), skip_special_tokens=True)
        assert len({*expected}) > 1
        for run in (marian, tmp_path / "run"):
            assert translations(Engine.load(run, "cpu"), beam=beam) == expected
    assert writehead("quantize", marian, tmp_path / "small")[0] == 0
    assert load_run(tmp_path / "small").model.config == load_run(marian).model.config
    text = "\n".join(LINES).encode()
    command = ("translate", marian, "--device=cpu", "--beam=1", "--max-length=20")
    expected = translations(Engine.load(marian, "cpu"), beam=1)
    assert writehead(*command, stdin=text)[1].splitlines() == expected
    answer = json.loads(writehead("explain", marian, "--source=9", "--target=9", "--json")[1])
    assert answer["approximations"] == []


def test_an_imported_model_translates_the_same_in_ctranslate2(tmp_path, marian, writehead):
    ctranslate2 = pytest.importorskip("ctranslate2")
    code, _, err = writehead("export", marian, tmp_path / "ct2", "--to=ctranslate2")
    assert code == 0, err
    texts = transformers.MarianTokenizer.from_pretrained(marian)
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), "cpu", compute_type="float32")
    given = [texts.convert_ids_to_tokens(ids) for ids in texts(LINES).input_ids]
    results = translator.translate_batch(given, beam_size=1, max_decoding_length=20)
    ids = [texts.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    expected = translations(Engine.load(marian, "cpu"), beam=1)
    assert texts.batch_decode(ids, skip_special_tokens=True) == expected


SIZES = {"d": 24, "h": 6, "k": 4, "v": 4, "vocab_size": 61}
EXPORTED = {
    "GPTBigCodeForCausalLM": {"norm": "layer", "g": 1, "activation": "relu"},
    "GPTBigCodeForCausalLM, multi-head": {"norm": "layer", "g": 6, "bias": True, "tied": False},
    "LlamaForCausalLM": {"positions": "rotary", "gated": True, "g": 2, "activation": "silu"},
    "LlamaForCausalLM, scaled": {"positions": "rotary", "gated": True, "tied": False}
    | {"logit_scale": 0.7, "rotary_factor": 2.0, "rotary_original": 8, "rotary_base": 30.0},
    "MistralForCausalLM": {"positions": "rotary", "gated": True, "window": 4},
    "GemmaForCausalLM": {"positions": "rotary", "gated": True, "norm_offset": 1.0}
    | {"embedding_scale": 24**0.5, "activation": "gelu_tanh"},
}


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_computes_the_logits_of_our_language_models(tmp_path, name):
    made = model(config("language", **SIZES, **EXPORTED[name]), dtype=torch.float32)
    save_run(tmp_path / "run", made)
    export_model(tmp_path / "run", tmp_path / "theirs")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", output_loading_info=True
    )
    assert type(theirs).__name__ == name.partition(",")[0]
    assert not any(info.values()), info
    given = tokens(2, 9, vocab_size=61)
    with torch.no_grad():
        assert_close(theirs.eval()(given).logits, made(given), atol=1e-5, rtol=1e-4)
    again = load_run(tmp_path / "theirs").model
    with torch.no_grad():
        assert_close(again(given), made(given), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "gpt_bigcode needs norm='layer', not 'rms'"),
        ({"norm": "layer", "g": 2}, "gpt_bigcode needs g=6, not 2"),
        ({"norm": "layer", "v": 5}, "v=4, not 5"),
        ({"norm": "layer", "window": 3}, "window=None, not 3"),
        ({"norm": "layer", "h": 3, "g": 3}, "k=8, not 4"),
    ],
)
def test_a_model_that_no_family_expresses_is_refused_with_the_reason(tmp_path, changes, words):
    save_run(tmp_path / "run", model(config("language", **(SIZES | changes))))
    with pytest.raises(ConfigError, match=words):
        export_model(tmp_path / "run", tmp_path / "theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_converted_model_is_refused_with_the_reason_of_its_own_family(tmp_path, marian):
    convert(marian, tmp_path / "converted", write_heads=1)
    with pytest.raises(ConfigError, match=r"marian needs .*to CTranslate2") as caught:
        export_model(tmp_path / "converted", tmp_path / "theirs")
    assert not [name for name in ("t5", "m2m") if name in str(caught.value)]


def rewrite(folder: Path, **fields: object) -> None:
    """Changes fields of a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def reweigh(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors, or removes them if they are None; `__` stands for a dot."""
    weights = load_file(folder / "model.safetensors")
    weights |= {name.replace("__", "."): T for name, T in tensors.items()}
    save_file({n: T for n, T in weights.items() if T is not None}, folder / "model.safetensors")


NORM = "model__norm__weight"
DAMAGES = {
    "supported: gemma, gpt2, gpt_bigcode, llama": lambda f: rewrite(f, model_type="resnet"),
    "lacks model.norm.weight": lambda f: reweigh(f, **{NORM: None}),
    r"unexpected model.norm.bias": lambda f: reweigh(f, model__norm__bias=torch.ones(24)),
    r"model.norm.weight has shape \[23\].*\[24\]": lambda f: reweigh(f, **{NORM: torch.ones(23)}),
    r"embed_tokens.weight has shape \[61, 24\].*\[60, 24\]": lambda f: rewrite(f, vocab_size=60),
    "eos_token_id=61, not a token of the model": lambda f: rewrite(f, eos_token_id=61),
    "yarn": lambda f: rewrite(f, rope_parameters={"rope_type": "yarn", "rope_theta": 10.0}),
    "only some of its projections": lambda f: rewrite(f, attention_bias=True),
    "damaged or truncated": lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 40),
    "not JSON": lambda f: (f / "config.json").write_text("{"),
    "no weights|cannot be|lacks model.safetensors": lambda f: (f / "model.safetensors").unlink(),
    "save_pretrained": lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
    "lacks model-2.safetensors": lambda f: (f / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-2.safetensors"}}'
    ),
    "not in its folder": lambda f: (f / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../secret.safetensors"}}'
    ),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, llama, refused, words):
    generation = json.loads((llama / "generation_config.json").read_text())
    generation.pop("eos_token_id", None)
    (llama / "generation_config.json").write_text(json.dumps(generation))
    DAMAGES[words](llama)
    with pytest.raises(WriteheadError, match=words):
        import_model(llama, tmp_path / "run")
    assert refused("import", llama, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_sharded_files_without_prefix_and_with_repeated_tensors_are_read(tmp_path):
    """Files of other versions of transformers; they go back under the same names."""
    made = witnesses.saved(tmp_path / "gpt2", "gpt2", dtype=torch.float32)
    file = tmp_path / "gpt2" / "model.safetensors"
    weights = {name.removeprefix("transformer."): T for name, T in load_file(file).items()}
    weights["lm_head.weight"] = weights["wte.weight"].clone()
    weights["h.0.attn.bias"] = torch.ones(1, 1, 37, 37).tril().bool()
    file.unlink()
    shards = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for i, (name, T) in enumerate(weights.items()):
        shards[f"model-{i % 2 + 1}.safetensors"][name] = T
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / "gpt2" / name)
    places = {name: shard for shard, tensors in shards.items() for name in tensors}
    index = tmp_path / "gpt2" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    import_model(tmp_path / "gpt2", tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], T) for name, T in weights.items())
    given = tokens(2, 7)
    with torch.no_grad():
        assert_close(load_run(tmp_path / "run").model(given), made(given).logits)


def test_weights_of_several_dtypes_keep_them(tmp_path, llama):
    reweigh(llama, **{NORM: torch.rand(24).bfloat16()})
    import_model(llama, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {T.dtype for T in again.values()} == {torch.float32, torch.bfloat16}
    with pytest.raises(RunError, match="several dtypes"):
        load_run(tmp_path / "run")
    assert load_run(llama, dtype=torch.float32).model.dtype == torch.float32


def test_names_on_the_hub_are_downloaded_and_errors_name_them(
    tmp_path, llama, refused, monkeypatch
):
    def download(name: str, *, revision: str | None, allow_patterns: list[str], **_: object) -> str:
        if revision != "v2":
            raise OSError("no network\nand more")
        assert not any(pattern.endswith((".bin", "*")) for pattern in allow_patterns)
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    import_model("owner/llama", tmp_path / "run", revision="v2")
    assert load_run(tmp_path / "run").model.config == load_run(llama).model.config
    for verb in (("import", "owner/llama", tmp_path / "new"), ("generate", "owner/llama", "a")):
        error = refused(*verb)
        assert "owner/llama" in error
        assert "no network" in error
    assert find_folder("a/b/c") == Path("a/b/c")
    with pytest.raises(RunError, match="is a path"):
        import_model(llama, tmp_path / "new", revision="v2")
    assert not (tmp_path / "new").exists()


def test_existing_folders_are_replaced_only_with_force_and_if_they_are_exports(
    tmp_path, llama, refused, writehead
):
    run, out = tmp_path / "run", tmp_path / "out"
    assert writehead("import", llama, run, "--dtype=bfloat16")[0] == 0
    assert load_run(run).model.dtype == torch.bfloat16
    assert "--force" in refused("import", llama, run)
    assert writehead("export", run, out, "--to=huggingface")[0] == 0
    assert "--force" in refused("export", run, out, "--to=huggingface")
    assert writehead("export", run, out, "--to=huggingface", "--force")[0] == 0
    assert "already" in refused("export", llama, tmp_path / "b", "--to=huggingface")
    assert "--quantization" in refused(
        *("export", run, tmp_path / "b", "--to=huggingface", "--quantization=int8")
    )
    (out / "thesis.tex").write_text("x")
    assert "not overwritten" in refused("export", run, out, "--to=huggingface", "--force")
    shutil.rmtree(out)
    with pytest.raises(ConfigError, match="huggingface"):
        export_model(run, out, to="onnx")
    assert not out.exists()
