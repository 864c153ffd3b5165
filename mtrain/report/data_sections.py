"""What the report shows of the data and of translations."""

from collections.abc import Iterator, Sequence
from html import escape

from mtrain.config.languages import split_tag
from mtrain.data.scanning.block_check import LENGTH_LABELS, RATIO_LABELS
from mtrain.data.scanning.check import Findings
from mtrain.errors import UsageError
from mtrain.evaluation.lengths import score_by_length
from mtrain.evaluation.metrics import make_metrics, score_sentences
from mtrain.report.page import html_differences, html_labeled, html_table, text_attributes
from mtrain.runs.records import RunRecords, Sentence, Translations, config_section

STEPS_SHOWN = 10  # validations whose translations of a sample are shown, at most
EXTREMES = 5  # best and worst sentences that are shown
Languages = tuple[object, object]  # of source and target, not validated


def html_data(run: RunRecords) -> str:
    """Statistics of the data and the tokenizer of a run, and the findings of its check."""
    tokenizer = config_section(run.config, "tokenizer")
    kind = "" if tokenizer.get("path") else f"{tokenizer.get('type')}, "  # not recorded if it is reused
    facts = {
        "Tokenizer": f"{kind}vocabulary size {tokenizer.get('vocab_size')}, "
        f"{'one vocabulary' if tokenizer.get('joint') else 'a vocabulary for each side'}"
    }
    if kept := run.summary.get("kept"):
        facts["Training pairs after encoding"] = f"{sum(kept):,}"
        dropped = run.summary.get("dropped") or {}
        facts["Dropped"] = ", ".join(f"{why}: {count:,}" for why, count in dropped.items()) or "none"
    parts = []
    if run.findings is not None:
        found = run.findings
        facts["Scripts"] = " to ".join(script or "none" for script in found.scripts)
        facts["Duplicate training pairs"] = f"{found.duplicates:,}"
        if (segmentation := found.segmentation) is not None:
            each, unknown = segmentation.tokens_per_word, segmentation.unknown
            facts["Tokens per word"] = f"{each[0]:.2f} source, {each[1]:.2f} target"
            facts["Unknown or byte tokens"] = f"{unknown[0]:.2%} source, {unknown[1]:.2%} target"
            sampled = f"{segmentation.pairs:,} sampled pairs"
            facts["Longer than data.max_length"] = f"{segmentation.too_long:,} of {sampled}"
        warnings = "".join(f"<li>{escape(text)}</li>" for text in found.warnings)
        parts.append(f'<h3>Findings of the check</h3><ul class="warnings">{warnings or "<li>none</li>"}</ul>')
        parts.append(_finding_tables(found))
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f"<dl>{listed}</dl>{''.join(parts)}"


def _finding_tables(found: Findings) -> str:
    sets = [
        [
            name,
            *(f"{count:,}" for count in (counts.usable, counts.empty, counts.bad)),
            f"{found.leaks[name].sources:,}" if name in found.leaks else "",
        ]
        for name, counts in found.sets.items()
    ]
    columns = ["set", "pairs", "empty", "unreadable", "sources in training"]
    kinds = [(kind, each) for kind, each in found.suspicious.items() if each.count]
    suspicious = [[kind, f"{each.count:,}", ", ".join(each.places[:3])] for kind, each in kinds]
    tables = [html_table("Sets", columns, sets)]
    if found.corpora:
        corpora = [[name, f"{count:,}"] for name, count in found.corpora.items()]
        tables.append(html_table("Training corpora", ["corpus", "pairs"], corpora))
    if suspicious:
        tables.append(html_table("Suspicious training pairs", ["kind", "pairs", "such as"], suspicious))
    tables += [
        '<p class="muted">In scripts without spaces, each character counts as a word.</p>',
        _histogram("Words of the source", LENGTH_LABELS, found.lengths[0]),
        _histogram("Words of the target", LENGTH_LABELS, found.lengths[1]),
        _histogram("Characters, target / source", RATIO_LABELS, found.ratios),
    ]
    return "".join(tables)


