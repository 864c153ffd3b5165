"""Import and export of the tokenizers of M2M-100 and NLLB-200: M2M100Tokenizer and NllbTokenizer of
Transformers.

Both segment with a SentencePiece model of the type BPE, but have other ids: M2M-100 the ids in `vocab.json`,
NLLB-200 the ids of fairseq, which are SentencePiece's plus one. The codes of languages follow the pieces.
"""

import base64
import json
import logging
import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.errors import ModelError
from mtrain.interop.huggingface import SENTENCEPIECE, read_object
from mtrain.storage.atomic import write_text
from mtrain.tokenizer.model_file import bpe_model
from mtrain.tokenizer.tokenizer import LANGUAGES, Tokenizer
from mtrain.tokenizer.vocabulary import Vocabulary, load_model_file

log = logging.getLogger(__name__)

_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # with the ids 0 to 3
# M2M100Tokenizer knows its languages, in the order of their ids, by the `language_codes` of its config.
_CODES = {
    "m2m100": "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd "
    "gl gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg "
    "mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw "
    "ta th tl tn tr uk ur uz vi wo xh yi yo zh zu",
    "wmt21": "en ha is ja cs ru zh de",
}
_UNUSED = "madeupword"  # how tokens are called that only pad the vocabulary
# Tokenizers of other models of this architecture place the codes of languages in other ways.
_CLASSES = ("NllbTokenizer", "NllbTokenizerFast", "M2M100Tokenizer")
# SentencePiece also removes repeated spaces and spaces at the end, as `Replace` and `Strip` do.
_NORMALIZERS = ("Precompiled", "Replace", "Strip")


class ImportedTokenizer(NamedTuple):
    """An imported tokenizer, and further facts from the original files."""

    tokenizer: Tokenizer
    is_nllb: bool = False
    unused: Sequence[int] = ()  # ids without text, such as made-up words that pad the vocabulary


