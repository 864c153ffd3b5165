"""Attention maps."""

import base64
import json
import re
import zlib

import numpy as np
import pytest
import torch

from mtrain.decoding.translate import Translator
from mtrain.report.attention import LONGEST, attention_maps, attention_page
from tests.support.html import Elements
from tests.support.training import fit_on_cpu


@pytest.fixture(scope="module")
def translator(run_dir):
    with Translator.load(run_dir, "cpu", workers=1) as translator:
        yield translator


def test_maps_are_those_of_every_layer_and_head(translator):
    [found] = attention_maps(translator, ["It rains."], ["Es regnet."])
    config = translator.models[0].config
    assert found.source[-1] == found.target[-1] == "</s>" and not found.cut
    assert "".join(found.source[:-1]).replace("▁", " ").strip() == "It rains."
    for kind, layers in found.layers.items():
        rows, columns = found.tokens(kind)
        assert len(layers) == (config.encoder_layers if kind == "encoder" else config.decoder_layers)
        for layer in layers:
            assert layer.shape == (config.heads, len(rows), len(columns))
            assert (layer.sum(dim=-1).float() - 100).abs().max() <= len(columns)  # rounded percentages
    assert not torch.triu(found.layers["decoder"][0][0], diagonal=1).any()  # no position sees later ones
    assert found.tokens("decoder")[1][0] == "<s>"


def test_pieces_that_cannot_be_seen_are_labeled_by_their_code_points(translator, monkeypatch):
    vocabulary = translator.tokenizer.source
    first, *_ = vocabulary.encode(["It rains."])[0]
    pieces = [*vocabulary.pieces]
    pieces[first] = "\u00a0"
    monkeypatch.setattr(vocabulary, "pieces", pieces)
    page = attention_page(translator, ["It rains."], ["Es regnet."], "x")
    assert '<th scope="col"><bdi>U+00A0</bdi></th>' in page and '"rows":["U+00A0",' in page


def test_long_sentences_are_cut(translator):
    [found] = attention_maps(translator, ["It rains. " * LONGEST], ["Es regnet."])
    assert found.cut and len(found.source) == LONGEST


def test_sentences_are_cut_at_the_positions_that_a_model_has(make_config):
    config = make_config(data={"max_length": 40}, model={"positions": "learned"}, training={"max_steps": 1})
    with Translator.load(fit_on_cpu(config), "cpu", workers=1) as translator:
        [found] = attention_maps(translator, ["It rains. " * LONGEST], ["Es regnet."])
    assert found.cut and len(found.source) == 40


def test_the_page_has_a_table_of_percentages_and_data_for_all_heads(translator):
    page = attention_page(translator, ["It rains.", "<b>"], ["Es regnet.", ""], "runs/<x>")
    assert "text-orientation: sideways" in page  # Chinese headings would be upside down
    elements = Elements(page)
    assert "http" not in page and "<b>" not in page and "runs/&lt;x&gt;" in page
    assert len(elements.of("table")) == len(elements.of("caption")) == 2
    headings = [tag for tag, _ in elements.found if tag in ("h1", "h2", "h3")]
    assert headings == ["h1", "h2", "h2"]
    assert len(elements.of("bdi")) == len(elements.of("th")) > 4  # tokens of either direction
    data = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', page)[0])
    [found] = attention_maps(translator, ["It rains."], ["Es regnet."])
    packed = np.frombuffer(zlib.decompress(base64.b64decode(data["packed"])), np.uint8)
    parts = [layer.numpy().ravel() for layers in found.layers.values() for layer in layers]
    assert packed.tolist() == np.concatenate(parts).tolist()
    sizes = (
        len(kind["rows"]) * len(kind["columns"]) * kind["heads"] * kind["layers"]
        for kind in data["kinds"].values()
    )
    assert sum(sizes) == len(packed)
