"""Writes the training pairs that the filters keep, and the rejected pairs, as TSV."""

import logging
from itertools import compress
from operator import add, ne
from typing import IO

from mtrain.config.sections.corpora import Corpus, Holdout, ToyCorpus, TsvCorpus
from mtrain.config.sections.data import DataConfig
from mtrain.data.pairs.rejections import REASONS, Codes, format_counts
from mtrain.data.reading.blocks import RawBlock, parse_block, read_blocks
from mtrain.data.reading.digests import RawFiles
from mtrain.data.reading.lines import decode_block
from mtrain.data.reading.records import Column, split_quoted
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.errors import DataError, UsageError
from mtrain.progress_bar import ProgressBar

log = logging.getLogger(__name__)

Examples = dict[str, list[str]]  # of rejected pairs, by reason
Lines = tuple[list[str], list[int]]  # of a block; see `_lines_of`
_EXAMPLES = 3  # pairs that are shown for each reason
_SHOWN = 160  # characters of a pair that are shown


def clean(
    data: DataConfig, out: IO[str], rejected: IO[str] | None, workers: int | None, shows_progress: bool
) -> None:
    """Write each training pair that the filters keep to `out`: source, target, and further columns of TSV.
    Write the others to `rejected`, after the reason. Pairs stay in the order of the corpora.

    The text is read twice: to filter it, with `workers` processes (see `CorpusScanner`), and to write it.
    Raises UsageError without `data.filters`; DataError if a corpus is missing, malformed or misaligned, if it
    changes meanwhile, or if no pair is kept; StorageError if temporary files cannot be written.
    """
    if data.filters is None:
        raise UsageError("data.filters has no rule; give some, such as {max_ratio: 3}")
    if data.has_several_directions:
        problem = "data.train has several directions, which the lines of the output would not tell apart"
        raise UsageError(f"{problem}; give one at a time")
    if isinstance(data.validation, Holdout):  # otherwise, pairs would be drawn
        data = data.model_copy(update={"validation": [ToyCorpus(toy="validation")]})
    scanner = CorpusScanner(RawFiles(data), seed=0, workers=workers, for_tokenizer=False)
    rejections = scanner.result.rejections
    assert rejections is not None, "there are filters"
    counts, total = rejections.counts(), len(rejections.codes)
    examples = {reason: list[str]() for reason in counts}
    replaced = 0  # sentences in which a tab or a line end was replaced
    with ProgressBar("clean: written", "pairs", total, not shows_progress) as progress:
        for index, corpus in enumerate(data.train):
            score = data.score_of(corpus)
            for raw in read_blocks(corpus, score=score):
                codes = rejections.of_pairs(index, raw.first, raw.end.first)
                replaced += _write(raw, _lines_of(raw, corpus, score), codes, out, rejected, examples)
                progress.add(len(codes))
    scanner.files.require_unchanged(data.train)
    _log(total, counts, examples, replaced)
    if total == sum(counts.values()):
        raise DataError(f"no pair is left; rejected: {format_counts(counts) or 'none'}")


def _log(total: int, rejected: dict[str, int], examples: Examples, replaced: int) -> None:
    """Log how many pairs were rejected for each reason, with examples."""
    kept = total - sum(rejected.values())
    log.info("clean: kept %s", f"{kept:,} of {total:,} pairs ({kept / max(1, total):.2%})")
    for reason, count in rejected.items():
        log.info("clean: rejected %s (%s): %s", f"{count:,}", f"{count / total:.2%}", reason)
        for example in examples[reason]:
            log.info("    %s", example)
    if replaced:
        message = "clean: a tab or a line end inside of %s sentence(s) was replaced by a space"
        log.warning(message, f"{replaced:,}")


