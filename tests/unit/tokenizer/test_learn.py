"""Learning a vocabulary: the files it writes, and sizes that fit the text."""

import logging
import random
from pathlib import Path

import pytest

from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.errors import DataError, UsageError
from mtrain.tokenizer.learn import train_tokenizer
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.tokenizer.vocabulary import SpecialIds
from tests.support.tokenizers import SOURCE, SPACE, TARGET, TYPES, roundtrip, train


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("joint", [True, False])
def test_vocabulary_of_either_type(trained, kind: str, joint: bool):
    size = 480 if joint else 350
    tokenizer = trained(type=kind, joint=joint, vocab_size=size)
    assert tokenizer.joint is joint
    assert (tokenizer.source is tokenizer.target) is joint
    assert tokenizer.source_vocab_size == tokenizer.target_vocab_size == size
    assert tokenizer.special == SpecialIds(pad=0, unk=1, bos=2, eos=3)
    assert [roundtrip(tokenizer, text) for text in TARGET[:50]] == TARGET[:50]
    lengths = [len(ids) for ids in tokenizer.encode_source(SOURCE)]
    assert sum(lengths) < sum(map(len, SOURCE)) / 1.5  # pieces, rather than letters
    assert all(i > 3 for ids in tokenizer.encode_source(SOURCE) for i in ids)


def test_the_two_types_segment_differently(trained):
    unigram, bpe = (trained(type=kind, vocab_size=480) for kind in TYPES)
    assert unigram.encode_source(SOURCE) != bpe.encode_source(SOURCE)


def test_each_language_learns_its_own_vocabulary(trained):
    tokenizer = trained(joint=False, vocab_size=350)
    listed = [set(side.pieces) for side in (tokenizer.source, tokenizer.target)]
    assert SPACE + "rice" in listed[0] - listed[1]
    assert SPACE + "riz" in listed[1] - listed[0]


@pytest.mark.parametrize(("joint", "names"), [(True, ["joint"]), (False, ["source", "target"])])
def test_files_and_listing(tmp_path: Path, joint: bool, names: list[str]):
    tokenizer = train(tmp_path / "deep" / "folder", joint=joint, vocab_size=360)
    files = sorted(file.name for file in (tmp_path / "deep" / "folder").iterdir())
    assert files == sorted(f"{name}.{end}" for name in names for end in ("model", "vocab"))
    listing = (tmp_path / "deep" / "folder" / f"{names[-1]}.vocab").read_bytes().decode().split("\n")
    assert [line.split("\t")[0] for line in listing[:-1]] == tokenizer.target.pieces


@pytest.mark.parametrize("kind", TYPES)
def test_the_same_text_gives_the_same_bytes(tmp_path: Path, kind: str):
    one, two = (train(tmp_path / name, type=kind) for name in "ab")
    assert one.files[0].read_bytes() == two.files[0].read_bytes()
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != train(tmp_path / "c", type=kind, vocab_size=401).fingerprint


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_too_small_a_vocabulary_names_the_smallest(tmp_path: Path, kind: str, byte_fallback: bool):
    keys = {"type": kind, "byte_fallback": byte_fallback}
    with pytest.raises(UsageError, match=r"vocab_size.* 20; .*smallest possible is \d+") as caught:
        train(tmp_path, vocab_size=20, **keys)
    smallest = int(str(caught.value).split("smallest possible is ")[1].split()[0])
    assert train(tmp_path, vocab_size=smallest, **keys).source_vocab_size == smallest
    with pytest.raises(UsageError, match="too small"):
        train(tmp_path, vocab_size=smallest - 1, **keys)


def test_errors_name_the_side(tmp_path: Path):
    with pytest.raises(UsageError, match="target side"):
        train(tmp_path, target=["a b"] * 10, joint=False, vocab_size=360)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(
    ("text", "keys"),
    [([], {}), (["", " "], {}), (["\t", "\u200b"], {"normalization": "nmt_nfkc"})],
    ids=["nothing", "blanks", "removed"],
)
def test_no_text_is_a_data_error(tmp_path: Path, joint: bool, text: list[str], keys: dict[str, str]):
    with pytest.raises(DataError, match="no text"):
        train(tmp_path, source=text, target=text, joint=joint, **keys)


def test_character_coverage_leaves_rare_characters_out(tmp_path: Path):
    rare = "".join(map(chr, range(0x4E00, 0x4E28)))
    source = [*SOURCE, rare]
    full, most = (
        train(tmp_path / str(share), source=source, vocab_size=450, character_coverage=share)
        for share in (1.0, 0.999)
    )
    assert "\u4e00" in full.source.pieces
    assert "\u4e00" not in most.source.pieces


def largest_size(folder: Path, kind: str, joint: bool, target: list[str] = TARGET) -> int:
    """The largest possible size, from the message for a size that is too large."""
    with pytest.raises(UsageError, match="largest possible") as caught:
        train(folder, target=target, type=kind, joint=joint, vocab_size=50_000)
    return int(str(caught.value).split("largest possible is ")[1])


