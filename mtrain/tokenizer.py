"""Subword segmentation with SentencePiece: learning a vocabulary, text to ids and back.

Kudo and Richardson, "SentencePiece" (EMNLP 2018); Kudo, "Subword Regularization" (ACL 2018) for `unigram`;
Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (ACL 2016) for `bpe`.
"""

import hashlib
import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import sentencepiece

from mtrain.errors import DataError, ModelError, UsageError
from mtrain.schema import Architecture, ModelConfig, TokenizerConfig

log = logging.getLogger(__name__)

# Beyond this many sentences a vocabulary hardly changes, while the trainer's memory goes on growing.
SAMPLED_SENTENCES = 5_000_000
# Byte pieces can spell characters that would break a line of output in two.
_LINE_BREAKERS = str.maketrans("\n\r\0", "   ")

Sentences = Callable[[], Iterable[str]]  # called once for each pass over the text


class SpecialIds(NamedTuple):
    """Ids that a trained vocabulary gives to its special pieces."""

    pad: int = 0
    unk: int = 1
    bos: int = 2
    eos: int = 3

    def options(self) -> dict[str, Any]:
        """`pad_id` and so on, as SentencePiece and ModelConfig name them."""
        return {f"{name}_id": value for name, value in self._asdict().items()}


def train_tokenizer(
    config: TokenizerConfig, source: Sentences, target: Sentences, folder: Path, seed: int
) -> None:
    """Learn the vocabulary of `config` and write `joint.model`, or `source.model` and `target.model`, with
    a listing of the pieces beside each.

    Raises DataError if there is no text, UsageError if `vocab_size` does not fit the text; the message
    states the largest (or smallest) size that does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {"source": source, "target": target}
    if config.joint:
        jobs = {"joint": lambda: chain(source(), target())}
    for name, sentences in jobs.items():
        model = _learn(config, sentences, seed, "" if config.joint else f" ({name} side)")
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces = (f"{processor.id_to_piece(i)}\t{processor.get_score(i)}\n" for i in range(len(processor)))
        (folder / f"{name}.vocab").write_text("".join(pieces), encoding="utf-8", newline="")
        (folder / f"{name}.model").write_bytes(model)


def _learn(config: TokenizerConfig, sentences: Sentences, seed: int, side: str) -> bytes:
    failures: list[BaseException] = []

    def remembering() -> Iterator[str]:
        try:
            yield from sentences()
            # Only now is all of the text known to be readable and aligned.
            log.info("tokenizer: learning %d %s pieces%s", config.vocab_size, config.type, side)
        except BaseException as error:  # SentencePiece would make a RuntimeError of it
            failures.append(error)
            raise

    given = size = config.vocab_size
    while True:
        model = io.BytesIO()
        sentencepiece.set_random_generator_seed(seed % 2**32)
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=remembering(),
                model_writer=model,
                model_type=config.type,
                vocab_size=size,
                character_coverage=config.character_coverage,
                byte_fallback=config.byte_fallback,
                normalization_rule_name=config.normalization,
                user_defined_symbols=config.symbols,
                **SpecialIds().options(),
                input_sentence_size=SAMPLED_SENTENCES,
                shuffle_input_sentence=True,
                max_sentence_length=16384,  # bytes; longer lines only take no part in the learning
                num_threads=4,  # fixed: sums over threads decide which pieces survive
                minloglevel=2,
            )
        except RuntimeError as error:
            if failures:
                raise failures[0] from None
            # The limit that it names is tried before it is told, since pruning depends on the size.
            size = _largest_size(" ".join(str(error).split()), given, side)
        else:
            if size == given:
                return model.getvalue()
            reason = f"tokenizer.vocab_size is too large for this text{side}; given {given}"
            raise UsageError(f"{reason}; the largest possible is {size}")


def _largest_size(message: str, given: int, side: str) -> int:
    """The limit in a message of SentencePiece. Raises an error of ours for any other message."""
    if large := re.search(r"Please set it to a value <= (\d+)", message):
        return int(large[1])
    if "sentences_.empty()" in message or "all_chars_count" in message:
        raise DataError(f"no text to learn a vocabulary from{side}; check data.train")
    if small := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        reason = f"tokenizer.vocab_size is too small for this text{side}; given {given}"
        raise UsageError(f"{reason}; the smallest possible is {small[1]}")
    raise UsageError(f"SentencePiece cannot learn this vocabulary{side}: {message}")


class Tokenizer:
    """The vocabularies of a model: text to ids for each side, and target ids back to text.

    `source` and `target` are SentencePiece processors, the same object if the vocabulary is joint.
    """

    def __init__(self, folder: Path):
        """Load from a `tokenizer/` folder. Raises ModelError if it is incomplete or not SentencePiece."""
        self.files = vocabulary_files(folder)
        self.joint = len(self.files) == 1
        loaded = [_load(file) for file in self.files]
        (self.source, self.special), (self.target, same) = loaded[0], loaded[-1]
        self.source_vocab_size, self.target_vocab_size = len(self.source), len(self.target)
        if self.special != same:
            raise ModelError(f"{folder}: source and target vocabulary disagree on the special ids")

    def encode_source(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special ids around them."""
        return cast(list[list[int]], self.source.encode(texts, num_threads=-1))

    def encode_target(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special ids around them."""
        return cast(list[list[int]], self.target.encode(texts, num_threads=-1))

    def word_starts(self, ids: list[int], target: bool = False) -> list[bool]:
        """Whether each piece, of the source or of the target, begins a word; the first always does."""
        pieces: list[str] = (self.target if target else self.source).id_to_piece(ids)
        return [number == 0 or piece.startswith("\u2581") for number, piece in enumerate(pieces)]

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Target text of each row of ids; special ids vanish, and no line break is ever produced."""
        return [text.translate(_LINE_BREAKERS) for text in self.target.decode(ids)] if ids else []

    def fingerprint(self) -> str:
        """SHA-256 over the vocabulary files."""
        digests = [hashlib.sha256(file.read_bytes()).digest() for file in self.files]
        return hashlib.sha256(b"".join(digests)).hexdigest()


def vocabulary_files(folder: Path) -> list[Path]:
    """The file of a joint vocabulary, or those of two, in a `tokenizer/` folder."""
    names = ["joint"] if (folder / "joint.model").exists() else ["source", "target"]
    return [folder / f"{name}.model" for name in names]


def _load(file: Path) -> tuple[sentencepiece.SentencePieceProcessor, SpecialIds]:
    try:
        if file.exists() and not file.is_file():
            raise ValueError  # a pipe would hang
        model = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file}: cannot read the tokenizer: {error.strerror}") from None
    except (RuntimeError, ValueError):  # which it is if not even the message is text
        raise ModelError(f"{file}: not a SentencePiece model") from None
    special = SpecialIds(model.pad_id(), model.unk_id(), model.bos_id(), model.eos_id())
    if min(special) < 0:
        raise ModelError(f"{file}: a special piece is missing; pad, unk, bos, eos are {tuple(special)}")
    return model, special


def model_config(architecture: Architecture, tokenizer: Tokenizer, max_length: int) -> ModelConfig:
    """The architecture with the sizes and ids of the tokenizer. `max_length`: the longest sentence, tokens.

    Raises UsageError if all embeddings are to be tied but the vocabularies are two.
    """
    if architecture.tie_embeddings == "all" and not tokenizer.joint:
        raise UsageError("model.tie_embeddings: all needs a joint vocabulary; with two use decoder or none")
    return ModelConfig(
        **architecture.model_dump(),
        **tokenizer.special.options(),
        source_vocab_size=tokenizer.source_vocab_size,
        target_vocab_size=tokenizer.target_vocab_size,
        max_positions=max_length,
    )
