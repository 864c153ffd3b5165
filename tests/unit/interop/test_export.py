"""`mtrain export`: exported models translate as in mtrain; unsupported ones are errors."""

import filecmp
import json
import math
import shutil
from typing import Any, get_args

import pytest
import sentencepiece
import torch
import yaml
from safetensors.torch import load_file, save_file

from mtrain.checkpoint.model_folder import load_model
from mtrain.cli.interop import ExportFormat
from mtrain.config.schema import Format
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.translate import Translator
from mtrain.errors import ModelError, UsageError
from mtrain.interop import export, verify
from mtrain.interop.export import export_model
from mtrain.interop.import_model import import_model
from mtrain.storage.manifest import write_manifest
from mtrain.tokenizer.tokenizer import SPACES, Tokenizer
from tests.support.cli import changed, one_line
from tests.support.marian import make, transformers
from tests.support.random_models import AWKWARD, SMALL_LIMIT, SOURCES, random_model, translated
from tests.support.training import PAIRS

SHAPES = [
    (True, {"norm": "pre", "activation": "relu"}),
    (True, {"norm": "post", "activation": "gelu", "positions": "learned", "tie_embeddings": "none"}),
    (True, {"norm": "pre", "activation": "swiglu", "positions": "rotary", "tie_embeddings": "decoder"}),
    (False, {"norm": "post", "activation": "silu", "positions": "rotary", "tie_embeddings": "none"}),
    (False, {"norm": "post", "positions": "sinusoidal_interleaved", "tie_embeddings": "decoder"}),
]


