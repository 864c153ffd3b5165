"""Finds the files of a corpus: by the patterns of the config, in the cache of sacreBLEU, or bundled. Opens
datasets of the Hugging Face Hub."""

import glob
import logging
import re
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from mtrain.config.sections.corpora import (
    Corpus,
    HubCorpus,
    JsonlCorpus,
    ParquetCorpus,
    SacrebleuCorpus,
    TextCorpus,
    TextTestSet,
    ToyCorpus,
    TsvCorpus,
    name_of,
)
from mtrain.config.sections.data import DataConfig
from mtrain.data import Pair
from mtrain.errors import DataError

log = logging.getLogger(__name__)

TOY_FOLDER = Path(__file__).parents[1] / "toy"
ToySplit = Literal["train", "validation", "test"]
LineCorpus = TextCorpus | TsvCorpus | JsonlCorpus | SacrebleuCorpus
_WILDCARD = re.compile(r"(\*|\?|\[[^]]+\])")


def files_of(corpus: Corpus) -> list[Path]:
    """The local files of a corpus. Raises DataError if one does not exist, or if a source file has no
    matching target file, or the reverse."""
    if isinstance(corpus, HubCorpus):
        return sorted(path for path in Path(corpus.hub).rglob("*") if path.is_file())
    if isinstance(corpus, ToyCorpus):
        return []
    if isinstance(corpus, ParquetCorpus):
        files = expand(corpus.parquet)
    else:
        files = [*chain.from_iterable(zip(*files_by_pair(corpus), strict=True))]
        files += chain.from_iterable(further_references(corpus))
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: {'not a file' if file.exists() else 'no such file'}")
    return files


def existing_files(corpus: Corpus) -> list[Path]:
    """The local files of a corpus; none if one does not exist, which is reported when it is read."""
    with suppress(DataError):
        return files_of(corpus)
    return []


def input_files(data: DataConfig) -> list[Path]:
    """The local files of the corpora and test sets of a config that exist."""
    corpora = data.all_corpora.values()
    local = (corpus for corpus in corpora if not isinstance(corpus, SacrebleuCorpus))  # may be downloaded
    return [*chain.from_iterable(map(existing_files, local))]


def further_references(corpus: Corpus) -> list[list[Path]]:
    """The files of each reference of a test set besides the targets of its pairs."""
    if isinstance(corpus, SacrebleuCorpus):
        return [[file] for file in sacrebleu_files(corpus.sacrebleu, corpus.langs)[2:]]
    if not isinstance(corpus, TextTestSet):
        return []
    return [
        _partners(corpus.source, name) if _WILDCARD.search(name) else expand(name)  # of all source files
        for name in corpus.references
    ]


def files_by_pair(corpus: LineCorpus) -> list[tuple[Path, ...]]:
    """The files of a corpus of lines; source files with their target files. They may be missing, or pipes.
    Raises DataError if a source file has no matching target file, or the reverse, or if a pattern matches
    nothing."""
    if isinstance(corpus, SacrebleuCorpus):
        return [tuple(sacrebleu_files(corpus.sacrebleu, corpus.langs)[:2])]
    if not isinstance(corpus, TextCorpus):
        return [(file,) for file in expand(name_of(corpus))]
    return [*zip(expand(corpus.source), _partners(corpus.source, corpus.target), strict=True)]


def place_of(corpus: Corpus, number: int) -> str:
    """The location of a pair, as `file:line`, or `pattern:line` in a corpus of several files. `number` counts
    from 1."""
    is_after_header = isinstance(corpus, TsvCorpus) and corpus.header
    return f"{name_of(corpus)}:{number + is_after_header}"


def expand(pattern: str) -> list[Path]:
    """The files that match the pattern, sorted by name, or the one file of this name."""
    names = [] if Path(pattern).exists() else sorted(glob.glob(pattern))  # noqa: PTH207 (absolute)
    return [Path(name) for name in names or [pattern]]


