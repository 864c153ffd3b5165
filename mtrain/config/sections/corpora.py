"""The kinds of parallel corpora that a configuration can name."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import chain, count
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, model_serializer, model_validator

from mtrain.config.section import Count, FilePath, PositiveInt, Section, Weight


class CorpusSpec(Section):
    """The keys that every kind of corpus has."""

    name: Annotated[str, Field(pattern=r"^\S(.*\S)?$")] | None = Field(
        None,
        description="name of the corpus, in messages and in `data.stages`; null: its file, pattern or "
        "dataset; for `train` only",
    )
    weight: Weight = Field(
        1.0, description="number of times that each pair occurs in an epoch; for `train` only"
    )
    source_lang: str | None = Field(
        None, min_length=1, description="language code of its sources; null: `data.source_lang`"
    )
    target_lang: str | None = Field(
        None, min_length=1, description="language code of its targets; null: `data.target_lang`"
    )
    filters: Literal["off"] | None = Field(
        None, description="`off`: keep the pairs that break a rule of `data.filters`; for `train` only"
    )


class TextCorpus(CorpusSpec):
    """Two parallel plain-text files with one sentence per line, or several pairs of files."""

    source: FilePath = Field(
        description="file of source sentences, one per line, or a pattern such as `part-*.en`, which stands "
        "for all files that match it, in the order of their names; may be compressed (.gz, .zst)"
    )
    target: FilePath = Field(
        description="file of target sentences, one per line, or a pattern such as `part-*.de`, one for each "
        "file of `source`; may be compressed (.gz, .zst)"
    )


class TextTestSet(TextCorpus):
    """Plain-text files of source sentences and of one or more reference translations."""

    references: list[FilePath] = Field([], description="files of further reference translations")


class TsvCorpus(CorpusSpec):
    """One or more tab-separated files with one pair per line."""

    tsv: FilePath = Field(
        description="tab-separated file, or a pattern such as `part-*.tsv`; may be compressed (.gz, .zst)"
    )
    source_column: Count = Field(0, description="column of the source sentence, starting at 0")
    target_column: Count = Field(1, description="column of the target sentence, starting at 0")
    header: bool = Field(
        False, description="whether the first line of each file contains the names of the columns"
    )
    quotes: bool = Field(
        False,
        description="whether fields may be enclosed in double quotes, with quotes inside doubled, as in "
        "spreadsheet exports; a field that continues on the next line is an error",
    )

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Data folders that were prepared before these keys existed record the corpus without them."""
        values = serialize(self).items()
        return {key: value for key, value in values if value or key not in ("header", "quotes")}


class FieldsCorpus(CorpusSpec):
    """The keys of corpora whose sentences are in named fields."""

    source_field: str = Field(
        description="field of the source sentence; dots reach nested fields, unless a field has the whole "
        "name: `translation.en`"
    )
    target_field: str = Field(
        description="field of the target sentence; dots reach nested fields, unless a field has the whole "
        "name: `translation.de`"
    )


class JsonlCorpus(FieldsCorpus):
    """One or more JSON Lines files with one object per line."""

    jsonl: FilePath = Field(
        description="file with one JSON object per line, or a pattern such as `part-*.jsonl`; may be "
        "compressed (.gz, .zst)"
    )


class ParquetCorpus(FieldsCorpus):
    """One or more Parquet files."""

    parquet: FilePath = Field(description="Parquet file, or a pattern such as `data/part-*.parquet`")


class HubCorpus(FieldsCorpus):
    """A dataset on the Hugging Face Hub, a local folder with one, or a folder that `save_to_disk` of the
    library `datasets` wrote. Datasets with a loading script are not supported."""

    hub: FilePath = Field(
        description="dataset on the Hugging Face Hub, such as `wmt/wmt14`, or a local folder"
    )
    config: str | None = Field(None, description="configuration of the dataset, such as `de-en`")
    split: str = Field("train", description="split of the dataset")
    revision: str | None = Field(None, description="commit hash or tag that pins the version of the dataset")


