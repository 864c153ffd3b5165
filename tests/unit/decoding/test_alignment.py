"""Word alignments from attention, and the choice of the layer that they are taken from."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain import Translator
from mtrain.config.sections.model import ModelConfig
from mtrain.decoding.alignment import align, word_spans, words_at
from mtrain.decoding.alignment_layer import best_layer, choose_alignment_layer
from mtrain.decoding.join import join
from mtrain.decoding.split import Splitter
from mtrain.decoding.translation import Translation
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.tokenizers import train
from tests.support.training import PAIRS

SOURCES = [source for source, _ in PAIRS]


def words(*indices: int | None) -> list[tuple[int, int]]:
    """The words of tokens that have one word each, or none."""
    return [(-1, -1) if i is None else (i, i + 1) for i in indices]


def test_each_target_word_is_aligned_to_the_word_that_it_attends_to_most() -> None:
    attention = torch.tensor(
        [[0.3, 0.3, 0.4, 0.0], [0.1, 0.1, 0.8, 0.0], [0.5, 0.1, 0.3, 0.1], [0.0, 0.0, 0.0, 1.0]]
    ).numpy()
    # Source words: tokens 0 and 1, token 2; the fourth is EOS. Target words: token 0, tokens 1 and 2; EOS.
    # Word 0 attends to tokens 0 and 1 with 0.3 each, and to token 2 with 0.4.
    assert align(attention, words(0, 0, 1), words(0, 1, 1)) == ((1, 0), (1, 1))
    assert align(attention[:, [2, 0, 1, 3]], words(0, 1, 1), words(0, 0, 1)) == ((0, 0), (1, 1))
    # Word 1 attends to token 2 with 0.8 + 0.3, and to token 0 with 0.1 + 0.5, then with 0.7 + 0.5.
    other = attention.copy()
    other[1, 0] = 0.7
    assert align(other, words(0, 0, 1), words(0, 1, 1)) == ((1, 0), (0, 1))
    assert align(attention, [], words(0)) == align(attention, words(0), []) == ()
    # A target word that attends most to a token of no word, and words without tokens, are not aligned.
    assert align(attention, words(0, 0, None), words(0, 1, 3)) == ((0, 3),)
    assert align(attention, words(None, None, None), words(0, 1, None)) == ()


def test_words_of_the_same_token_have_the_same_alignments() -> None:
    attention = np.eye(3)
    assert align(attention, [(0, 1), (1, 3), (3, 4)], [(0, 2), (2, 3), (3, 5)]) == (
        *((0, 0), (0, 1)),
        *((1, 2), (2, 2)),
        *((3, 3), (3, 4)),
    )
    # The second token begins inside of the second word, which then is not the same as the first one.
    assert align(attention, words(0, 1, 2), [(0, 2), (1, 2), (2, 3)]) == ((0, 0), (1, 1), (2, 2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ein Hund.", ["Ein", "Hund."]),
        ("한국어는 좋다.", ["한국어는", "좋다."]),
        ("我有2只iPhone手机。", ["我", "有", "2", "只", "iPhone", "手", "机", "。"]),
        ("ラーメン を", ["ラ", "ー", "メ", "ン", "を"]),
        ("ที่นี่ok", ["ที่", "นี่", "ok"]),
        ("ខ្ញុំ\u200bបាន", ["ខ្ញុំ\u200b", "បា", "ន"]),
        ("\x1f \u200b", ["\u200b"]),
    ],
)
def test_each_character_is_a_word_in_scripts_without_spaces(text: str, expected: list[str]) -> None:
    assert len(word_spans(text)) == len(expected)
    spans = words_at(text, list(range(len(text))))
    found = [""] * len(expected)
    for character, (first, stop) in zip(text, spans, strict=True):
        assert stop == first + 1
        found[first] += character.strip()
    assert found == [word.strip() for word in expected]


@pytest.mark.parametrize(
    "text", ["a\x1cb", "a\x85b\u3000c", "\u200b a\u200bb", "x\u00a0y ", "नमस्ते दुनिया", "a\n1,\v."]
)
def test_other_words_are_separated_as_python_separates_them(text: str) -> None:
    assert len(word_spans(text)) == len(text.split())


def test_a_token_has_all_words_that_begin_in_it() -> None:
    assert words_at("我看到 大马。", [0, 3, 5]) == [(0, 3), (3, 4), (4, 6)]
    assert words_at("Ein Hund", [0, 3, 6]) == [(0, 1), (1, 2), (1, 2)]
    assert words_at("", [0, 0]) == [(-1, -1)] * 2
    assert words_at("Ein Hund", [-1, 0, 4]) == [(-1, -1), (0, 1), (1, 2)]


def test_alignments_are_word_numbers_of_both_sides(translator: Translator) -> None:
    for source, found in zip(SOURCES, translator.translate(SOURCES, alignments=True), strict=True):
        assert found.alignment is not None
        assert [j for _, j in found.alignment] == list(range(len(found.text.split())))
        assert all(0 <= i < len(source.split()) for i, _ in found.alignment)
    assert translator.translate(["It rains."])[0].alignment is None
    found = translator.translate(["It rains."], n_best=3, alignments=True)[0]
    assert all(len(t.alignment or ()) == len(t.text.split()) for t in found.n_best)


def test_each_token_belongs_to_the_word_that_it_is_in(tmp_path: Path) -> None:
    """The tokenizer makes two words of an acute accent and one of a zero-width space."""
    line = "It \u00b4rains\u200b. The\u3000sun\u00a0 shines."
    tokenizer = train(tmp_path, normalization="nmt_nfkc")
    source = tokenizer.source
    [part] = Splitter(tokenizer, 300, "en").parts_of([line], [], 0, alignments=True)
    texts = [""] * len(line.split())
    for i, (word, _) in zip(part.source[:-1], part.words, strict=True):
        texts[word] += source.pieces[i]
    assert [text.replace("▁", "")[-5:] for text in texts] == ["It", "ains.", "The", "sun", "ines."]
    ids = tokenizer.encode_target(["Es", "\u00b4"])
    row = [*ids[0], tokenizer.special.unk, *ids[0]]  # decodes to a word of its own
    [text] = tokenizer.decode([row])
    words = [first for first, _ in words_at(text, tokenizer.target.decoded_positions(row))]
    assert words[len(ids[0])] == 1 and sorted(set(words)) == list(range(len(text.split()))) == [0, 1, 2]


def test_words_are_separated_by_spaces(translator: Translator) -> None:
    tokenizer = translator.tokenizer
    space, letter = (tokenizer.source.pieces.index(piece) for piece in ("▁", "a"))
    word = next(i for i, piece in enumerate(tokenizer.source.pieces) if len(piece) > 1 and piece[0] == "▁")
    for ids in (
        [word, word],
        [word, space, letter],
        [word, space, word],
        [space, word],
        [word, space, space],
    ):
        starts = tokenizer.word_starts(ids)
        text = "".join(tokenizer.source.pieces[i] for i in ids).replace("▁", " ")
        assert starts[0] and sum(starts) == len(text.split()), ids
    assert tokenizer.word_starts([word, space, letter]) == [True, True, False]


def test_parts_joined_without_a_space_share_a_word() -> None:
    parts = [
        Translation("ab c", -1, -1, 4, True, ((0, 0), (1, 1))),
        Translation("d", -1, -1, 2, True, ((2, 0),)),
    ]
    joined = join(parts, space="", length_penalty=1.0)
    assert joined.text.split() == ["ab", "cd"] and joined.alignment == ((0, 0), (1, 1), (2, 1))
    assert join(parts, space=" ", length_penalty=1.0).alignment == ((0, 0), (1, 1), (2, 2))
    # Not if there is a space at the end, or nothing before.
    spaced = [Translation("", -1, -1, 1, True, ()), replace(parts[0], text="ab c "), parts[1]]
    assert join(spaced, space="", length_penalty=1.0).alignment == ((0, 0), (1, 1), (2, 2))
    # Chinese characters are words.
    parts = [replace(parts[0], text="一二"), replace(parts[1], text="三")]
    assert join(parts, space="", length_penalty=1.0).alignment == ((0, 0), (1, 1), (2, 2))


# ------------------------------------------------------------------------------------ the choice of the layer


def reordered_pairs(count: int = 200) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Sources, targets that translate them word by word in reverse or in order, and the true alignments."""
    draw = np.random.default_rng(0)
    sources = [draw.integers(0, 30, draw.integers(2, 9)).tolist() for _ in range(count)]
    orders = [list(range(len(source)))[:: draw.choice([1, -1])] for source in sources]
    targets = [[100 + source[i] for i in order] for source, order in zip(sources, orders, strict=True)]
    return sources, targets, orders


