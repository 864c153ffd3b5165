"""The vocabulary of one side: pieces with the ids of SentencePiece or of an imported model's `vocab.json`."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from sentencepiece import SentencePieceNormalizer, SentencePieceProcessor

from mtrain.errors import ModelError
from mtrain.processes.cores import count_cores
from mtrain.regular_files import read_file
from mtrain.tokenizer.model_file import has_rules, types_of_pieces
from mtrain.tokenizer.punctuation import normalize_punctuation, normalized_offsets

SPACE = "\u2581"  # how SentencePiece represents a space
_USER_DEFINED = 4  # a type of pieces in a SentencePiece model
_FEW = 100  # texts, which take less time to convert than threads take to start and convert them
_TAG = re.compile(">>.*?<<", re.DOTALL)  # the target language, for multilingual Marian models


class SpecialIds(NamedTuple):
    """Ids of the special tokens; the defaults are the ids in vocabularies learned here."""

    pad: int = 0
    unk: int = 1
    bos: int = 2
    eos: int = 3

    def options(self) -> dict[str, Any]:
        """The ids as `pad_id` etc., the names that SentencePiece and ModelConfig use."""
        return {f"{name}_id": value for name, value in self._asdict().items()}


class Vocabulary:
    """Encodes and decodes text with a SentencePiece model. `pieces` lists the piece of each id.

    With a `mapping` of pieces to ids, pieces that are not in it are unknown. Without `languages`, a text may
    then begin with a tag of its target language, such as `>>deu<<`. `languages` has the id of the code of
    each language, which no text is encoded to, and whether punctuation is normalized before segmentation.
    """

    def __init__(self, file: Path, mapping: Path | None = None, languages: Path | None = None):
        """Load a `.model` file, and the JSON files of a mapping and of languages. Raises ModelError if one is
        malformed."""
        self.processor, pieces = load_model_file(file)
        self.threads = count_cores()  # that encode and decode
        self.ids: dict[str, int] | None = None
        self.codes: dict[str, int] = {}  # of languages
        self._has_tags = mapping is not None and languages is None  # as Marian models have them
        self.normalizes_punctuation = False
        if mapping is None:
            model = self.processor
            self.special = SpecialIds(model.pad_id(), model.unk_id(), model.bos_id(), model.eos_id())
            if min(self.special) < 0:
                found = tuple(self.special)
                raise ModelError(f"{file}: a special piece is missing; pad, unk, bos, eos are {found}")
            self.pieces = pieces
            return
        self.ids = ids = _read_mapping(mapping)
        if missing := [piece for piece in ("<pad>", "<unk>", "</s>") if piece not in ids]:
            raise ModelError(f"{mapping}: has no {missing[0]}")
        self.special = SpecialIds(ids["<pad>"], ids["<unk>"], bos=ids["<pad>"], eos=ids["</s>"])
        self.pieces = [f"<no piece {i}>" for i in range(max(ids.values()) + 1)]
        for piece, i in ids.items():
            self.pieces[i] = piece
        if languages is not None:
            self.codes, self.normalizes_punctuation = _read_languages(languages, len(self.pieces))
            self.special = self.special._replace(bos=self.special.eos)
        # Tokens that are never text.
        self._control = {self.special.pad, self.special.eos, *self.codes.values()}
        self._control |= {ids[piece] for piece in ("<s>", "<mask>") if self.codes and piece in ids}
        self._text_ids = {piece: i for piece, i in ids.items() if i not in self._control}

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text."""
        if self.ids is None:
            return self._convert(self.processor.encode, texts)
        ids, unknown = self._text_ids, self.special.unk
        return [[ids.get(piece, unknown) for piece in row] for row in self.segment(texts)]

    def segment(self, texts: list[str]) -> list[list[str]]:
        """Pieces of each text. Text that SentencePiece has no piece for is returned unchanged, as a piece; a
        mapping may have an id for it."""
        tags, rest = self._divide(texts)
        if self.normalizes_punctuation:
            rest = [normalize_punctuation(text) for text in rest]
        rows = self._convert(self.processor.encode, rest, out_type=str)
        return [[tag, *row] if tag else row for tag, row in zip(tags, rows, strict=True)]

    def positions(self, texts: list[str]) -> list[list[int]]:
        """The character offset in its text at which each id of `encode` begins."""
        if self.normalizes_punctuation:
            normalized = [normalized_offsets(text) for text in texts]
            found = self._convert(
                self.processor.encode, [text for text, _ in normalized], return_type="offset_mapping"
            )
            pairs = zip(found, normalized, strict=True)
            return [[offsets[begin] for begin, _ in row["offsets"]] for row, (_, offsets) in pairs]
        tags, rest = self._divide(texts)
        found = self._convert(self.processor.encode, rest, return_type="offset_mapping")
        rows = zip(tags, found, strict=True)
        return [[*[0] * bool(tag), *(len(tag) + begin for begin, _ in row["offsets"])] for tag, row in rows]

    def _convert(self, convert: Callable[..., Any], items: Sequence[Any], **options: Any) -> list[Any]:
        """What a method of SentencePiece returns for each item."""
        if len(items) < _FEW:
            return [convert(item, **options) for item in items]
        return cast(list[Any], convert(items, num_threads=self.threads, **options))

    def _divide(self, texts: list[str]) -> tuple[list[str], list[str]]:
        """The tag of a Marian model that each text begins with, or nothing; and the rest of each text."""
        tags = [match[0] if self._has_tags and (match := _TAG.match(text)) else "" for text in texts]
        return tags, [text[len(tag) :] for text, tag in zip(texts, tags, strict=True)]

    def join(self, rows: list[list[str]]) -> list[str]:
        """The text of each row of pieces, the inverse of `segment` but for normalization."""
        # One row at a time: before 0.2.3, SentencePiece mistook pieces for ids if the first row was empty.
        texts = (self.processor.decode(self._readable(row)) if row else "" for row in rows)
        return [text.strip(" ") for text in texts]

    def _readable(self, pieces: list[str]) -> list[str]:
        """The pieces, with a space for SPACE in those that SentencePiece does not know, such as the pieces
        that only a mapping has: it returns them unchanged."""
        unknown = self.processor.unk_id()
        numbered = zip(self.processor.piece_to_id(pieces), pieces, strict=True)
        return [piece.replace(SPACE, " ") if i == unknown else piece for i, piece in numbered]

    def decode(self, rows: list[list[int]]) -> list[str]:
        """The text of each row of ids, without special tokens."""
        if self.ids is None:
            return self._convert(self.processor.decode, rows)
        return self.join([[self.pieces[i] for i in row if i not in self._control] for row in rows])

    def decoded_positions(self, ids: list[int]) -> list[int]:
        """The character offset at which each id begins in the text that `decode` returns; -1 for the code of
        a language."""
        if self.ids is None:
            offsets = self.processor.decode(ids, return_type="offset_mapping")["offsets"]
            return [begin for begin, _ in offsets]
        pieces = [self.pieces[i] for i in ids if i not in self._control]
        found = self.processor.decode(self._readable(pieces), return_type="offset_mapping")
        text = found["text"]
        removed = len(text) - len(text.lstrip(" "))  # as in `join`
        begins = iter([max(0, begin - removed) for begin, _ in found["offsets"]])
        end = len(text.strip(" "))
        codes = self.codes.values()
        return [-1 if i in codes else end if i in self._control else next(begins) for i in ids]

    def tag(self, ids: list[int]) -> list[int]:
        """The tag that a row of ids begins with, or []: a piece like `>>de<<` of a Marian model, otherwise
        any of `symbols` before all other words."""
        if self._has_tags:
            return ids[:1] if ids and _TAG.fullmatch(self.pieces[ids[0]]) else []
        end = 0
        for number, i in enumerate(ids, start=1):
            if i in self.symbols:
                end = number
            elif self.pieces[i] != SPACE:
                break
        return ids[:end]

    @cached_property
    def symbols(self) -> frozenset[int]:
        """Ids of the pieces that were given, not learned: `tokenizer.symbols`, or the codes of languages."""
        if self.codes:
            return frozenset(self.codes.values())
        types = types_of_pieces(self.processor.serialized_model_proto())
        return frozenset(i for i, type_ in enumerate(types) if type_ == _USER_DEFINED)

    @property
    def symbol_names(self) -> list[str]:
        """The pieces of `symbols`, in the order of their ids."""
        return [self.pieces[i] for i in sorted(self.symbols)]

    @cached_property
    def marian_tags(self) -> list[str]:
        """The language tags of a Marian model, such as `>>fra<<`."""
        return [piece for piece in self.pieces if self._has_tags and _TAG.fullmatch(piece)]

    @cached_property
    def symbol_pattern(self) -> re.Pattern[str] | None:
        """A pattern of the symbols in a text: `tokenizer.symbols`, or the tag of a Marian model at its
        beginning. None if no text contains symbols."""
        if self.codes:
            return None
        if self._has_tags:
            return re.compile(rf"\A{_TAG.pattern}", _TAG.flags)
        return pattern_of(self.symbol_names)

    def normalizer(self) -> SentencePieceNormalizer | None:
        """How texts are normalized before they are segmented; see `make_normalizer`."""
        return make_normalizer(model=self.processor.serialized_model_proto())

    def scores(self) -> list[float]:
        """The score of each piece in SentencePiece's model; 0 if it was not learned."""
        scores: list[float] = self.processor.get_score(self.processor.piece_to_id(self.pieces))
        return scores

    def unlearned(self) -> set[int]:
        """The ids of <unk> and of byte pieces, which stand for text that no piece was learned for."""
        known = self.processor.piece_to_id(self.pieces)
        return {self.special.unk} | {i for i, piece in enumerate(known) if self.processor.is_byte(piece)}


