"""Model folders with random weights, and how they translate."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mtrain.config.schema import ModelFolderConfig
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.model import Architecture
from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.config.yaml_io import to_yaml
from mtrain.decoding.translate import Translator
from mtrain.model.transformer import Transformer
from mtrain.storage.atomic import write_folder, write_text
from mtrain.tokenizer.tokenizer import Tokenizer, model_config
from tests.support.training import PAIRS

SOURCES = [pair[0] for pair in PAIRS]
AWKWARD = ["<bt> I like 日本 😀.", "a\tb  c", "ﬁ >> <<", "<s> \u2581", "J'aime l'eau."]
SMALL_LIMIT = DecodingConfig(precision="fp32", beam_size=2, max_length_ratio=0, max_length_offset=20)


def random_model(folder: Path, tokenizer: Path, decoding: DecodingConfig | None = None, **shape: Any) -> Path:
    """A model folder with random weights, widely different logits, and biases."""
    sizes = {"d_model": 32, "heads": 4, "ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 1}
    config = model_config(Architecture(**{**sizes, **shape}), Tokenizer(tokenizer), 64)
    model = Transformer(config)
    torch.manual_seed(5)
    usual = Transformer(config.model_copy(update={"norm": "pre"})).state_dict()
    # Not the small weights with which post-norm models begin: few logits would differ.
    model.load_state_dict({name: usual[name] for name in model.state_dict()})
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data *= 1.6
        else:
            parameter.data.normal_(float("norm.weight" in name), 0.3)
    described = ModelFolderConfig(
        source_lang="en",
        target_lang="fr",
        max_length=64,
        tokenizer=TokenizerConfig(),
        model=config,
        decoding=decoding or DecodingConfig(precision="fp32", beam_size=2),
    )

    def fill(temporary: Path) -> None:
        write_text(temporary / "config.yaml", to_yaml(described))
        save_file(model.state_dict(), temporary / "model.safetensors")
        shutil.copytree(tokenizer, temporary / "tokenizer")

    write_folder(folder, fill)
    return folder


def translated(model: Path, **decoding: Any) -> list[tuple[str, Any]]:
    with Translator.load(model, "cpu", ["decoding.precision=fp32"], workers=1) as translator:
        found = translator.with_settings(**decoding).translate(SOURCES + AWKWARD)
    return [(best.text, pytest.approx(best.score, abs=1e-4)) for best in found]