@pytest.mark.parametrize(
    ("joint", "shape"),
    [
        pytest.param(*case, id=str(list(case[1].values())), marks=[pytest.mark.slow] * (number in (1, 2)))
        for number, case in enumerate(SHAPES)
    ],
)
def test_ctranslate2_translates_every_architecture_identically(tokenizers, tmp_path, joint, shape):
    model = random_model(tmp_path / "model", tokenizers[joint], **shape)
    before = load_file(model / "model.safetensors")
    summary, *differing = export_model(model, tmp_path / "out", "ctranslate2", None, SOURCES + AWKWARD)
    assert summary.startswith("13 sentences: 13 translations identical (greedy)") and not differing
    after = load_file(model / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_empty_translations_are_exported(tokenizers, tmp_path):
    """CTranslate2 itself generates at least one token unless told otherwise."""
    model = random_model(tmp_path / "model", tokenizers[True], output_bias=True)
    tensors = load_file(model / "model.safetensors")
    tensors["output_bias"][Tokenizer(tokenizers[True]).special.eos] = 1e3
    save_file(tensors, model / "model.safetensors")
    write_manifest(model)
    assert [best.text for best in Translator.load(model, "cpu").translate(SOURCES)] == [""] * len(SOURCES)
    [summary] = export_model(model, tmp_path / "out", "ctranslate2", texts=SOURCES)
    assert summary.startswith("8 sentences: 8 translations identical (greedy)")


def test_a_model_that_is_replaced_meanwhile_is_not_exported(model_copy, tmp_path, monkeypatch):
    original = verify.verify

    def verify_while_fit_publishes(*arguments: Any, **settings: Any) -> list[str]:
        with (model_copy / "manifest.json").open("a") as manifest:
            manifest.write("\n")
        return original(*arguments, **settings)

    monkeypatch.setattr("mtrain.interop.export.verify", verify_while_fit_publishes)
    with pytest.raises(ModelError, match="was replaced while it was exported; try again"):
        export_model(model_copy, tmp_path / "out", "ctranslate2", texts=SOURCES[:1])
    assert not (tmp_path / "out").exists()


def test_the_command_accepts_every_format():
    assert get_args(ExportFormat) == get_args(Format)


def test_quantized_models_are_smaller(run_dir, tmp_path):
    sizes = []
    for quantization in (None, "float16", "bfloat16", "int8_float32", "int8"):
        out = tmp_path / str(quantization)
        [summary, *_] = export_model(run_dir, out, "ctranslate2", quantization, SOURCES[:2])
        assert summary.startswith("2 sentences: 2 translations identical")
        sizes.append((out / "model.bin").stat().st_size)
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 2


@pytest.mark.parametrize("joint", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_vocabulary_learned_by_mtrain_survives_export_to_marian_and_import(tokenizers, tmp_path, joint):
    """With byte tokens, a symbol, and normalization; a joint vocabulary, or one for each language."""
    tie = "all" if joint else "decoder"
    decoding = DecodingConfig(precision="fp32", beam_size=2, max_length_ratio=0, max_length_offset=20)
    shape = {"norm": "post", "activation": "silu", "tie_embeddings": tie}
    model = random_model(tmp_path / "model", tokenizers[joint], decoding, **shape)
    summary, *differing = export_model(model, tmp_path / "out", "marian", texts=SOURCES + AWKWARD)
    assert summary.startswith("13 sentences: 13 translations identical (beam 2)") and not differing
    import_model(str(tmp_path / "out"), tmp_path / "back")
    ours, back = load_model(model), load_model(tmp_path / "back")
    assert back.tokenizer.fingerprint == ours.tokenizer.fingerprint
    changed = {"activation_dropout": 0.1, "max_positions": 1024}
    assert back.config.model == ours.config.model.model_copy(update=changed)
    assert translated(tmp_path / "back") == translated(model)
    export_model(tmp_path / "back", tmp_path / "again", "marian", texts=SOURCES[:1])
    files = ["model.safetensors", "vocab.json", "config.json", "generation_config.json"]
    assert filecmp.cmpfiles(tmp_path / "out", tmp_path / "again", files, shallow=False)[0] == files
    assert back.config.max_length == ours.config.max_length
    assert back.config.decoding == ours.config.decoding.model_copy(update={"precision": "auto"})


@pytest.mark.parametrize(
    "tie", ["all", *(pytest.param(tie, marks=pytest.mark.slow) for tie in ("decoder", "none"))]
)
def test_the_converter_of_ctranslate2_accepts_an_export_to_marian(ctranslate2, tokenizers, tmp_path, tie):
    """The converter takes <pad> for the last token, and starts the decoder with an embedding of zeros."""
    model = random_model(
        tmp_path / "model", tokenizers[True], SMALL_LIMIT, norm="post", tie_embeddings=tie, output_bias=True
    )
    export_model(model, tmp_path / "out", "marian", texts=SOURCES[:1])
    for _ in range(2):  # also after Transformers has saved it
        tokenizer = transformers().MarianTokenizer.from_pretrained(tmp_path / "out")
        ctranslate2.converters.TransformersConverter(str(tmp_path / "out")).convert(
            str(tmp_path / "ct2"), force=True
        )
        converted = ctranslate2.Translator(str(tmp_path / "ct2"), device="cpu", compute_type="float32")
        rows = [tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) for text in SOURCES + AWKWARD]
        options = {"beam_size": 1, "max_decoding_length": 20, "min_decoding_length": 0}
        found = converted.translate_batch(rows, **options, return_scores=True)
        ids = [tokenizer.convert_tokens_to_ids(each.hypotheses[0]) for each in found]
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
        ours = translated(model, beam_size=1)
        texts = [text.translate(SPACES).strip() for text in texts]
        assert texts == [text.strip() for text, _ in ours] and len({*texts}) > 3
        scores = [each.scores[0] for each in found]
        assert scores == [score for _, score in ours]
        loaded = transformers().MarianMTModel.from_pretrained(tmp_path / "out")
        loaded.save_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_an_export_that_transformers_has_trained_is_imported_as_it_is(tokenizers, tmp_path):
    """BOS has been trained, so it cannot take the place of the start token again."""
    model = random_model(tmp_path / "model", tokenizers[True], SMALL_LIMIT, norm="post", tie_embeddings="all")
    export_model(model, tmp_path / "out", "marian", texts=SOURCES[:1])
    trained = transformers().MarianMTModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        trained.model.shared.weight[2] += 0.1
    trained.save_pretrained(tmp_path / "out")
    import_model(str(tmp_path / "out"), tmp_path / "back")
    back = load_model(tmp_path / "back")
    assert back.model.config.bos_id == back.model.config.pad_id == 360
    assert [text for text, _ in translated(tmp_path / "back")] == [text for text, _ in translated(model)]


def test_a_trained_model_translates_the_same(ctranslate2, run_dir, tmp_path):
    """Using only CTranslate2, SentencePiece and the files of the exported folder."""
    summary = export_model(run_dir, tmp_path / "out", "ctranslate2", None, [" ", "It rains."])
    assert summary[0].startswith("1 sentences: 1 translations identical")  # the other text has no tokens
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out" / "joint.model"))
    exported = ctranslate2.Translator(str(tmp_path / "out"), device="cpu", compute_type="float32")
    translator = Translator.load(run_dir, "cpu", ["decoding.precision=fp32"])
    vocabulary = json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text())
    assert vocabulary == translator.tokenizer.source.pieces
    rows = processor.encode(SOURCES, out_type=str)
    for beams in (1, 5):
        ours = [best.text for best in translator.with_settings(beam_size=beams).translate(SOURCES)]
        theirs = exported.translate_batch(rows, beam_size=beams)
        assert (
            [processor.decode(found.hypotheses[0]) for found in theirs] == ours == [pair[1] for pair in PAIRS]
        )


