"""The findings about the data, for people to read."""

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mtrain.config.schema import DataConfig
from mtrain.data.check import LENGTH_BINS, RATIO_BINS, Findings, check_data
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MANY = 0.01  # share from which on what is wrong with single pairs matters for all
_REPEATED = 0.1
_BAR = 40  # characters of the longest bar


def log_warnings(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Look at the data, and log what a user should look at before training."""
    findings = check_data(data, tokenizer)
    warnings = warnings_of(findings)
    for warning in warnings:
        log.warning("data: %s", warning)
    log.info("data: checked %s pairs, %d warning(s)", f"{findings.sets['train'].usable:,}", len(warnings))


def warnings_of(findings: Findings) -> list[str]:
    """What a user should look at before training, the worst first."""
    return [*_leaks(findings), *_shares(findings)]


def _leaks(findings: Findings) -> Iterator[str]:
    for name, leak in findings.leaks.items():
        total = findings.sets[name].usable
        if leak.sources or leak.normalised:
            alike = max(leak.sources, leak.normalised)
            effect = ": its scores will be too good" if alike > _MANY * total else ""
            yield (
                f"LEAK: {alike:,} of the {total:,} sources of {name} are in training ({leak.sources:,} "
                f"letter by letter, {leak.pairs:,} with their target){effect}"
            )


def _shares(findings: Findings) -> Iterator[str]:
    usable = findings.sets["train"].usable
    if not usable:
        yield "no training pair can be used"
        return
    if bad := findings.sets["train"].bad:
        yield f"{bad:,} training pairs cannot be read; data.bad_lines: skip drops them"
    for kind, suspects in findings.suspects.items():
        if suspects.count > _MANY * usable:
            yield f"{suspects.count:,} training pairs ({suspects.count / usable:.1%}) have {kind}"
    if findings.duplicates > _REPEATED * usable:
        yield f"{findings.duplicates:,} training pairs ({findings.duplicates / usable:.1%}) repeat another"
    unknown = max(findings.segmentation.unknown) if findings.segmentation else 0
    if unknown > _MANY:
        yield f"{unknown:.1%} of the tokens of one side are unknown or single bytes"


def report_of(findings: Findings) -> str:
    """Everything, with histograms, and the verdict at the end."""
    lines = [
        f"{name}: {counts.usable:,} pairs (empty: {counts.empty:,}, unreadable: {counts.bad:,})"
        for name, counts in findings.sets.items()
    ]
    lines.append(f"repeated training pairs: {findings.duplicates:,}")
    lines.append("script: {} to {}".format(*(script or "none" for script in findings.scripts)))
    words = [f"{start} to {end - 1}" for start, end in pairwise(LENGTH_BINS)]
    words.append(f"{LENGTH_BINS[-1]} or more")
    for side, counts in zip(("source", "target"), findings.lengths, strict=True):
        lines += ["", f"words, {side}", *_histogram(words, counts)]
    ratios = [f"{start:g} to {end:g}" for start, end in pairwise(RATIO_BINS)]
    ratios.append(f"{RATIO_BINS[-1]:g} or more")
    lines += ["", "characters, target / source", *_histogram(ratios, findings.ratios), ""]
    for kind, suspects in findings.suspects.items():
        where = f": {', '.join(suspects.places)}" if suspects.places else ""
        more = ", ..." if suspects.count > len(suspects.places) else ""
        lines.append(f"pairs with {kind}: {suspects.count:,}{where}{more}")
    if (cut := findings.segmentation) is not None:
        per_word, unknown = cut.tokens_per_word, cut.unknown
        lines += [
            f"of {cut.pairs:,} pairs longer than data.max_length: {cut.too_long:,}",
            f"tokens a word: {per_word[0]:.2f} source, {per_word[1]:.2f} target",
            f"unknown or single bytes: {unknown[0]:.2%} of source tokens, {unknown[1]:.2%} of target tokens",
        ]
    warnings = warnings_of(findings)
    lines += ["", *(f"warning: {warning}" for warning in warnings)]
    lines.append(f"verdict: {f'{len(warnings)} warning(s)' if warnings else 'good to train on'}")
    return "\n".join(lines)


def _histogram(labels: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    width, most = max(map(len, labels)), max(1, *counts)
    for label, count in zip(labels, counts, strict=True):
        yield f"  {label:>{width}}  {count:>11,}  {'#' * round(_BAR * count / most)}".rstrip()
