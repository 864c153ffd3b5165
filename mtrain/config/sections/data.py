"""The `data` section."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mtrain.config.languages import Direction, LanguageTags, is_same_language, scripts_of_language
from mtrain.config.section import FilePath, PositiveFraction, PositiveInt, Section, TextLength
from mtrain.config.sections.augment import Augment
from mtrain.config.sections.corpora import (
    CORPUS_KINDS,
    AnyCorpus,
    Corpora,
    CorpusSpec,
    FieldsCorpus,
    SacrebleuCorpus,
    TestCorpus,
    TsvCorpus,
    ValidationCorpora,
    names_of,
)
from mtrain.config.sections.corruptions import Corruptions
from mtrain.config.sections.filters import Filters
from mtrain.config.sections.stages import Stage, check_stages


class DataConfig(Section):
    """The corpora for training, validation and testing."""

    source_lang: str = Field(min_length=1, description="language code of the source, such as `en`")
    target_lang: str = Field(
        min_length=1, description="language code of the target, such as `de`; selects the tokenizer of BLEU"
    )
    language_tags: LanguageTags = Field(
        "none",
        description="language tags before each source: `target` adds `<2de>`, `both` adds `<en> <2de>`; "
        "required if the corpora have several target languages; an imported M2M-100 or NLLB-200 model sets "
        "`codes` or `codes_last`",
    )
    train: Corpora = Field(description="training corpus, or a list of corpora")
    validation: ValidationCorpora = Field(
        description="validation corpus, a list of corpora, or `{holdout: N}` for N pairs taken out of `train`"
    )
    test: dict[str, TestCorpus] = Field({}, description="test sets by name, scored at the end of `fit`")
    stages: Annotated[list[Stage], Field(min_length=1)] | None = Field(
        None,
        description="stages of training, one after another, each with shares of the corpora of `train`; "
        "null: all pairs of all corpora, by their `weight`",
    )
    temperature: Annotated[float, Field(ge=1, le=1000)] | None = Field(
        None,
        description="the share of a corpus is proportional to its size to the power of 1 / `temperature`: 1 "
        "keeps the proportions, 5 favors small corpora; null: corpora are mixed by their `weight`",
    )
    folder: Annotated[FilePath, Field(pattern=r"^[^\x00]+$")] | None = Field(
        None,
        description="folder of encoded pairs, which several runs may share; null: `data/` in the run folder",
    )
    max_length: TextLength = Field(
        256, description="longest source and target, in tokens with EOS; longer pairs are dropped"
    )
    bad_lines: Literal["error", "skip"] = Field(
        "error",
        description="error: stop at the first invalid UTF-8, NUL character or missing field; skip: drop and "
        "count such pairs; those of test sets are always errors",
    )
    filters: Filters | None = Field(
        None,
        description="rules that drop pairs from `train`; null: only empty and too long pairs are dropped",
    )
    check: bool = Field(
        True, description="whether to check the corpora before they are first encoded, as `mtrain check` does"
    )
    subword_sampling: PositiveFraction | None = Field(
        None,
        description="sample new segmentations in each epoch: alpha of unigram, dropout of BPE; null: never",
    )
    augment: Augment | None = Field(
        None, description="random changes to the pairs of `train`, which differ in each epoch; null: none"
    )
    corruptions: Corruptions | None = Field(
        None, description="the bad pairs that a pair classifier is trained on; null: all kinds equally often"
    )
    window_pairs: PositiveInt = Field(
        4_000_000,
        description="approximate number of pairs that are shuffled together and held in memory, at 150 bytes "
        "each; at least 250,000, and at least 1/1,024 of the corpus",
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

    @property
    def direction(self) -> Direction:
        """The direction of the corpora that do not give their own languages."""
        return Direction(self.source_lang, self.target_lang)

    def direction_of(self, corpus: CorpusSpec) -> Direction:
        """The languages of a corpus or test set."""
        source, target = self.direction
        if isinstance(corpus, SacrebleuCorpus) and self.language_tags != "none":
            source, target = corpus.langs.split("-")
        return Direction(corpus.source_lang or source, corpus.target_lang or target)

    @property
    def directions(self) -> list[Direction]:
        """The languages of each training corpus."""
        return [self.direction_of(corpus) for corpus in self.train]

    @property
    def has_several_directions(self) -> bool:
        """Whether the training corpora differ in their languages."""
        return len(set(self.directions)) > 1

    def common_direction(self, corpora: Iterable[CorpusSpec]) -> Direction:
        """The languages of some corpora, with `und` (undetermined) for a side whose languages differ."""
        sides = zip(*map(self.direction_of, corpora), strict=True)  # all sources, all targets
        return Direction(*(codes[0] if len({*codes}) == 1 else "und" for codes in sides))

    @property
    def target_languages(self) -> list[str]:
        """The languages of the targets of all corpora and test sets."""
        corpora = self.all_corpora.values()
        return list(dict.fromkeys(self.direction_of(corpus).target for corpus in corpora))

    def tag_of(self, corpus: CorpusSpec) -> str:
        """The language tag before each source of a corpus; see `Direction.tag`."""
        return self.direction_of(corpus).tag(self.language_tags)

    @property
    def tags(self) -> list[str]:
        """All language tags, each of which is one token."""
        words = (word for corpus in self.train for word in self.tag_of(corpus).split())
        return list(dict.fromkeys(words))

    @property
    def _other_corpora(self) -> dict[str, AnyCorpus]:
        """The corpora for validation and testing, by key."""
        validation = self.validation if isinstance(self.validation, list) else []
        named: dict[str, AnyCorpus] = {f"test.{name}": corpus for name, corpus in self.test.items()}
        return {f"validation.{index}": corpus for index, corpus in enumerate(validation)} | named

    @property
    def all_corpora(self) -> dict[str, AnyCorpus]:
        """All corpora and test sets, by key."""
        return {f"train.{index}": corpus for index, corpus in enumerate(self.train)} | self._other_corpora

    @model_validator(mode="after")
    def _languages_agree(self) -> Self:
        if self.language_tags == "none":
            return self
        directions = {name: self.direction_of(corpus) for name, corpus in self.all_corpora.items()}
        for name, direction in {"data": self.direction, **directions}.items():
            if wrong := [code for code in direction if not re.fullmatch("[A-Za-z0-9_-]+", code)]:
                problem = f"the language code {wrong[0]!r} cannot be a tag"
                raise ValueError(f"{name}: {problem}; use one such as de or pt-BR")
        return self

    def require_one_target_language(self) -> None:
        """Raise ValueError if the corpora and test sets have several target languages, but no tags."""
        for name, corpus in self.all_corpora.items() if self.language_tags == "none" else ():
            language = self.direction_of(corpus).target
            if not is_same_language(language, self.target_lang):
                found = f"data.{name} has the target language {language}"
                cure = "set language_tags: target for several target languages"
                raise ValueError(f"{found}, but target_lang is {self.target_lang}; {cure}")

    def require_known_tags(self) -> None:
        """Raise ValueError if a corpus or test set has a language tag that is in no training corpus."""
        others = self._other_corpora.items()
        directions = {f"data.{name}": self.direction_of(corpus) for name, corpus in others}
        for name, direction in {"data": self.direction, **directions}.items():
            for tag in direction.tag(self.language_tags).split():
                if tag not in self.tags:
                    known = f"no corpus in train has the language tag {tag}; they have {', '.join(self.tags)}"
                    raise ValueError(f"{name} has the direction {direction}, but {known}")

    @property
    def names(self) -> list[str]:
        """The names of the training corpora."""
        return names_of(self.train)

    @model_validator(mode="after")
    def _some_keys_are_for_training(self) -> Self:
        others = self._other_corpora.values()
        if any(corpus.weight != 1 for corpus in others):
            raise ValueError("weight is allowed in data.train only; other corpora use each pair once")
        if any(corpus.name is not None for corpus in others):
            raise ValueError("name is allowed in data.train only; the key of a test set is its name")
        if any(corpus.filters for corpus in others):
            raise ValueError("filters is allowed in data.train only; other corpora are never filtered")
        return self

    @model_validator(mode="after")
    def _stages_fit_the_corpora(self) -> Self:
        names = self.names
        if self.stages is not None:
            check_stages(self.stages, names)
        has_weights = any(corpus.weight != 1 for corpus in self.train)
        given = {"weight": has_weights, "temperature": self.temperature, "stages": self.stages}
        if len(several := [name for name, value in given.items() if value]) > 1:
            raise ValueError(f"{' and '.join(several)} are mutually exclusive; give one of them")
        return self

    @field_validator("filters", "augment", mode="after")
    @classmethod
    def _none_without_effect(cls, section: Section | None) -> Section | None:
        return None if section in (Filters(), Augment()) else section

    @model_validator(mode="after")
    def _filters_can_be_applied(self) -> Self:
        if self.filters is None:
            return self
        filtered = [corpus for corpus in self.train if not corpus.filters]
        codes = [code for corpus in filtered for code in self.direction_of(corpus)]
        for code in codes if self.filters.script else ():
            if not scripts_of_language(code):
                problem = f"the script of {code} is not known"
                language = re.split("[-_]", code)[0]
                raise ValueError(f"filters.script: {problem}; write {language}-Latn, for example")
        if self.filters.min_score is not None:
            column = self.filters.min_score.column
            of_tsv = isinstance(column, int)
            kind, needed = (TsvCorpus, "tsv") if of_tsv else (FieldsCorpus, "jsonl, parquet or hub")
            if not all(isinstance(corpus, kind) for corpus in filtered):
                cure = "others need filters: off"
                raise ValueError(f"filters.min_score: column {column} needs {needed} corpora; {cure}")
        return self

    @field_validator("test", mode="before")
    @classmethod
    def _test_sets_have_names(cls, value: Any) -> Any:
        keys = value.items() if isinstance(value, dict) else ()
        if any(key in CORPUS_KINDS and not isinstance(each, dict) for key, each in keys):
            raise ValueError("give each test set a name, such as test: {mine: {source: a.en, target: a.de}}")
        return value

    @model_validator(mode="after")
    def _languages_of_named_sets(self) -> Self:
        for corpus in self.all_corpora.values():
            if isinstance(corpus, SacrebleuCorpus):
                direction = self.direction_of(corpus)
                if not all(map(is_same_language, corpus.langs.split("-"), direction)):
                    found = f"{corpus.sacrebleu} has langs {corpus.langs}, but data translates {direction}"
                    raise ValueError(f"{found}; give it a source_lang and target_lang of its own")
        return self