@pytest.mark.parametrize("right", [0, 1, 2])
def test_the_layer_that_follows_the_translations_of_words_is_chosen(right: int) -> None:
    sources, targets, orders = reordered_pairs()
    draw = np.random.default_rng(1)
    layers = [
        [draw.random((len(target), len(source))) for source, target in zip(sources, targets, strict=True)],
        [np.eye(len(target), len(source)) for source, target in zip(sources, targets, strict=True)],
    ]
    layers.insert(right, [np.eye(len(order))[order] + 0.5 for order in orders])
    assert best_layer(sources, targets, layers) == right


def test_the_choice_follows_ibm_model_1() -> None:
    """Attention to the most probable source token is preferred to any that deviates from it in one place."""
    sources, targets, _ = reordered_pairs(20)
    posteriors = ibm_model_1(sources, targets)
    attention: list[list[Any]] = [[], []]
    for number, posterior in enumerate(posteriors):
        deviating = posterior.copy()
        if number == 0:
            deviating[0, posterior[0].argmin()] = 2
        attention[0].append(deviating)
        attention[1].append(posterior)
    assert best_layer(sources, targets, attention) == 1
    assert best_layer(sources, targets, attention[::-1]) == 0


def ibm_model_1(sources: list[list[int]], targets: list[list[int]]) -> list[np.ndarray]:
    """Posterior alignments (T, S) of five iterations, computed with loops."""
    table: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)
    pairs = list(zip(sources, targets, strict=True))
    for iteration in range(6):
        counts: dict[tuple[int, int], float] = defaultdict(float)
        totals: dict[int, float] = defaultdict(float)
        posteriors = [np.zeros((len(target), len(source))) for source, target in pairs]
        for source, target, posterior in zip(sources, targets, posteriors, strict=True):
            for row, t in enumerate(target):
                norm = sum(table[t, s] for s in (-1, *source))
                for column, s in enumerate((-1, *source)):
                    share = table[t, s] / norm
                    counts[t, s] += share
                    totals[s] += share
                    if column:
                        posterior[row, column - 1] = share
        if iteration < 5:
            table = defaultdict(float, {(t, s): count / totals[s] for (t, s), count in counts.items()})
    return posteriors