@pytest.mark.parametrize("kind", TYPES)
def test_an_adapted_size_is_the_largest_possible_one(tmp_path: Path, caplog, kind: str):
    largest = largest_size(tmp_path / "error", kind, joint=True)
    config = TokenizerConfig(type=kind, vocab_size=50_000)
    with caplog.at_level(logging.INFO, "mtrain"):
        size = train_tokenizer(config, lambda: SOURCE, lambda: TARGET, tmp_path, 1, adapt_vocab_size=True)
    tokenizer = Tokenizer(tmp_path)
    assert size == largest == tokenizer.source_vocab_size
    assert f"using {largest}, the largest possible" in caplog.text
    assert train(tmp_path / "given", type=kind, vocab_size=largest).fingerprint == tokenizer.fingerprint
    with pytest.raises(UsageError, match="too large"):
        train(tmp_path / "larger", type=kind, vocab_size=largest + 1)


@pytest.mark.parametrize("kind", TYPES)
def test_each_side_gets_the_size_that_its_text_allows(tmp_path: Path, kind: str):
    config = TokenizerConfig(type=kind, joint=False, vocab_size=350)
    target = ["a b c"] * 10  # far too little text for 350 pieces
    size = train_tokenizer(config, lambda: SOURCE, lambda: target, tmp_path, 1, adapt_vocab_size=True)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.source_vocab_size == size == 350
    assert 260 < tokenizer.target_vocab_size < 300  # 4 special pieces, 256 bytes and a few letters


def test_a_size_that_fits_is_not_adapted(tmp_path: Path):
    config = TokenizerConfig(vocab_size=400)
    assert train_tokenizer(config, lambda: SOURCE, lambda: TARGET, tmp_path, 1, adapt_vocab_size=True) == 400
    assert Tokenizer(tmp_path).fingerprint == train(tmp_path / "plain", vocab_size=400).fingerprint


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("joint", [True, False])
def test_a_text_with_many_characters_gets_entries_for_all(tmp_path: Path, kind: str, joint: bool):
    characters = [chr(0x4E00 + number) for number in range(599)]
    rng = random.Random(0)
    text = [" ".join("".join(rng.choices(characters, k=3)) for _ in range(6)) for _ in range(1000)]
    config = TokenizerConfig(type=kind, vocab_size=700, joint=joint)
    with pytest.raises(UsageError, match="too small for this text"):
        train_tokenizer(config, lambda: text, lambda: text, tmp_path / "given", 1)
    size = train_tokenizer(config, lambda: text, lambda: text, tmp_path, 1, adapt_vocab_size=True)
    for vocabulary in (Tokenizer(tmp_path).source, Tokenizer(tmp_path).target):
        # 599 characters and the space are 200 more than those of an alphabet.
        assert len(vocabulary.pieces) == size == 900 and set(characters) <= set(vocabulary.pieces)


def test_characters_that_the_coverage_leaves_out_need_no_entries(tmp_path: Path):
    text = ["some brown foxes"] * 2000 + [chr(0x4E00 + number) for number in range(450)]
    config = TokenizerConfig(type="bpe", vocab_size=275, character_coverage=0.98)
    assert train_tokenizer(config, lambda: text, lambda: [], tmp_path, 1, adapt_vocab_size=True) == 275


def test_symbols_need_entries(tmp_path: Path):
    config = TokenizerConfig(type="bpe", vocab_size=1000, symbols=[f"<{n}>" for n in range(900)])
    size = train_tokenizer(config, lambda: SOURCE, lambda: TARGET, tmp_path, 1, adapt_vocab_size=True)
    assert size > 260 + 900


@pytest.mark.parametrize("zero", ["០", "๐", "०", "0"])
def test_digits_are_pieces_apart_from_letters(tmp_path: Path, zero: str):
    """Khmer "riel", Thai "baht" and Hindi "rupee" after their own digits."""
    word = {"០": "រៀល", "๐": "บาท", "०": "रुपये", "0": "euro"}[zero]
    numbers = [str(n).translate({ord("0") + i: ord(zero) + i for i in range(10)}) for n in range(100, 200)]
    text = [number + word for number in numbers]
    train_tokenizer(TokenizerConfig(), lambda: text, lambda: ["a"], tmp_path, 1, adapt_vocab_size=True)
    pieces = [piece for piece in Tokenizer(tmp_path).source.pieces if not piece.startswith("<")]
    mixed = [piece for piece in pieces if piece.strip("▁").isdigit() != any(map(str.isdigit, piece))]
    assert not mixed and word in pieces


@pytest.mark.parametrize("kind", TYPES)
def test_a_very_long_line_without_spaces(tmp_path: Path, kind: str):
    tokenizer = train(tmp_path, source=[*SOURCE, "a" * 1_000_000], type=kind, vocab_size=480)
    lengths = [len(ids) for ids in tokenizer.encode_source(SOURCE)]
    assert sum(lengths) < sum(map(len, SOURCE)) / 1.5


def test_a_long_line_that_only_occurs_again_as_a_whole(tmp_path: Path):
    line = "".join(map(chr, range(0x4E00, 0x4E28)))
    config = TokenizerConfig(vocab_size=400)
    train_tokenizer(config, lambda: [line], lambda: [line], tmp_path, 1, adapt_vocab_size=True)
    assert set(line) <= set(Tokenizer(tmp_path).source.pieces)


@pytest.mark.parametrize("joint", [True, False])
def test_adapting_the_size_does_not_hide_that_there_is_no_text(tmp_path: Path, joint: bool):
    config = TokenizerConfig(joint=joint)
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(config, lambda: [""], lambda: [""], tmp_path, 1, adapt_vocab_size=True)
