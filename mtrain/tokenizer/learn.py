"""Learns the subword vocabulary of a run with SentencePiece.

Kudo and Richardson, "SentencePiece" (EMNLP 2018); Kudo, "Subword Regularization" (ACL 2018) for `unigram`;
Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (ACL 2016) for `bpe`.
"""

import io
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.errors import DataError, UsageError
from mtrain.progress_bar import waiting_for
from mtrain.tokenizer.code_points import code_points
from mtrain.tokenizer.model_file import without_paths
from mtrain.tokenizer.seeds import write_seeds
from mtrain.tokenizer.vocabulary import SPACE, SpecialIds

log = logging.getLogger(__name__)

# SentencePiece takes about 20 bytes of memory for each character when it learns a unigram vocabulary.
SAMPLED_CHARACTERS = 80_000_000
_SENTENCES = 5_000_000  # of which SentencePiece draws a sample, if they are shorter than 16 characters
# Candidates for the pieces of a unigram vocabulary; see docs/experiments/vocabularies.md. With all candidates
# of a large corpus, SentencePiece keeps worse pieces.
_LEAST_SEEDS, _SEEDS_OF_PIECE = 100_000, 12
_UNUSABLE = 4  # candidates in the file for each one that is used: many contain punctuation beside letters
# With `identity`, U+2581 would be a space, because SentencePiece represents spaces by it.
ESCAPES = {SPACE: "\ufdd0\ufdd1", "\ufdd0": "\ufdd0\ufdd0"}
_REVERSED = {escape: text for text, escape in ESCAPES.items()}
# Characters of a large alphabet, such as the Ethiopic one, and of English. For scripts with more characters,
# the vocabulary grows, so that entries remain for words; see docs/experiments/vocabularies.md.
_ALPHABET = 400
_BATCH = 10_000  # sentences whose characters are counted at a time
_SEEDS = "seed_sentencepieces_file"  # an option
# Characters. In much longer words, the probabilities that SentencePiece computes become infinite.
_LONGEST_WORD = 1000
_WORD = re.compile(f"[^ ]{{1,{_LONGEST_WORD}}}")

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

    With `adapt_vocab_size`, `vocab_size` is the size for an alphabet: further characters and symbols get
    entries of their own, and a size that is too large for the text is replaced by the largest possible one.
    Raises DataError if there is no text, UsageError if `vocab_size` does not fit the text; the message states
    the largest (or smallest) possible size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {"source": source, "target": target}
    if config.joint:
        jobs = {"joint": lambda: chain(source(), target())}
    sizes, size_for_alphabet = [], config.vocab_size
    for name, sentences in jobs.items():
        side = "" if config.joint else f" ({name} side)"
        if adapt_vocab_size:
            given = _count_characters(sentences(), config.character_coverage) + len(config.symbols)
            size = size_for_alphabet + max(0, given - _ALPHABET)
            config = config.model_copy(update={"vocab_size": size})
        log.info("tokenizer: learning a %s vocabulary of size %d%s", config.type, config.vocab_size, side)
        with (
            waiting_for(f"tokenizer: learning{side}"),
            tempfile.TemporaryDirectory(prefix=".", dir=folder) as temporary,
        ):
            options = _options(config, sentences, Path(temporary))
            model, size = _learn_possible(config, options, sentences, seed, side)
        if size < config.vocab_size:
            reason = f"tokenizer.vocab_size is too large for this text{side}; given {config.vocab_size}"
            if not adapt_vocab_size:
                raise UsageError(f"{reason}; the largest possible is {size}")
            message = "tokenizer: the text is too small for this size; using %d, the largest possible%s"
            log.info(message, size, side)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces = (f"{processor.id_to_piece(i)}\t{processor.get_score(i)}\n" for i in range(len(processor)))
        (folder / f"{name}.vocab").write_text("".join(pieces), encoding="utf-8", newline="")
        (folder / f"{name}.model").write_bytes(model)
        sizes.append(size)
    return max(sizes)