def test_attention_to_eos_does_not_count_as_agreement() -> None:
    sources, targets, orders = reordered_pairs()
    useful = [np.pad(np.eye(len(order))[order], ((0, 1), (0, 1))) for order in orders]
    useless = [
        np.pad(np.zeros((len(order), len(order))), ((0, 1), (0, 1)), constant_values=1) for order in orders
    ]
    assert best_layer(sources, targets, [useless, useful]) == 1


def positional_model(vocab_size: int, right: int, layers: int = 3) -> Transformer:
    """A model in which only decoder layer `right` attends to the source position of the token to predict.

    Without embeddings and sublayer outputs, hidden states are positions. Equal projections of queries and
    keys make positions attend to themselves, opposite ones avoid it, zeros spread attention evenly.
    """
    sizes = {"d_model": 32, "ffn_dim": 8, "heads": 1, "encoder_layers": 1, "decoder_layers": layers}
    words = {"source_vocab_size": vocab_size, "target_vocab_size": vocab_size, "max_positions": 256}
    model = Transformer(ModelConfig(**sizes, **words)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        for number, layer in enumerate(model.decoder):
            projection = layer.get_parameter("cross_attention.query_key_value.weight")
            sign = 3 if number == right else -3 if number % 2 else 0
            projection[:32], projection[32:64] = torch.eye(32), sign * torch.eye(32)
    return model


@pytest.mark.parametrize("right", [0, 1, 2])
def test_the_layer_of_a_model_is_chosen_by_its_attention(run_dir, right: int) -> None:
    tokenizer = Tokenizer(run_dir / "model" / "tokenizer")
    model = positional_model(len(tokenizer.source), right)
    letters = [np.random.default_rng(n).choice(list("abdefghiklmnorstu"), 5) for n in range(60)]
    lines = [" ".join(line) for line in letters]
    pairs = [(line, line) for line in lines]  # translations are copies, in the same order
    assert choose_alignment_layer(model, tokenizer, pairs, torch.device("cpu")) == right
    assert choose_alignment_layer(model.train(), tokenizer, pairs, torch.device("cpu")) == right
    assert model.training
    for nothing in ([], [("", ""), ("a", "")], [("a " * 200, "a")]):
        assert choose_alignment_layer(model, tokenizer, nothing, torch.device("cpu")) is None


def test_alignments_are_taken_from_the_layer_of_the_config(run_dir) -> None:
    last = Translator.load(run_dir, "cpu").with_settings(alignment_layer=None)
    [first, second] = (last.with_settings(alignment_layer=layer) for layer in (0, 1))
    aligned = [
        [found.alignment for found in each.translate(SOURCES, alignments=True)]
        for each in (last, first, second, last.with_settings(alignment_layer=9))
    ]
    assert aligned[0] == aligned[2] == aligned[3] != aligned[1]
