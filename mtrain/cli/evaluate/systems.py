"""The translations that `mtrain evaluate` scores, made by models or read from files."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mtrain.cli.console import terminal
from mtrain.cli.evaluate.results import Metrics, Outputs, report_results
from mtrain.cli.translate.translate import load_translator
from mtrain.config.languages import Direction
from mtrain.distributed.launch import read_launch
from mtrain.errors import DataError, UsageError

if TYPE_CHECKING:
    from mtrain.decoding.translate import Translator
    from mtrain.evaluation.evaluate import Output, TestSet


class EvaluationInputs(NamedTuple):
    """What the command line names."""

    model: Path | None
    source: Path | None
    references: Sequence[Path]
    hypotheses: Path | None
    compared: Sequence[Path]
    augment: Sequence[str] = ()  # the changes of which copies of the test sets are scored, too
    languages: tuple[str | None, str | None] = (None, None)  # of --from and --to
    validation: bool = False  # whether to score the validation set of MODEL instead of its test sets

    @property
    def systems(self) -> list[Path]:
        """The baseline, and what is compared with it."""
        baseline = self.model if self.hypotheses is None else self.hypotheses
        return [*([] if baseline is None else [baseline]), *self.compared]

    @property
    def models(self) -> list[Path]:
        """The systems that are models: the baseline unless it is a file, and folders."""
        return [path for path in self.systems if self.is_model(path)]

    def is_model(self, path: Path) -> bool:
        """Whether one of `systems` is a model, rather than a file of translations."""
        return path == self.model or (path != self.hypotheses and path.is_dir())


def evaluate_files(inputs: EvaluationInputs, metrics: Metrics, outputs: Outputs) -> None:
    """Report on existing translations. MODEL is used only for its target language."""
    from mtrain.evaluation.evaluate import given_output, target_lang_of

    if read_launch().rank == 0:
        texts = _read_systems(inputs)
        [test] = _given_test_sets(inputs, texts)
        language = inputs.languages[1]
        if language is None and inputs.model is not None:
            language = target_lang_of(inputs.model)
        given = {name: given_output(test, lines) for name, lines in texts.items()}
        report_results([(test, given)], language, metrics, outputs)


def evaluate_models(
    inputs: EvaluationInputs,
    decoding_settings: Sequence[str],
    data_settings: Sequence[str],
    beam_size: int | None,
    device: str,
    metrics: Metrics,
    outputs: Outputs,
) -> None:
    """Translate with each model in turn, and report on its translations and on translations in files. The
    settings are assignments of --set.

    If there are several ranks, they share the translation, and the first alone reads and reports. The last
    model translates one test set after another while the report proceeds.
    """
    from mtrain.distributed.many_ranks import joined_ranks
    from mtrain.evaluation.evaluate import given_output, translate_set, with_augmented

    given: list[TestSet] = []
    tests: list[TestSet] = []
    texts: dict[str, list[str]] = {}
    if read_launch().rank == 0:
        texts = _read_systems(inputs)
        given = _given_test_sets(inputs, texts) if inputs.references else []
    done: dict[str, list[Output]] = {}  # the translations of each test set by the other models
    direction: Direction | None = None  # of the first model
    languages: tuple[str | None, str | None] = inputs.languages  # of a model, for sets without their own
    chosen = (False, False)  # whether --from and --to chose them

    def translated(last: "Translator") -> "Iterator[tuple[TestSet, dict[str, Output]]]":
        names = [_name_of(path) for path in inputs.systems]
        for number, test in enumerate(tests):
            known = {name: given_output(test, lines) for name, lines in texts.items()}
            known |= {name: of_sets[number] for name, of_sets in done.items()}
            yield test, {name: known[name] if name in known else translate_set(test, last) for name in names}

    with joined_ranks(device) as ranks:
        for path in inputs.models:
            loaded = load_translator(path, str(ranks.device), decoding_settings, beam_size=beam_size)
            with _between(path, loaded, languages) as translator:
                loaded = translator  # which alone keeps the model in memory
                if direction is None:
                    direction, chosen = translator.direction, translator.chosen
                translator.chosen = chosen  # so that lines may have tags, as with the first model

                def work(path: Path = path, translator: "Translator" = translator) -> None:
                    if not tests:
                        plain = given or _configured_test_sets(inputs, data_settings, texts)
                        tests.extend(with_augmented(plain, inputs.augment, translator))
                        used = {test.direction or translator.direction for test in tests}
                        _check_models(inputs.models[1:], used, decoding_settings, beam_size)
                    for test in tests:  # fail now, not after the first of them
                        if not test.sources:
                            raise DataError(f"{test.name}: has no sentences; there is nothing to score")
                        _between(path, translator, test.direction or translator.direction)
                        metrics.make(test.target_lang(translator.target_lang))
                    if path == inputs.models[-1]:
                        report_results(translated(translator), translator.target_lang, metrics, outputs)
                    else:
                        done[str(path)] = [translate_set(test, translator) for test in tests]

                translator.lead(ranks, work)
                if not ranks.broadcast(all(test.direction for test in tests)):
                    languages = direction


def _check_models(
    others: Sequence[Path], directions: Collection[Direction], settings: Sequence[str], beam_size: int | None
) -> None:
    """Raise an error now, not after the translation by the first model, if another one cannot be used."""
    for path in others:
        with load_translator(path, "cpu", settings, beam_size=beam_size) as translator:
            for direction in directions:
                _between(path, translator, direction)


def _between(path: Path, translator: "Translator", languages: tuple[str | None, str | None]) -> "Translator":
    """The translator of the model in `path` for other languages. Raises UsageError if it does not know
    them."""
    try:
        return translator.between(languages[0], languages[1])
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _read_systems(inputs: EvaluationInputs) -> dict[str, list[str]]:
    """The lines of the files among the systems."""
    files = [path for path in inputs.systems if not inputs.is_model(path)]
    return {_name_of(file): list(terminal.read_lines(file)) for file in files}


def _given_test_sets(inputs: EvaluationInputs, texts: dict[str, list[str]]) -> list["TestSet"]:
    """The test set in the files of --source and --reference. Raises DataError if numbers of lines differ."""
    from mtrain.evaluation.evaluate import TestSet, require_counts

    sources = [] if inputs.source is None else list(terminal.read_lines(inputs.source))
    given = {} if inputs.source is None else {_name_of(inputs.source): sources}
    first = inputs.source if inputs.hypotheses is None else inputs.hypotheses
    assert first is not None
    name = _name_of(first)
    count = len((texts | given)[name])
    references = [list(terminal.read_lines(file)) for file in inputs.references]
    require_counts([*zip(inputs.references, references, strict=True), *(given | texts).items()], name, count)
    return [TestSet(Path(name).name, sources, references)]


def _configured_test_sets(
    inputs: EvaluationInputs, settings: Sequence[str], texts: dict[str, list[str]]
) -> list["TestSet"]:
    """The test sets or the validation set of MODEL's run. There must be one set if files are compared with
    the model."""
    from mtrain.evaluation.evaluate import configured_test_sets, require_counts, validation_sets

    assert inputs.model is not None
    tests = (validation_sets if inputs.validation else configured_test_sets)(inputs.model, settings)
    if texts and len(tests) > 1:
        names = ", ".join(test.name for test in tests)
        several = f"{inputs.model} has several test sets ({names})"
        raise UsageError(f"--compare {next(iter(texts))}: {several}; give --source and --reference")
    require_counts(texts.items(), tests[0].name, len(tests[0].sources))
    return tests


def _name_of(path: Path) -> str:
    """The name of a system or file in messages and results."""
    return "<stdin>" if str(path) == "-" else str(path)
