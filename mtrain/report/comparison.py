"""A page that shows the translations of several systems side by side."""

import os.path
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from mtrain.evaluation.compare import MetricComparison
from mtrain.evaluation.metrics import TITLES, named_signature
from mtrain.evaluation.results import SetResult
from mtrain.report.page import html_differences, html_labeled, html_page, html_radios, html_table

SHOWN = 1000  # sentences of a comparison at most, so that a browser shows the page at once


def comparison_page(sets: Sequence[SetResult], language: str | None = None) -> str:
    """The page for one or more test sets with scores of sentences. It has tables of scores, then the
    sentences of each compared system beside those of the baseline, sorted by the difference in the first
    metric. `language` is the target language of the sets without a direction of their own."""
    shown = _without_common_folder(list(sets[0].outputs))
    sets = [_renamed(each, shown) for each in sets]
    baseline, *others = sets[0].outputs
    title = f"{', '.join(others)} compared with {baseline}"
    links = "".join(
        f'<li><a href="#set-{n}">{escape(each.test.name)}</a></li>' for n, each in enumerate(sets)
    )
    contents = f'<nav aria-label="Test sets"><ul>{links}</ul></nav>' if len(sets) > 1 else ""
    parts = "\n".join("\n".join(_parts_of_set(each, n, language)) for n, each in enumerate(sets))
    head = f"<header><h1>{escape(title)}</h1>{contents}</header>"
    return html_page(title, f'{head}\n<main id="main">{parts}</main>', ["comparison.css"])


def _without_common_folder(names: Sequence[str]) -> dict[str, str]:
    """By the name of each system, which may be a path, the part of it that distinguishes it."""
    prefix = ""
    if len({Path(name).is_absolute() for name in names}) == 1:
        prefix = os.path.commonpath([Path(name).parent for name in names]).rstrip("/") + "/"
    if not all(name.startswith(prefix) and name != prefix for name in names):
        prefix = ""
    return {name: name.removeprefix(prefix) for name in names}


def _renamed(compared: SetResult, shown: dict[str, str]) -> SetResult:
    comparisons = [
        each._replace(scores=[score._replace(system=shown[score.system]) for score in each.scores])
        for each in compared.comparisons
    ]
    return compared._replace(
        outputs={shown[name]: output for name, output in compared.outputs.items()},
        comparisons=comparisons,
        sentences={shown[name]: scores for name, scores in compared.sentences.items()},
    )


def _parts_of_set(compared: SetResult, number: int, language: str | None) -> Iterator[str]:
    test, (baseline, *others) = compared.test, compared.outputs
    yield f'<h2 id="set-{number}"><bdi>{escape(test.name)}</bdi> ({len(test.references[0])} sentences)</h2>'
    for comparison in compared.comparisons:
        yield _score_table(comparison)
    yield (
        '<p class="muted">The baseline is the first system. * p &lt; 0.05: a difference from the baseline is '
        "unlikely to be due to chance, by paired bootstrap resampling or approximate randomization.</p>"
    )
    for index, system in enumerate(others):
        yield "\n".join(_sentences_of(compared, baseline, system, f"{number}-{index}", language))


def _score_table(comparison: MetricComparison) -> str:
    title = TITLES[comparison.metric]
    rows = [
        (system, score, f"{mean} {confidence}", *map(str.strip, tests))
        for system, score, mean, confidence, *tests in comparison.rows()
    ]
    columns = ("system", title, "mean, 95% interval", "p (boot\u00adstrap)", "p (random\u00adization)")
    signature = escape(named_signature(comparison.metric, comparison.signature))
    return html_table(title, columns, rows) + f'<p class="muted">{signature}</p>'


def _sentences_of(
    compared: SetResult, baseline: str, system: str, key: str, language: str | None
) -> Iterator[str]:
    """A list of sentences by descending difference."""
    metric = next(iter(compared.sentences[system]))
    sign = -1 if metric == "ter" else 1
    before, after = (compared.sentences[name][metric] for name in (baseline, system))
    gains = [sign * (new - old) for old, new in zip(before, after, strict=True)]
    order = sorted(range(len(gains)), key=lambda row: -abs(gains[row]))
    texts, baseline_texts = compared.outputs[system].texts, compared.outputs[baseline].texts
    different = [row for row in order if texts[row] != baseline_texts[row]]
    shown = different[:SHOWN]
    better, worse = (sum(flag * gain > 0 for gain in gains) for flag in (1, -1))
    counts = f"{better} sentences score better than with {baseline}, and {worse} worse"
    same = f"{len(gains) - len(different)} translations are the same and are not shown"
    text = f"By {TITLES[metric]}, {counts}. {same}."
    if len(shown) < len(different):
        text += f" Of the others, the {len(shown)} with the largest differences are shown."
    yield f'<section aria-labelledby="title-{key}">'
    yield f'<h3 id="title-{key}">Sentences of {escape(system)} and {escape(baseline)}</h3>'
    yield (
        f"<p>{escape(text)} Words of only one translation are marked: <del>baseline</del>, "
        "<ins>other system</ins>.</p>"
    )
    # The style sheet evaluates the choice.
    choices = {"all": "all", "better": "better than the baseline", "worse": "worse"}
    yield html_radios("Show", f"show-{key}", choices, "all")
    for row in shown:
        yield _sentence(compared, (baseline, system), row, metric, gains[row], language)
    yield "</section>"


def _sentence(
    compared: SetResult, systems: tuple[str, str], row: int, metric: str, gain: float, language: str | None
) -> str:
    test = compared.test
    source = test.direction and test.direction.source
    target = test.target_lang(language)
    kind = "better" if gain > 0 else "worse" if gain < 0 else "same"
    difference = f"{TITLES[metric]} {gain:+.{_digits(metric)}f}"
    if metric == "ter":
        difference += " (positive: better)"
    context = [("Source", test.sources[row], source)] if test.sources else []
    several = len(test.references) > 1
    context += [
        (f"Reference {n}" if several else "Reference", lines[row], target)
        for n, lines in enumerate(test.references, 1)
        if n == 1 or lines[row].strip()
    ]
    before, after = (compared.outputs[name].texts[row] for name in systems)
    marked = [html_differences(before, after, "del"), html_differences(after, before, "ins")]
    labels = [f"{name}: {_scores(compared.sentences[name], row)}" for name in systems]
    pair = "".join(
        f"<div>{html_labeled(label, text, target, html or '(empty)')}</div>"
        for label, text, html in zip(labels, (before, after), marked, strict=True)
    )
    above = "".join(html_labeled(label, text, code) for label, text, code in context)
    heading = f"<h4>Line {row + 1}: {escape(difference)}</h4>"
    return f'<article class="{kind}">{heading}{above}<div class="pair">{pair}</div></article>'


def _scores(scores: dict[str, list[float]], row: int) -> str:
    columns = scores.items()
    return ", ".join(f"{TITLES[metric]} {values[row]:.{_digits(metric)}f}" for metric, values in columns)


def _digits(metric: str) -> int:
    """The decimals of sentence scores."""
    return 4 if metric == "comet" else 1
