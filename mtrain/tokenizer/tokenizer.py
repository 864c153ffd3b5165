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

import sentencepiece

from mtrain.config.schema import Architecture, ModelConfig, TokenizerConfig
from mtrain.errors import DataError, ModelError, UsageError
from mtrain.tokenizer.vocabulary import SPACE, SpecialIds, Vocabulary

log = logging.getLogger(__name__)

# Beyond this many sentences a vocabulary hardly changes, while the trainer's memory goes on growing.
SAMPLED_SENTENCES = 5_000_000
# Byte pieces can spell characters that would break a line of output in two.
LINE_BREAKERS = str.maketrans("\n\r\0", "   ")
MAPPINGS = ("vocab.json", "source_vocab.json", "target_vocab.json")  # of both sides, or of each

Sentences = Callable[[], Iterable[str]]  # called once for each pass over the text


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
            log.info("tokenizer: learning %d %s pieces%s", size, config.type, side)
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

    `source` and `target` are the same object if they are of the same files. `joint` says that an id means the
    same piece on both sides.
    """

    def __init__(self, folder: Path):
        """Load from a `tokenizer/` folder: `joint.model`, or `source.model` and `target.model`, and where ids
        are not SentencePiece's, `vocab.json`, or `source_vocab.json` and `target_vocab.json`, with the id of
        each piece. Raises ModelError if it is incomplete or not what it should be."""
        models, mappings = vocabulary_files(folder)
        self.files = [*models, *mappings]
        self.joint = len(mappings or models) == 1
        self.source = self.target = Vocabulary(models[0], mappings[0] if mappings else None)
        if len(models) > 1 or len(mappings) > 1:
            self.target = Vocabulary(models[-1], mappings[-1] if mappings else None)
        self.source_vocab_size, self.target_vocab_size = len(self.source), len(self.target)
        self.special = _common(self.source.special, self.target.special, folder)

    def encode_source(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special ids around them."""
        return self.source.encode(texts)

    def encode_target(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special ids around them."""
        return self.target.encode(texts)

    def word_starts(self, ids: list[int], target: bool = False) -> list[bool]:
        """Whether each piece, of the source or of the target, begins a word; the first always does. Words are
        what whitespace separates: a lone space before another, or at the end, makes none."""
        pieces = (self.target if target else self.source).pieces
        starts: list[bool] = []
        last, filled = 0, True  # where the word so far began, and whether it has a letter
        for number, i in enumerate(ids):
            begins = number == 0 or (pieces[i].startswith(SPACE) and filled)
            letters = bool(pieces[i].strip(SPACE))
            last, filled = (number, letters) if begins else (last, filled or letters)
            starts.append(begins)
        if last and not filled:
            starts[last] = False
        return starts

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Target text of each row of ids; special ids vanish, and no line break is ever produced."""
        return [text.translate(LINE_BREAKERS) for text in self.target.decode(ids)]

    def fingerprint(self) -> str:
        """SHA-256 over the vocabulary files."""
        digests = [hashlib.sha256(file.read_bytes()).digest() for file in self.files]
        return hashlib.sha256(b"".join(digests)).hexdigest()


def vocabulary_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The SentencePiece models of a `tokenizer/` folder, one or two, and as many files of ids, or none."""
    models = _one_or_two(folder, "joint.model", "source.model", "target.model")
    mapped = any((folder / name).exists() for name in MAPPINGS)
    return models, _one_or_two(folder, *MAPPINGS) if mapped else []


def _one_or_two(folder: Path, both: str, source: str, target: str) -> list[Path]:
    """The file of both sides if there is one, or those of each."""
    return [folder / both] if (folder / both).exists() else [folder / source, folder / target]


def _common(source: SpecialIds, target: SpecialIds, folder: Path) -> SpecialIds:
    """The special ids of a model of both sides. Padding is never looked at, so any id will do that both have;
    what starts the target is the target's own."""
    special = target._replace(pad=min(source.pad, target.pad))
    if (source.unk, source.eos) != (target.unk, target.eos):
        raise ModelError(f"{folder}: source and target vocabulary disagree on the special ids")
    return special


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
