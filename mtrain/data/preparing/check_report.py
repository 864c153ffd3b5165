"""Runs a data check, and shows its findings as text: warnings and a report."""

import json
import logging
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

from pydantic import TypeAdapter

from mtrain.config.sections.data import DataConfig
from mtrain.data.scanning.block_check import LENGTH_LABELS, RATIO_LABELS
from mtrain.data.scanning.check import Findings, segment
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import CHECK, DataFolder, read_summary
from mtrain.duration import format_duration
from mtrain.errors import DataError, ModelError, StorageError
from mtrain.invisible_characters import code_point, is_blank
from mtrain.regular_files import read_file
from mtrain.storage.atomic import write_atomically
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MANY = 0.01  # share of suspicious pairs or tokens that causes a warning
_SEGMENTED = 20_000  # maximum number of pairs that a check segments
_REPEATED = 0.1  # share of repeated pairs that causes a warning
_BAR = 40  # characters of the longest bar
_ADJECTIVES = {"train": "training", "validation": "validation"}


@dataclass(kw_only=True)
class RecordedFindings(Findings):
    """The findings of a check as check.json contains them, with the warnings that they caused."""

    contents: list[str]  # the content hashes of the corpora that were checked
    warnings: list[str]


_RECORD = TypeAdapter(RecordedFindings)