@pytest.mark.parametrize(
    ("beam_size", "length_penalty"),
    [(1, 1.0), (5, 0.6), *(pytest.param(5, rate, marks=pytest.mark.slow) for rate in (0.0, 1.0, 1.2))],
)
def test_prefixed_translations_and_scores_equal_those_of_ctranslate2(
    ctranslate2, run_dir, tmp_path, beam_size, length_penalty
):
    """Improbable prefixes, the beginnings of other translations, must not make the rest longer."""
    export_model(run_dir, tmp_path / "out", "ctranslate2", None, SOURCES[:1])
    texts, others = SOURCES[:6], [target for _, target in PAIRS[1:6]]
    prefixes = ["", *(" ".join(target.split()[:2]) for target in others)]
    overrides = [f"decoding.beam_size={beam_size}", f"decoding.length_penalty={length_penalty}"]
    overrides += ["decoding.precision=fp32", "decoding.max_length_offset=50"]
    translator = Translator.load(run_dir, "cpu", overrides)
    sides = [(translator.tokenizer.source, texts), (translator.tokenizer.target, prefixes)]
    source, prefix = ([[side.pieces[i] for i in ids] for ids in side.encode(lines)] for side, lines in sides)
    exported = ctranslate2.Translator(str(tmp_path / "out"), device="cpu", compute_type="float32")
    found = exported.translate_batch(
        source,
        target_prefix=prefix,
        beam_size=beam_size,
        patience=2,
        length_penalty=length_penalty,
        min_decoding_length=0,
        return_scores=True,
    )
    ours = translator.translate(texts, prefixes=prefixes)
    assert [one.text for one in ours] == [
        translator.tokenizer.target.join(one.hypotheses)[0] for one in found
    ]
    assert [one.score for one in ours] == pytest.approx([one.scores[0] for one in found], abs=1e-4)


