"""Export to Hugging Face Transformers: pre-norm models as Pegasus, loaded and imported again."""

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.checkpoint.model_folder import load_model
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.presets import PRESETS
from mtrain.decoding.translate import Translator
from mtrain.interop.export import export_model
from mtrain.interop.import_model import import_model
from mtrain.interop.to_transformers import write_m2m_100
from mtrain.tokenizer.tokenizer import SPACES
from tests.support.m2m_100 import MAX_LENGTH, make, write_m2m_tokenizer, write_nllb_tokenizer
from tests.support.marian import transformers
from tests.support.random_models import AWKWARD, SMALL_LIMIT, SOURCES, random_model, translated

ODD = [
    "no\u00a0break", "zero\u200dwidth\u200cjoiners", "\u2581 a\u2581b \ufdd0\ufdd1", "e\u0301 \u00ad-",
    "\u202fx", "</s> <pad> <unk> <s>", ">>fra<< rice",
]  # fmt: skip
SHAPES: list[dict[str, Any]] = [
    {"activation": "gelu", "positions": "learned", "output_bias": True},
    {"activation": "relu", "positions": "sinusoidal"},
    {"activation": "silu", "positions": "sinusoidal_interleaved", "decoder_layers": 3},
]


def by_generate(folder: Path, texts: list[str]) -> list[str]:
    """The translations by `generate` in one batch, as a user of Transformers calls it."""
    tokenizer = transformers().AutoTokenizer.from_pretrained(folder)
    model = transformers().AutoModelForSeq2SeqLM.from_pretrained(folder)
    output = model.generate(**tokenizer(texts, return_tensors="pt", padding=True))
    decoded = tokenizer.batch_decode(output, skip_special_tokens=True)
    return [text.translate(SPACES).strip() for text in decoded]


@pytest.mark.parametrize(
    "shape", [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:])]
)
def test_pre_norm_models_are_pegasus_and_are_imported_exactly(tokenizers, tmp_path, shape):
    model, out, back = tmp_path / "model", tmp_path / "out", tmp_path / "back"
    settings = {"forbidden_ids": [7, 20, 30], "length_penalty": 0.7}
    random_model(model, tokenizers[True], SMALL_LIMIT.model_copy(update=settings), norm="pre", **shape)
    texts = SOURCES + AWKWARD
    [summary] = export_model(model, out, "transformers", texts=texts + ODD)
    assert summary.startswith("20 sentences: 20 translations identical (beam 2)")
    assert by_generate(out, texts) == [text.strip() for text, _ in translated(model)]
    import_model(str(out), back)
    before, after = load_file(model / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    ours, theirs = load_model(model), load_model(back)
    positions = 64 if shape["positions"] == "learned" else 1024
    changed = {"activation_dropout": 0.1, "max_positions": positions}
    assert theirs.config.model == ours.config.model.model_copy(update=changed)
    assert theirs.tokenizer.fingerprint == ours.tokenizer.fingerprint
    assert theirs.config.decoding == ours.config.decoding.model_copy(update={"precision": "auto"})
    export_model(back, tmp_path / "again", "pegasus", texts=SOURCES[:1])
    files = ["model.safetensors", "vocab.json", "config.json", "generation_config.json"]
    assert filecmp.cmpfiles(out, tmp_path / "again", files, shallow=False)[0] == files


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_converter_of_ctranslate2_accepts_pegasus(ctranslate2, tokenizers, tmp_path, shape):
    model = random_model(tmp_path / "model", tokenizers[True], SMALL_LIMIT, norm="pre", **shape)
    export_model(model, tmp_path / "out", "pegasus", texts=SOURCES[:1])
    for _ in range(2):  # also after Transformers has saved it
        tokenizer = transformers().AutoTokenizer.from_pretrained(tmp_path / "out")
        converter = ctranslate2.converters.TransformersConverter(str(tmp_path / "out"))
        converter.convert(str(tmp_path / "ct2"), force=True)
        converted = ctranslate2.Translator(str(tmp_path / "ct2"), device="cpu", compute_type="float32")
        rows = [tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) for text in SOURCES + AWKWARD]
        options = {"beam_size": 1, "max_decoding_length": 20, "min_decoding_length": 0}
        found = converted.translate_batch(rows, **options, return_scores=True)
        special = {*tokenizer.all_special_tokens}  # which a random model generates
        kept = [[token for token in each.hypotheses[0] if token not in special] for each in found]
        texts = [tokenizer.convert_tokens_to_string(tokens) for tokens in kept]
        ours = translated(model, beam_size=1)
        assert [text.translate(SPACES).strip() for text in texts] == [text.strip() for text, _ in ours]
        assert [each.scores[0] for each in found] == [score for _, score in ours]
        loaded = transformers().AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
        loaded.save_pretrained(tmp_path / "out"), tokenizer.save_pretrained(tmp_path / "out")
    import_model(str(tmp_path / "out"), tmp_path / "back")
    assert translated(tmp_path / "back") == translated(model)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.startswith("big")])  # in memory
