"""Measures what the rules of `data.filters`, and scores, find in a clean corpus with injected noise.

    python scripts/measure_filters.py inject CLEAN.tsv NOISY.tsv --other LINES [--share 0.3] [--seed 1]
    python scripts/measure_filters.py table CONFIG
    python scripts/measure_filters.py scores SCORED.tsv

`inject` writes the pairs of CLEAN.tsv and, in equal parts, eight kinds of noise, together `--share` of the
output. The first two columns of NOISY.tsv are source and target, the third one is the kind of noise, which is
empty for the original pairs. `--other` is a file of sentences in a third language. The same arguments always
produce the same text.

`table` applies each rule of `data.filters` in CONFIG alone, and all of them together, to such a file, the
training corpus. It prints a table in Markdown: the share of each kind of noise that is rejected (recall), the
share of the original pairs that is rejected, and the share of noise among the rejected pairs (precision).

`scores` prints such a table for the scores that `mtrain score --tsv` has added to NOISY.tsv: for the lower
bounds that reject 1 and 5% of the original pairs, and the area under the ROC curve of each kind (AUC).
"""

import argparse
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mtrain.config.load import load_config
from mtrain.config.sections.data import DataConfig
from mtrain.config.sections.filters import Filters
from mtrain.data.reading.digests import RawFiles
from mtrain.data.reading.lines import read_text
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.training.validation.classifier import roc_auc

SYMBOLS = "@#%&*+=/\\|<>{}~^_0123456789"
TRIES = 1000  # to find a pair that a kind of noise changes
Pair = tuple[str, str]