class SacrebleuCorpus(CorpusSpec):
    """A public test set by its name in sacreBLEU, which downloads it once, to `~/.sacrebleu` or the folder in
    the environment variable `SACREBLEU`. `data.test` uses all of its references, the others the first."""

    sacrebleu: str = Field(
        description="name of the test set, such as `wmt24`; `sacrebleu --list` prints them"
    )
    langs: str = Field(description="language pair, such as `en-de`")

    @model_validator(mode="after")
    def _exists(self) -> Self:
        from sacrebleu.dataset import DATASETS

        if self.sacrebleu not in DATASETS:
            near = get_close_matches(self.sacrebleu, DATASETS, 1)
            hint = f"did you mean {near[0]}?" if near else "`sacrebleu --list` prints their names"
            raise ValueError(f"sacreBLEU has no test set {self.sacrebleu}; {hint}")
        pairs = DATASETS[self.sacrebleu].langpairs
        if self.langs not in pairs:
            known = ", ".join(pairs)
            raise ValueError(f"{self.sacrebleu} has no language pair {self.langs}; choose from {known}")
        return self


class ToyCorpus(CorpusSpec):
    """The bundled English-French toy corpus."""

    toy: Literal["train", "validation", "test"] = Field(description="split of the bundled toy corpus")


class Holdout(Section):
    """A validation set that is taken out of the training corpora."""

    holdout: PositiveInt = Field(
        description="number of pairs to hold out, drawn at random with `seed` from all corpora, whatever "
        "their weights; those of a direction have different sources. Training leaves out every pair with one "
        "of these sources or, if the corpora have several directions, with one of these sentences on either "
        "side"
    )


AnyCorpus = TextCorpus | TsvCorpus | JsonlCorpus | ParquetCorpus | HubCorpus | SacrebleuCorpus | ToyCorpus
_KINDS = {next(iter(kind.__annotations__)): kind for kind in get_args(AnyCorpus)}  # by the first key of each
# Keys that tell the kinds of corpora and validation sets apart.
CORPUS_KINDS = frozenset({*_KINDS, "holdout"})
_EXPECTED = "expected a corpus, such as {source: train.en, target: train.de}"


def name_of(corpus: AnyCorpus) -> str:
    """The file, pattern or dataset that a corpus names; the source file if it names two."""
    if isinstance(corpus, ToyCorpus):
        return f"toy {corpus.toy}"
    return str(next(getattr(corpus, key) for key in _KINDS if hasattr(corpus, key)))


def names_of(corpora: Sequence[AnyCorpus]) -> list[str]:
    """The names of the corpora of `data.train`. A corpus without a name is named after its file, pattern or
    dataset, with a number if that name is taken. Raises ValueError if two corpora are given the same name."""
    given = [corpus.name for corpus in corpora if corpus.name is not None]
    for name in given:
        if given.count(name) > 1:
            raise ValueError(f"two corpora of data.train have the name {name}; each name must be unique")
    taken, names = set(given), []
    for corpus in corpora:
        own = name_of(corpus)
        numbered = chain([own], (f"{own} ({number})" for number in count(2)))
        name = corpus.name or next(free for free in numbered if free not in taken)
        taken.add(name)
        names.append(name)
    return names


def _one_kind(value: Any) -> Any:
    """Validate a corpus as the kind that its keys name, so that an error concerns that kind only."""
    if isinstance(value, CorpusSpec):
        return value
    if not isinstance(value, dict):
        raise ValueError(_EXPECTED)
    kinds = [key for key in _KINDS if key in value]
    if len(kinds) != 1:
        found = f"; got {' and '.join(kinds)}" if kinds else ""
        known = "source (with target), tsv, jsonl, parquet, hub, sacrebleu, toy"
        raise ValueError(f"a corpus has exactly one of {known}{found}")
    return _KINDS[kinds[0]].model_validate(value)


def _test_set(value: Any) -> Any:
    is_text = isinstance(value, dict) and "source" in value
    return TextTestSet.model_validate(value) if is_text else _one_kind(value)


def _as_list(value: Any) -> Any:
    if not isinstance(value, (dict, list)) or not value:
        raise ValueError(f"{_EXPECTED}, or a list of corpora")
    return [value] if isinstance(value, dict) else value


def _corpora_or_holdout(value: Any) -> Any:
    if isinstance(value, dict) and any(str(key).startswith("hold") for key in value):
        return Holdout.model_validate(value)
    return value if isinstance(value, Holdout) else TypeAdapter(Corpora).validate_python(value)


Corpus = Annotated[AnyCorpus, BeforeValidator(_one_kind)]
TestCorpus = Annotated[TextTestSet | AnyCorpus, BeforeValidator(_test_set)]
Corpora = Annotated[list[Corpus], BeforeValidator(_as_list)]
ValidationCorpora = Annotated[list[Corpus] | Holdout, BeforeValidator(_corpora_or_holdout)]