def _write(
    raw: RawBlock, found: Lines, codes: Codes, out: IO[str], rejected: IO[str] | None, examples: Examples
) -> int:
    """Write the pairs of a block, and collect examples of rejected ones. Returns the number of sentences that
    were written with a space in place of a tab or a line end."""
    lines, replaced = found
    out.write("\n".join([*compress(lines, codes == 0), ""]))
    reasons = [(i, REASONS[codes[i] - 1]) for i in codes.nonzero()[0].tolist()]
    if rejected is not None:
        rejected.write("".join(f"{reason}\t{lines[i]}\n" for i, reason in reasons))
    for i, reason in reasons:
        if len(examples[reason]) < _EXAMPLES:
            place = f"{raw.names[0]}:{raw.first + i - raw.skipped}: "
            examples[reason].append(place + lines[i].removeprefix(place)[:_SHOWN].replace("\t", " | "))
    return sum(replaced if rejected is not None else compress(replaced, codes == 0))


def _lines_of(raw: RawBlock, corpus: Corpus, score: Column | None) -> Lines:
    """The pairs of a block as lines of TSV, and in how many sentences of each pair a tab or a line end was
    replaced by a space. The line of an unreadable pair is the error; so is that of a pair without the score,
    unless the corpus is TSV."""
    if isinstance(corpus, TsvCorpus):
        first = raw.first - raw.skipped
        decoded = decode_block(raw.lines[0], raw.names[0], first)
        lines = [_as_line(line) if isinstance(line, DataError) else line for line in decoded]
        replaced = [0] * len(lines)
        if corpus.quotes:
            lines, replaced = _without_quotes(lines, raw.names[0], first)
        if (columns := (corpus.source_column, corpus.target_column)) != (0, 1):
            lines = [_reorder(line, *columns) for line in lines]
        lines, others = _make_readable(lines, "")
        return lines, [*map(max, replaced, others)]
    block = parse_block(raw, corpus, score)
    (sources, in_sources), (targets, in_targets) = (_make_readable(side, "\t\n") for side in block[:2])
    rows = zip(map("{}\t{}".format, sources, targets), map(add, in_sources, in_targets), strict=True)
    pairs = dict(zip(block.numbers, rows, strict=True))
    pairs |= {number: (_as_line(error), 0) for number, error in block.errors.items()}
    in_order = [pairs[number] for number in sorted(pairs)]
    return [line for line, _ in in_order], [count for _, count in in_order]


def _as_line(error: object) -> str:
    """An error as one column of a line. It may quote any text, such as file names and keys of JSON."""
    return " ".join(str(error).split()).encode("utf-8", "replace").decode()


def _without_quotes(lines: list[str], name: str, first: int) -> tuple[list[str], list[int]]:
    """Lines of TSV without the quotes of their fields, with a space in place of each tab in a field; and for
    each line 1 if a tab was replaced, otherwise 0. A line whose quotes do not match becomes the error."""
    plain, replaced = list[str](), list[int]()
    for number, line in enumerate(lines, first):
        try:
            columns, has_tabs = _make_readable(split_quoted(line), "\t")
        except DataError as error:
            columns, has_tabs = [_as_line(f"{name}:{number}: {error}")], [0]
        plain.append("\t".join(columns))
        replaced.append(max(has_tabs))
    return plain, replaced


def _make_readable(texts: list[str], replaced: str) -> tuple[list[str], list[int]]:
    """The texts with spaces in place of the characters `replaced`, and of a CR at the end, which would be
    read as part of the line end; and for each text 1 if it differs, otherwise 0."""
    readable = [text[:-1] + " " if text.endswith("\r") else text for text in texts]
    for character in replaced:
        readable = [text.replace(character, " ") for text in readable]
    return readable, [*map(ne, texts, readable)]


def _reorder(line: str, source: int, target: int) -> str:
    """A line of TSV with source and target in front of the other columns."""
    columns = line.split("\t")
    if len(columns) <= max(source, target):
        return line
    others = (column for i, column in enumerate(columns) if i not in (source, target))
    return "\t".join([columns[source], columns[target], *others])
