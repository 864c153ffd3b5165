"""The whole configuration of a run, made of the sections of the other modules, and the configuration of a
model folder."""

import os
import re
from typing import Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from mtrain.config.languages import Direction, LanguageTags
from mtrain.config.section import FilePath, Section, Seed, TextLength
from mtrain.config.sections.data import DataConfig
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.model import Architecture, ModelConfig
from mtrain.config.sections.presets import SIZES
from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.config.sections.training import ENDING_AT_ZERO, TrainingConfig

Format = Literal["transformers", "marian", "pegasus", "m2m_100", "ctranslate2", "argos", "bergamot"]


class ExportConfig(Section):
    """The formats that the model will be exported to."""

    require: list[Format] = Field(
        [],
        description="formats that must be possible; `fit` fails at startup if the model rules one out; "
        "transformers: `marian`, `pegasus` or `m2m_100`, whichever supports the model",
    )


class Config(Section):
    """A complete experiment."""

    run_dir: FilePath = Field(
        pattern=r"^[^\x00]+$", description="run folder, with checkpoints, metrics and the trained model"
    )
    seed: Seed = Field(1, description="seed of weights, batch order, dropout and held-out pairs")
    data: DataConfig = Field(description="the corpora")
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="the subword tokenizer")
    model: Architecture = Field(Architecture(), description="the architecture")
    training: TrainingConfig = Field(TrainingConfig(), description="the training recipe")
    decoding: DecodingConfig = Field(DecodingConfig(), description="how translations are decoded")
    export: ExportConfig = Field(ExportConfig(), description="the formats that the model will be exported to")

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_depend_on_the_model(cls, values: Any) -> Any:
        """The defaults of a pair classifier, and the automatic recipe if no sizes are given."""
        found = values if isinstance(values, dict) else {}
        model, training = found.get("model", {}), found.get("training", {})
        data = found.get("data", {})
        if not all(isinstance(section, dict) for section in (values, model, training, data)):
            return values  # which is an error
        if model.get("head") == "pair_classifier":
            training = {"label_smoothing": 0.0, **training}
            if training.get("best_metric", "auto") == "auto":
                training["best_metric"] = "auc"
            if data.get("corruptions") is None:
                data = {**data, "corruptions": {}}
            return {**values, "training": training, "data": data}
        has_sizes = {"preset", *SIZES} & model.keys()
        return values if has_sizes else {**values, "model": {**model, "preset": "auto"}}

    @model_validator(mode="wrap")
    @classmethod
    def _make_language_tags_symbols(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Language tags are symbols of the tokenizer, unless the tokenizer of another model is reused."""
        config = validate(values)
        chosen = "language_tags" in config.data.model_fields_set or not config.training.init_from
        if chosen and not config.model.is_classifier:
            config.data.require_one_target_language()  # an initial model may have tags
        tokenizer = config.tokenizer
        missing = [tag for tag in config.data.tags if tag not in tokenizer.symbols]
        if tokenizer.path or config.training.init_from:  # whose vocabulary may have more tags
            return config
        config.data.require_known_tags()
        if not missing:
            return config
        tokenizer = tokenizer.model_copy(update={"symbols": [*tokenizer.symbols, *missing]})
        TokenizerConfig.model_validate(tokenizer.model_dump())
        return config.model_copy(update={"tokenizer": tokenizer})

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        training, auto = self.training, self.model.preset == "auto"
        # `auto` plans the steps of a number of minutes, and of fine-tuning.
        plans = auto and (training.max_minutes or training.init_from)
        planned = training.max_steps or training.max_epochs or training.planned_steps or plans
        if training.schedule in ENDING_AT_ZERO and not planned:
            raise ValueError(f"training.schedule: {training.schedule} needs max_steps or max_epochs")
        if self.data.folder and os.path.abspath(self.data.folder) == os.path.abspath(self.run_dir):  # noqa: PTH100
            cure = "give another folder, such as data/encoded"
            raise ValueError(f"data.folder must differ from run_dir; {cure}")
        # The settings of a reused tokenizer are compared with the config later.
        reused = self.tokenizer.path or self.training.init_from
        if self.model.tie_embeddings == "all" and not self.tokenizer.joint and not reused:
            raise ValueError("model.tie_embeddings: all needs tokenizer.joint: true; set it, or use decoder")
        self._require_visible_changes(reused is not None)
        if self.data.language_tags.startswith("codes") and not reused:
            raise ValueError("data.language_tags: codes are for imported models; give training.init_from")
        longest = self.longest_sequence
        if auto and "batch_tokens" not in training.model_fields_set:  # the batch will be large enough
            training = training.model_copy(update={"batch_tokens": max(longest, training.batch_tokens)})
        budget = training.micro_batch_limit
        known = "max_length" in self.data.model_fields_set or not self.training.init_from
        if known and longest > budget:
            halved = self.training.r_drop and self.training.micro_batch_tokens != "auto"
            limits = "training.batch_tokens and micro_batch_tokens" + (" / 2" if halved else "")
            name = "data.max_length" if longest == self.data.max_length else "twice data.max_length"
            raise ValueError(f"{name} ({longest}) must not exceed {limits} ({budget})")
        return self

    @model_validator(mode="after")
    def _head_agrees(self) -> Self:
        training, model = self.training, self.model
        if not model.is_classifier:
            if training.best_metric == "auc":
                raise ValueError("training.best_metric: auc needs model.head: pair_classifier")
            if self.data.corruptions is not None:
                raise ValueError("data.corruptions needs model.head: pair_classifier")
            return self
        if training.best_metric not in ("auc", "nll"):
            problem = f"{training.best_metric} scores translations"
            raise ValueError(f"training.best_metric: {problem}; use auc or nll")
        if training.r_drop or "decoder" in training.freeze:
            key = "r_drop" if training.r_drop else "freeze: decoder"
            raise ValueError(f"training.{key} does not apply to a pair classifier; remove it")
        if not self.tokenizer.joint:
            raise ValueError("model.head: pair_classifier needs tokenizer.joint: true")
        if self.data.language_tags != "none":
            raise ValueError("data.language_tags does not apply to a pair classifier; remove it")
        if self.data.augment is not None and self.data.augment.noise:
            raise ValueError("data.augment.noise would be examples of good pairs for a classifier; remove it")
        return self

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that the model reads: a side or, of a classifier, both of them."""
        return self.data.max_length * (2 if self.model.is_classifier else 1)

    def _require_visible_changes(self, is_reused: bool) -> None:
        """Raise ValueError if a new tokenizer could not represent what `data.augment` does."""
        augment, tokenizer = self.data.augment, self.tokenizer
        if augment is None or is_reused:
            return
        if augment.cases and tokenizer.normalization.endswith("_cf"):
            raise ValueError(
                f"data.augment.{next(iter(augment.cases))} has no effect with tokenizer.normalization: "
                f"{tokenizer.normalization}, which lowercases all text; leave out one of the two"
            )
        if augment.noise and not tokenizer.byte_fallback:
            reason = "because the vocabulary lacks its characters"
            raise ValueError(f"data.augment.noise needs tokenizer.byte_fallback: true, {reason}")


class ModelFolderConfig(Section):
    """`config.yaml` of a model folder: all settings that translation needs."""

    source_lang: str = Field(min_length=1, description="language code of the source")
    target_lang: str = Field(min_length=1, description="language code of the target")
    language_tags: LanguageTags = Field("none", description="language tags before each source, or codes")
    languages: list[str] = Field([], description="languages that the vocabulary has codes for")
    normalizes_punctuation: bool = Field(
        False, description="whether to normalize punctuation by the rules of Moses before segmentation"
    )
    max_length: TextLength = Field(description="longest source, in tokens; longer lines are split")
    tokenizer: TokenizerConfig = Field(description="the settings that the tokenizer was made with")
    model: ModelConfig = Field(description="the architecture, vocabulary sizes and token ids")
    decoding: DecodingConfig = Field(description="default decoding settings")

    @property
    def direction(self) -> Direction:
        """The languages of the model, `und` where they are not known."""
        return Direction(self.source_lang, self.target_lang)

    @property
    def example(self) -> Direction | None:
        """Two of `languages`, if there are any: the model's own or, if they are not known, the first and the
        last."""
        if not self.languages:
            return None
        pairs = (self.source_lang, self.languages[0]), (self.target_lang, self.languages[-1])
        return Direction(*(other if code == "und" else code for code, other in pairs))

    @property
    def target_languages(self) -> list[str]:
        """The languages that the model translates into, from its language tags if it uses any."""
        if self.language_tags.startswith("codes"):
            return self.languages
        tags = [symbol[2:-1] for symbol in self.tokenizer.symbols if re.fullmatch(r"<2[\w-]+>", symbol)]
        return [self.target_lang] if self.language_tags == "none" else tags