def _count_characters(sentences: Iterable[str], coverage: float) -> int:
    """The number of different characters that make up the share `coverage` of a text."""
    counts = np.zeros(sys.maxunicode + 1, np.int64)
    rest = iter(sentences)
    while texts := list(islice(rest, _BATCH)):
        counts += np.bincount(code_points("".join(texts)), minlength=len(counts))
    frequent = np.cumsum(np.sort(counts[counts > 0])[::-1])
    return int(np.searchsorted(frequent, coverage * counts.sum())) + 1


def _options(config: TokenizerConfig, sentences: Sentences, folder: Path) -> dict[str, Any]:
    """The options of SentencePiece that depend on the config. The files that they name are in `folder`."""
    options: dict[str, Any] = {"normalization_rule_name": config.normalization}
    if config.normalization == "identity":
        options = {}
        for name, rules in (("normalization", ESCAPES), ("denormalization", _REVERSED)):
            file = folder / f"{name}.tsv"
            lines = (f"{_codes(text)}\t{_codes(other)}\n" for text, other in rules.items())
            file.write_text("".join(lines), encoding="ascii", newline="")
            options[f"{name}_rule_tsv"] = str(file)
    if config.type == "unigram":
        file = folder / "seeds.tsv"
        write_seeds(sentences(), config.normalization, _UNUSABLE * _seeds(config.vocab_size), file)
        options[_SEEDS] = str(file)
    return options


def _seeds(vocab_size: int) -> int:
    """The number of candidates for pieces that SentencePiece uses."""
    return max(_LEAST_SEEDS, _SEEDS_OF_PIECE * vocab_size)


def _learn_possible(
    config: TokenizerConfig, options: dict[str, Any], sentences: Sentences, seed: int, side: str
) -> tuple[bytes, int]:
    """A serialized SentencePiece model and its size: `vocab_size`, or the largest possible below that."""
    size = config.vocab_size
    while True:
        try:
            of_size = {"vocab_size": size, "seed_sentencepiece_size": _seeds(size)}
            return _learn(config, options | of_size, sentences, seed), size
        except RuntimeError as error:
            message = " ".join(str(error).split())
            required = re.search(r"smaller than required_chars\. \d+ vs (\d+)", message)  # the characters
            if "no pieces are loaded" in message and options.pop(_SEEDS, None):
                # In text that repeats only whole lines, all candidates within a line are equally frequent,
                # and SentencePiece removes all of them. It then has to find candidates itself: the lines.
                continue
            if required is None:
                # The limit in the message is an estimate, because how much `unigram` prunes depends on the
                # size. It is tried, and lowered again if it is still too large.
                size = _largest_size(message, side)
            else:
                reason = f"tokenizer.vocab_size is too small for this text{side}; given {config.vocab_size}"
                raise UsageError(f"{reason}; the smallest possible is {required[1]}") from None


def _learn(config: TokenizerConfig, options: dict[str, Any], sentences: Sentences, seed: int) -> bytes:
    """A serialized SentencePiece model. Raises RuntimeError if SentencePiece fails, and any exception
    that `sentences` raises."""
    failures: list[BaseException] = []

    def recording_failures() -> Iterator[str]:
        try:
            yield from map(_with_short_words, sentences())
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
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            **options,
            user_defined_symbols=config.symbols,
            **SpecialIds().options(),
            input_sentence_size=_SENTENCES,
            shuffle_input_sentence=True,
            max_sentence_length=2**30,  # bytes; longer lines would be ignored
            num_threads=4,  # fixed, because the order of floating-point sums decides which pieces survive
            minloglevel=2,
        )
    except RuntimeError:
        if failures:
            raise failures[0] from None
        raise
    return without_paths(model.getvalue())


def _with_short_words(text: str) -> str:
    """The text, with spaces in longer words than `_LONGEST_WORD`, such as encoded files."""
    return text if len(text) <= _LONGEST_WORD else " ".join(_WORD.findall(text))


def _largest_size(message: str, side: str) -> int:
    """The limit in an error message of SentencePiece. Raises UsageError or DataError for other messages."""
    if large := re.search(r"Please set it to a value <= (\d+)", message):
        return int(large[1])
    if "sentences_.empty()" in message or "all_chars_count" in message:
        raise DataError(f"no text to learn a vocabulary from{side}; check data.train")
    raise UsageError(f"SentencePiece cannot learn this vocabulary{side}: {message}")


def _codes(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)