def _partners(pattern: str, other: str) -> list[Path]:
    """The file of the other pattern that belongs to each file of the first: the wildcards stand for the same
    text.

    Raises DataError if a file of either side has no partner, if that cannot be told because the patterns do
    not have the same number of wildcards, or if a pattern matches nothing.
    """
    files, others = _by_wildcards(pattern), _by_wildcards(other)
    if not files or not others or len(next(iter(files))) != len(next(iter(others))):
        sources, partners = expand(pattern), expand(other)
        if len(sources) != len(partners):
            counts = f"{pattern} matches {len(sources)} files but {other} matches {len(partners)}"
            raise DataError(f"{counts}; each source file needs one target or reference file")
        if len(partners) > 1:
            cure = "give patterns with the same wildcards, or a corpus for each pair of files"
            raise DataError(f"{pattern} and {other}: cannot tell which files belong together; {cure}")
        return partners
    for found, expected, missing in ((files, others, other), (others, files, pattern)):
        for text, file in found.items():
            if text not in expected:
                raise DataError(f"{file}: no file of {missing} belongs to it")
    # The order of the names may differ between the sides: 1.en, 10.en, but 10_de.txt, 1_de.txt.
    return [others[text] for text in files]


def _by_wildcards(pattern: str) -> dict[tuple[str, ...], Path]:
    """The files of a pattern, by what its wildcards stand for; none if a name does not match. Raises
    DataError if there are wildcards, but no file."""
    files = expand(pattern)
    if files == [Path(pattern)] and _WILDCARD.search(pattern) and not files[0].exists():
        raise DataError(f"{pattern}: no such file")
    parts = _WILDCARD.split(str(Path(pattern)))
    groups = {"*": "([^/]*)", "?": "([^/])"}
    named = (groups.get(part, "(.)") if i % 2 else re.escape(part) for i, part in enumerate(parts))
    expression = "".join(named)
    found = {file: re.fullmatch(expression, str(file), re.DOTALL) for file in files}
    return {match.groups(): file for file, match in found.items() if match} if all(found.values()) else {}


@cache
def sacrebleu_files(name: str, langs: str) -> list[Path]:
    """The source file of a test set, then each reference file, with one sentence per line. They
    are downloaded unless they are in sacreBLEU's folder.

    Raises DataError if that fails, or if the test set has no reference.
    """
    from sacrebleu.dataset import DATASETS
    from sacrebleu.utils import SACREBLEU_DIR

    log.info("data: test set %s of sacreBLEU, cached in %s", name, SACREBLEU_DIR)
    dataset: Any = DATASETS[name]
    try:
        references, source = dataset.get_reference_files(langs), dataset.get_source_file(langs)
    except (Exception, SystemExit) as error:  # a wrong checksum ends in SystemExit
        is_exit = isinstance(error, SystemExit)
        reason = "sacreBLEU gave up; see its message above" if is_exit else " ".join(str(error).split())
        raise DataError(
            f"{name}: cannot download the test set: {reason}; run "
            f"`sacrebleu -t {name} -l {langs} --echo src` on a machine with a network, and copy its folder "
            f"~/.sacrebleu to {SACREBLEU_DIR} on this machine"
        ) from None
    if not references:
        raise DataError(f"{name}: this test set has no reference for {langs}; choose another one")
    return [Path(source), *map(Path, references)]


def load_dataset(corpus: HubCorpus) -> Any:
    """A memory-mapped `datasets.Dataset`."""
    import datasets

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # errors are reported below, in one line
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    whole, split = Path(corpus.hub), Path(corpus.hub, corpus.split)
    try:
        if (whole / "state.json").is_file() and corpus.split == "train":
            return datasets.load_from_disk(whole)
        if (split / "state.json").is_file():
            return datasets.load_from_disk(split)
        return datasets.load_dataset(corpus.hub, corpus.config, split=corpus.split, revision=corpus.revision)
    except Exception as error:  # the library and its dependencies raise dozens of exception types
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise DataError(f"{name_of(corpus)}: cannot load the dataset: {reason}") from error


def toy_pairs(split: ToySplit) -> list[Pair]:
    """The sentence pairs of a split of the bundled toy corpus, English to French: 5,000 for training, 300 for
    validation and 300 for test. `scripts/make_toy_corpus.py` generates the corpus and describes it."""
    text = (TOY_FOLDER / f"{split}.tsv").read_text(encoding="utf-8")
    return [Pair(*line.split("\t")) for line in text.splitlines()]