def make_normalizer(rule: str | None = None, model: bytes | None = None) -> SentencePieceNormalizer | None:
    """SentencePiece's normalizer of characters with the name `rule`, or of a serialized model. It leaves runs
    and ends of spaces as they are. None if it changes nothing."""
    normalizer = SentencePieceNormalizer(
        rule_name=rule,
        model_proto=model,
        add_dummy_prefix=False,
        escape_whitespaces=False,
        remove_extra_whitespaces=False,
    )
    return normalizer if has_rules(normalizer.serialized_normalizer_spec()) else None


def pattern_of(symbols: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern of symbols in a text, or None if there are none."""
    names = sorted(symbols, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def load_model_file(file: Path) -> tuple[SentencePieceProcessor, list[str]]:
    """A SentencePiece model, and its pieces. Raises ModelError if it cannot be read."""
    with suppress(RuntimeError, ValueError):  # ValueError if a piece or the error message is not valid UTF-8
        # SentencePiece would load an empty file as a model without pieces.
        if contents := _read(file, "tokenizer"):
            processor = SentencePieceProcessor(model_proto=contents)
            return processor, processor.id_to_piece(list(range(len(processor))))
    raise ModelError(f"{file}: not a SentencePiece model")


def _read(file: Path, kind: str) -> bytes:
    try:
        return read_file(file)
    except OSError as error:
        raise ModelError(f"{file}: cannot read the {kind}: {error.strerror}") from None


def _read_mapping(file: Path) -> dict[str, int]:
    try:
        ids = json.loads(_read(file, "vocabulary"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not JSON: {error}") from None
    if not isinstance(ids, dict) or not ids:
        raise ModelError(f"{file}: expected an object that maps pieces to ids")
    limit = 2 * len(ids)  # some ids may be unused, but not most
    for piece, i in ids.items():
        if type(i) is not int or not 0 <= i < limit:
            expected = f"an integer from 0 to {limit - 1}"
            raise ModelError(f"{file}: the id of {piece!r} is {i!r}; expected {expected}")
        if not piece.isascii() and any("\ud800" <= c <= "\udfff" for c in piece):
            raise ModelError(f"{file}: {piece!r} is not valid Unicode")
    if len(set(ids.values())) < len(ids):
        raise ModelError(f"{file}: two pieces have the same id")
    return cast(dict[str, int], ids)


def _read_languages(file: Path, size: int) -> tuple[dict[str, int], bool]:
    """The id of the code of each language, and whether punctuation is normalized."""
    try:
        found = json.loads(_read(file, "languages"))
        codes, punctuation = found["codes"], found["normalizes_punctuation"]
        valid = all(type(i) is int and 0 <= i < size for i in codes.values()) and type(punctuation) is bool
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        valid = False
    if not valid or not codes:
        raise ModelError(f"{file}: expected the id of each language, and how punctuation is normalized")
    return codes, punctuation