class Noise:
    """Makes noisy pairs out of clean ones."""

    def __init__(self, pairs: list[Pair], other: list[str], generator: random.Random):
        self._pairs, self._other, self._random = pairs, other, generator

    def misaligned(self, source: str, target: str) -> Pair:
        """The translation of another sentence."""
        return source, self._random.choice(self._pairs)[1]

    def copied(self, source: str, target: str) -> Pair:
        """The source in place of its translation."""
        return source, source

    def other_language(self, source: str, target: str) -> Pair:
        """A sentence of a third language on one side."""
        sentence = self._random.choice(self._other)
        return (source, sentence) if self._random.random() < 0.5 else (sentence, target)

    def truncated(self, source: str, target: str) -> Pair:
        """The first third of the words of the target, at most."""
        words = target.split()
        return source, " ".join(words[: max(1, len(words) // 3)])

    def other_numbers(self, source: str, target: str) -> Pair:
        """Another number in the target. If the pair has none, two different ones are inserted."""
        number = str(self._random.randint(2, 2030))
        if re.search(r"\d", source) and re.search(r"\d", target):
            return source, re.sub(r"\d+", number, target, count=1)
        return self._insert(source, number), self._insert(target, str(self._random.randint(2031, 4000)))

    def garbled(self, source: str, target: str) -> Pair:
        """Symbols in place of two of three letters of the target."""
        symbols = (self._random.choice(SYMBOLS) if self._random.random() < 2 / 3 else c for c in target)
        return source, "".join(old if old == " " else new for old, new in zip(target, symbols, strict=True))

    def overlong(self, source: str, target: str) -> Pair:
        """The target and four more sentences."""
        return source, " ".join([target, *(self._random.choice(self._pairs)[1] for _ in range(4))])

    def repeated(self, source: str, target: str) -> Pair:
        """The pair once more."""
        return source, target

    def _insert(self, text: str, word: str) -> str:
        words = text.split()
        words.insert(self._random.randint(0, len(words)), word)
        return " ".join(words)

    def kinds(self) -> list[Callable[[str, str], Pair]]:
        return [
            *(self.misaligned, self.copied, self.other_language, self.truncated),
            *(self.other_numbers, self.garbled, self.overlong, self.repeated),
        ]


def inject(clean: Path, noisy: Path, other: Path, share: float, seed: int) -> None:
    """Write the pairs of `clean` and noise to `noisy`."""
    generator = random.Random(seed)
    pairs: list[Pair] = list(
        dict.fromkeys((s, t) for s, t, *_ in (row.split("\t") for row in read_text(clean)))
    )
    kinds = Noise(pairs, read_text(other), generator).kinds()
    rows = [(*pair, "") for pair in pairs]
    for _ in range(round(len(pairs) * share / (1 - share) / len(kinds))):
        for kind in kinds:
            for _ in range(TRIES):
                pair = generator.choice(pairs)
                made = kind(*pair)
                if made != pair or kind.__name__ == "repeated":
                    break  # else the pair is too short to be truncated, for example
            else:
                raise SystemExit(f"{clean}: found no pair that can be {kind.__name__}")
            rows.append((*made, kind.__name__))
    # A repeated pair follows its original, which counts as clean.
    originals, others = rows[: len(pairs)], rows[len(pairs) :]
    generator.shuffle(others)
    repeated = [row for row in others if row[2] == "repeated"]
    mixed = originals + [row for row in others if row[2] != "repeated"]
    generator.shuffle(mixed)
    noisy.write_text("".join("\t".join(row) + "\n" for row in mixed + repeated), encoding="utf-8")


def table(config: Path) -> None:
    """Print what each rule of a config rejects."""
    data = load_config(config).data
    assert data.filters is not None, "CONFIG has no data.filters"
    labels = np.array([line.split("\t")[2] for line in read_text(Path(data.train[0].tsv))])  # type: ignore[union-attr]
    kinds = [kind for kind in dict.fromkeys(sorted(labels)) if kind]
    print(f"| Rule | {' | '.join(kind.replace('_', ' ') for kind in kinds)} | original pairs | precision |")
    print("|---" * (len(kinds) + 3) + "|")
    given = data.filters.model_dump(exclude_defaults=True)
    for name, rules in [*((key, {key: value}) for key, value in given.items()), ("all", given)]:
        rejected = find_rejected(data, Filters.model_validate(rules))
        found, total = Counter(labels[rejected].tolist()), Counter(labels.tolist())
        recall = [f"{found[kind] / total[kind]:.1%}" for kind in kinds]
        precision = 1 - found[""] / max(1, int(rejected.sum()))
        print(f"| `{name}` | {' | '.join(recall)} | {found[''] / total['']:.2%} | {precision:.1%} |")


def score_table(scored: Path) -> None:
    """Print what the scores of noisy pairs, in the last column, find. Repeated pairs are left out."""
    rows = [line.split("\t") for line in read_text(scored)]
    labels = np.array([row[2] for row in rows])
    # A pair that is too long to be scored would be rejected.
    scores = np.nan_to_num(np.array([float(row[-1]) for row in rows]), nan=-np.inf)
    kinds = [kind for kind in dict.fromkeys(sorted(labels)) if kind not in ("", "repeated")]
    clean = np.sort(scores[labels == ""])
    noise = np.isin(labels, kinds)
    names = " | ".join(kind.replace("_", " ") for kind in kinds)
    print(f"| `min_score` | {names} | original pairs | precision |")
    print("|---" * (len(kinds) + 3) + "|")
    for share in (0.01, 0.05):
        bound = float(f"{clean[round(share * len(clean))]:.3g}")
        recall = [f"{(scores[labels == kind] < bound).mean():.1%}" for kind in kinds]
        lost, found = (clean < bound).mean(), (scores[noise] < bound).sum()
        precision = found / max(1, found + (clean < bound).sum())
        print(f"| {bound:g} | {' | '.join(recall)} | {lost:.2%} | {precision:.1%} |")
    areas = [f"{roc_auc(clean, scores[labels == kind]):.3f}" for kind in kinds]
    print(f"| AUC | {' | '.join(areas)} | | |")


def find_rejected(data: DataConfig, filters: Filters) -> np.ndarray:
    """Which pairs some rules reject."""
    files = RawFiles(data.model_copy(update={"filters": filters}))
    scanner = CorpusScanner(files, seed=0, for_tokenizer=False)
    rejections = scanner.result.rejections
    assert rejections is not None
    return np.asarray(rejections.codes) > 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    injecting = commands.add_parser("inject", help="add noise to a corpus")
    injecting.add_argument("clean", type=Path, metavar="CLEAN.tsv")
    injecting.add_argument("noisy", type=Path, metavar="NOISY.tsv")
    injecting.add_argument("--other", type=Path, required=True, help="sentences of a third language")
    injecting.add_argument("--share", type=float, default=0.3, help="of noise in the output (default: 0.3)")
    injecting.add_argument("--seed", type=int, default=1, help="(default: 1)")
    measuring = commands.add_parser("table", help="measure the rules of a config")
    measuring.add_argument("config", type=Path, metavar="CONFIG")
    scoring = commands.add_parser("scores", help="measure the scores of a noisy corpus")
    scoring.add_argument("scored", type=Path, metavar="SCORED.tsv")
    arguments = parser.parse_args()
    if arguments.command == "inject":
        inject(arguments.clean, arguments.noisy, arguments.other, arguments.share, arguments.seed)
    elif arguments.command == "table":
        table(arguments.config)
    else:
        score_table(arguments.scored)


if __name__ == "__main__":
    main()
