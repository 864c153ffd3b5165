"""Subword segmentation: text to token ids and back, and the tokenizer folder of a run or a model."""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mtrain.config.languages import Direction, LanguageTags, base_language, find_code, names_in_tags
from mtrain.config.sections.model import Architecture, ModelConfig
from mtrain.errors import ModelError, UsageError
from mtrain.regular_files import read_file
from mtrain.tokenizer.vocabulary import SPACE, Vocabulary

# Byte pieces can decode to control characters, such as line breaks and tabs, which would split a line or a
# column of output. Spaces replace them.
SPACES = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), " ")
_SURROGATE = re.compile("[\ud800-\udfff]")
MAPPINGS = ("vocab.json", "source_vocab.json", "target_vocab.json")  # joint, or one for each side
LANGUAGES = "languages.json"  # of a model that has a token for the code of each language


class TagIds(NamedTuple):
    """The ids for the languages of a pair, see `LanguageTags`."""

    source: Sequence[int] = ()  # before the source
    after_source: Sequence[int] = ()  # after its EOS
    target: Sequence[int] = ()  # before the target

    @property
    def counts(self) -> tuple[int, int]:
        """The number of ids on each side."""
        return len(self.source) + len(self.after_source), len(self.target)


class Tokenizer:
    """The vocabularies of a model: encodes source and target text, decodes target ids.

    `source` and `target` are one object if both sides use the same files. `joint` is true if an id means the
    same piece on both sides. `fingerprint` is the SHA-256 of all files.
    """

    def __init__(self, folder: Path, threads: int | None = None):
        """Load a `tokenizer/` folder: `joint.model`, or `source.model` and `target.model`. If the ids are not
        SentencePiece's, `vocab.json`, or `source_vocab.json` and `target_vocab.json`, hold the id of each
        piece, and `languages.json` the `languages` of `Vocabulary`. Text is encoded with `threads` threads,
        by default one for each core. Raises ModelError if a file is missing or malformed."""
        models, mappings, languages = vocabulary_files(folder)
        self.files = [*models, *mappings, *languages]
        self.joint = len(mappings or models) == 1
        self.source = self.target = Vocabulary(models[0], *mappings[:1], *languages)
        if len(models) > 1 or len(mappings) > 1:
            self.target = Vocabulary(models[-1], mappings[-1] if mappings else None)
        self.source_vocab_size, self.target_vocab_size = len(self.source), len(self.target)
        source, target = self.source.special, self.target.special
        if (source.unk, source.eos) != (target.unk, target.eos):
            raise ModelError(f"{folder}: the source and target vocabularies have different special ids")
        # Padding is masked, so its id may be any that both vocabularies have. BOS comes from the
        # target, because sources have none.
        self.special = target._replace(pad=min(source.pad, target.pad))
        self.fingerprint = fingerprint_of(self.files)
        if threads:
            self.set_threads(threads)

    def __reduce__(self) -> tuple[Callable[[Path, str], "Tokenizer"], tuple[Path, str]]:
        """A worker process loads a tokenizer again, from the same files."""
        return _load_again, (self.files[0].parent.resolve(), self.fingerprint)

    def set_threads(self, count: int) -> None:
        """Encode with `count` threads instead of one for each core."""
        self.source.threads = self.target.threads = count

    def encode_source(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special ids around them."""
        return self.source.encode(texts)

    def encode_target(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special ids around them."""
        return self.target.encode(texts)

    def tag_ids(self, tag: str) -> list[int]:
        """The source ids of a language tag (see `Direction.tag`), which may be empty. Raises UsageError
        unless each of its words is a symbol of the vocabulary."""
        if not tag:
            return []
        names = sorted(self.source.symbol_names)
        if missing := [word for word in tag.split() if word not in names]:
            found = f"the vocabulary has no language tag {missing[0]}"
            raise UsageError(f"{found}; its symbols are {', '.join(names) or 'none'}")
        return self.encode_source([tag])[0]

    def complete(self, direction: Direction, tags: LanguageTags) -> Direction:
        """The direction with the names that language `tags` have in this vocabulary: its codes, such as
        `deu_Latn` for `de`, or those in its symbols, such as `de` for `deu_Latn` if there is a tag `<2de>`
        but none `<2deu_Latn>`; unknown languages, `und`, stay. Raises UsageError if a language lacks a code.
        """
        if tags.startswith("codes") and (codes := self.source.codes):
            return Direction(*(find_code(x, codes) if x != "und" else x for x in direction))
        if tags not in ("target", "both"):
            return direction
        names, targets = names_in_tags(self.source.symbol_names)
        source = _tagged(direction.source, names) if tags == "both" else direction.source
        return Direction(source, _tagged(direction.target, targets))

    def tags_of(self, direction: Direction, tags: LanguageTags) -> TagIds:
        """The ids of the languages of pairs. Raises UsageError if the vocabulary lacks a language or, with
        codes, if one is not known."""
        if not tags.startswith("codes"):
            return TagIds(tuple(self.tag_ids(direction.tag(tags))))
        if not self.source.codes:
            raise UsageError(f"language_tags: {tags} needs a model with codes, but this vocabulary has none")
        if "und" in direction:
            some = ", ".join([*self.source.codes][:3])
            found = f"the model has the codes of {len(self.source.codes)} languages, such as {some}"
            raise UsageError(f"{found}; give the two to translate between, with --from and --to in commands")
        source, target = ((self.source.codes[code],) for code in self.complete(direction, tags))
        return TagIds(source, (), target) if tags == "codes" else TagIds((), source, target)

    def word_starts(self, ids: list[int]) -> list[bool]:
        """Whether each source token begins a word; the first one always does. Words are separated by
        whitespace. A token of only spaces does not begin a word if a space or the end follows."""
        pieces = self.source.pieces
        starts: list[bool] = []
        last, filled = 0, True  # start of the current word; whether it has more than spaces
        for number, i in enumerate(ids):
            begins = number == 0 or (pieces[i].startswith(SPACE) and filled)
            letters = bool(pieces[i].strip(SPACE))
            last, filled = (number, letters) if begins else (last, filled or letters)
            starts.append(begins)
        if last and not filled:
            starts[last] = False
        return starts

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Target text of each row of ids, without special tokens. Spaces replace control characters."""
        texts = self.target.decode(ids)
        return [text if text.isprintable() else text.translate(SPACES) for text in texts]


def _load_again(folder: Path, fingerprint: str) -> Tokenizer:
    """The tokenizer of a folder, which encodes with one thread: there is a worker process for each core.
    Raises ModelError if it has another fingerprint."""
    tokenizer = Tokenizer(folder, threads=1)
    if tokenizer.fingerprint != fingerprint:
        raise ModelError(f"{folder}: its files have changed since they were loaded; start the command again")
    return tokenizer


def _tagged(code: str, tagged: Sequence[str]) -> str:
    """The code of a language in its tag: the same one or, without region and script, its base."""
    base = base_language(code)
    return base if code not in tagged and base in tagged else code


def valid_text(text: str) -> str:
    """Replace each unpaired surrogate, as it occurs in broken JSON, by U+FFFD, and each pair of surrogates
    by the character that it encodes."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def fingerprint_of(files: Sequence[Path]) -> str:
    """SHA-256 of vocabulary files."""
    digests = [hashlib.sha256(read_file(file)).digest() for file in files]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def vocabulary_files(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """The SentencePiece models of a `tokenizer/` folder (one or two), and its JSON vocabularies and its
    languages, if any."""
    models = _one_or_two(folder, "joint.model", "source.model", "target.model")
    mapped = any((folder / name).exists() for name in MAPPINGS)
    languages = [file for file in [folder / LANGUAGES] if file.exists()]
    return models, _one_or_two(folder, *MAPPINGS) if mapped else [], languages


def _one_or_two(folder: Path, both: str, source: str, target: str) -> list[Path]:
    """The files of the two sides if one of them exists and no joint file, otherwise the joint file."""
    sides = [folder / source, folder / target]
    are_separate = not (folder / both).exists() and any(file.exists() for file in sides)
    return sides if are_separate else [folder / both]


def model_config(architecture: Architecture, tokenizer: Tokenizer, max_length: int) -> ModelConfig:
    """The architecture, completed with the vocabulary sizes and special ids of the tokenizer. `max_length` is
    the length of the longest sentence, in tokens.

    Raises UsageError if `tie_embeddings` is `all` and there are two vocabularies.
    """
    needs = "needs a joint vocabulary"
    if architecture.is_classifier and not tokenizer.joint:
        raise UsageError(f"model.head: pair_classifier {needs}, but this tokenizer has one for each side")
    if architecture.tie_embeddings == "all" and not tokenizer.joint:
        raise UsageError(f"model.tie_embeddings: all {needs}; use decoder or none with two vocabularies")
    return ModelConfig(
        **architecture.model_dump(),
        **tokenizer.special.options(),
        source_vocab_size=tokenizer.source_vocab_size,
        target_vocab_size=tokenizer.target_vocab_size,
        max_positions=max_length,
    )