def test_log_probabilities_of_every_preset_are_equal(tokenizers, tmp_path, preset, norm):
    decoding = DecodingConfig(precision="fp32", max_length_ratio=0, max_length_offset=9)
    model = random_model(tmp_path / "model", tokenizers[True], decoding, **PRESETS[preset], norm=norm)
    [summary] = export_model(model, tmp_path / "out", "transformers", texts=SOURCES)
    assert summary.startswith("8 sentences: 8 translations identical (beam 5)")
    assert float(summary.split()[-2]) < 1e-5


def test_the_longest_translation_has_a_position_for_each_token(tmp_path):
    make(tmp_path / "hf", write_m2m_tokenizer(tmp_path / "hf"))
    import_model(str(tmp_path / "hf"), tmp_path / "imported", ["source_lang=en", "target_lang=de"])
    loaded = load_model(tmp_path / "imported")
    limit = loaded.config.decoding.model_copy(update={"max_length_offset": 2000})
    loaded = loaded._replace(config=loaded.config.model_copy(update={"decoding": limit}))
    (tmp_path / "out").mkdir()
    write_m2m_100(loaded, tmp_path / "out")
    import_model(str(tmp_path / "out"), tmp_path / "back")
    assert load_model(tmp_path / "back").config.decoding.max_length_offset == 2000


def test_positions_are_recognized_in_weights_in_bf16(tokenizers, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    random_model(model, tokenizers[True], SMALL_LIMIT, norm="pre", activation="relu", positions="sinusoidal")
    export_model(model, out, "pegasus")
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(out / "model.safetensors").items()}
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})
    import_model(str(out), tmp_path / "back")
    assert load_model(tmp_path / "back").config.model.positions == "sinusoidal"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["m2m", "nllb", "legacy"])
def test_imported_models_with_codes_go_back_as_m2m_100(ctranslate2, tmp_path, kind):
    """As M2M100Tokenizer, and as NllbTokenizer whose code of the source is before or after the text."""
    hf, imported, out, back = (tmp_path / name for name in ("hf", "imported", "out", "back"))
    languages, codes = ("en", "de"), ("__en__", "__de__")
    if kind == "m2m":
        make(hf, write_m2m_tokenizer(hf))
    else:
        languages = codes = ("eng_Latn", "deu_Latn")
        make(hf, write_nllb_tokenizer(hf, new=kind == "nllb", legacy_behaviour=kind == "legacy"))
    import_model(str(hf), imported, [f"source_lang={languages[0]}", f"target_lang={languages[1]}"])
    export_model(imported, out, "transformers", texts=SOURCES + AWKWARD)
    import_model(str(out), back)
    ours, theirs = load_model(imported), load_model(back)
    weights = theirs.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in ours.model.state_dict().items())
    path = ours.config.tokenizer.model_copy(update={"path": str(out)})
    model = ours.config.model.model_copy(update={"max_positions": 1024})
    assert theirs.config == ours.config.model_copy(update={"tokenizer": path, "model": model})
    assert theirs.tokenizer.fingerprint == ours.tokenizer.fingerprint
    with Translator.load(imported, "cpu", ["decoding.precision=fp32"], workers=1) as translator:
        wanted = [best.text.strip() for best in translator.translate(SOURCES)]
    assert by_generate(out, SOURCES) == wanted  # the target is the default
    tokenizer = transformers().AutoTokenizer.from_pretrained(out)
    rows = [tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) for text in SOURCES]
    assert codes[0] in (rows[0][0], rows[0][-1])
    ctranslate2.converters.TransformersConverter(str(out)).convert(str(tmp_path / "ct2"))
    converted = ctranslate2.Translator(str(tmp_path / "ct2"), device="cpu", compute_type="float32")
    options: dict[str, Any] = {"beam_size": 1, "max_decoding_length": MAX_LENGTH - 1}
    options["min_decoding_length"] = 0
    # The converter names these tokens, but does not know that they are forbidden.
    options["suppress_sequences"] = [
        [f"madeupword{i}"] for i in range(len(ours.config.decoding.forbidden_ids))
    ]
    found = converted.translate_batch(rows, target_prefix=[[codes[1]]] * len(rows), **options)
    ids = [tokenizer.convert_tokens_to_ids(each.hypotheses[0]) for each in found]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert [text.strip() for text in texts] == wanted
    export_model(imported, tmp_path / "direct", "ctranslate2")
    direct = ctranslate2.Translator(str(tmp_path / "direct"), device="cpu", compute_type="float32")
    if kind != "legacy":
        rows = [row[:-1] for row in rows]  # CTranslate2 adds </s>
    options.pop("suppress_sequences")  # the weights forbid them
    found = direct.translate_batch(rows, target_prefix=[[codes[1]]] * len(rows), **options)
    ids = [tokenizer.convert_tokens_to_ids(each.hypotheses[0]) for each in found]
    assert [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)] == wanted
    card = (tmp_path / "direct" / "README.md").read_text()
    row = f'[*pieces, "</s>", "{codes[0]}"]' if kind == "legacy" else f'["{codes[0]}", *pieces]'
    assert f"row = {row}" in card and f'target_prefix=[["{codes[1]}"]]' in card
