"""Test sets, and scoring a model on them."""

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mtrain.checkpoint import model_info
from mtrain.config.languages import Direction
from mtrain.config.load import load_config
from mtrain.config.sections.corpora import Corpus, Holdout, HubCorpus, TextTestSet, ToyCorpus
from mtrain.config.sections.data import DataConfig
from mtrain.data.preparing.inputs import hashes_of_missing
from mtrain.data.reading.blocks import good_pairs, read_corpus
from mtrain.data.reading.files import existing_files, files_by_pair, further_references, input_files
from mtrain.data.reading.lines import raise_errors, read_text
from mtrain.data.rewriting.augment import Side, change_pair
from mtrain.data.store.folder import DataFolder, directions_of_validation, locate_data_folder, read_validation
from mtrain.decoding.problems import ProblemCounter, count_problems
from mtrain.errors import DataError, UsageError
from mtrain.evaluation.metrics import MetricScore, score
from mtrain.progress_bar import ProgressBar

if TYPE_CHECKING:
    from mtrain.decoding.translate import Translator

log = logging.getLogger(__name__)


class TestSet(NamedTuple):
    """Source sentences and one or more lists of reference translations."""

    name: str
    sources: list[str]
    references: list[list[str]]
    direction: Direction | None = None  # for models with language tags; None: the languages of the model

    def target_lang(self, of_model: str | None) -> str | None:
        """The language of the references, given the target language of the model."""
        return of_model if self.direction is None else self.direction.target


def configured_test_sets(run_dir: Path, overrides: Sequence[str] = ()) -> list[TestSet]:
    """The test sets in `data.test` of a run. `run_dir` may also be its model folder or a checkpoint.

    Raises UsageError if there are none, and DataError if one cannot be read.
    """
    data = _data_of(run_dir, overrides)
    if data is None or not data.test:
        cure = "give --source and --reference" + ("" if data is None else ", or --validation")
        raise UsageError(f"{run_dir}: no test sets are configured; {cure}")
    sets = []
    for name, corpus in data.test.items():
        pairs = list(raise_errors(read_corpus(corpus)))
        further = further_references(corpus)
        others = [_lines_of_reference(corpus, files) for files in further]
        for number, lines in enumerate(others, start=2):
            if len(lines) != len(pairs):
                found = f"reference {number} has {len(lines)} lines"
                raise DataError(f"{name} has {len(pairs)} pairs but {found}")
        references = [[pair.target for pair in pairs], *others]
        direction = data.direction_of(corpus) if data.language_tags != "none" else None
        sets.append(TestSet(name, [pair.source for pair in pairs], references, direction))
    return sets


def _lines_of_reference(corpus: Corpus, files: Sequence[Path]) -> list[str]:
    """The lines of a further reference of a test set. Raises DataError if one of several files has another
    number of lines than its source file."""
    lines = [read_text(file) for file in files]
    if isinstance(corpus, TextTestSet) and len(files) > 1:
        sources = (source for source, _ in files_by_pair(corpus))
        for source, file, found in zip(sources, files, lines, strict=True):
            require_counts([(file, found)], str(source), len(read_text(source)))
    return [line for found in lines for line in found]


def validation_sets(run_dir: Path, overrides: Sequence[str] = ()) -> list[TestSet]:
    """The validation set of a run, divided by direction: the pairs in its files or, if it is a holdout or
    files are missing, the pairs in the data folder of the run. Unreadable pairs are treated as in training.

    Raises UsageError if there is none, DataError if it cannot be read, ModelError if the folder is damaged.
    """
    data = _data_of(run_dir, overrides)
    if data is None:
        problem = "does not belong to a run, so it has no validation set"
        raise UsageError(f"{run_dir}: {problem}; leave out --validation")
    if folder := _folder_with_validation(data, model_info.run_folder_of(run_dir) or run_dir):
        pairs = read_validation(folder.path, folder.summary)
        directions = directions_of_validation(data, folder.summary, pairs)
    else:
        pairs, directions = [], []
        for corpus in data.validation if isinstance(data.validation, list) else ():
            read = list(good_pairs([corpus], data.bad_lines))
            pairs += read
            directions += [data.direction_of(corpus)] * len(read)
    if not pairs:
        raise DataError(f"{run_dir}: data.validation has no pairs")
    found = []
    for direction in dict.fromkeys(directions):
        chosen = [pair for pair, of in zip(pairs, directions, strict=True) if of == direction]
        name = f"validation {direction}" if len(set(directions)) > 1 else "validation"
        tagged = direction if data.language_tags != "none" else None
        sources, targets = [pair.source for pair in chosen], [pair.target for pair in chosen]
        found.append(TestSet(name, sources, [targets], tagged))
    return found


