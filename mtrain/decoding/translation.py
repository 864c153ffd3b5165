"""`Translation`, the result of translating a line."""

import json
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from mtrain.decoding.alignment import Alignment


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
        left_out = {"n_best"} if self.alignment is not None else {"n_best", "alignment"}
        return {name: value for name, value in vars(self).items() if name not in left_out}


def json_line(value: object) -> str:
    """A value as one line of JSON, with null for numbers that are not finite, which JSON cannot express."""
    known = to_jsonable_python(value, inf_nan_mode="null")
    return json.dumps(known, ensure_ascii=False, allow_nan=False) + "\n"
