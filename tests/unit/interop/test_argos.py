"""Packages for Argos Translate. Where it is not installed, the tests read them as it does."""

import json
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import yaml

from mtrain.config.languages import argos_code
from mtrain.data.reading.files import toy_pairs
from mtrain.storage.manifest import write_manifest
from tests.support.cli import one_line
from tests.support.random_models import SOURCES, random_model

# The settings of `argostranslate.translate.apply_packaged_translation`.
SETTINGS: dict[str, Any] = {
    "beam_size": 4,
    "num_hypotheses": 4,
    "length_penalty": 0.2,
    "replace_unknowns": True,
    "batch_type": "tokens",
    "max_batch_size": 32,
}


@pytest.fixture
def package(mtrain, run_dir, tmp_path) -> Path:
    """The package of a trained model."""
    code, out, err = mtrain("export", run_dir, tmp_path / "out", "--format", "argos")
    assert code == 0 and "translations identical (greedy)" in out and "install_from_path" in err
    return tmp_path / "out/translate-en_de.argosmodel"


def by_ctranslate2(ctranslate2: Any, model: Path, spm: Path, texts: list[str]) -> list[str]:
    """The translations by CTranslate2 with the settings of Argos Translate."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    rows = processor.encode(texts, out_type=str)
    found = ctranslate2.Translator(str(model), compute_type="float32").translate_batch(rows, **SETTINGS)
    return [processor.decode(each.hypotheses[0]) for each in found]


def test_a_package_contains_what_argos_translate_reads(ctranslate2, mtrain, run_dir, package, tmp_path):
    with zipfile.ZipFile(package) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "translate-en_de"
    described = json.loads((folder / "metadata.json").read_text("ascii"))
    assert described.pop("package_version") >= "2026.11.01"
    names = {"from_code": "en", "from_name": "English", "to_code": "de", "to_name": "German"}
    assert described == {"argos_version": "1.10.0", **names}
    card = (folder / "README.md").read_text("utf-8")
    assert 'install_from_path("translate-en_de.argosmodel")' in card
    assert {file.name for file in package.parent.iterdir()} == {
        *(package.name, "README.md", "info.json", "manifest.json")
    }
    assert "argos" in mtrain("info", package.parent)[1]
    mtrain("export", run_dir, tmp_path / "plain", "--format", "ctranslate2")
    plain = by_ctranslate2(ctranslate2, tmp_path / "plain", tmp_path / "plain/joint.model", SOURCES)
    assert by_ctranslate2(ctranslate2, folder / "model", folder / "sentencepiece.model", SOURCES) == plain
    assert "Es regnet." in plain


def test_a_package_with_a_vocabulary_for_each_language_has_that_of_the_source(
    ctranslate2, mtrain, tokenizers, tmp_path
):
    """Argos Translate also decodes with it. OPUS-MT has such vocabularies."""
    model = random_model(tmp_path / "model", tokenizers[False], tie_embeddings="none")
    code, out, _ = mtrain("export", model, tmp_path / "out", "--format", "argos")
    assert code == 0 and "16 translations identical (greedy)" in out
    with zipfile.ZipFile(tmp_path / "out/translate-en_fr.argosmodel") as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "translate-en_fr"
    assert (folder / "sentencepiece.model").read_bytes() == (model / "tokenizer/source.model").read_bytes()
    source, target = (
        sentencepiece.SentencePieceProcessor(str(model / f"tokenizer/{side}.model"))
        for side in ("source", "target")
    )
    rows = source.encode(SOURCES, out_type=str)
    found = ctranslate2.Translator(str(folder / "model"), compute_type="float32").translate_batch(
        rows, **SETTINGS
    )
    pieces = [each.hypotheses[0] for each in found]
    decoded = [source.decode_pieces(row).replace("\u2581", " ").strip() for row in pieces]
    assert decoded == [target.decode_pieces(row).strip() for row in pieces] and any(decoded)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        *(("zh-Hant", "zt"), ("zh_TW", "zt"), ("zho_Hant", "zt"), ("zh-Hans", "zh"), ("zh", "zh")),
        *(("pt-BR", "pb"), ("pt_BR", "pb"), ("pt-PT", "pt"), ("deu_Latn", "de"), ("de-AT", "de")),
    ],
)
def test_codes_are_those_of_argos_translate(code, expected):
    assert argos_code(code) == expected


@pytest.mark.slow
def test_argos_translate_translates_100_lines_as_ctranslate2(ctranslate2, package, tmp_path, monkeypatch):
    for name in ("DATA", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setenv("ARGOS_COMPUTE_TYPE", "float32")  # by default, the fastest type of the machine
    # Its own sentence splitters download models.
    splitter = SimpleNamespace(SBDetect=None, models=SimpleNamespace(list_models=lambda: ["en"]))
    monkeypatch.setitem(sys.modules, "minisbd", splitter)
    monkeypatch.setitem(sys.modules, "stanza", SimpleNamespace())
    argos = pytest.importorskip("argostranslate.translate")
    monkeypatch.setattr(argos.sbd.MiniSBDSentencizer, "split_sentences", lambda _, text: [text])
    argos.package.install_from_path(package)
    texts = [pair.source for pair in toy_pairs("train")[:100]]
    [installed] = argos.package.get_installed_packages()
    folder = installed.package_path
    plain = by_ctranslate2(ctranslate2, folder / "model", folder / "sentencepiece.model", texts)
    assert [argos.translate(text, "en", "de") for text in texts] == [text.replace("_", " ") for text in plain]


@pytest.mark.parametrize(
    ("joint", "changes", "message"),
    [
        (True, {"language_tags": "target"}, "language_tags must be none"),
        (
            True,
            {"target_lang": "und"},
            "argos does not support this model: both languages must have codes of ISO 639, and und is not",
        ),
    ],
)
def test_a_model_that_a_package_cannot_contain_is_an_error(
    mtrain, tokenizers, tmp_path, joint, changes, message
):
    model = random_model(tmp_path / "model", tokenizers[joint], tie_embeddings="all" if joint else "none")
    raw = yaml.safe_load((model / "config.yaml").read_text())
    (model / "config.yaml").write_text(yaml.safe_dump({**raw, **changes}))
    write_manifest(model)
    code, _, err = mtrain("export", model, tmp_path / "out", "--format", "argos")
    assert code == 4 and message in one_line(err) and not (tmp_path / "out").exists()
