"""`mtrain import`: which models it accepts, and that other ones are errors that name the reason."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.checkpoint.model_folder import load_model
from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.decoding.translate import Translator
from mtrain.errors import ModelError, UsageError
from mtrain.interop.import_model import import_model
from mtrain.tokenizer.sampling import make_resegment
from mtrain.tokenizer.vocabulary import Vocabulary
from mtrain.training.fit import fit
from tests.support.checking import check_data
from tests.support.cli import one_line
from tests.support.marian import make, sentences, write_tokenizer
from tests.support.tokenizers import resegmented


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A MarianMT model's folder."""
    folder = tmp_path_factory.mktemp("marian") / "opus"
    make(folder, {"num_beams": 2}, seed=38, activation_function="swish")
    return folder


@pytest.fixture
def source(original, tmp_path) -> Path:
    """A copy of that folder that a test may change."""
    return Path(shutil.copytree(original, tmp_path / "source"))


def edited(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def imported(source: Path) -> dict[str, torch.Tensor]:
    import_model(str(source), source.with_name("out"))
    return load_file(source.with_name("out") / "model.safetensors")


def as_bin(folder: Path, **options: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin", **options)
    (folder / "model.safetensors").unlink()


# ----------------------------------------------------------------------------------------------- valid models


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_equal_those_in_safetensors(original, source, zipped):
    as_bin(source, _use_new_zipfile_serialization=zipped)
    expected = load_file(original / "model.safetensors")
    assert torch.equal(imported(source)["source_embedding.weight"], expected["model.shared.weight"])


def test_symbolic_links_of_a_hub_cache_are_followed(source, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in list(source.iterdir()):
        file.symlink_to(file.rename(blobs / file.name))
    imported(source)
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    load_model(tmp_path / "out")


def test_redundant_tensors_and_settings_of_old_files_are_accepted(source):
    """Sinusoidal positions and copies of tied embeddings, in fp16, and generation settings in config.json."""

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.shared.weight"].clone()
        tensors["model.encoder.embed_tokens.weight"] = tensors["model.shared.weight"].clone()
        from mtrain.model.transformer import sinusoidal_positions

        tensors["model.encoder.embed_positions.weight"] = sinusoidal_positions(64, 32)
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})

    weights(source, add)
    (source / "generation_config.json").unlink()
    edited(source / "config.json", num_beams=3, max_length=30, bad_words_ids=[[167]], normalize_before=False)
    assert {tensor.dtype for tensor in imported(source).values()} == {torch.float32}
    decoding = load_model(source.with_name("out")).config.decoding
    assert (decoding.beam_size, decoding.max_length_offset, decoding.forbidden_ids) == (3, 29, [167])
    assert decoding.force_eos  # the default of MarianConfig


def test_without_a_length_limit_it_is_the_number_of_positions(source):
    (source / "generation_config.json").write_text("{}")
    edited(source / "config.json", forced_eos_token_id=0)
    imported(source)
    assert load_model(source.with_name("out")).config.decoding.max_length_offset == 64


def test_settings_and_languages_can_be_overridden(source):
    edited(source / "tokenizer_config.json", source_lang=None)
    import_model(str(source), source.with_name("out"), ["source_lang=de", "decoding.beam_size=7"])
    config = load_model(source.with_name("out")).config
    assert (config.source_lang, config.target_lang, config.decoding.beam_size) == ("de", "fr", 7)


def test_a_forbidden_token_that_does_not_exist_is_an_error(source):
    with pytest.raises(UsageError, match="forbidden_ids: no token has the id 99999"):
        import_model(str(source), source.with_name("out"), ["decoding.forbidden_ids=[99999]"])
    assert not source.with_name("out").exists()


def test_unknown_languages_are_logged(source, caplog):
    (source / "tokenizer_config.json").unlink()
    imported(source)
    assert "unknown languages; set them with --set source_lang=" in caplog.text
    assert load_model(source.with_name("out")).config.target_lang == "und"  # BCP 47 for undetermined


def test_each_part_of_a_long_text_keeps_the_tag(source):
    imported(source)
    translator = Translator.load(source.with_name("out"), "cpu", ["decoding.precision=fp32"])
    tag, text = ">>deu<<", "She likes rice."
    long = " ".join([text] * 12)
    parts = [translator.translate([f"{tag} {text}"])[0].text] * 12
    assert translator.translate([f"{tag} {long}"])[0].text == " ".join(parts)
    # Sentences are joined as the language of the tag does, which the config does not know.
    lines = translator.splitter.parts_of([f">>fra<< {text}", f"{tag} {text}", text], [], 0, False)
    assert [part.target_lang for part in lines] == ["fra", "deu", None]
    with pytest.raises(UsageError, match="begin each line with a tag of the model, such as >>"):
        translator.between(None, "zh")
    [one] = translator.translate([f"{tag} {text}"], alignments=True)
    [all_] = translator.translate([f"{tag} {long}"], alignments=True)
    source, target = (
        len(text.split()),
        len(one.text.split()),
    )  # words; the tag is one more word, at the beginning
    assert all_.alignment == tuple(
        (i + source * part if i else 0, j + target * part) for part in range(12) for i, j in one.alignment
    )


def test_a_model_with_tags_is_not_exported_for_argos_translate(source, mtrain, tmp_path):
    imported(source)
    code, _, err = mtrain("export", source.with_name("out"), tmp_path / "argos", "--format", "argos")
    assert code == 4 and "cannot begin a text with a tag such as >>" in one_line(err)


def test_special_tokens_in_a_text_are_never_encoded_as_such(tmp_path):
    """SentencePiece may return such a text as one token, because it does not know the characters."""
    write_tokenizer(tmp_path)
    (tmp_path / "source.spm").rename(tmp_path / "joint.model")
    vocabulary = Vocabulary(tmp_path / "joint.model", tmp_path / "vocab.json")
    texts = ["</s>", "<pad>", ">>fra<< </s>", "rice</s>", "</s> <unk> <pad>"]
    vocabulary.processor = SimpleNamespace(encode=lambda text, **_: text.split())
    for row in vocabulary.encode(texts):
        assert not {vocabulary.special.eos, vocabulary.special.pad} & set(row)


def test_sampled_segmentations_decode_to_the_same_text(tmp_path):
    write_tokenizer(tmp_path)
    vocabulary = Vocabulary(tmp_path / "source.spm", tmp_path / "vocab.json")
    rows = vocabulary.encode(sentences())
    sampled = resegmented(make_resegment(vocabulary, 0.3), rows, np.random.default_rng(1))
    assert vocabulary.decode(sampled) == vocabulary.decode(rows)
    assert sum(new != old for new, old in zip(sampled, rows, strict=True)) > 20


def test_training_with_an_imported_vocabulary_resumes_exactly(source, make_config, caplog):
    """Both sides share one set of ids, so all embeddings can be tied."""
    imported(source)
    out = source.with_name("out")
    own = load_model(out).config.tokenizer.model_dump(mode="json")
    keys = {"tokenizer": {**own, "path": str(out)}, "model": {"tie_embeddings": "all"}}
    keys["data"] = {"subword_sampling": 0.2, "max_length": 64}
    for run, steps in (("whole", 8), ("halves", 4), ("halves", 8)):
        fit(make_config(run, training={"max_steps": steps}, **keys), device="cpu")
    runs = [source.parent / run for run in ("whole", "halves")]
    states = [load_file(run / "checkpoints" / "step-00000008" / "model.safetensors") for run in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    loaded = load_model(runs[0])
    assert loaded.tokenizer.fingerprint == load_model(source.with_name("out")).tokenizer.fingerprint
    assert (loaded.model.config.bos_id, loaded.model.config.pad_id, loaded.model.config.eos_id) == (
        167,
        167,
        0,
    )
    check_data(make_config("whole", **keys).data, loaded.tokenizer)


def test_training_starts_from_an_imported_model(source, make_config):
    imported(source)
    out, raw = source.with_name("out"), make_config("tuned").model_dump(mode="json")
    raw |= {"model": {"preset": None}, "tokenizer": {}, "decoding": {}}
    raw["data"].pop("max_length")
    raw["export"] = {"require": ["marian"]}  # checked for the imported model, not for the default sizes
    raw["training"] |= {"init_from": str(out), "max_steps": 1, "warmup_steps": 10**6}  # a tiny step
    fit(validate(Config, raw, "test"), device="cpu")
    tuned, began = load_model(source.parent / "tuned"), load_model(out)
    assert tuned.config.model == began.config.model
    decoding = tuned.config.decoding
    assert decoding.alignment_layer is not None  # chosen by training
    assert decoding.model_copy(update={"alignment_layer": None}) == began.config.decoding
    texts = sentences()[:8]
    assert tuned.tokenizer.encode_source(texts) == began.tokenizer.encode_source(texts)
    for ours, theirs in zip(tuned.model.parameters(), began.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_an_imported_model_translates_and_scores(mtrain, source, tmp_path):
    code, out, _ = mtrain("import", source, tmp_path / "model", "--set", "decoding.precision=fp32")
    assert (code, out) == (0, "")
    code, out, _ = mtrain("translate", tmp_path / "model", *sentences()[:3], "--alignments", "--scores")
    assert code == 0 and len(out.splitlines()) == 3
    (tmp_path / "in").write_text("I like rice.\n")
    code, out, _ = mtrain("score", tmp_path / "model", "-i", tmp_path / "in", "--target", tmp_path / "in")
    assert code == 0 and float(out.split()[0]) < 0


# ----------------------------------------------------------------------------------------------------- errors

CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "bert"}, "nor a Pegasus model of mtrain; model_type in config.json is 'bert'"),
    ({"scale_embedding": False}, "unsupported: scale_embedding: False"),
    ({"scale_embedding": None}, "unsupported: scale_embedding: False"),
    ({"normalize_before": True}, "unsupported: normalize_before: True"),
    ({"add_final_layer_norm": True}, "unsupported: add_final_layer_norm: True"),
    ({"layernorm_embedding": True}, "unsupported: layernorm_embedding: True"),
    ({"static_position_embeddings": False}, "unsupported: static_position_embeddings: False"),
    ({"decoder_attention_heads": 2}, r"attention_heads of encoder and decoder differ: \(4, 2\)"),
    ({"decoder_ffn_dim": 32}, r"ffn_dim of encoder and decoder differ: \(64, 32\)"),
    ({"activation_function": "gelu_new"}, "unsupported: activation_function: 'gelu_new'; known: relu"),
    ({"activation_function": ["relu"]}, "activation_function: "),
    ({"d_model": None}, "config.json: d_model is missing"),
    ({"d_model": "32"}, 'config.json: d_model: expected an integer .*got "32"'),
    ({"d_model": 10**9}, "config.json: d_model"),
    ({"d_model": 64}, "has the shape .*; the settings require"),
    ({"encoder_layers": 200}, "missing tensor model.encoder.layers.2"),
    ({"encoder_layers": 1}, "unexpected tensors: model.encoder.layers.1"),
    ({"vocab_size": 10**12, "decoder_vocab_size": 10**12}, "but the vocabulary files have"),
    ({"decoder_vocab_size": 100}, "but the vocabulary files have"),
    ({"eos_token_id": 5}, "eos_token_id is 5, but the vocabulary's is 0"),
    ({"eos_token_id": [0, 1]}, r"eos_token_id is \[0, 1\]"),
    ({"decoder_start_token_id": 3}, "decoder_start_token_id is 3, but the vocabulary's is 167"),
    ({"share_encoder_decoder_embeddings": False}, "missing tensor model.encoder.embed_tokens.weight"),
    ({"tie_word_embeddings": False}, "missing tensor lm_head.weight"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS, ids=[str(changes)[:40] for changes, _ in CONFIGS])
def test_unsupported_architectures_are_errors(source, changes, message):
    edited(source / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        import_model(str(source), source.with_name("out"))
    assert {path.name for path in source.parent.iterdir()} == {"source"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_sample": True}, "do_sample: True"),
        ({"repetition_penalty": 1.2}, "repetition_penalty: 1.2"),
        ({"num_beam_groups": 2}, "num_beam_groups: 2"),
        ({"suppress_tokens": [3]}, r"suppress_tokens: \[3\]"),
        ({"bad_words_ids": [[1, 2]]}, "unsupported: bad_words_ids"),
        ({"bad_words_ids": [1]}, "unsupported: bad_words_ids"),
        ({"bad_words_ids": [["a"]]}, "forbidden_ids"),
        ({"bad_words_ids": [[168]]}, "bad_words_ids: 168 is not a token id of this model"),
        ({"early_stopping": 1}, "early_stopping: 1"),
        ({"early_stopping": []}, "early_stopping"),
        ({"forced_eos_token_id": 4}, "forced_eos_token_id is 4"),
        ({"num_beams": "4"}, 'beam_size: .*got "4"'),
        ({"max_length": "40"}, "must be an integer; got '40'"),
        ({"max_length": 1}, "max_length_offset"),
        ({"decoder_start_token_id": 0}, "decoder_start_token_id is 0"),
    ],
)
def test_unsupported_generation_settings_are_errors(source, changes, message):
    edited(source / "generation_config.json", **changes)
    with pytest.raises(ModelError, match=message):
        import_model(str(source), source.with_name("out"))


@pytest.mark.parametrize(
    "name", ["config.json", "vocab.json", "source.spm", "target.spm", "model.safetensors"]
)
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "folder", "pipe"])
def test_missing_or_damaged_files_are_named(source, name, how):
    file = source / name
    contents = file.read_bytes()
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "pipe":  # which would hang
        os.mkfifo(file)
    elif how != "missing":
        file.write_bytes(contents[: len(contents) // 2 if how == "cut" else 0])
    with pytest.raises(ModelError, match=re.escape(name)) as caught:
        import_model(str(source), source.with_name("out"))
    assert "\n" not in str(caught.value) and not source.with_name("out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected an object that maps pieces"),
        ("{}", "expected an object that maps pieces"),
        ("[" * 100_000, "not JSON"),
        ('{"a": 1.5}', "the id of 'a' is 1.5"),
        ('{"a": true}', "the id of 'a' is True"),
        ('{"a": "1"}', "the id of 'a' is '1'"),
        ('{"a": -1}', "the id of 'a' is -1"),
        ('{"a": 999999999999}', "the id of 'a' is 999999999999"),
        ('{"a": 1, "b": 1}', "two pieces have the same id"),
        ('{"\\ud800": 1}', "not valid Unicode"),
        ('{"</s>": 0, "<unk>": 1}', "has no <pad>"),
        ('{"</s>": 0, "<unk>": 1, "<pad>": 2}', "the vocabulary's is 2"),
    ],
)
def test_an_invalid_vocabulary_is_an_error(source, text, message):
    (source / "vocab.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        import_model(str(source), source.with_name("out"))


def _broadcast(tensors):
    tensors["model.shared.weight"] = torch.zeros(1, 1).expand(10**6, 10**6)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_named(source, name):
    (source / "model.safetensors").unlink()
    (source / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(ModelError, match=f"{name}: is only a pointer of Git LFS; run `git lfs pull`"):
        import_model(str(source), source.with_name("out"))


class Payload:
    def __reduce__(self):
        return os.mkdir, ("was-here",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(x=Payload()), "damaged, or contains objects other than weights"),
        (lambda t: t.update(x=3), "x is not a dense tensor of fp64, fp32, fp16 or bf16 numbers"),
        (
            lambda t: t.update(x=torch.ones(2, dtype=torch.long)),
            "x is not a dense tensor of fp64, fp32, fp16 or bf16 numbers",
        ),
        (
            lambda t: t.update(x=torch.eye(3).to_sparse()),
            "x is not a dense tensor of fp64, fp32, fp16 or bf16 numbers",
        ),
        (lambda t: t.update(x=torch.ones(2)), "unexpected tensors: x"),
        (_broadcast, "model.shared.weight has fewer numbers than its shape requires"),
    ],
)
def test_a_pickle_runs_no_code_and_must_contain_only_weights(source, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    tensors: dict[str, Any] = dict(load_file(source / "model.safetensors"))
    (source / "model.safetensors").unlink()
    change(tensors)
    torch.save(tensors, source / "pytorch_model.bin")
    with pytest.raises(ModelError, match=message):
        import_model(str(source), source.with_name("out"))
    assert not Path("was-here").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["final_logits_bias"].fill_(torch.nan), "final_logits_bias contains NaN"),
        (lambda t: t.update({"lm_head.weight": torch.ones(168, 32)}), "and lm_head.weight differ"),
        (lambda t: t.update({"lm_head.weight": torch.ones(3)}), "and lm_head.weight differ"),
        (
            lambda t: t.pop("model.encoder.layers.0.fc1.bias"),
            "missing tensor model.encoder.layers.0.fc1.bias",
        ),
        (
            lambda t: t.update({"model.encoder.embed_positions.weight": torch.ones(64, 32)}),
            "embed_positions.weight: unsupported: positional encodings",
        ),
        (
            lambda t: t.update({"model.decoder.embed_positions.weight": torch.ones(3)}),
            "that are not sinusoidal",
        ),
    ],
)
def test_invalid_tensors_are_named(source, change, message):
    weights(source, change)
    with pytest.raises(ModelError, match=message):
        import_model(str(source), source.with_name("out"))


