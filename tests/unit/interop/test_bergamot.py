"""Models for the Bergamot engine, and models of Marian."""

import gzip
import json
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
import yaml

from mtrain.checkpoint.model_folder import LoadedModel, load_model
from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.data.reading.files import toy_pairs
from mtrain.decoding.translate import Translator
from mtrain.errors import ModelError, UsageError
from mtrain.interop.bergamot.engine import FILES, compare_with_engine, translate_with_engine
from mtrain.interop.bergamot.heads import choose_head, with_head_first
from mtrain.interop.export import export_model
from mtrain.interop.import_model import import_model
from mtrain.interop.verify import sentences_of
from mtrain.model.transformer import Transformer
from mtrain.training.fit import fit
from mtrain.training.setup.prepare_run import check_exports
from tests.support.bergamot import engine, log_probs, read_binary
from tests.support.cli import one_line
from tests.support.random_models import SOURCES, random_model

__all__ = ["engine"]
SHAPE: dict[str, Any] = {"d_model": 64, "ffn_dim": 64, "norm": "post", "positions": "sinusoidal_marian"}
TARGET = [40, 3, 50, 60]
PLAIN = ["decoding.beam_size=1", "decoding.no_repeat_ngram=0"]  # as the engine searches
JOINT, SEPARATE = (True, "all"), (False, "none")  # vocabularies and ties
COMBINATIONS = [JOINT, SEPARATE, pytest.param((True, "decoder"), marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def model_of(tokenizers, tmp_path_factory) -> Callable[[tuple[bool, Any]], Path]:
    """Makes a model with a combination of vocabularies and ties, and exports it in fp32."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(combination: tuple[bool, Any]) -> Path:
        joint, tie = combination
        decoding = DecodingConfig(precision="fp32", forbidden_ids=[7])
        model = random_model(folder / tie, tokenizers[joint], decoding, tie_embeddings=tie, **SHAPE)
        [summary] = export_model(model, exported(model), "bergamot", texts=SOURCES)
        assert summary.startswith("8 sentences: 8 translations identical (greedy)")
        return model

    return make


def exported(model: Path) -> Path:
    return model.with_name(f"{model.name}-out")


def of_model(loaded: LoadedModel, source: list[int]) -> torch.Tensor:
    """The log-probabilities (T, V) of TARGET."""
    ids = torch.tensor([source])
    keep, target = (
        torch.ones_like(ids, dtype=torch.bool),
        torch.tensor([[loaded.model.config.bos_id, *TARGET]]),
    )
    with torch.no_grad():
        hidden = loaded.model.decode(target, loaded.model.encode(ids, keep), keep)
        return loaded.model.project(hidden[0]).log_softmax(-1)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_marian_computes_the_same_probabilities(model_of, combination):
    loaded = load_model(model_of(combination))
    arrays, options = read_binary(exported(model_of(combination)) / "model.bin")
    source, size = [9, 20, 31, 3], len(loaded.tokenizer.target)
    ours = of_model(loaded, source)
    ours[:, 7] = -torch.inf
    theirs = torch.tensor(log_probs(arrays, options, source, TARGET))
    possible = [i for i in range(size) if i != 7]
    torch.testing.assert_close(
        theirs[:, possible].float(), ours.log_softmax(-1)[:, possible], atol=1e-4, rtol=0
    )
    assert theirs.size(1) % 8 == 0 and (theirs[:, [7, *range(size, theirs.size(1))]] < -1000).all()
    assert options["dim-vocabs"][1] == theirs.size(1)


def test_int8_for_firefox_rounds_matrices_to_127_steps(mtrain, model_of, tmp_path):
    arguments = ("--format", "bergamot", "--quantization", "int8", "--firefox")
    code, out, _ = mtrain("export", model_of(SEPARATE), tmp_path / "out", *arguments)
    assert code == 0 and "16 sentences: " in out
    plain, contents = exported(model_of(SEPARATE)), {}
    for file in (tmp_path / "out").glob("*.gz"):
        contents[file.name] = gzip.decompress(file.read_bytes())
    for side in ("src", "trg"):
        assert contents.pop(f"{side}vocab.enfr.spm.gz") == (plain / f"{side}vocab.spm").read_bytes()
    (tmp_path / "model.bin").write_bytes(contents.pop("model.enfr.intgemm8.bin.gz"))
    with pytest.raises(ModelError, match=r"model.enfr.intgemm8.bin.gz: is compressed.* gunzip"):
        import_model(str(tmp_path / "out"), tmp_path / "back")
    others = {file.name for file in (tmp_path / "out").iterdir() if file.suffix != ".gz"}
    assert not contents and others == {"README.md", "info.json", "manifest.json"}
    before, _ = read_binary(plain / "model.bin")
    after, _ = read_binary(tmp_path / "model.bin")
    for name, array in before.items():
        is_matrix = (name[-3:-1] == "_W" and name[-1] != "t") or name.endswith("Wemb")
        step = np.abs(array).max() / 127 if is_matrix else 0
        if "context" not in name:  # other sentences may choose another attention head
            assert np.abs(after[name] - array).max() <= step / 2 + 1e-6, name
            assert is_matrix == (not np.array_equal(after[name], array)), name
    assert (tmp_path / "model.bin").stat().st_size < (plain / "model.bin").stat().st_size / 1.8


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_model_of_marian_is_imported_with_equal_probabilities(model_of, tmp_path, combination):
    """As `.npz`, with the vocabularies of OPUS-MT: SentencePiece models, and a file of ids in YAML."""
    (joint, _), folder = combination, tmp_path / "marian"
    folder.mkdir()
    arrays, options = read_binary(exported(model_of(combination)) / "model.bin")
    text = np.frombuffer(yaml.safe_dump(options).encode() + b"\0", np.int8)
    if "decoder_ff_logit_out_Wt" in arrays:  # as old versions of Marian store it
        arrays["decoder_ff_logit_out_W"] = arrays.pop("decoder_ff_logit_out_Wt").T
    np.savez(folder / "model.npz", **{"special:model.yml": text}, **arrays)
    loaded = load_model(model_of(combination))
    sides = {"source": loaded.tokenizer.source, "target": loaded.tokenizer.target}
    for side, vocabulary in sides.items():
        (folder / f"{side}.spm").write_bytes(vocabulary.processor.serialized_model_proto())
        ids = {piece: i for i, piece in enumerate(vocabulary.pieces) if piece != "<pad>"}
        name = "vocab.yml" if joint else f"{side}.vocab.yml"
        (folder / name).write_text(yaml.safe_dump(ids, allow_unicode=True), "utf-8")
    import_model(str(folder), tmp_path / "back", ["source_lang=en", "target_lang=fr"])
    back = load_model(tmp_path / "back")
    assert back.tokenizer.joint == joint and back.config.decoding.forbidden_ids == [1]
    assert back.model.config.bos_id == back.model.config.pad_id == len(back.tokenizer.target) - 1
    assert back.tokenizer.encode_source(SOURCES) == loaded.tokenizer.encode_source(SOURCES)
    ours, theirs = (of_model(each, [9, 20, 31, 3]) for each in (loaded, back))
    ours[:, 7] = -torch.inf
    possible = [i for i in range(ours.size(1)) if i != 7]
    torch.testing.assert_close(theirs[:, possible], ours.log_softmax(-1)[:, possible], atol=1e-4, rtol=0)
    if joint:
        names = [*ids]
        ids[names[20]], ids[names[21]] = ids[names[21]], ids[names[20]]
        (folder / "vocab.yml").write_text(yaml.safe_dump(ids, allow_unicode=True), "utf-8")
        import_model(str(folder), tmp_path / "other", ["source_lang=en", "target_lang=fr"])
        reason = r"bergamot does not support this model: its token ids \(vocab\.json\) are not those of "
        with pytest.raises(ModelError, match=reason):
            export_model(tmp_path / "other", tmp_path / "again", "bergamot", texts=SOURCES)
        corpora = {"train": {"toy": "train"}, "validation": {"toy": "test"}}
        data = {"source_lang": "en", "target_lang": "fr", **corpora}
        training = {"init_from": str(tmp_path / "other"), "max_steps": 1}
        given = {"run_dir": str(tmp_path / "run"), "data": data, "training": training}
        with pytest.raises(UsageError, match=reason):
            check_exports(validate(Config, {**given, "export": {"require": ["bergamot"]}}, "test"))
    else:  # fine-tuned, it leaves again, although it has one token more than its SentencePiece model
        [summary] = export_model(tmp_path / "back", tmp_path / "again", "bergamot", texts=SOURCES)
        assert summary.startswith("8 sentences: 8 translations identical (greedy)")


def test_tokens_that_no_file_has_are_logged(model_of, tmp_path, caplog):
    """In models with several target languages, these are their tags."""
    arrays, _ = read_binary(exported(model_of(JOINT)) / "model.bin")
    table, bias = arrays["Wemb"], arrays["decoder_ff_logit_out_b"]
    wider = {"Wemb": np.concatenate([table, table[-1:]])}
    wider["decoder_ff_logit_out_b"] = np.concatenate([bias, bias[:, -1:]], axis=1)
    folder = marian_folder(model_of(JOINT), tmp_path / "marian", {}, **wider)
    import_model(str(folder), tmp_path / "back")
    assert "tokens are not in its SentencePiece model; tags such as >>deu<< need" in caplog.text


def test_an_export_is_imported_with_the_same_vocabulary(model_of, tmp_path):
    import_model(str(exported(model_of(JOINT))), tmp_path / "back")
    loaded, back = load_model(model_of(JOINT)), load_model(tmp_path / "back")
    assert (back.config.source_lang, back.config.target_lang) == ("en", "fr")
    size = len(loaded.tokenizer.target)
    assert back.tokenizer.target.pieces[:size] == loaded.tokenizer.target.pieces
    assert back.model.config.bos_id == loaded.model.config.bos_id and len(back.tokenizer.files) == 1
    assert not back.model.source_embedding.weight[back.model.config.bos_id].any()


@pytest.mark.parametrize(
    ("described", "languages"),
    [
        ({"src": "German", "trg": "English"}, ["de", "en"]),
        ({"src": "Norwegian", "srcTags": {"nb": "Bokmål"}, "trgTag": "pt-BR"}, ["nb", "pt-BR"]),
        ({"src": "Slavic", "srcTags": {"cs": "Czech", "pl": "Polish"}, "trg": 5}, ["und", "und"]),
        ({}, ["und", "und"]),
    ],
)
def test_languages_come_from_the_description_of_translatelocally(model_of, tmp_path, described, languages):
    folder = marian_folder(model_of(JOINT), tmp_path / "marian", {})
    (folder / "model_info.json").write_text(json.dumps(described), "utf-8")
    import_model(str(folder), tmp_path / "back")
    config = load_model(tmp_path / "back").config
    assert [config.source_lang, config.target_lang] == languages


def test_the_folder_is_what_translatelocally_reads(model_of):
    folder = exported(model_of(JOINT))
    settings = yaml.safe_load((folder / "config.intgemm8bitalpha.yml").read_text())
    assert settings["models"] == ["model.bin"] and settings["vocabs"] == ["vocab.spm"] * 2
    assert settings["gemm-precision"] == "float32" and settings["max-length-break"] == 64
    described = json.loads((folder / "model_info.json").read_text())
    assert described["shortName"] == "en-fr-mtrain" and described["srcTags"] == {"en": "English"}
    assert described["type"] == "tiny"  # others are not used for web pages if there is a public one
    assert "translateLocally" in (folder / "README.md").read_text()
    settings = yaml.safe_load((exported(model_of(SEPARATE)) / "config.intgemm8bitalpha.yml").read_text())
    assert settings["vocabs"] == ["srcvocab.spm", "trgvocab.spm"]


def test_another_order_of_heads_changes_nothing_but_the_first_head(model_of):
    loaded = load_model(model_of(JOINT))
    reordered = Transformer(loaded.model.config).eval()
    reordered.load_state_dict(with_head_first(loaded.model.state_dict(), 0, 2, 4))
    source = [9, 20, 31, 3]
    torch.testing.assert_close(of_model(loaded._replace(model=reordered), source), of_model(loaded, source))
    name = "decoder.0.cross_attention.query_key_value.bias"
    before, after = (model.state_dict()[name] for model in (loaded.model, reordered))
    assert torch.equal(after[:16], before[32:48])


def sharpen_head(loaded: LoadedModel, layer: int, head: int) -> None:
    """Let one of four heads lead the average: the others attend to everything alike."""
    attention: Any = loaded.model.decoder[layer].cross_attention.query_key_value
    by_head = attention.weight.data.view(3, 4, 16, 64)
    by_head[0, [i for i in range(4) if i != head]], attention.bias.data[:64] = 0, 0
    by_head[0, head] *= 30  # sharp: with flat heads, words with many tokens win


def test_the_head_that_agrees_with_the_alignments_is_chosen(model_of):
    """Of four heads, three attend to everything alike, so their average is led by the other one."""
    loaded = load_model(model_of(JOINT))
    sharpen_head(loaded, 0, 2)
    rows = [row for _, row in sentences_of(loaded, SOURCES)]
    for layer in (None, 7):  # of one
        decoding = loaded.config.decoding.model_copy(update={"alignment_layer": layer})
        config = loaded.config.model_copy(update={"decoding": decoding})
        assert choose_head(loaded._replace(config=config), rows) == (0, 2)


def test_the_layer_of_the_alignments_decides_which_head_agrees_with_them(tokenizers, tmp_path):
    folder = random_model(tmp_path / "model", tokenizers[True], decoder_layers=2, **SHAPE)
    loaded = load_model(folder)
    sharpen_head(loaded, 0, 1)
    sharpen_head(loaded, 1, 2)
    rows = [row for _, row in sentences_of(loaded, SOURCES)]
    for layer, expected in ((None, (1, 2)), (0, (0, 1)), (1, (1, 2))):
        decoding = loaded.config.decoding.model_copy(update={"alignment_layer": layer})
        config = loaded.config.model_copy(update={"decoding": decoding})
        assert choose_head(loaded._replace(config=config), rows) == expected


def test_an_alignment_head_is_chosen_even_if_others_agree_as_well(tokenizers, tmp_path):
    folder = random_model(tmp_path / "model", tokenizers[True], decoder_layers=2, **SHAPE)
    loaded = load_model(folder)
    assert choose_head(loaded, []) == (0, 0)
    loaded.model.config = loaded.model.config.model_copy(update={"alignment_head": True})
    for layer in (None, 1, 7):  # 7: as in decoding, the last one
        decoding = loaded.config.decoding.model_copy(update={"alignment_layer": layer})
        config = loaded.config.model_copy(update={"decoding": decoding})
        assert choose_head(loaded._replace(config=config), []) == (1, 0)


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"norm": "pre"}, "model.norm must be post; train with model.preset: student_tiny or student_base"),
        ({"positions": "sinusoidal"}, "model.positions must be sinusoidal_marian"),
        ({"first_position": 2}, "model.first_position must be 0"),
        ({"activation": "gelu"}, "model.activation must be relu or silu"),
        ({"ffn_dim": 48}, "model.d_model and ffn_dim must be multiples of 64"),
    ],
)
def test_an_unsupported_model_is_refused_with_the_setting(mtrain, tokenizers, tmp_path, shape, message):
    model = random_model(tmp_path / "model", tokenizers[True], **{**SHAPE, **shape})
    code, _, err = mtrain("export", model, tmp_path / "out", "--format", "bergamot")
    assert code == 4 and message in one_line(err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bergamot", "--quantization", "float16"), "float16: bergamot supports int8; leave it out for fp32"),
        (("bergamot", "--firefox"), "--firefox requires --quantization int8"),
        (("ctranslate2", "--firefox"), "--firefox requires --format bergamot"),
        (("argos", "--engine", "."), "--engine requires --format bergamot"),
        (("bergamot", "--engine", "nowhere"), "nowhere: does not contain @browsermt/bergamot-translator"),
    ],
)
def test_options_that_do_not_fit(mtrain, model_of, tmp_path, arguments, message):
    code, _, err = mtrain("export", model_of(JOINT), tmp_path / "out", "--format", *arguments)
    assert code == 2 and message in one_line(err)


def test_an_engine_needs_node(mtrain, model_of, tmp_path, monkeypatch):
    (tmp_path / "worker").mkdir()
    for name in FILES:
        (tmp_path / "worker" / name).touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    options = ("--format", "bergamot", "--engine", tmp_path)
    code, _, err = mtrain("export", model_of(JOINT), tmp_path / "out", *options)
    assert code == 2 and f"--engine {tmp_path}: needs Node, which is not installed; leave it out" in one_line(
        err
    )


def marian_folder(model: Path, folder: Path, options: dict[str, Any], **changed: Any) -> Path:
    """A folder with an `.npz` and a SentencePiece model."""
    arrays, own = read_binary(exported(model) / "model.bin")
    folder.mkdir()
    text = np.frombuffer(yaml.safe_dump(own | options).encode(), np.int8)
    arrays |= {"special:model.yml": text} | changed
    np.savez(folder / "model.npz", **arrays)
    (folder / "vocab.spm").write_bytes((exported(model) / "vocab.spm").read_bytes())
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "s2s"}, "unsupported: type: 's2s'; must be 'transformer'"),
        ({"transformer-decoder-autoreg": "rnn"}, "unsupported: transformer-decoder-autoreg: 'rnn'"),
        ({"transformer-preprocess": "n"}, "unsupported: transformer-preprocess: 'n'; must be ''"),
        ({"transformer-ffn-activation": "gelu"}, "activation: 'gelu'; must be relu or swish"),
        ({"dim-emb": None}, "d_model"),
        ({"enc-depth": 3}, "missing tensor model.encoder.layers.2"),
        ({"dec-depth": 0}, "decoder_layers must be at least 1"),
    ],
)
def test_an_unsupported_model_of_marian_is_refused_with_the_option(model_of, tmp_path, options, message):
    folder = marian_folder(model_of(JOINT), tmp_path / "marian", options)
    with pytest.raises(ModelError, match=message):
        import_model(str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_of_vocabularies_must_say_which_side_is_which(model_of, tmp_path):
    folder = shutil.copytree(exported(model_of(SEPARATE)), tmp_path / "marian")
    own = [folder / "srcvocab.spm", folder / "trgvocab.spm"]
    unclear = [own[0].rename(folder / "vocab.fr.spm"), own[1].rename(folder / "vocab.en.spm")]
    with pytest.raises(ModelError, match=r"found vocab.en.spm and vocab.fr.spm, and cannot tell which"):
        import_model(str(folder), tmp_path / "out")
    unclear[0].rename(folder / "vocab.src.spm")
    unclear[1].rename(folder / "Target.spm")
    import_model(str(folder), tmp_path / "out")
    tokenizers = load_model(model_of(SEPARATE)).tokenizer, load_model(tmp_path / "out").tokenizer
    assert tokenizers[0].source.pieces == tokenizers[1].source.pieces[: len(tokenizers[0].source)]


UNENDING = struct.pack("<6Q", 1, 1, 2**63, 0, 0, 0)  # the name of an array that is too long to be read


def damage_npz(file):
    """Weights with a file that is not an array."""
    np.savez(file, **{"special:model.yml": np.zeros(1, np.int8)})
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("README.txt", "weights of a model")


def test_damaged_folders_of_marian_are_refused(model_of, tmp_path):
    folder = marian_folder(model_of(JOINT), tmp_path / "marian", {}, Wpos=np.zeros((2, 2), "f4"))
    (folder / "vocab.spm").rename(folder / "vocab.sp")
    np.save(npy := BytesIO(), np.zeros(1))
    for change, message in (
        (lambda: None, "the vocabularies must be source.spm and target.spm with .*; found: none"),
        (lambda: (folder / "vocab.sp").rename(folder / "vocab.spm"), "unexpected tensors: Wpos"),
        (lambda: (folder / "vocab.yml").write_text("a: b"), "vocab.yml: does not map pieces to ids"),
        (lambda: (folder / "model.npz").write_bytes(b"PK"), "model.npz: damaged"),
        (lambda: (folder / "model.npz").write_bytes(npy.getvalue()), "model.npz: damaged"),
        (
            lambda: np.savez(
                folder / "model.npz",
                **{"special:model.yml": np.zeros(1, np.int8)},
                a=np.zeros((1, 1, 1), "f4"),
            ),
            "a has 3 dimensions of float32; expected 1 or 2",
        ),
        (lambda: np.savez(folder / "model.npz", a=np.zeros(1)), "has no special:model.yml"),
        (lambda: damage_npz(folder / "model.npz"), "README.txt has 0 dimensions of .*; expected 1 or 2"),
        (lambda: (folder / "model.bin").write_bytes(b"x" * 99), "several models: model.bin, model.npz"),
        (lambda: (folder / "model.npz").unlink(), "model.bin: damaged, or not weights of Marian"),
        (
            lambda: (folder / "model.bin").write_bytes(UNENDING),
            "model.bin: damaged, or not weights of Marian",
        ),
    ):
        change()
        with pytest.raises(ModelError, match=message):
            import_model(str(folder), tmp_path / "out")


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("found", ["", "zzz"])
def test_an_engine_that_translates_otherwise_is_noticed(model_of, tmp_path, monkeypatch, int8, found):
    monkeypatch.setattr("mtrain.interop.bergamot.engine.translate_with_engine", lambda *_: [found] * 3)
    loaded = load_model(model_of(JOINT))
    given = [(text, [*loaded.tokenizer.encode_source([text])[0], 3]) for text in SOURCES[:3]]
    with pytest.raises(ModelError, match=r"3 sentences: 0 translations identical, chrF .*; source: "):
        compare_with_engine(tmp_path, tmp_path, loaded, given, int8)


def test_texts_of_which_mtrain_reads_only_the_beginning_are_not_compared(model_of, tmp_path, monkeypatch):
    texts: list[str] = []

    def translate(engine, folder, given, int8):
        texts.extend(given)
        return given

    monkeypatch.setattr("mtrain.interop.bergamot.engine.translate_with_engine", translate)
    loaded = load_model(model_of(JOINT))
    loaded = loaded._replace(config=loaded.config.model_copy(update={"max_length": 8}))
    given = [(f"{length} tokens", [5] * (length - 1) + [3]) for length in (7, 8)]
    assert "1 sentences" in compare_with_engine(tmp_path, tmp_path, loaded, given, int8=False)
    assert texts == ["7 tokens"]


# -------------------------------------------------------------------------------------------- the real engine


@pytest.mark.slow
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_the_engine_translates_as_mtrain(engine, model_of, tmp_path, combination):
    lines = export_model(model_of(combination), tmp_path / "out", "bergamot", None, SOURCES, engine=engine)
    assert re.match("Bergamot engine, 8 sentences: [78] translations identical", lines[-1])


@pytest.mark.slow
def test_a_failure_of_the_engine_is_one_line(engine, tmp_path, model_of):
    (tmp_path / "model.bin").write_bytes(b"no model")
    (tmp_path / "vocab.spm").write_bytes(b"no model")
    with pytest.raises(ModelError, match="the Bergamot engine failed: "):
        translate_with_engine(engine, tmp_path, ["Hello."], int8=False)


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    """A run that has learned the toy corpus, with the settings of students in a smaller size."""
    sizes = {"d_model": 64, "ffn_dim": 128, "heads": 4, "encoder_layers": 2, "decoder_layers": 1}
    raw = {
        "run_dir": str(tmp_path_factory.mktemp("student") / "run"),
        "data": {
            **{"source_lang": "en", "target_lang": "fr", "max_length": 64},
            "train": {"toy": "train"},
            "validation": {"toy": "validation"},
        },
        "tokenizer": {"vocab_size": 540},
        "model": {"preset": "student_tiny", "dropout": 0.0, **sizes},
        "training": {
            **{"max_steps": 800, "batch_tokens": 1024, "learning_rate": 0.003, "schedule": "cosine"},
            **{"warmup_steps": 100, "validate_every": 800, "validation_pairs": 20},
            **{"checkpoint_every": 800, "precision": "fp32", "patience": None},
        },
        "export": {"require": ["bergamot"]},
    }
    fit(validate(Config, raw, "test"))
    return Path(raw["run_dir"])


def with_bold_words(texts: list[str]) -> list[str]:
    """HTML of texts, in each of which one word is bold."""
    tagged = []
    for number, text in enumerate(texts):
        words = text.split()
        words[number % len(words)] = f"<b>{words[number % len(words)]}</b>"
        tagged.append(" ".join(words))
    return tagged


def bold_words(html: str) -> list[str]:
    return re.sub(r"[^\w\s]", " ", " ".join(re.findall(r"<b>(.*?)</b>", html))).split()


@pytest.mark.slow
def test_the_engine_translates_a_trained_student_as_mtrain(engine, student, tmp_path):
    """In fp32 99% of the sentences identically, in int8 nearly as well, and with all tags."""
    pairs = [*toy_pairs("test"), *toy_pairs("validation")]
    for folder, quantization in (("fp32", None), ("int8", "int8")):
        texts = [pair.source for pair in pairs[:20]]
        export_model(student, tmp_path / folder, "bergamot", quantization, texts, engine=engine)
    with Translator.load(student, "cpu", ["decoding.precision=fp32", *PLAIN], workers=1) as own:
        found = own.translate([pair.source for pair in pairs])
        lengths = [2 * len(ids) for ids in own.splitter.encode([pair.source for pair in pairs])]
    kept = [i for i, each in enumerate(found) if each.tokens < lengths[i]][:500]  # the limit of the engine
    texts, references, ours = ([x[i] for i in kept] for x in (*zip(*pairs, strict=True), found))
    assert len(kept) == 500
    fp32 = translate_with_engine(engine, tmp_path / "fp32", texts, int8=False)
    int8 = translate_with_engine(engine, tmp_path / "int8", texts, int8=True)
    same = sum(each.text == text for each, text in zip(ours, fp32, strict=True))
    assert same >= 0.99 * len(texts)
    bleu = [sacrebleu.corpus_bleu(each, [references]).score for each in (fp32, int8)]
    chrf = sacrebleu.corpus_chrf(int8, [fp32]).score
    assert bleu[1] > bleu[0] - 0.5 and chrf > 95
    tagged = with_bold_words(texts[:100])
    theirs = translate_with_engine(engine, tmp_path / "fp32", tagged, int8=False, html=True)
    assert all(html.count("<b>") == html.count("</b>") > 0 for html in theirs)
    assert [re.sub("</?b>", "", html) for html in theirs] == fp32[:100]


@pytest.mark.slow
def test_the_engine_puts_tags_around_the_words_that_are_aligned(engine, student, tmp_path):
    """In sentences in which each word is one token, because the engine aligns tokens."""
    pairs = [*toy_pairs("test"), *toy_pairs("validation")]
    texts = [source for source, target in pairs if "'" not in source + target and "?" not in source][:100]
    tagged = with_bold_words(texts)
    export_model(student, tmp_path / "out", "bergamot", None, texts, engine=engine)
    with Translator.load(student, "cpu", PLAIN, workers=1) as own:
        found = own.translate(texts, alignments=True)
    theirs = translate_with_engine(engine, tmp_path / "out", tagged, int8=False, html=True)
    agreed = 0
    for html, each, placed in zip(tagged, found, theirs, strict=True):
        [bold] = [i for i, word in enumerate(html.split()) if word.startswith("<b>")]
        aligned = {j for i, j in each.alignment if i == bold}
        expected = [word for j, word in enumerate(each.text.split()) if j in aligned]
        agreed += bold_words(f"<b>{' '.join(expected)}</b>") == bold_words(placed)
    assert len(texts) == 100 and agreed >= 90, agreed