def _histogram(caption: str, labels: Sequence[str], counts: Sequence[int]) -> str:
    most = max(1, *counts)
    rows = [
        f'<tr><th scope="row">{label}</th><td>{count:,}</td>'
        f'<td aria-hidden="true"><span class="bar" style="--w:{100 * count / most:.0f}"></span></td></tr>'
        for label, count in zip(labels, counts, strict=True)
        if count
    ]
    return (
        f'<table class="bars"><caption>{caption}</caption><thead><tr><th scope="col">range</th>'
        '<th scope="col">pairs</th><td aria-hidden="true"></td></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def html_samples(run: RunRecords) -> str:
    """The translations of a few validation sentences at several steps."""
    records = run.samples
    if len(records) > STEPS_SHOWN:
        last = len(records) - 1
        records = [records[number * last // (STEPS_SHOWN - 1)] for number in range(STEPS_SHOWN)]
    rows = range(len(records[-1].sentences))
    return "".join(_sample(records, row, _languages(run)) for row in rows)


def _sample(records: Sequence[Translations], row: int, languages: Languages) -> str:
    latest = records[-1].sentences[row]
    target, rows = latest.target_lang or languages[1], []
    for record in records:
        sentences = record.sentences
        if row < len(sentences) and sentences[row].source == latest.source:
            text = sentences[row].translation
            cell = f"<td {text_attributes(text, target)}>{_marked(text, latest.reference)}</td>"
            rows.append(f'<tr><th scope="row">{record.step:,}</th>{cell}</tr>')
    return (
        f"<article>{html_labeled('Source', latest.source, languages[0])}"
        f"{html_labeled('Reference', latest.reference, target)}"
        '<table class="through-time"><caption class="label">Translations</caption><thead><tr>'
        '<th scope="col">step</th><th scope="col" style="text-align:start">translation</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></article>"
    )


def _marked(translation: str, reference: str) -> str:
    """A translation whose words that the reference lacks are marked."""
    return html_differences(translation, reference, "mark") or "(empty)"


def html_lengths(runs: Sequence[RunRecords]) -> str:
    """BLEU of the validation sentences of each range of source lengths, by run and, if there are several, by
    target language."""
    cells: dict[tuple[int, str], dict[str, str]] = {}  # of each range, from the shortest, by column
    columns, missing = list[str](), ""
    for run in runs:
        by_language = _by_target_language(run)
        for language, sentences in by_language.items():
            column = run.name if len(by_language) == 1 else f"{run.name}, {language}"
            try:
                metrics = make_metrics(("bleu",), language)
            except UsageError as error:  # a package that divides the text into words is missing
                missing += f"<p>{escape(column)}: {escape(str(error))}</p>"
                continue
            columns.append(column)
            sources, translations, references = _columns(sentences)
            for bucket in score_by_length(sources, translations, references, metrics):
                cell = f"{bucket.scores[0].score:.1f} ({bucket.sentences:,})"
                cells.setdefault((bucket.shortest, bucket.name), {})[column] = cell
    rows = [[name, *(cells[at, name].get(column, "") for column in columns)] for at, name in sorted(cells)]
    table = html_table("BLEU (number of sentences)", ["words of the source", *columns], rows)
    return missing + table * bool(columns)


def html_extremes(run: RunRecords) -> str:
    """The sentences that the best model of a run translates best and worst, by chrF. Of equally good ones,
    the longest come first."""
    assert run.best is not None
    sentences = run.best.sentences
    sources, translations, [references] = _columns(sentences)
    scores = score_sentences(translations, [references], make_metrics(("chrf",), None))["chrf"]
    longest = sorted(range(len(scores)), key=lambda row: len(references[row]), reverse=True)
    worst = sorted(longest, key=lambda row: scores[row])[:EXTREMES]
    others = [row for row in longest if row not in worst]
    best = sorted(others, key=lambda row: -scores[row])[:EXTREMES]

    source, own_target = _languages(run)

    def articles(rows: Sequence[int]) -> Iterator[str]:
        for row in rows:
            target = sentences[row].target_lang or own_target
            yield f"<article><h4>chrF {scores[row]:.1f}</h4>"
            marked = _marked(translations[row], references[row])
            yield html_labeled("Source", sources[row], source)
            yield html_labeled("Reference", references[row], target)
            yield html_labeled("Translation", translations[row], target, marked)
            yield "</article>"

    return f"<h3>Worst</h3>{''.join(articles(worst))}<h3>Best</h3>{''.join(articles(best))}"


def _by_target_language(run: RunRecords) -> dict[str | None, list[Sentence]]:
    """The validation sentences of a run, without language tags; None stands for an unknown language."""
    assert run.best is not None
    data = config_section(run.config, "data")
    configured = data.get("target_lang")
    tagged = data.get("language_tags") in ("target", "both")
    found: dict[str | None, list[Sentence]] = {}
    for sentence in run.best.sentences:
        language = sentence.target_lang or (configured if isinstance(configured, str) else None)
        if tagged:
            language, source = split_tag(sentence.source)
            sentence = sentence.model_copy(update={"source": source})
        found.setdefault(language, []).append(sentence)
    return found


def _columns(sentences: Sequence[Sentence]) -> tuple[list[str], list[str], list[list[str]]]:
    """The sources, the translations, and the only list of references."""
    sources, translations = [each.source for each in sentences], [each.translation for each in sentences]
    return sources, translations, [[each.reference for each in sentences]]


def _languages(run: RunRecords) -> Languages:
    """The codes of source and target, as far as the config has them."""
    data = config_section(run.config, "data")
    return data.get("source_lang"), data.get("target_lang")