def _folder_with_validation(data: DataConfig, run_dir: Path) -> DataFolder | None:
    """The data folder of a run if the validation pairs are read from it. Raises DataError if they are nowhere
    else and it does not have them."""
    data = data.model_copy(update={"folder": data.folder and str(locate_data_folder(run_dir, data.folder))})
    if isinstance(data.validation, Holdout):
        folder = DataFolder.of_run(data, run_dir)
        if not folder.is_complete:
            cure = "restore it, or give --source and --reference"
            raise DataError(f"{folder.path}: the held-out pairs are missing; {cure}")
        return folder
    readable: tuple[type, ...] = (HubCorpus, ToyCorpus) if data.folder is None else (ToyCorpus,)
    of_files = [each for each in data.validation if not isinstance(each, readable)]
    if all(map(existing_files, of_files)):
        return None
    folder = DataFolder.of_run(data, run_dir)
    return folder if any(hashes_of_missing(data, folder)[len(data.train) :]) else None


def target_lang_of(path: Path) -> str:
    """The target language of a run folder, a model folder or a checkpoint, whose weights are not read.

    Raises ModelError if it is missing or is no model, UsageError if the config of a run is invalid.
    """
    model_info.require_model(path)
    folder = model_info.model_folder_of(path)
    # A checkpoint, and a run without a model folder, has the settings of the run.
    data = _data_of(path, ()) if model_info.is_checkpoint(path) or not folder.is_dir() else None
    return model_info.read_model_config(folder).target_lang if data is None else data.target_lang


def data_files_of(path: Path, overrides: Sequence[str] = ()) -> list[Path]:
    """The local files of the corpora and test sets of the run that a path belongs to; none without a run.

    Raises UsageError if the config of the run is invalid.
    """
    data = _data_of(path, overrides)
    return [] if data is None else input_files(data)


def _data_of(path: Path, overrides: Sequence[str]) -> DataConfig | None:
    """The `data` section of the run that a run folder, a model folder or a checkpoint belongs to."""
    run_dir = model_info.run_folder_of(path)
    if run_dir is None or not (run_dir / "config.yaml").exists():
        return None
    return load_config(run_dir / "config.yaml", overrides).data


def with_augmented(
    tests: Iterable[TestSet], changes: Sequence[str], translator: "Translator"
) -> Iterator[TestSet]:
    """Each test set and, for each of some `CHANGES`, a copy with that change in every sentence where it is
    possible. Sources and references change as training pairs do with `data.augment`. Which typing errors a
    source has depends only on its place in the set. A copy in which nothing would change is left out."""
    tokenizer = translator.tokenizer
    for test in tests:
        yield test
        direction = test.direction or translator.direction
        source_side = Side(direction.source, tokenizer.source.symbol_pattern)
        sides = source_side, Side(direction.target, tokenizer.target.symbol_pattern)
        for name in changes:
            pairs = [
                change_pair(name, source, references, sides, random.Random(f"{name} {row}"))
                for row, (source, *references) in enumerate(zip(test.sources, *test.references, strict=True))
            ]
            sources = [source for source, _ in pairs]
            if sources == test.sources:
                log.warning("%s: %s changes no sentence; the copy is left out", test.name, name)
                continue
            references = [[*each] for each in zip(*(changed for _, changed in pairs), strict=True)]
            yield TestSet(f"{test.name}, {name}", sources, references, test.direction)


def evaluate_set(test: TestSet, translator: "Translator", metrics: dict[str, Any]) -> list[MetricScore]:
    """Translate a test set and score the translations."""
    return score(translate_set(test, translator).texts, test.references, metrics)


class Output(NamedTuple):
    """The translations of a test set, and how many of them have each problem that `find_problem` finds."""

    texts: list[str]
    problems: dict[str, int] | None  # None if the sources are not known


def translate_set(test: TestSet, translator: "Translator") -> Output:
    """Translate a test set, with a progress bar. Raises UsageError if the model does not know its
    languages."""
    if test.direction is not None:
        translator = translator.between(test.direction.source, test.direction.target)
    problems, texts = ProblemCounter(), []
    with ProgressBar(f"{test.name}: translated", "lines", len(test.sources)) as progress:
        found = translator.stream(test.sources, scored=False, progress=progress.add)
        for line, (source, translation) in enumerate(zip(test.sources, found, strict=True), start=1):
            problems.add(line, source, translation.text, translation.finished)
            texts.append(translation.text)
    return Output(texts, problems.as_dict())


def given_output(test: TestSet, texts: list[str]) -> Output:
    """Translations of a test set that were read from a file."""
    return Output(texts, count_problems(test.sources, texts) if test.sources else None)


def require_counts(texts: Iterable[tuple[object, list[str]]], name: str, count: int) -> None:
    """Raise DataError if a named text has another number of lines than the text `name`, which has `count`."""
    for other, lines in texts:
        if len(lines) != count:
            raise DataError(f"{name} has {count} lines but {other} has {len(lines)}")
