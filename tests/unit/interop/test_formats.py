"""Which models each format supports, and `export.require`."""

import re
from typing import Any

import pytest

from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.config.sections.presets import PRESETS
from mtrain.errors import UsageError
from mtrain.interop.formats import require_exports
from mtrain.tokenizer.tokenizer import Tokenizer


def config_with(required: str, data: dict[str, Any] | None = None, **sections: Any) -> Config:
    corpora = {"source_lang": "en", "target_lang": "de", "validation": {"holdout": 1}}
    corpora |= {"train": {"source": "a", "target": "b"}} | (data or {})
    given = {"run_dir": "run", "data": corpora, "export": {"require": [required]}}
    return validate(Config, {**given, **sections}, "test")


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("preset", ["auto", *PRESETS])
def test_every_preset_can_be_exported_to_transformers_and_argos(preset, norm):
    for required in ("transformers", "argos", "ctranslate2"):
        require_exports(config_with(required, model={"preset": preset, "norm": norm}))


@pytest.mark.parametrize(
    ("required", "sections", "reason"),
    [
        ("transformers", {"model": {"positions": "rotary"}}, "model.positions must not be rotary"),
        ("transformers", {"model": {"activation": "swiglu"}}, "model.activation must not be swiglu"),
        ("transformers", {"model": {"tie_embeddings": "none"}}, "model.tie_embeddings must be all"),
        (
            "transformers",
            {"model": {"norm": "post", "positions": "learned"}},
            "model.positions must be sinusoidal",
        ),
        ("pegasus", {"model": {"norm": "post"}}, "model.norm must be pre"),
        ("marian", {}, "model.norm must be post"),
        (
            "m2m_100",
            {},
            "it is only for models imported from M2M-100 or NLLB-200, which have codes of languages",
        ),
        ("argos", {"data": {"language_tags": "target"}}, "language_tags must be none"),
        ("bergamot", {"data": {"language_tags": "target"}}, "language_tags must be none"),
        (
            "bergamot",
            {"model": {"d_model": 96, "heads": 4}},
            "model.norm must be post, model.positions must be sinusoidal_marian, "
            "model.d_model and ffn_dim must be multiples of 64; train with model.preset: student_tiny",
        ),
    ],
)
def test_a_model_that_rules_out_a_required_format_is_an_error(required, sections, reason):
    expected = re.escape(f"export.require: {required} does not support this model: {reason}")
    with pytest.raises(UsageError, match=expected):
        require_exports(config_with(required, **sections))


def test_a_tokenizer_with_two_sentencepiece_models_rules_out_transformers(tokenizers):
    """They may have one vocabulary, like the published Marian models."""
    two = Tokenizer(tokenizers[False])
    for format in ("ctranslate2", "argos"):
        require_exports(config_with(format), two)
    with pytest.raises(UsageError, match="has a SentencePiece model for each language; use ctranslate2"):
        require_exports(config_with("transformers"), two)
