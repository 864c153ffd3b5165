"""Attention maps of a model as HTML. Symbols in shapes: see `mtrain.model`."""

import base64
import zlib
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.decoding.batches import padded
from mtrain.decoding.search.forced import all_attention
from mtrain.decoding.translate import Translator
from mtrain.invisible_characters import show_piece
from mtrain.report.page import html_page, html_radios, json_script, text_attributes
from mtrain.tokenizer.vocabulary import Vocabulary

LONGEST = 60  # tokens of a sentence that are shown, at most
KINDS = {"cross": "Decoder to encoder", "encoder": "Encoder", "decoder": "Decoder"}
SHOWN = 5  # percent; smaller weights are drawn without a number
HINT = (
    '<p class="muted">Each row shows, in percent, how much the token on its left attends to each token at '
    "the top. In the decoder, it is the position that predicts this token that attends. Numbers below "
    f"{SHOWN} are not shown. ▁ begins a word, &lt;/s&gt; ends a sentence, and &lt;s&gt; begins the input of "
    "the decoder. Choose a picture to see another layer or head.</p>"
)


class AttentionMap(NamedTuple):
    """The attention weights of one sentence and its translation, in percent."""

    source: list[str]  # tokens, EOS last
    target: list[str]
    layers: dict[str, list[Tensor]]  # by kind: uint8 (H, queries, keys) of each layer
    cut: bool  # whether the sentence or its translation is longer
    best_layer: int  # the decoder layer that word alignments come from, from 0

    def tokens(self, kind: str) -> tuple[list[str], list[str]]:
        """The tokens that attend, and the tokens that are attended to."""
        if kind == "encoder":
            return self.source, self.source
        return self.target, ["<s>", *self.target[:-1]] if kind == "decoder" else self.source

    def packed(self) -> str:
        """The maps of all kinds, layers and heads one after another, compressed by zlib, in base64."""
        parts = [layer.numpy().tobytes() for layers in self.layers.values() for layer in layers]
        return base64.b64encode(zlib.compress(b"".join(parts), 9)).decode("ascii")


@torch.inference_mode()
def attention_maps(
    translator: Translator, sources: Sequence[str], translations: Sequence[str]
) -> list[AttentionMap]:
    """The attention with which a model reads each source and predicts its translation. For an ensemble, it is
    the attention of the first model.

    Row t of the decoder's maps is the position that predicts target token t. It attends to BOS and the
    tokens before t, which are the columns of the decoder's own map.
    """
    tokenizer, model = translator.tokenizer, translator.models[0]
    special = tokenizer.special
    longest = min(LONGEST, translator.max_length)
    maps = []
    splitter = translator.splitter
    whole = zip(splitter.encode(sources), splitter.encode_target(translations), strict=True)
    encoded_sources = splitter.encode(sources, most=longest)
    encoded_targets = splitter.encode_target(translations, longest)
    for (source, target), source_ids, target_ids in zip(whole, encoded_sources, encoded_targets, strict=True):
        batch, keep = padded([source_ids], special.pad, translator.device)
        targets, _ = padded([target_ids], special.pad, translator.device)
        weights = all_attention(model, batch, keep, targets)
        percent = {
            kind: [(100 * layer[0].float()).round().to(torch.uint8).cpu() for layer in weights[kind]]
            for kind in KINDS
        }
        last, layer = model.config.decoder_layers - 1, translator.decoding.alignment_layer
        best = last if layer is None else min(layer, last)
        is_cut = max(len(source), len(target)) > longest
        source_tokens = _pieces(tokenizer.source, source_ids)
        target_tokens = _pieces(tokenizer.target, target_ids)
        maps.append(AttentionMap(source_tokens, target_tokens, percent, is_cut, best))
    return maps


def _pieces(vocabulary: Vocabulary, ids: Sequence[int]) -> list[str]:
    """The labels of tokens, see `show_piece`."""
    eos = vocabulary.special.eos
    return ["</s>" if i == eos else show_piece(vocabulary.pieces[i]) for i in ids]


def attention_page(
    translator: Translator, sources: Sequence[str], translations: Sequence[str], name: str
) -> str:
    """A page with the attention of a model for each sentence and its translation."""
    title = f"Attention of {name}"
    parts = html_attention(translator, sources, translations, "s", "h2")
    body = f'<header><h1>{escape(title)}</h1></header>\n<main id="main">{HINT}{parts}</main>'
    return html_page(title, body, ["attention.css"], ["attention.js"])


def html_attention(
    translator: Translator, sources: Sequence[str], translations: Sequence[str], key: str, heading: str
) -> str:
    """The attention maps of each sentence, whose `heading` is `h2`, for example. `key` makes the names of
    inputs unique in a page."""
    maps = attention_maps(translator, sources, translations)
    source_lang, target_lang = translator.direction
    sections = [
        f'<div class="attention" data-attention>'
        f"<{heading} {text_attributes(source, source_lang)}>{escape(source)}</{heading}>"
        f"<p {text_attributes(text, target_lang)}>{escape(text) or '(empty)'}</p>"
        f"{_map(each, f'{key}-{number}')}</div>"
        for number, (source, text, each) in enumerate(zip(sources, translations, maps, strict=True))
    ]
    return "".join(sections)


def _map(each: AttentionMap, key: str) -> str:
    kinds = {}
    for kind, title in KINDS.items():
        rows, columns = each.tokens(kind)
        layers = each.layers[kind]
        kinds[kind] = {
            "name": title,
            "rows": rows,
            "columns": columns,
            "heads": len(layers[0]),
            "layers": len(layers),
            "shown": each.best_layer if kind == "cross" else len(layers) - 1,
        }
    mean = each.layers["cross"][each.best_layer].float().mean(dim=0).round().int()
    caption = f"{KINDS['cross']}, layer {each.best_layer + 1}, mean of the heads"
    cut = f"<p>Only the first {len(each.source)} and {len(each.target)} tokens are shown.</p>" * each.cut
    return (
        f"{cut}{html_radios('Attention', f'kind-{key}', KINDS, 'cross')}"
        f'<div class="scroll" tabindex="0" role="group" aria-label="Attention weights in percent">'
        f"{_table(caption, each.target, each.source, mean)}</div>"
        f'<div class="heads"></div>{json_script({"kinds": kinds, "packed": each.packed()})}'
    )


def _table(caption: str, rows: Sequence[str], columns: Sequence[str], percent: Tensor) -> str:
    head = "".join(f'<th scope="col"><bdi>{escape(token)}</bdi></th>' for token in columns)
    lines = []
    for token, values in zip(rows, percent.tolist(), strict=True):
        cells = "".join(f'<td style="--w:{v}">{v if v >= SHOWN else ""}</td>' for v in values)
        lines.append(f'<tr><th scope="row"><bdi>{escape(token)}</bdi></th>{cells}</tr>')
    return (
        f"<table><caption>{caption}</caption><thead><tr><td></td>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )
