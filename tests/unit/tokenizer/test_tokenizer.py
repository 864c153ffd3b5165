"""The tokenizer: encoding and decoding without loss, and loading of damaged files."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.config.sections.model import Architecture
from mtrain.errors import ModelError, UsageError
from mtrain.tokenizer.tokenizer import Tokenizer, model_config
from mtrain.tokenizer.vocabulary import SpecialIds
from tests.support.tokenizers import SOURCE, TARGET, TYPES, roundtrip, texts, train


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.target.pieces[i] for i in tokenizer.encode_target([text])[0]]


# ----------------------------------------------------------------------------------------- encoding, decoding


@pytest.mark.parametrize("kind", TYPES)
@settings(deadline=None, max_examples=60)
@given(text=texts)
def test_with_byte_fallback_no_token_is_unknown_or_special(trained, kind: str, text: str):
    tokenizer = trained(type=kind)
    assert not set(tokenizer.encode_source([text])[0]) & set(tokenizer.special)


@pytest.mark.parametrize(
    ("normalization", "text", "expected"),
    [
        ("nmt_nfkc", "ﬁ Ⅳ", "fi IV"),
        ("nfkc", "ﬁ Ⅳ", "fi IV"),
        ("nmt_nfkc_cf", "ﬁ ÀB", "fi àb"),
        ("nfkc_cf", "ﬁ ÀB", "fi àb"),
        ("identity", "ﬁ Ⅳ e\u0301", "ﬁ Ⅳ e\u0301"),
    ],
)
def test_normalization_rules(trained, normalization: str, text: str, expected: str):
    assert roundtrip(trained(normalization=normalization), text) == expected


def test_nfkc_equals_unicode_nfkc(trained):
    text = "e\u0301 ½ ㎏ Å"
    assert roundtrip(trained(normalization="nfkc"), text) == unicodedata.normalize("NFKC", text)


@pytest.mark.parametrize("kind", TYPES)
def test_without_byte_fallback_unknown_characters_are_unk(trained, kind: str):
    tokenizer = trained(type=kind, byte_fallback=False, vocab_size=200)
    assert tokenizer.special.unk in tokenizer.encode_target(["I like 日本."])[0]
    assert tokenizer.special.unk not in tokenizer.encode_target(["I like oranges."])[0]
    assert "日" not in roundtrip(tokenizer, "日本")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_symbols_are_one_piece_and_round_trip(trained, kind: str, byte_fallback: bool):
    symbols = ["<bt>", "<a,b>", "@@", "ünï"]
    size = 360 if byte_fallback else 200
    tokenizer = trained(type=kind, symbols=symbols, byte_fallback=byte_fallback, vocab_size=size)
    assert tokenizer.special == SpecialIds()
    for symbol in symbols:
        for text in (symbol, f"{symbol} I like", f"I{symbol}like", f"I like {symbol}", f"{symbol}{symbol}"):
            assert pieces(tokenizer, text).count(symbol) == text.count(symbol), text
            assert roundtrip(tokenizer, text) == text


@pytest.mark.parametrize("symbol", ["<s>", "</s>", "<unk>", "<pad>", "<0x41>"])
def test_a_symbol_cannot_be_a_special_piece(tmp_path: Path, symbol: str):
    """Otherwise the text of a sentence could contain EOS."""
    with pytest.raises(UsageError, match="is a reserved token"):
        train(tmp_path, symbols=[symbol])


@settings(deadline=None, max_examples=100)
@given(rows=st.lists(st.lists(st.integers(0, 399), max_size=20), max_size=4))
def test_any_ids_decode_to_one_line_each(trained, rows: list[list[int]]):
    lines = trained(type="unigram").decode(rows)
    assert len(lines) == len(rows)
    assert not any(unicodedata.category(c) == "Cc" for line in lines for c in line)


def test_special_tokens_are_not_decoded(trained):
    tokenizer = trained(type="unigram")
    ids = tokenizer.encode_target(["J'aime les oranges."])[0]
    pad, _, bos, eos = tokenizer.special
    assert tokenizer.decode([[bos, *ids, eos, pad, pad]]) == ["J'aime les oranges."]
    assert tokenizer.decode([[], [eos]]) == ["", ""]


def test_no_texts_give_no_rows(trained):
    tokenizer = trained(type="unigram", normalization="nmt_nfkc")
    assert tokenizer.encode_source([]) == tokenizer.encode_target([]) == tokenizer.decode([]) == []
    assert tokenizer.encode_source(["", " ", "\u200b"]) == [[], [], []]


def test_sides_use_their_own_vocabulary(trained):
    tokenizer = trained(joint=False, vocab_size=350)
    text = "Les enfants ne boivent pas l'eau."
    assert len(tokenizer.encode_target([text])[0]) < len(tokenizer.encode_source([text])[0])
    assert roundtrip(tokenizer, text) == text


def test_many_texts_are_converted_by_threads_like_each_alone(trained):
    vocabulary = trained(type="unigram").target
    assert vocabulary.decode(vocabulary.encode(TARGET)) == TARGET
    for method in (vocabulary.encode, vocabulary.segment, vocabulary.positions):
        assert method(TARGET) == [row for text in TARGET for row in method([text])]


# ---------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("content", [b"", b"not a model", bytes(range(256)) * 40, None])
def test_not_a_model_is_a_model_error(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "joint.model").write_bytes(content)
    with pytest.raises(ModelError, match=r": (not a SentencePiece model|cannot read the tokenizer)"):
        Tokenizer(tmp_path)


def test_a_missing_side_is_a_model_error(tmp_path: Path):
    train(tmp_path, joint=False, vocab_size=360)
    (tmp_path / "target.model").unlink()
    with pytest.raises(ModelError, match=r"target\.model"):
        Tokenizer(tmp_path)


def test_a_cut_or_flipped_model_never_crashes(tmp_path: Path):
    train(tmp_path)
    file = tmp_path / "joint.model"
    content = file.read_bytes()
    for i in range(0, len(content), len(content) // 40):
        for damaged in (content[:i], content[:i] + bytes([content[i] ^ 0x55]) + content[i + 1 :]):
            file.write_bytes(damaged)
            try:
                tokenizer = Tokenizer(tmp_path)
            except ModelError as error:
                message = str(error)
            else:
                message = f"a vocabulary of {tokenizer.source_vocab_size}"  # it can be read
            assert "\n" not in message


def test_a_vocabulary_without_special_pieces_is_a_model_error(tmp_path: Path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SOURCE), model_prefix=str(tmp_path / "joint"), vocab_size=100, minloglevel=2
    )
    with pytest.raises(ModelError, match="special"):
        Tokenizer(tmp_path)


# ----------------------------------------------------------------------------------------------- model config


def test_model_config_takes_sizes_and_ids(trained):
    tokenizer = trained(joint=False, vocab_size=350)
    config = model_config(Architecture(tie_embeddings="decoder", d_model=64), tokenizer, 77)
    assert (config.source_vocab_size, config.target_vocab_size, config.max_positions) == (350, 350, 77)
    assert (config.pad_id, config.unk_id, config.bos_id, config.eos_id) == (0, 1, 2, 3)
    assert config.d_model == 64


def test_tied_embeddings_need_one_vocabulary(trained):
    model_config(Architecture(tie_embeddings="all"), trained(type="unigram"), 77)
    with pytest.raises(UsageError, match="joint"):
        model_config(Architecture(tie_embeddings="all"), trained(joint=False, vocab_size=350), 77)