def check_data(data: DataConfig, tokenizer: Tokenizer | None, scanner: CorpusScanner) -> Findings:
    """Check every corpus of a config, and the tokenizer on a sample of the training pairs.

    `check` of the scanner must be set. Raises DataError if a corpus is missing or its sides differ in
    length; unreadable lines are counted, if `scanner` is not strict.
    """
    scan = scanner.result
    findings = scan.findings
    assert findings is not None, "`check` of the scanner must be set"
    usable = (pair for pair in scan.text.pairs() if not any(map(is_blank, pair)))
    if tokenizer is not None and (count := min(findings.sets["train"].usable, len(scan.text))):
        sample = list(islice(usable, 0, None, -(-count // _SEGMENTED)))
        findings.segmentation = segment(sample, tokenizer, data)
    return findings


def log_warnings(data: DataConfig, tokenizer: Tokenizer, scanner: CorpusScanner) -> None:
    """Check the data, and log a warning for each problem found."""
    findings = check_data(data, tokenizer, scanner)
    warnings = list_warnings(findings, data.bad_lines)
    for warning in warnings:
        log.warning("data: %s", warning)
    for place in chain.from_iterable(findings.unreadable.values()):
        log.warning("data: unreadable: %s", place)
    pairs, seconds = scanner.result.pairs, scanner.result.seconds
    cost = f"{pairs:,} pairs in {format_duration(seconds)} ({pairs / max(seconds, 1e-9):,.0f} pairs/s)"
    log.info("data: read and checked %s, %s", cost, _count(warnings))


def record_findings(folder: DataFolder, findings: Findings, bad_lines: str) -> None:
    """Write the findings to a data folder whose encoding from the checked text has just begun. A failure is
    logged; training does not need them."""
    contents = folder.summary["inputs"]["contents"]
    record = {"contents": contents, **asdict(findings), "warnings": list_warnings(findings, bad_lines)}
    text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
    text = text.encode("utf-8", "replace").decode()  # a file name need not be valid text
    try:
        write_atomically(folder.path / CHECK, text)
    except StorageError as error:
        log.warning("%s; the report will lack the findings", error)


def read_findings(folder: Path) -> RecordedFindings | None:
    """The recorded findings; None if there are none about the text that the data folder is encoded from, or,
    with a warning, if they are damaged."""
    file = folder / CHECK
    try:
        contents = read_summary(folder)["inputs"]["contents"]
        findings = _RECORD.validate_json(read_file(file))
    except (OSError, KeyError, TypeError, ModelError, StorageError):
        return None
    except ValueError:
        log.warning("%s: damaged; the report will lack the findings of the data check", file)
        return None
    return findings if findings.contents == contents else None


def list_warnings(findings: Findings, bad_lines: str = "error") -> list[str]:
    """The problems to look at before training, the most serious first. `bad_lines` is the config key."""
    return [*_leaks(findings), *_misreadings(findings), *_shares(findings, bad_lines)]


def _leaks(findings: Findings) -> Iterator[str]:
    for name, leak in findings.leaks.items():
        total = findings.sets[name].usable
        if leak.sources or leak.normalized:
            similar = max(leak.sources, leak.normalized)
            effect = "; its scores will be too high" if similar > _MANY * total else ""
            yield (
                f"LEAK: {similar:,} of the {total:,} sources of {name} are in the training corpus "
                f"({leak.sources:,} exactly, {leak.pairs:,} with the same target){effect}"
            )


def _misreadings(findings: Findings) -> Iterator[str]:
    for shift in findings.shifts:
        if shift.lines is None:
            order = "look for a side that was sorted, shuffled or replaced"
            yield f"{shift.first} to {shift.last}: the lengths of the two sides seem to be unrelated; {order}"
            continue
        lines = f"{abs(shift.lines)} line{'s' * (abs(shift.lines) > 1)}"
        by = f"{lines} {'below' if shift.lines > 0 else 'above'}"
        cause = f"look for a missing or additional line at or shortly before {shift.first}"
        yield f"{shift.first} to {shift.last}: the targets seem to be {by} their sources; {cause}"
    for name, wrong in findings.languages.items():
        yield f"{name}: {wrong}"
    for file in findings.quoted:
        yield f"{file}: the fields seem to be in quotes, as csv writers write them; set quotes: true for it"


def _shares(findings: Findings, bad_lines: str) -> Iterator[str]:
    usable = findings.sets["train"].usable
    if not usable:
        yield "no training pair is usable"
        return
    remedy = "they are skipped" if bad_lines == "skip" else "set data.bad_lines: skip to drop them"
    for name, counts in findings.sets.items():
        if counts.bad and name in ("train", "validation"):
            yield f"{counts.bad:,} {_ADJECTIVES[name]} pair(s) cannot be read; {remedy}"
        elif counts.bad:
            consequence = "it cannot be scored until they are corrected"
            yield f"{counts.bad:,} pair(s) of {name} cannot be read; {consequence}"
        if not counts.usable:
            yield f"{name} has no usable pair"
    yield from (f"{name} has no usable pair" for name in findings.unusable)
    all_usable = usable + findings.rejected.get("duplicates", 0)  # suspicious pairs are counted before these
    for kind, suspicious in findings.suspicious.items():
        if suspicious.count > _MANY * all_usable:
            share = suspicious.count / all_usable
            yield f"{suspicious.count:,} training pairs ({share:.1%}) have {kind}"
    if findings.duplicates > _REPEATED * usable:
        share = findings.duplicates / usable
        yield f"{findings.duplicates:,} training pairs ({share:.1%}) are duplicates"
    if "target" in findings.changes:
        changes = _count_changes(findings, "target", ", which the model can never write")
        yield f"{changes}; only tokenizer.normalization: identity keeps them"
    unknown = max(findings.segmentation.unknown) if findings.segmentation else 0
    if unknown > _MANY:
        yield f"{unknown:.1%} of the tokens of one side are unknown or bytes"


def format_report(findings: Findings, bad_lines: str = "error") -> str:
    """The full report, with histograms; the warnings come last."""
    lines = [*chain.from_iterable(_lines_of_set(findings, name) for name in findings.sets)]
    if findings.rejected:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in findings.rejected.items())
        lines.append(f"rejected by data.filters: {sum(findings.rejected.values()):,} ({reasons})")
    lines.append(f"duplicate training pairs: {findings.duplicates:,}")
    lines.append("script: {} to {}".format(*(script or "none" for script in findings.scripts)))
    for side, counts in zip(("source", "target"), findings.lengths, strict=True):
        lines += ["", f"words, {side}", *_histogram(LENGTH_LABELS, counts)]
    lines += ["", "characters, target / source", *_histogram(RATIO_LABELS, findings.ratios), ""]
    for kind, suspicious in findings.suspicious.items():
        where = f": {', '.join(suspicious.places)}" if suspicious.places else ""
        more = ", ..." if suspicious.count > len(suspicious.places) else ""
        lines.append(f"pairs with {kind}: {suspicious.count:,}{where}{more}")
    if "source" in findings.changes:  # the targets are warned of
        lines.append(_count_changes(findings, "source"))
    if (segmentation := findings.segmentation) is not None:
        per_word, unknown = segmentation.tokens_per_word, segmentation.unknown
        lines += [
            f"longer than data.max_length: {segmentation.too_long:,} of {segmentation.pairs:,} pairs",
            f"tokens per word: {per_word[0]:.2f} source, {per_word[1]:.2f} target",
            f"unknown or byte tokens: {unknown[0]:.2%} source, {unknown[1]:.2%} target",
        ]
    warnings = list_warnings(findings, bad_lines)
    lines += ["", *(f"warning: {warning}" for warning in warnings)]
    lines.append(f"result: {_count(warnings)}")
    return "\n".join(lines)


def _count_changes(findings: Findings, side: str, effect: str = "") -> str:
    """How many characters of a side are normalized, with examples."""
    changes = findings.changes[side]
    shown = [f"{_show_change(*change)} ({times:,})" for *change, times in changes.examples]
    if changes.count > sum(times for *_, times in changes.examples):
        shown.append("...")
    characters = f"{changes.count:,} {side} character{'s' * (changes.count > 1)}"
    return f"normalization changes {characters}{effect}: {', '.join(shown)}"


def _show_change(before: str, after: str) -> str:
    if unicodedata.normalize("NFC", before) == unicodedata.normalize("NFC", after):  # they look the same
        codes = (" ".join(map(code_point, text)) for text in (before, after))
        return f"{before} {' → '.join(codes)}"
    return f"{_show_text(before)} → {_show_text(after)}"


def _show_text(text: str) -> str:
    """A text; the code points and names of its characters if some of them cannot be seen."""
    if text in ("", " "):
        return "a space" if text else "nothing"
    if text.isprintable() and not unicodedata.category(text[0]).startswith("M"):
        return text
    names = (f"{code_point(character)} {unicodedata.name(character, '')}" for character in text)
    return " ".join(name.rstrip() for name in names)


def _lines_of_set(findings: Findings, name: str) -> Iterator[str]:
    counts, places = findings.sets[name], findings.unreadable.get(name, [])
    yield f"{name}: {counts.usable:,} pairs (empty: {counts.empty:,}, unreadable: {counts.bad:,})"
    if name == "train":
        yield from (f"  {corpus}: {count:,} pairs" for corpus, count in findings.corpora.items())
    yield from (f"  unreadable: {place}" for place in places)
    if places and counts.bad > len(places):
        yield f"  unreadable: {counts.bad - len(places):,} more"


def require_usable(findings: Findings) -> None:
    """Raise DataError if no pair of a set can be used."""
    for name, counts in findings.sets.items():
        if counts.usable:
            continue
        if places := findings.unreadable.get(name):
            raise DataError(f"no pair of {name} can be used; the first that cannot be read: {places[0]}")
        if name != "train":
            raise DataError(f"no pair of {name} can be used; {counts.empty:,} are empty")
        rejected = sum(findings.rejected.values())
        reasons = f"{counts.empty:,} are empty, and data.filters rejects {rejected:,}"
        raise DataError(f"no training pair can be used; {reasons}")
    if findings.remaining is not None:
        require_rest(findings.remaining)


def require_rest(pairs: int) -> None:
    """Raise DataError if no training `pairs` are left beside those that are held out."""
    if pairs <= 0:
        raise DataError("no training pair is left: data.validation.holdout takes all of them; lower it")


def _count(warnings: Sequence[str]) -> str:
    return f"{len(warnings) or 'no'} warning{'s' * (len(warnings) != 1)}"


def _histogram(labels: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    width, most = max(map(len, labels)), max(1, *counts)
    for label, count in zip(labels, counts, strict=True):
        yield f"  {label:>{width}}  {count:>11,}  {'#' * round(_BAR * count / most)}".rstrip()
