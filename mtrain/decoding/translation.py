"""What a translator returns."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mtrain.decoding.alignment import Alignment


@dataclass(frozen=True)
class Translation:
    """One translation of a line. Of a line that was translated in parts, the numbers are of all parts. Score
    and log-probability are NaN if the translations were not to be scored, but for empty lines."""

    text: str
    score: float  # log-probability / length ** length_penalty, and the coverage penalty; 0 for an empty line
    log_prob: float  # nats
    tokens: int  # EOS counted
    finished: bool  # ended by the model, not cut at the maximum length
    alignment: Alignment | None = None  # if asked for
    n_best: tuple["Translation", ...] = ()  # the best so many, this one first, if more than one was asked for

    def answer(self, n_best: int = 1, scores: bool = False, alignments: bool = False) -> str:
        """A line, or `n_best` of them, blank where fewer were found: the text, and after tabs its score and
        its alignment (as Pharaoh's `i-j`) if they are wanted."""
        lines = [one._line(scores, alignments) for one in self.n_best or (self,)]
        return "".join(f"{line}\n" for line in lines + [""] * (n_best - len(lines)))

    def _line(self, scores: bool, alignments: bool) -> str:
        if not scores and not alignments:
            return self.text
        fields = [self.text.replace("\t", " ")]
        if scores:
            fields.append(f"{self.score:.6f}")
        if alignments:
            fields.append(" ".join(f"{i}-{j}" for i, j in self.alignment or ()))
        return "\t".join(fields)

    def as_json(self) -> str:
        """All that is known, as one line of JSON."""
        known = self._known()
        if self.n_best:
            known["n_best"] = [one._known() for one in self.n_best]
        return json.dumps(known, ensure_ascii=False) + "\n"

    def _known(self) -> dict[str, Any]:
        """Its own fields; the alignment only if it was asked for."""
        known = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "n_best"}
        if self.alignment is None:
            del known["alignment"]
        return known


EMPTY = Translation("", 0.0, 0.0, 0, True)


def join(
    parts: Sequence[Translation], source_words: Sequence[int], tag: int, space: str, length_penalty: float
) -> Translation:
    """The translation of a line from those of its parts, which have so many source words each, the first
    `tag` of which are the same, and the line's first."""
    alignment: list[tuple[int, int]] = []
    source, target = tag, 0
    for part, words in zip(parts, source_words, strict=True):
        if target and part.text and not space:
            target -= 1  # its first word goes on with the last one so far
        links = part.alignment or ()
        alignment += [(i if i < tag else source + i - tag, target + j) for i, j in links]
        source, target = source + words - tag, target + len(part.text.split())
    tokens = sum(part.tokens for part in parts)
    log_prob = sum(part.log_prob for part in parts)
    coverage = sum(part.score - part.log_prob / part.tokens**length_penalty for part in parts)
    return Translation(
        space.join(part.text for part in parts if part.text),
        log_prob / tokens**length_penalty + coverage,
        log_prob,
        tokens,
        all(part.finished for part in parts),
        None if parts[0].alignment is None else tuple(dict.fromkeys(alignment)),
    )


def with_n_best(ways: Sequence[Translation], n_best: int) -> Translation:
    """The first of the translations of a line, which carries them all if more than one was asked for."""
    return replace(ways[0], n_best=tuple(ways[:n_best])) if n_best > 1 else ways[0]
