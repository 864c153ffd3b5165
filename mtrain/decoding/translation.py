"""`Translation`, the result of translating a line."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, chain, zip_longest
from typing import Any

from mtrain.decoding.alignment import Alignment, words_at


@dataclass(frozen=True)
class Translation:
    """One translation of a line. If the line was translated in parts, the fields refer to all parts."""

    text: str
    # log_prob / tokens ** length_penalty, plus the coverage penalty; 0 for an empty line, NaN if not computed
    score: float
    log_prob: float  # nats, of all tokens except for a given prefix; NaN if it was not computed
    tokens: int  # including EOS and the prefix
    finished: bool  # ended with EOS, not cut at the maximum length
    alignment: Alignment | None = None  # None if not requested
    n_best: tuple["Translation", ...] = ()  # the n best translations, this one first; empty if n is 1

    def answer(self, n_best: int = 1, scores: bool = False, alignments: bool = False) -> str:
        """`n_best` lines: the text and, if requested, its score and its alignment (in Pharaoh format, `i-j`),
        separated by tabs. If there are fewer translations, the other lines are empty."""
        lines = [one._line(scores, alignments) for one in self.n_best or (self,)]
        return "".join(f"{line}\n" for line in lines + [""] * (n_best - len(lines)))

    def _line(self, scores: bool, alignments: bool) -> str:
        if not scores and not alignments:
            return self.text
        columns = [self.text.replace("\t", " ")]
        if scores:
            columns.append(f"{self.score:.6f}")
        if alignments:
            columns.append(" ".join(f"{i}-{j}" for i, j in self.alignment or ()))
        return "\t".join(columns)

    def as_json(self) -> str:
        """One line of JSON with all fields; numbers that were not computed are null."""
        known = self._as_dict()
        if self.n_best:
            known["n_best"] = [one._as_dict() for one in self.n_best]
        return json_line(known)

    def _as_dict(self) -> dict[str, Any]:
        """The fields by name, without `n_best`; the alignment only if it was requested."""
        known = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "n_best"}
        if self.alignment is None:
            del known["alignment"]
        return known


LINE_BREAK = re.compile("(\r?\n)")
EMPTY = Translation("", 0.0, 0.0, 0, True)


def json_line(value: object) -> str:
    """A value as one line of JSON, with null for numbers that are not finite, which JSON cannot express."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_fields(found: Sequence[Sequence[Translation]]) -> list[list[dict[str, Any]]]:
    """The translations of some parts, which have no `n_best`, in a form that JSON can express."""
    return [[asdict(one) for one in of_part] for of_part in found]


def from_fields(found: Sequence[Sequence[dict[str, Any]]]) -> list[list[Translation]]:
    """The translations whose `to_fields` were decoded from JSON."""
    return [[_translation(**one) for one in of_part] for of_part in found]


def _translation(alignment: list[list[int]] | None, n_best: object, **others: Any) -> Translation:
    links = None if alignment is None else tuple((source, target) for source, target in alignment)
    return Translation(alignment=links, **others)


def join(parts: Sequence[Translation], space: str, length_penalty: float) -> Translation:
    """The translation of a line from the translations of its parts, with `space` between them. The alignments
    of the parts have the words of the line as sources."""
    filled = [part for part in parts if part.text]
    text = space.join(part.text for part in filled)
    starts = accumulate((len(part.text) + len(space) for part in filled[:-1]), initial=0)
    # Without a space, the first word of a part is joined to the previous word.
    first_words = words_at(text, list(starts)) if filled else []
    alignment = [
        (source, first + target)
        for part, first in zip(filled, first_words, strict=True)
        for source, target in part.alignment or ()
    ]
    tokens = sum(part.tokens for part in parts)
    log_prob = sum(part.log_prob for part in parts)
    coverage = sum(part.score - part.log_prob / part.tokens**length_penalty for part in parts)
    return Translation(
        text,
        log_prob / tokens**length_penalty + coverage,
        log_prob,
        tokens,
        all(part.finished for part in parts),
        None if parts[0].alignment is None else tuple(dict.fromkeys(alignment)),
    )


def join_lines(lines: Sequence[Translation], text: str, n_best: int, length_penalty: float) -> Translation:
    """The translation of a text from the translations of its lines, with the same line breaks. The k-th best
    consists of the k-th best of each line."""
    if len(lines) == 1:
        return lines[0]
    columns = kth_best([line.n_best or (line,) for line in lines])
    return with_n_best([_with_breaks(column, text, length_penalty) for column in columns], n_best)


def kth_best(ranked: Sequence[Sequence[Translation]]) -> Iterator[list[Translation]]:
    """Yield the best translations of several texts, then the second best ones, and so on. Where a text has
    fewer than others, its last one is repeated."""
    for k in range(max(map(len, ranked))):
        yield [found[min(k, len(found) - 1)] for found in ranked]


def _with_breaks(lines: Sequence[Translation], text: str, length_penalty: float) -> Translation:
    """The translations of the lines of a text, joined."""
    fields_of_text = LINE_BREAK.split(text)
    sources, breaks = fields_of_text[::2], fields_of_text[1::2]
    filled, words = [], 0
    for line, source in zip(lines, sources, strict=True):
        if line.alignment is not None:
            line = replace(line, alignment=tuple((words + i, j) for i, j in line.alignment))
        filled += [line] if line.tokens else []
        words += len(source.split())
    joined = join(filled, " ", length_penalty) if filled else lines[0]
    texts = [line.text for line in lines]
    return replace(joined, text="".join(chain.from_iterable(zip_longest(texts, breaks, fillvalue=""))))


def with_n_best(translations: Sequence[Translation], n_best: int) -> Translation:
    """The best of the translations of a line, with all of them in its field `n_best` if `n_best` > 1."""
    return replace(translations[0], n_best=tuple(translations[:n_best])) if n_best > 1 else translations[0]
