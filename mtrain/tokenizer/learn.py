"""Learns the subword vocabulary of a run with SentencePiece.

Kudo and Richardson, "SentencePiece" (EMNLP 2018); Kudo, "Subword Regularization" (ACL 2018) for `unigram`;
Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (ACL 2016) for `bpe`.
"""

import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import sentencepiece

from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.errors import DataError, UsageError
from mtrain.progress_bar import waiting_for
from mtrain.tokenizer.vocabulary import SpecialIds

log = logging.getLogger(__name__)

# SentencePiece takes about 20 bytes of memory for each character when it learns a unigram vocabulary.
SAMPLED_CHARACTERS = 80_000_000
_SENTENCES = 5_000_000  # of which SentencePiece draws a sample, if they are shorter than 16 characters

Sentences = Callable[[], Iterable[str]]  # called once for each pass over the text


def train_tokenizer(
    config: TokenizerConfig,
    source: Sentences,
    target: Sentences,
    folder: Path,
    seed: int,
    adapt_vocab_size: bool = False,
) -> int:
    """Learn the vocabulary that `config` describes. Write `joint.model`, or `source.model` and
    `target.model`, and beside each a `.vocab` file that lists its pieces. Return the vocabulary size (of the
    larger vocabulary if there are two).

    With `adapt_vocab_size`, a `vocab_size` that is too large for the text is replaced by the largest
    possible one. One that is too small for the characters of the text is increased by their number. Raises
    DataError if there is no text, UsageError if `vocab_size` does not fit the text; the message states the
    largest (or smallest) possible size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {"source": source, "target": target}
    if config.joint:
        jobs = {"joint": lambda: chain(source(), target())}
    sizes = []
    for name, sentences in jobs.items():
        side = "" if config.joint else f" ({name} side)"
        log.info("tokenizer: learning a %s vocabulary of size %d%s", config.type, config.vocab_size, side)
        with waiting_for(f"tokenizer: learning{side}"):
            model, size = _learn_possible(config, sentences, seed, side, adapt_vocab_size)
        if size < config.vocab_size:
            reason = f"tokenizer.vocab_size is too large for this text{side}; given {config.vocab_size}"
            if not adapt_vocab_size:
                raise UsageError(f"{reason}; the largest possible is {size}")
            message = "tokenizer: the text is too small for this size; using %d, the largest possible%s"
            log.info(message, size, side)
        elif size > config.vocab_size:
            log.info("tokenizer: the text has too many characters for this size; using %d%s", size, side)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces = (f"{processor.id_to_piece(i)}\t{processor.get_score(i)}\n" for i in range(len(processor)))
        (folder / f"{name}.vocab").write_text("".join(pieces), encoding="utf-8", newline="")
        (folder / f"{name}.model").write_bytes(model)
        sizes.append(size)
    return max(sizes)


def _learn_possible(
    config: TokenizerConfig, sentences: Sentences, seed: int, side: str, may_grow: bool
) -> tuple[bytes, int]:
    """A serialized SentencePiece model and its size: `vocab_size`, or the largest possible below that. If
    it `may_grow`, and the characters alone are too many for `vocab_size`, that many entries are added."""
    size = config.vocab_size
    while True:
        try:
            return _learn(config, size, sentences, seed), size
        except RuntimeError as error:
            message = " ".join(str(error).split())
            required = re.search(r"smaller than required_chars\. \d+ vs (\d+)", message)  # the characters
            if required is None:
                # The limit in the message is an estimate, because how much `unigram` prunes depends on the
                # size. It is tried, and lowered again if it is still too large.
                size = _largest_size(message, side)
            elif may_grow and size == config.vocab_size:
                size += int(required[1])
            else:
                reason = f"tokenizer.vocab_size is too small for this text{side}; given {config.vocab_size}"
                raise UsageError(f"{reason}; the smallest possible is {required[1]}") from None


def _learn(config: TokenizerConfig, size: int, sentences: Sentences, seed: int) -> bytes:
    """A serialized SentencePiece model. Raises RuntimeError if SentencePiece fails, and any exception
    that `sentences` raises."""
    failures: list[BaseException] = []

    def recording_failures() -> Iterator[str]:
        try:
            yield from sentences()
        except BaseException as error:  # SentencePiece would replace it with a RuntimeError
            failures.append(error)
            raise

    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(seed % 2**32)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=recording_failures(),
            model_writer=model,
            model_type=config.type,
            vocab_size=size,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            normalization_rule_name=config.normalization,
            user_defined_symbols=config.symbols,
            **SpecialIds().options(),
            input_sentence_size=_SENTENCES,
            shuffle_input_sentence=True,
            max_sentence_length=16384,  # bytes; longer lines are ignored
            num_threads=4,  # fixed, because the order of floating-point sums decides which pieces survive
            minloglevel=2,
        )
    except RuntimeError:
        if failures:
            raise failures[0] from None
        raise
    return model.getvalue()


def _largest_size(message: str, side: str) -> int:
    """The limit in an error message of SentencePiece. Raises UsageError or DataError for other messages."""
    if large := re.search(r"Please set it to a value <= (\d+)", message):
        return int(large[1])
    if "sentences_.empty()" in message or "all_chars_count" in message:
        raise DataError(f"no text to learn a vocabulary from{side}; check data.train")
    raise UsageError(f"SentencePiece cannot learn this vocabulary{side}: {message}")