@pytest.mark.parametrize("format", ["marian", "pegasus", "ctranslate2", "argos"])
def test_a_forbidden_token_that_does_not_exist_is_an_error(tokenizers, tmp_path, format):
    norm = "pre" if format == "pegasus" else "post"
    model = random_model(tmp_path / "model", tokenizers[True], DecodingConfig(), norm=norm)
    with pytest.raises(UsageError, match="forbidden_ids: no token has the id 99999; the ids of this model"):
        export_model(model, tmp_path / "out", format, overrides=["decoding.forbidden_ids=[99999]"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_text_longer_than_any_training_pair_can_be_translated_with_transformers(tokenizers, tmp_path):
    model = random_model(tmp_path / "model", tokenizers[True], DecodingConfig(), norm="post")
    export_model(model, tmp_path / "out", "marian", texts=SOURCES[:1])
    loaded = transformers().MarianMTModel.from_pretrained(tmp_path / "out")
    longest = load_model(model).config.max_length
    assert (
        loaded(torch.full((1, 4 * longest), 5), decoder_input_ids=torch.full((1, 1), 2))
        .logits.isfinite()
        .all()
    )


def test_language_tags_survive_export_to_marian_and_import(tokenizers, tmp_path):
    model = random_model(tmp_path / "model", tokenizers[True], DecodingConfig(), norm="post")
    raw = yaml.safe_load((model / "config.yaml").read_text())
    (model / "config.yaml").write_text(yaml.safe_dump({**raw, "language_tags": "target"}))
    write_manifest(model)
    export_model(model, tmp_path / "out", "marian", texts=SOURCES[:1])
    import_model(str(tmp_path / "out"), tmp_path / "back")
    loaded, back = load_model(model), load_model(tmp_path / "back")
    assert back.config.language_tags == "target"
    assert back.config.tokenizer.symbols == loaded.tokenizer.source.symbol_names


def test_forbidden_tokens_of_an_imported_model_stay_forbidden_in_ctranslate2(ctranslate2, tmp_path):
    make(tmp_path / "hf", {"num_beams": 4}, seed=38, activation_function="swish")
    import_model(str(tmp_path / "hf"), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    [summary] = export_model(tmp_path / "model", tmp_path / "out", "ctranslate2")
    assert "16 translations identical" in summary
    exported = ctranslate2.Translator(str(tmp_path / "out"), device="cpu")
    [scored] = exported.score_batch([["\u2581a"]], [["<pad>"]])
    assert scored.log_probs[0] == -float("inf") and tensors["output_bias"].isfinite().all()
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {
        "source.model",
        "target.model",
        "vocab.json",
    }


def test_the_command_prints_a_summary_and_the_differences(mtrain, run_dir, corpus, tmp_path, monkeypatch):
    arguments = ("export", run_dir, tmp_path / "out", "--format", "ctranslate2", "-i", corpus / "train.en")
    code, out, err = mtrain(*arguments, "--quantization", "int8", "--quiet")
    assert (code, err) == (0, "") and out.startswith("8 sentences: ")
    monkeypatch.setattr(verify.Exported, "translate", property(lambda _: lambda *_: [5]), raising=False)
    code, out, _ = mtrain(*arguments[:2], tmp_path / "other", *arguments[3:], "--quantization", "int8")
    assert code == 0 and out.count("source: ") == out.count("mtrain: ") == out.count("export: ") == 8


@pytest.mark.parametrize(("what", "gap"), [("translate", 0.0), ("log_probs", 0.01), ("log_probs", math.nan)])
def test_an_export_that_differs_is_an_error_and_is_removed(run_dir, tmp_path, monkeypatch, what, gap):
    opened = verify.open_ctranslate2

    def wrong(*arguments: Any) -> verify.Exported:
        exported = opened(*arguments)
        changes = {
            "translate": lambda row, limit: exported.translate(row, limit)[:-1],
            "log_probs": lambda row, said: [value - gap for value in exported.log_probs(row, said)],
        }
        return exported._replace(**{what: changes[what]})

    monkeypatch.setattr(export, "open_ctranslate2", wrong)
    with pytest.raises(ModelError, match="the exported model differs"):
        export_model(run_dir, tmp_path / "out", "ctranslate2")
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("ctranslate2")
def test_unsupported_exports_are_errors(mtrain, tokenizers, run_dir, tmp_path, monkeypatch):
    for shape, message in (
        ({"norm": "pre"}, "model.norm must be post; use --format transformers"),
        ({"norm": "post", "positions": "rotary"}, "model.positions must be sinusoidal"),
        ({"norm": "post", "activation": "swiglu"}, "model.activation must not be swiglu"),
    ):
        model = random_model(tmp_path / "model", tokenizers[True], **shape)
        code, _, err = mtrain("export", model, tmp_path / "out", "--format", "marian")
        assert code == 4 and message in one_line(err)
        shutil.rmtree(model)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    good = ("export", run_dir, tmp_path / "out", "--format")
    empty = tmp_path / "mine" / "empty.txt"
    empty.write_text(" \n\n")
    for arguments, expected, message in (
        (("export", run_dir, tmp_path / "mine", "--format", "ctranslate2"), 2, "is not overwritten"),
        (("export", tmp_path / "mine", tmp_path / "out", "--format", "marian"), 4, "not a complete"),
        ((*good, "onnx"), 2, "onnx"),
        (
            (*good, "pegasus", "--quantization", "int8"),
            2,
            "--quantization requires --format ctranslate2, argos or bergamot",
        ),
        ((*good, "ctranslate2", "-i", "nowhere"), 3, "nowhere: no such file"),
        ((*good, "ctranslate2", "-i", empty), 3, "empty.txt: has no text to compare; give another file"),
        ((*good, "ctranslate2", "--set", "model.heads=1"), 2, "only decoding.* can be set"),
    ):
        code, _, err = mtrain(*arguments)
        assert code == expected and message in one_line(err)
    monkeypatch.setitem(__import__("sys").modules, "ctranslate2.converters", None)
    code, _, err = mtrain(*good, "ctranslate2")
    assert code == 2 and "pip install 'mtrain[interop]'" in one_line(err)
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def test_settings_that_generate_does_not_support_are_logged(tokenizers, tmp_path, caplog):
    decoding = DecodingConfig(precision="fp32", coverage_penalty=0.2, split="sentences", beam_size=2)
    model = random_model(tmp_path / "model", tokenizers[True], decoding, norm="post")
    export_model(model, tmp_path / "out", "marian", texts=SOURCES[:2])
    assert (
        "generation_config.json does not support them: decoding.coverage_penalty, decoding.split, "
        "decoding.max_length_ratio" in caplog.text
    )


# -------------------------------------------------------------------------------------------------- preflight


def test_fit_logs_which_exports_are_possible_if_debug_messages_are_wanted(mtrain, config_file):
    code, _, err = mtrain("fit", config_file, "--set", "training.max_steps=1", "--debug")
    assert code == 0 and "exports: marian: no (model.norm must be post), pegasus: yes, " in err


def test_fit_rejects_a_model_that_a_required_export_does_not_support(mtrain, config_file, tmp_path):
    config = changed(config_file, "export", require=["ctranslate2", "marian"])
    code, _, err = mtrain("fit", config)
    assert (
        code == 2
        and "marian does not support this model: model.norm must be post; use transformers" in one_line(err)
    )
    assert not (tmp_path / "run").exists()
    code, _, err = mtrain("fit", config, "--set", "model.norm=post", "--set", "training.max_steps=1")
    assert code == 0 and "exports: marian: yes, pegasus: no (model.norm must be pre), " in err


def test_an_unknown_export_is_a_usage_error(mtrain, config_file):
    code, _, err = mtrain("fit", changed(config_file, "export", require=["onnx"]))
    assert code == 2 and "export.require.0: expected one of transformers, marian, " in one_line(err)


def test_a_missing_package_is_named():
    from mtrain.interop.formats import import_optional

    with pytest.raises(
        UsageError, match=r"no_such_package is not installed: pip install 'mtrain\[interop\]'"
    ):
        import_optional("no_such_package.part")
