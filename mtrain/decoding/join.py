"""Joining the translations of the parts of a line, and of the lines of a text."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, count, islice

from mtrain.config.languages import sentence_separator
from mtrain.decoding.alignment import word_spans, words_at
from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.split import LINE_BREAK
from mtrain.decoding.translation import Translation


def count_lines(text: str) -> int:
    """The number of lines of a text, which are translated like separate texts."""
    return 1 + text.count("\n")


def join_texts(
    texts: Sequence[str], task: DecodingTask, found: Sequence[list[Translation]]
) -> Iterator[Translation]:
    """Yield the translation of each text of a window, given what was `found` for each part of the task: up to
    `task.n_best` translations, best first."""
    penalty = task.config.length_penalty
    parts_of_line: dict[int, list[list[Translation]]] = defaultdict(list)
    target_langs: dict[int, str] = {}  # of lines
    for part, of_part in zip(task.parts, found, strict=True):
        parts_of_line[part.line].append(of_part)
        target_langs[part.line] = part.target_lang or task.target_lang
    empty = Translation("", 0.0, 0.0, 0, True, alignment=() if task.alignments else None)

    def translation_of(line: int) -> list[Translation]:
        space = sentence_separator(target_langs.get(line, task.target_lang))
        return _joined(parts_of_line.get(line, [[empty]]), partial(join, space=space, length_penalty=penalty))

    numbers = count()  # of all lines
    for text in texts:
        of_lines = [*map(translation_of, islice(numbers, count_lines(text)))]
        best, *others = _joined(of_lines, partial(_with_breaks, text=text, length_penalty=penalty))
        yield replace(best, n_best=(best, *others)) if task.n_best > 1 else best


def _joined(
    ranked: Sequence[Sequence[Translation]], join_column: Callable[[Sequence[Translation]], Translation]
) -> list[Translation]:
    """The best translations of a line or text from those of its parts: `join_column` joins the k-th best
    translations of all parts into the k-th best of the whole."""
    return [*ranked[0]] if len(ranked) == 1 else [join_column(column) for column in kth_best(ranked)]


def join(parts: Sequence[Translation], space: str, length_penalty: float) -> Translation:
    """The translation of a line from the translations of its parts, with `space` between them. The alignments
    of the parts have the words of the line as sources."""
    filled = [part for part in parts if part.text]
    text = space.join(part.text for part in filled)
    starts = accumulate((len(part.text) + len(space) for part in filled[:-1]), initial=0)
    # Without a space, the first word of a part is joined to the previous word.
    first_words = [first for first, _ in words_at(text, list(starts))] if filled else []
    alignment = [
        (source, first + target)
        for part, first in zip(filled, first_words, strict=True)
        for source, target in part.alignment or ()
    ]
    tokens = sum(part.tokens for part in parts)
    log_prob = sum(part.log_prob for part in parts)
    coverage = sum(part.score - part.log_prob / part.tokens**length_penalty for part in parts)
    score = log_prob / tokens**length_penalty + coverage
    finished = all(part.finished for part in parts)
    aligned = None if parts[0].alignment is None else tuple(dict.fromkeys(alignment))
    return Translation(text, score, log_prob, tokens, finished, aligned)


def kth_best(ranked: Sequence[Sequence[Translation]]) -> Iterator[list[Translation]]:
    """Yield the best translations of several texts, then the second best ones, and so on. Where a text has
    fewer than others, its last one is repeated. Without texts, one empty list."""
    for k in range(max(map(len, ranked), default=1)):
        yield [found[min(k, len(found) - 1)] for found in ranked]


def _with_breaks(lines: Sequence[Translation], text: str, length_penalty: float) -> Translation:
    """The translations of the lines of a text, joined."""
    fields = LINE_BREAK.split(text)  # every other one is a line break
    filled, words = [], 0
    for line, source in zip(lines, fields[::2], strict=True):
        if line.alignment is not None:
            line = replace(line, alignment=tuple((words + i, j) for i, j in line.alignment))
        filled += [line] if line.tokens else []
        words += len(word_spans(source))
    joined = join(filled, " ", length_penalty) if filled else lines[0]
    fields[::2] = [line.text for line in lines]
    return replace(joined, text="".join(fields))