def take_tokenizer(folder: Path, into: Path, size: object) -> ImportedTokenizer:
    """Write the tokenizer of a folder of Transformers as a `tokenizer/` folder, for a model whose vocabulary
    has a `size`. Raises ModelError if a file is missing, damaged or unsupported."""
    names = read_object(folder / "tokenizer_config.json", optional=True)
    if (kind := names.get("tokenizer_class", _CLASSES[0])) not in _CLASSES:
        raise ModelError(f"{folder}: unsupported: tokenizer_class: {kind!r}; known: {', '.join(_CLASSES)}")
    code = [file.name for file in sorted(folder.glob("tokenization_*.py"))]
    if code or names.get("auto_map"):
        name = next(iter(code), "auto_map")
        raise ModelError(f"{folder}: unsupported: has code of its own for its tokenizer: {name}")
    into.mkdir()
    is_nllb = not (folder / "vocab.json").is_file()
    if (file := folder / SENTENCEPIECE).is_file():
        original = str(file)
        shutil.copyfile(file, into / "joint.model")
        pieces = _shifted(file) if is_nllb else read_object(folder / "vocab.json", most=None)
        listed = _listed_codes(folder, names) if is_nllb else _m2m_codes(names)
    elif is_nllb and (file := folder / "tokenizer.json").is_file():
        original = f"{file} (converted)"
        pieces, model = _from_tokenizer_json(file)
        (into / "joint.model").write_bytes(model)
        listed = []
    else:
        raise ModelError(f"{folder}: contains neither {SENTENCEPIECE} nor tokenizer.json")
    added, words = _added_tokens(folder, names)
    ids: dict[str, Any] = pieces | added
    ids |= {token: i for i, token in enumerate(listed, len(pieces)) if token not in ids}
    words -= {*pieces, *listed}
    if words:
        advice = "if one is the code of a language, set `special` to true where the tokenizer's files list it"
        some = f"{len(words)} added word(s), such as {', '.join(sorted(words)[:5])}"
        log.warning("%s: %s, are segmented like other text; %s", folder, some, advice)
    others = {*pieces, *words}
    codes = [token for token in ids if token not in others and not token.startswith("<")]
    if not codes:
        cure = "tokenizer.json or special_tokens_map.json must list them"
        raise ModelError(f"{folder}: the tokenizer has no codes of languages; {cure}")
    numbers = range(size if isinstance(size, int) else 0)
    are_ids = all(type(i) is int and i in numbers for i in ids.values())
    if not are_ids or len({*ids.values()}) < len(ids):
        raise ModelError(f"{folder}: the ids of the tokenizer are not distinct ids of {size} entries")
    unused = sorted({*numbers} - {*ids.values()})
    unused += [i for token, i in ids.items() if token.startswith(_UNUSED)]
    ids |= {f"{_UNUSED}{number:04d}": i for number, i in enumerate(unused)}
    try:
        vocabulary = json.dumps(ids, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ModelError(f"{folder}: the tokenizer has tokens that are not valid Unicode") from None
    (into / "vocab.json").write_bytes(vocabulary)
    write_languages(into, {token.strip("_"): ids[token] for token in codes}, is_nllb)
    try:
        return ImportedTokenizer(Tokenizer(into), is_nllb, unused)
    except ModelError as error:  # which names a copy
        text = str(error).replace(str(into / "joint.model"), original)
        raise ModelError(text.replace(str(into), str(folder))) from None


def write_languages(into: Path, codes: dict[str, int], normalizes_punctuation: bool) -> None:
    """Write the file of a `tokenizer/` folder that `Vocabulary` reads."""
    values = {"codes": codes, "normalizes_punctuation": normalizes_punctuation}
    write_text(into / LANGUAGES, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def write_tokenizer_of_codes(vocabulary: Vocabulary, folder: Path) -> dict[str, Any]:
    """Write the files that `take_tokenizer` reads, except tokenizer_config.json, whose keys are returned.

    Raises ModelError if the vocabulary is neither M2M-100's nor NLLB-200's.
    """
    codes = {vocabulary.pieces[i]: i for i in sorted(vocabulary.codes.values())}
    first, ids = min(codes.values()), vocabulary.ids or {}
    pieces = {piece: i for piece, i in ids.items() if i < first}
    names: dict[str, Any] = {"additional_special_tokens": [*codes]}
    (folder / SENTENCEPIECE).write_bytes(vocabulary.processor.serialized_model_proto())
    for kind in _CODES:
        if [*codes] == _m2m_codes({"language_codes": kind}) and len(pieces) == first:
            write_text(folder / "vocab.json", json.dumps(pieces))
            return names | {"tokenizer_class": "M2M100Tokenizer", "language_codes": kind}
    if pieces != _shifted(folder / SENTENCEPIECE):
        raise ModelError("m2m_100 needs the vocabulary of M2M-100 or NLLB-200, but this one is another")
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    added = {token: i for token, i in ids.items() if i >= first and not token.startswith(_UNUSED)}
    special = {*codes, "<mask>"}
    described = {str(i): {**plain, "content": t, "special": t in special} for t, i in added.items()}
    return names | {"tokenizer_class": "NllbTokenizer", "added_tokens_decoder": described}


def _shifted(file: Path) -> dict[str, int]:
    """The ids that fairseq gives the pieces of a SentencePiece model."""
    _, pieces = load_model_file(file)
    if pieces[:3] != ["<unk>", "<s>", "</s>"]:
        problem = f"the first pieces must be <unk>, <s> and </s>, not {pieces[:3]}"
        raise ModelError(f"{file}: unsupported: {problem}")
    return {piece: i for i, piece in enumerate([*_SPECIAL, *pieces[3:]])}


def _m2m_codes(names: dict[str, Any]) -> list[str]:
    kind = names.get("language_codes", "m2m100")
    if kind not in [*_CODES]:  # it may be a list or an object
        raise ModelError(f"tokenizer_config.json: language_codes is {kind!r}; known: {', '.join(_CODES)}")
    return [f"__{code}__" for code in _CODES[kind].split()]


def _listed_codes(folder: Path, names: dict[str, Any]) -> list[str]:
    """The additional special tokens, whose ids follow the pieces in this order."""
    key = "additional_special_tokens"
    listed = names.get(key) or read_object(folder / "special_tokens_map.json", optional=True).get(key) or []
    if not isinstance(listed, list):
        raise ModelError(f"{folder}: {key} is not a list of tokens: {listed!r}")
    return [token for token in map(_content, listed) if token and not token.startswith("<")]


def _added_tokens(folder: Path, names: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The ids of tokens that were added to the vocabulary, as far as the files have them, and which of these
    tokens are not special, but words of texts."""
    try:
        listed = read_object(folder / "tokenizer.json", optional=True, most=None).get("added_tokens") or []
        added: list[tuple[Any, Any]] = [(each.get("id"), each) for each in listed]
        added += [(int(i), each) for i, each in (names.get("added_tokens_decoder") or {}).items()]
        found = {token: i for i, each in added if (token := _content(each))}
        words = {each["content"] for _, each in added if _content(each) and each.get("special") is False}
    except (TypeError, AttributeError, ValueError) as error:
        raise ModelError(f"{folder}: the tokens added to the vocabulary are damaged: {error!r}") from None
    return found | read_object(folder / "added_tokens.json", optional=True), words


def _content(token: object) -> str | None:
    """The text of a token, which some files describe by an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _from_tokenizer_json(file: Path) -> tuple[dict[str, int], bytes]:
    """The ids of the pieces in a `tokenizer.json`, and a SentencePiece model that segments in the same way.

    SentencePiece may merge two pieces whenever the result is a piece, the one with the highest score first.
    The file lists the pairs to merge in this order, so it must contain each pair that makes a piece.
    """
    found = read_object(file, most=None)
    try:
        model, normalizer, split = found["model"], found["normalizer"] or {}, found["pre_tokenizer"]
        kinds = model["type"], split["type"], split["replacement"]
        # Old files say this by `add_prefix_space`.
        prefix = split.get("prepend_scheme", "always" if split.get("add_prefix_space") else "never")
        added = {_content(token) for token in found.get("added_tokens") or []} - {*_SPECIAL}
        options = [model.get(key) for key in ("byte_fallback", "dropout", "continuing_subword_prefix")]
        vocabulary: dict[str, int] = dict(model["vocab"])
        "".join(vocabulary).encode()  # a ValueError if it is not valid Unicode
        characters = [piece for piece in vocabulary if len(piece) == 1]
        pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        merged = ["".join((left, right)) for left, right in pairs]
        charsmap = b""
        for rule in normalizer.get("normalizers", [normalizer] if normalizer else []):
            if rule["type"] not in _NORMALIZERS:
                raise ModelError(f"{file}: unsupported: the normalizer {rule['type']}")
            charsmap = base64.b64decode(rule.get("precompiled_charsmap", "")) or charsmap
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(f"{file}: not the tokenizer of NLLB-200: {error!r}") from None
    if (*kinds, prefix) != ("BPE", "Metaspace", "\u2581", "always") or any(options):
        supported = "only BPE with spaces as \u2581, as of NLLB-200"
        raise ModelError(f"{file}: unsupported: {supported}; found {kinds}, {prefix}")
    pieces = [piece for piece, _ in groupby(merged)]
    known, given = {*pieces, *characters}, {*pairs}
    possible = ((piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece)))
    complete = all(pair in given for pair in possible if known.issuperset(pair))
    if not complete or len({*pieces}) < len(pieces) or not vocabulary.keys() >= known:
        raise ModelError(f"{file}: unsupported: SentencePiece cannot reproduce its merges")
    # The published file, and what Transformers 5 saves from it, has the codes of languages among the pieces.
    own = {piece: i for piece, i in vocabulary.items() if piece not in added}
    return own, bpe_model([*pieces, *characters], charsmap)
