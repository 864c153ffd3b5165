"""The `data` section."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from mtrain.config.augment import Augment
from mtrain.config.corpora import (
    Corpora,
    CorpusSpec,
    FieldsCorpus,
    SacrebleuCorpus,
    TestSet,
    TsvCorpus,
    Validation,
)
from mtrain.config.filters import Filters
from mtrain.config.languages import base_language, scripts_of_language
from mtrain.config.section import Section


class DataConfig(Section):
    """The corpora for training, validation and testing."""

    source_lang: str = Field(min_length=1, description="language code of the source, such as `en`")
    target_lang: str = Field(
        min_length=1, description="language code of the target, such as `de`; selects the tokenizer of BLEU"
    )
    train: Corpora = Field(description="training corpus, or a list of corpora")
    validation: Validation = Field(
        description="validation corpus, a list of corpora, or `{holdout: N}` for N pairs taken out of `train`"
    )
    test: dict[str, TestSet] = Field({}, description="test sets by name, for `mtrain evaluate`")
    folder: Annotated[str, Field(pattern=r"^[^\x00]+$")] | None = Field(
        None,
        description="folder of encoded pairs, which several runs may share; null: `data/` in the run folder",
    )
    max_length: int = Field(
        256,
        ge=2,
        le=65536,
        description="longest source and target, in tokens with EOS; longer pairs are dropped",
    )
    bad_lines: Literal["error", "skip"] = Field(
        "error", description="what to do with invalid UTF-8, NUL characters and missing fields"
    )
    filters: Filters | None = Field(
        None, description="rules that leave pairs out of `train`; null: none, but empty and too long pairs"
    )
    check: bool = Field(
        True, description="whether to check the corpora before they are first encoded, as `mtrain check` does"
    )
    subword_sampling: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="sample new segmentations in each epoch: alpha of unigram, dropout of BPE; null: never",
    )
    augment: Augment | None = Field(
        None, description="random changes to the pairs of `train`, which differ in each epoch; null: none"
    )
    window_pairs: int = Field(
        4_000_000,
        ge=1,
        description="about how many pairs are shuffled together and held in memory, at 150 bytes each",
    )

    def score_of(self, corpus: CorpusSpec) -> int | str | None:
        """The column or field of a training corpus with the scores that `filters.min_score` needs, if any."""
        if self.filters is None or self.filters.min_score is None or corpus.filters == "off":
            return None
        return self.filters.min_score.column

    @property
    def changes_pairs(self) -> bool:
        """Whether the ids of training pairs differ from epoch to epoch."""
        return self.subword_sampling is not None or self.augment is not None

    @model_validator(mode="after")
    def _weights_are_for_training(self) -> Self:
        validation = self.validation if isinstance(self.validation, list) else []
        if any(corpus.weight != 1 for corpus in (*validation, *self.test.values())):
            raise ValueError("weight is allowed in data.train only; other corpora use each pair once")
        return self

    @field_validator("filters", mode="after")
    @classmethod
    def _none_without_rules(cls, filters: Filters | None) -> Filters | None:
        return None if filters == Filters() else filters

    @field_validator("augment", mode="after")
    @classmethod
    def _none_without_changes(cls, augment: Augment | None) -> Augment | None:
        return None if augment == Augment() else augment

    @model_validator(mode="after")
    def _filters_are_for_training(self) -> Self:
        validation = self.validation if isinstance(self.validation, list) else []
        if any(corpus.filters for corpus in (*validation, *self.test.values())):
            raise ValueError("filters is allowed in data.train only; other corpora are never filtered")
        return self

    @model_validator(mode="after")
    def _filters_can_be_applied(self) -> Self:
        if self.filters is None:
            return self
        for code in (self.source_lang, self.target_lang) if self.filters.script else ():
            if not scripts_of_language(code):
                raise ValueError(
                    f"filters.script: the script of {code} is not known; write {code}-Latn, for example"
                )
        if self.filters.min_score is not None:
            column = self.filters.min_score.column
            kind, needed = (
                (TsvCorpus, "tsv") if isinstance(column, int) else (FieldsCorpus, "jsonl, parquet or hub")
            )
            if not all(isinstance(corpus, kind) or corpus.filters for corpus in self.train):
                raise ValueError(
                    f"filters.min_score: column {column} needs {needed} corpora; others need filters: off"
                )
        return self

    @model_validator(mode="after")
    def _languages_of_named_sets(self) -> Self:
        validation = self.validation if isinstance(self.validation, list) else []
        for corpus in (*self.train, *validation, *self.test.values()):
            if isinstance(corpus, SacrebleuCorpus):
                languages = [base_language(code) for code in (self.source_lang, self.target_lang)]
                if [base_language(code) for code in corpus.langs.split("-")] != languages:
                    pair = f"{self.source_lang}-{self.target_lang}"
                    raise ValueError(
                        f"{corpus.sacrebleu} has langs {corpus.langs}, but data translates {pair}"
                    )
        return self