def test_nothing_is_overwritten(mtrain, source, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out in ("mine", "mine/letter", "link", "source"):
        code, _, err = mtrain("import", source, tmp_path / out)
        assert code == 2 and "already exists and is not overwritten" in one_line(err)
    assert (tmp_path / "mine" / "letter").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    code, _, err = mtrain("import", source, ".")
    assert code == 2 and ".: is the working directory" in one_line(err)
    monkeypatch.chdir(tmp_path)
    assert mtrain("import", source, tmp_path / "empty")[0] == 0


def test_mistakes_on_the_command_line_are_reported_in_one_line(mtrain, source, tmp_path, monkeypatch):
    code, _, err = mtrain("import", source, tmp_path / "out", "--set", "model.heads=2")
    assert code == 2 and "only decoding.*, source_lang and target_lang can be set" in one_line(err)
    (tmp_path / "opus.zip").touch()
    code, _, err = mtrain("import", tmp_path / "opus.zip", tmp_path / "out")
    assert code == 4 and "not a folder; unpack it, and give the folder" in one_line(err)

    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no route to the hub\nby any way")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    code, _, err = mtrain("import", "nobody/nothing", tmp_path / "out")
    assert code == 4 and "not available from the Hugging Face Hub: no route to the hub" in one_line(err)


def test_a_model_name_is_downloaded_from_the_hub(source, tmp_path, monkeypatch):
    asked = []

    def fetched(name: str, allow_patterns: list[str]) -> str:
        assert name == "Helsinki-NLP/opus-mt-xx-yy"
        names = ("model.safetensors", "pytorch_model.bin", "*.npz")
        asked.append([each for each in names if each in allow_patterns])
        return str(source)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    as_bin(source)
    import_model("Helsinki-NLP/opus-mt-xx-yy", tmp_path / "out")
    assert asked == [[], ["model.safetensors"], ["pytorch_model.bin"]]
    asked.clear()
    edited(source / "config.json", model_type="t5")
    with pytest.raises(ModelError, match="neither a MarianMT"):
        import_model("Helsinki-NLP/opus-mt-xx-yy", tmp_path / "other")
    assert asked == [[]]  # no weights
    asked.clear()
    (source / "config.json").unlink()  # a model of the program Marian
    with pytest.raises(ModelError):
        import_model("Helsinki-NLP/opus-mt-xx-yy", tmp_path / "other")
    assert asked == [[], ["*.npz"]]


def test_an_override_out_of_range_is_a_usage_error(source):
    with pytest.raises(UsageError, match="beam_size"):
        import_model(str(source), source.with_name("out"), ["decoding.beam_size=0"])


def test_an_empty_row_before_others_is_decoded(source, tmp_path, monkeypatch):
    import_model(str(source), tmp_path / "model")
    vocabulary = load_model(tmp_path / "model").tokenizer.target
    processor = vocabulary.processor

    def decode(pieces: list[Any]) -> Any:  # as in SentencePiece before 0.2.3
        if pieces and pieces[0] == []:
            raise TypeError("list must contain strings")
        return processor.decode(pieces)

    known = {"piece_to_id": processor.piece_to_id, "unk_id": processor.unk_id}
    monkeypatch.setattr(vocabulary, "processor", SimpleNamespace(decode=decode, **known))
    empty, text = vocabulary.decode([[vocabulary.special.eos], [5, 6, 7]])
    assert empty == "" and text


def in_shards(source: Path, kind: str = ".safetensors") -> dict[str, str]:
    """Divide the weights among three files and an index, as `save_pretrained` does; returns their place."""
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    stem = "model" if kind == ".safetensors" else "pytorch_model"
    places = {name: f"{stem}-{1 + i % 3:05}-of-00003{kind}" for i, name in enumerate(sorted(tensors))}
    for place in {*places.values()}:
        part = {name: tensors[name].clone() for name in places if places[name] == place}
        save_file(part, source / place) if kind == ".safetensors" else torch.save(part, source / place)
    (source / f"{stem}{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


@pytest.mark.parametrize("kind", [".safetensors", ".bin"])
def test_weights_in_shards_equal_those_in_one_file(original, source, kind):
    in_shards(source, kind)
    import_model(str(original), source.with_name("whole"))
    whole = load_file(source.with_name("whole") / "model.safetensors")
    found = imported(source)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def elsewhere(path: str) -> Callable[[Path, dict[str, str]], Any]:
    """Let the index name another file for one tensor."""
    return lambda source, places: edited(
        source / "model.safetensors.index.json", weight_map={**places, "final_logits_bias": path}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda source, _: (source / "model-00002-of-00003.safetensors").unlink(),
            "00002-of-00003.* missing, b",
        ),
        (
            lambda source, _: os.truncate(source / "model-00003-of-00003.safetensors", 99),
            "00003.*cannot read",
        ),
        (elsewhere("../secret.safetensors"), "not the name of a .safetensors file in the same folder"),
        (elsewhere("/etc/secret.safetensors"), "not the name of a .safetensors file in the same folder"),
        (elsewhere("model-00001-of-00003.bin"), "not the name of a .safetensors file in the same folder"),
        (
            lambda source, places: edited(
                source / "model.safetensors.index.json",
                weight_map={**places, "extra": "model-00001-of-00003.safetensors"},
            ),
            "00001-of-00003.safetensors: has no tensor extra, which model.safetensors.index.json lists",
        ),
        (
            lambda source, _: edited(source / "model.safetensors.index.json", weight_map=["a"]),
            "weight_map does",
        ),
        (
            lambda source, _: edited(source / "model.safetensors.index.json", weight_map={"a": 1}),
            "1: not the n",
        ),
        (
            lambda source, _: os.truncate(source / "model.safetensors.index.json", 2**33),
            "too large: 8,589,934,592 bytes",
        ),
        (lambda source, _: (source / "model.safetensors.index.json").unlink(), "nor the index of several"),
    ],
)
def test_a_mistake_in_the_index_of_shards_is_named(source, change, message):
    change(source, in_shards(source))
    with pytest.raises(ModelError, match=message):
        imported(source)
    assert not source.with_name("out").exists()
