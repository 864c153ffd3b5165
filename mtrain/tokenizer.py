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
from typing import NamedTuple

import sentencepiece

from mtrain.errors import DataError, ModelError, UsageError
from mtrain.schema import Architecture, ModelConfig, TokenizerConfig

log = logging.getLogger(__name__)

JOINT, SOURCE, TARGET = "joint.model", "source.model", "target.model"
# Beyond this many sentences a vocabulary hardly changes, while the trainer's memory goes on growing.
SAMPLED_SENTENCES = 5_000_000
# Byte pieces can spell characters that would break a line of output in two.
_LINE_BREAKERS = str.maketrans({"\n": " ", "\r": " ", "\0": " "})

Sentences = Callable[[], Iterable[str]]  # called once for each pass over the text


class SpecialIds(NamedTuple):
    """Ids that a trained vocabulary gives to its special pieces."""

    pad: int = 0
    unk: int = 1
    bos: int = 2
    eos: int = 3


def train_tokenizer(
    config: TokenizerConfig, source: Sentences, target: Sentences, folder: Path, seed: int
) -> None:
    """Learn the vocabulary of `config` and write `joint.model`, or `source.model` and `target.model`, with
    a listing of the pieces beside each.

    Raises DataError if there is no text, UsageError if `vocab_size` does not fit the text; the message
    states the largest (or smallest) size that does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if config.joint:
        jobs: dict[str, Sentences] = {JOINT: lambda: chain(source(), target())}
    else:
        jobs = {SOURCE: source, TARGET: target}
    for name, sentences in jobs.items():
        model = _train_one(config, sentences, seed, "" if name == JOINT else f" ({Path(name).stem} side)")
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces = (f"{processor.id_to_piece(i)}\t{processor.get_score(i)}\n" for i in range(len(processor)))
        (folder / name).with_suffix(".vocab").write_text("".join(pieces), encoding="utf-8", newline="")
        (folder / name).write_bytes(model)


def _train_one(config: TokenizerConfig, sentences: Sentences, seed: int, side: str) -> bytes:
    failures: list[BaseException] = []

    def remembering() -> Iterator[str]:
        try:
            yield from sentences()
            # Only now is all of the text known to be readable and aligned.
            log.info("tokenizer: learning %d %s pieces%s", config.vocab_size, config.type, side)
        except BaseException as error:  # SentencePiece would make a RuntimeError of it
            failures.append(error)
            raise

    def learn(vocab_size: int) -> bytes:
        model = io.BytesIO()
        sentencepiece.set_random_generator_seed(seed % 2**32)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=remembering(),
            model_writer=model,
            model_type=config.type,
            vocab_size=vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            normalization_rule_name=config.normalization,
            user_defined_symbols=config.symbols,
            pad_id=SpecialIds().pad,
            unk_id=SpecialIds().unk,
            bos_id=SpecialIds().bos,
            eos_id=SpecialIds().eos,
            input_sentence_size=SAMPLED_SENTENCES,
            shuffle_input_sentence=True,
            max_sentence_length=16384,  # bytes; longer lines only take no part in the learning
            num_threads=4,  # fixed: sums over threads decide which pieces survive
            minloglevel=2,
        )
        return model.getvalue()

    try:
        return learn(config.vocab_size)
    except RuntimeError as error:
        message = str(error)
    if failures:
        raise failures[0]
    if "sentences_.empty()" in message or "all_chars_count" in message:
        raise DataError(f"no text to learn a vocabulary from{side}; check data.train")
    if small := _TOO_SMALL.search(message):
        raise UsageError(
            f"tokenizer.vocab_size is too small for this text{side}; given {config.vocab_size}; the smallest "
            f"possible is {small[1]}"
        )
    if _TOO_LARGE.search(message):
        raise UsageError(
            f"tokenizer.vocab_size is too large for this text{side}; given {config.vocab_size}; the largest "
            f"possible is {_largest_size(learn, message)}"
        )
    raise UsageError(f"SentencePiece cannot learn this vocabulary{side}: {' '.join(message.split())}")


_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
_TOO_LARGE = re.compile(r"Please set it to a value <= (\d+)")


def _largest_size(learn: Callable[[int], bytes], message: str) -> int:
    """SentencePiece names a limit; it is tried before it is told, since pruning depends on the size."""
    while True:
        match = _TOO_LARGE.search(message)
        if match is None:
            raise UsageError(f"SentencePiece cannot learn this vocabulary: {message}")
        try:
            learn(int(match[1]))
            return int(match[1])
        except RuntimeError as error:
            message = str(error)


class Tokenizer:
    """The vocabularies of a model: text to ids for each side, and target ids back to text.

    `source` and `target` are SentencePiece processors, the same object if the vocabulary is joint.
    """

    def __init__(self, folder: Path):
        """Load from a `tokenizer/` folder. Raises ModelError if it is incomplete or not SentencePiece."""
        if (folder / JOINT).exists():
            self.files = [folder / JOINT]
        else:
            self.files = [folder / SOURCE, folder / TARGET]
        processors = [_load(file) for file in self.files]
        self.joint = len(processors) == 1
        self.source, self.target = processors[0], processors[-1]
        self.special = _special_ids(self.source, self.files[0])
        if self.special != _special_ids(self.target, self.files[-1]):
            raise ModelError(f"{folder}: source and target vocabulary disagree on the special ids")

    @property
    def source_vocab_size(self) -> int:
        return len(self.source)

    @property
    def target_vocab_size(self) -> int:
        return len(self.target)

    def encode_source(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special ids around them."""
        return self._encode(self.source, texts)

    def encode_target(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special ids around them."""
        return self._encode(self.target, texts)

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Target text of each row of ids; special ids vanish, and no line break is ever produced."""
        return [text.translate(_LINE_BREAKERS) for text in self.target.decode(ids)] if ids else []

    @staticmethod
    def _encode(processor: sentencepiece.SentencePieceProcessor, texts: list[str]) -> list[list[int]]:
        rows: list[list[int]] = processor.encode(texts, num_threads=-1) if texts else []
        return rows

    def fingerprint(self) -> str:
        """SHA-256 over the vocabulary files."""
        return hashlib.sha256(
            b"".join(hashlib.sha256(f.read_bytes()).digest() for f in self.files)
        ).hexdigest()


def _load(file: Path) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file}: cannot read the tokenizer: {error.strerror}") from None
    except RuntimeError:
        raise ModelError(f"{file}: not a SentencePiece model") from None


def _special_ids(processor: sentencepiece.SentencePieceProcessor, file: Path) -> SpecialIds:
    ids = SpecialIds(processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
    if min(ids) < 0:
        raise ModelError(f"{file}: the vocabulary lacks a special piece; pad, unk, bos, eos are {tuple(ids)}")
    return ids


def model_config(architecture: Architecture, tokenizer: Tokenizer, max_length: int) -> ModelConfig:
    """The architecture with the sizes and ids of the tokenizer. `max_length`: the longest sentence, tokens.

    Raises UsageError if all embeddings are to be tied but the vocabularies are two.
    """
    if architecture.tie_embeddings == "all" and not tokenizer.joint:
        raise UsageError("model.tie_embeddings: all needs a joint vocabulary; with two use decoder or none")
    pad, unk, bos, eos = tokenizer.special
    return ModelConfig(
        **architecture.model_dump(),
        source_vocab_size=tokenizer.source_vocab_size,
        target_vocab_size=tokenizer.target_vocab_size,
        max_positions=max_length,
        pad_id=pad,
        unk_id=unk,
        bos_id=bos,
        eos_id=eos,
    )
