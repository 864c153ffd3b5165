"""Every key of the configuration: its type, default, unit and range, in one place.

The sections are frozen and strict: an unknown key is refused with the nearest real one.
"""

import difflib
import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
MicroBatchTokens = PositiveInt | Literal["auto"]
Normalization = Literal["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"]
Preset = Literal["auto", "tiny", "small", "base", "big", "tiny_deep", "small_deep", "base_deep", "big_deep"]
Positions = Literal["sinusoidal", "sinusoidal_interleaved", "learned", "rotary"]
Tied = Literal["none", "decoder", "all"]
Schedule = Literal["inverse_sqrt", "cosine", "linear", "constant"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Switch = Literal["auto", "on", "off"]
Stop = Literal["default", "first_k", "exact"]
Format = Literal["marian", "ctranslate2"]
Workers = Annotated[int, Field(ge=1, le=64)] | Literal["auto"]
Samples = Annotated[int, Field(ge=1, le=1024)]
Part = Literal["encoder", "decoder", "embeddings"]


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, and helpful about misspelt keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if not isinstance(values, (dict, cls)):
            raise ValueError("expected keys and values")
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                close = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.5)
                hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(cls.model_fields)}"
                raise ValueError(f"unknown key '{key}'; {hint}")
        return values


class CorpusSpec(Section):
    """What every kind of corpus has."""

    weight: float = Field(1.0, ge=0.001, le=1000, description="times each pair occurs in an epoch")


class TextCorpus(CorpusSpec):
    """Two plain-text files, line by line; `.gz` and `.zst` are decompressed."""

    source: str = Field(description="file of source sentences, one a line")
    target: str = Field(description="file of target sentences, one a line")


class TsvCorpus(CorpusSpec):
    """One tab-separated file."""

    tsv: str = Field(description="tab-separated file; `.gz` and `.zst` are decompressed")
    source_column: int = Field(0, ge=0, description="column of the source sentence, from 0")
    target_column: int = Field(1, ge=0, description="column of the target sentence, from 0")


class FieldsCorpus(CorpusSpec):
    """A corpus whose sides are named fields."""

    source_field: str = Field(description="field of the source; dots reach inside: `translation.en`")
    target_field: str = Field(description="field of the target")


class JsonlCorpus(FieldsCorpus):
    """One JSON object a line."""

    jsonl: str = Field(description="file with one JSON object a line; `.gz` and `.zst` are decompressed")


class ParquetCorpus(FieldsCorpus):
    """A Parquet file, or several."""

    parquet: str = Field(description="Parquet file, or a pattern such as `data/part-*.parquet`")


class HubCorpus(FieldsCorpus):
    """A data set of the Hugging Face hub (Parquet; script data sets no longer load), or a folder of one."""

    hub: str = Field(description="data set on the Hugging Face hub, such as `wmt/wmt14`, or a folder")
    config: str | None = Field(None, description="configuration of the data set, such as `de-en`")
    split: str = Field("train", description="split of the data set")
    revision: str | None = Field(None, description="commit or tag that pins the data set's contents")


class ToyCorpus(CorpusSpec):
    """The bundled English-French grammar."""

    toy: Literal["train", "validation", "test"] = Field(description="split of the bundled toy corpus")


class Holdout(Section):
    """Validation pairs taken out of the training corpora."""

    holdout: PositiveInt = Field(description="pairs held out of `train`, drawn by `seed`")


def _one_kind(value: Any) -> Any:
    """Validate a corpus as the kind that its keys tell, so that an error speaks of that kind alone."""
    if isinstance(value, CorpusSpec):
        return value
    kinds = [kind for key, kind in _KINDS.items() if isinstance(value, dict) and key in value]
    if len(kinds) != 1:
        raise ValueError("a corpus is one of: source (with target), tsv, jsonl, parquet, hub, toy")
    return kinds[0].model_validate(value)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _corpora_or_holdout(value: Any) -> Any:
    if isinstance(value, dict) and any(str(key).startswith("hold") for key in value):
        return Holdout.model_validate(value)
    return value if isinstance(value, Holdout) else TypeAdapter(Corpora).validate_python(value)


AnyCorpus = TextCorpus | TsvCorpus | JsonlCorpus | ParquetCorpus | HubCorpus | ToyCorpus
_KINDS = {next(iter(kind.__annotations__)): kind for kind in get_args(AnyCorpus)}  # by its own first key
Corpus = Annotated[AnyCorpus, BeforeValidator(_one_kind)]
Corpora = Annotated[list[Corpus], BeforeValidator(_as_list)]
Validation = Annotated[list[Corpus] | Holdout, BeforeValidator(_corpora_or_holdout)]


class DataConfig(Section):
    """Which parallel text to learn from, to choose by, and to report on."""

    source_lang: str = Field(min_length=1, description="language code of the source, such as `en`")
    target_lang: str = Field(min_length=1, description="language of the target; BLEU's tokenizer follows it")
    train: Corpora = Field(min_length=1, description="a corpus, or a list of them")
    validation: Validation = Field(description="a corpus, a list, or `{holdout: N}`: N pairs of `train`")
    test: dict[str, Corpus] = Field({}, description="test sets by name, to evaluate on")
    max_length: int = Field(256, ge=2, le=65536, description="tokens, EOS counted; longer pairs are dropped")
    bad_lines: Literal["error", "skip"] = Field("error", description="invalid UTF-8, NUL, fields missing")
    subword_sampling: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="train on new segmentations each epoch: unigram's alpha, bpe's dropout"
    )

    @model_validator(mode="after")
    def _weights_are_for_training(self) -> Self:
        validation = self.validation if isinstance(self.validation, list) else []
        if any(corpus.weight != 1 for corpus in (*validation, *self.test.values())):
            raise ValueError("weights are for train; others take each pair once")
        return self


class TokenizerConfig(Section):
    """The SentencePiece subword vocabulary."""

    type: Literal["unigram", "bpe"] = Field("unigram", description="subword algorithm")
    vocab_size: int = Field(8000, ge=8, le=1_000_000, description="pieces of a vocabulary, all counted")
    joint: bool = Field(True, description="one vocabulary for both languages; false: one for each")
    character_coverage: float = Field(1.0, ge=0.98, le=1, description="share of characters that get a piece")
    byte_fallback: bool = Field(True, description="spell other characters as bytes; nothing is unknown")
    normalization: Normalization = Field("nmt_nfkc", description="of Unicode; `_cf` also lowercases")
    symbols: list[str] = Field([], description="tags that are never split, such as `<bt>`")
    path: str | None = Field(None, description="take that of this model or run folder; other keys must agree")

    @model_validator(mode="after")
    def _symbols_are_usable(self) -> Self:
        if len(set(self.symbols)) < len(self.symbols) or any(s.split() != [s] for s in self.symbols):
            raise ValueError("symbols must be distinct, not empty, and without spaces")
        if taken := [s for s in self.symbols if re.fullmatch(r"<(s|/s|pad|unk|0x[0-9A-F]{2})>", s)]:
            raise ValueError(f"symbols: {taken[0]} is a piece of its own already")
        return self


PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "ffn_dim": 256, "heads": 4, "encoder_layers": 4, "decoder_layers": 4},
    "small": {"d_model": 256, "ffn_dim": 1024, "heads": 4, "encoder_layers": 3, "decoder_layers": 3},
    "base": {"d_model": 512, "ffn_dim": 2048, "heads": 8, "encoder_layers": 6, "decoder_layers": 6},
    "big": {"d_model": 1024, "ffn_dim": 4096, "heads": 16, "encoder_layers": 6, "decoder_layers": 6},
}
# Nearly all time of a translation goes into the decoder; layers of the encoder make up for the quality (Kasai
# et al., "Deep Encoder, Shallow Decoder", ICLR 2021).
for _name, _layers in {"tiny": 6, "small": 6, "base": 12, "big": 12}.items():
    PRESETS[f"{_name}_deep"] = {**PRESETS[_name], "encoder_layers": _layers, "decoder_layers": 1}


class Architecture(Section):
    """The shape of the Transformer. A preset fills the sizes that are not given."""

    preset: Preset | None = Field(None, description="sizes by name; deep: shallow decoder; auto: by corpus")
    d_model: int = Field(128, ge=2, le=16384, description="width of the model; a multiple of `heads`")
    heads: int = Field(4, ge=1, le=256, description="attention heads of each layer")
    encoder_layers: int = Field(4, ge=1, le=256, description="layers of the encoder")
    decoder_layers: int = Field(4, ge=1, le=256, description="layers of the decoder")
    ffn_dim: int = Field(256, ge=1, le=65536, description="inner width of the feed-forward blocks")
    dropout: Fraction = Field(0.1, description="of embeddings and the outputs of sublayers")
    attention_dropout: Fraction = Field(0.0, description="of attention weights")
    activation_dropout: Fraction | None = Field(None, description="inside feed-forward; null: as `dropout`")
    word_dropout: Fraction = Field(0.0, description="of whole words of source and target input")
    activation: Literal["relu", "gelu", "silu", "swiglu"] = Field("relu", description="non-linearity")
    norm: Literal["pre", "post"] = Field("pre", description="layer norm before a sublayer or after it")
    positions: Positions = Field("sinusoidal", description="sines, then cosines, unless interleaved")
    tie_embeddings: Tied = Field("all", description="decoder: of target and output; all: of the source too")
    output_bias: bool = Field(False, description="whether the output projection has a bias")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and str(values.get("preset")) in PRESETS:
            return {**PRESETS[str(values["preset"])], **values, "preset": None}
        return values

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(f"d_model ({self.d_model}) must be a multiple of heads ({self.heads})")
        if self.positions.startswith("sinusoidal") and self.d_model % 2:
            raise ValueError("sinusoidal positions need an even d_model")
        if self.positions == "rotary" and (self.d_model // self.heads) % 2:
            raise ValueError("rotary positions need an even d_model / heads")
        return self


class ModelConfig(Architecture):
    """The architecture with what the tokenizer adds to it: all that the network needs to be built."""

    source_vocab_size: PositiveInt = Field(description="pieces of the source vocabulary")
    target_vocab_size: PositiveInt = Field(description="pieces of the target vocabulary")
    max_positions: PositiveInt = Field(description="positions that a learned table holds, tokens")
    pad_id: int = Field(0, ge=0, description="token id that fills batches; may equal bos_id")
    unk_id: int = Field(1, ge=0, description="token id of what the vocabulary lacks")
    bos_id: int = Field(2, ge=0, description="token id that starts the target")
    eos_id: int = Field(3, ge=0, description="token id that ends every sentence")


class TrainingConfig(Section):
    """The recipe: from where, how long, how fast, how much at a time."""

    init_from: str | None = Field(None, description="run or model to start as: weights, tokenizer, sizes")
    freeze: list[Part] = Field([], description="parts not trained; embeddings: positions, tied output too")
    max_steps: PositiveInt | None = Field(None, description="optimizer steps; any limit ends training")
    max_epochs: PositiveInt | None = Field(None, description="passes over the training pairs")
    max_minutes: PositiveFloat | None = Field(None, description="minutes of training and validation, in all")
    batch_tokens: PositiveInt = Field(4096, description="padded tokens of a step, on the longer side")
    micro_batch_tokens: MicroBatchTokens = Field(
        "auto", description="padded tokens of a micro-batch; auto: what fits in memory"
    )
    learning_rate: PositiveFloat = Field(0.001, le=10, description="peak rate, reached at the end of warm-up")
    schedule: Schedule = Field("inverse_sqrt", description="decay after warm-up; cosine, linear end at zero")
    warmup_steps: int = Field(2000, ge=0, description="steps of linear rise from zero to the peak")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.98), strict=False, description="AdamW's moment decay")
    weight_decay: float = Field(0.0, ge=0, le=10, description="AdamW's decoupled decay, of matrices alone")
    clip_norm: float = Field(1.0, ge=0, le=1e9, description="largest gradient norm; 0: no limit")
    label_smoothing: Fraction = Field(0.1, description="probability mass spread over the whole vocabulary")
    r_drop: float = Field(0.0, ge=0, le=1000, description="alpha of R-Drop: each pair passes twice; try 5")
    ema_decay: Fraction | None = Field(None, description="use a moving average of the weights; per step")
    average_checkpoints: PositiveInt = Field(1, description="use the mean of the weights of so many")
    precision: Precision = Field("auto", description="of matrix products; auto: the fastest there is")
    compile: Switch = Field("auto", description="by torch.compile; auto: on GPUs that Triton is for")
    validate_every: PositiveInt = Field(500, description="steps between validations; one more at the end")
    validation_beam_size: int = Field(1, ge=1, le=128, description="beams for the translations it scores")
    checkpoint_every: PositiveInt = Field(500, description="steps between checkpoints; one more at the end")
    keep_checkpoints: PositiveInt = Field(
        3, description="kept: the newest, as many at multiples of checkpoint_every, the best"
    )
    log_every: PositiveInt = Field(50, description="steps between lines of metrics.jsonl")
    best_metric: Literal["bleu", "chrf", "nll"] = Field("bleu", description="score that picks the best")
    patience: PositiveInt | None = Field(10, description="validations without improvement that end training")

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if self.max_steps is None and self.max_epochs is None:
            if self.max_minutes is None:
                raise ValueError("set at least one of max_steps, max_epochs, max_minutes")
            if self.schedule in ("cosine", "linear"):
                raise ValueError("this schedule needs max_steps or max_epochs to end at")
        if self.average_checkpoints > 1 and self.ema_decay is not None:
            raise ValueError("give ema_decay or average_checkpoints, not both")
        if self.average_checkpoints > self.keep_checkpoints + 1:
            raise ValueError("average_checkpoints needs keep_checkpoints of at least one less")
        return self

    @property
    def micro_batch_limit(self) -> int:
        """Maximum padded tokens per side of a micro-batch; R-Drop processes each micro-batch twice."""
        if self.micro_batch_tokens == "auto":
            return self.batch_tokens
        return min(
            self.batch_tokens, (self.micro_batch_tokens + 1) // 2 if self.r_drop else self.micro_batch_tokens
        )


class DecodingConfig(Section):
    """How translations are searched for."""

    beam_size: int = Field(5, ge=1, le=128, description="hypotheses kept at each step; 1: greedy")
    length_penalty: float = Field(1.0, ge=-10, le=10, description="score is log-probability / length ** this")
    coverage_penalty: float = Field(0.0, ge=0, le=10, description="beta of GNMT: against leaving words out")
    stop: Stop = Field("default", description="done: by Hugging Face's rule; at K ends; when no beam can win")
    max_length_ratio: float = Field(1.5, ge=0, le=100, description="longest output, tokens: this x source")
    max_length_offset: int = Field(10, ge=1, le=65536, description="longest output, tokens: constant part")
    min_length_ratio: float = Field(0.0, ge=0, le=100, description="shortest output, tokens: this x source")
    min_length_offset: int = Field(0, ge=0, le=65536, description="shortest output, tokens: constant part")
    no_repeat_ngram: int = Field(0, ge=0, le=100, description="no n-gram of so many tokens twice; 0: any")
    forbidden_ids: list[Annotated[int, Field(ge=0)]] = Field([], description="ids of tokens never to be said")
    force_eos: bool = Field(False, description="what reaches the limit ends in EOS, at no cost")
    renormalize: bool = Field(False, description="share a barred token's probability among the others")
    samples: Samples | None = Field(None, description="translations drawn at random; null: searched for")
    temperature: float = Field(1.0, gt=0, le=100, description="of samples: below 1 the likely grow likelier")
    top_k: int = Field(0, ge=0, description="draw from so many likeliest tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens of so much probability")
    seed: int = Field(1, ge=0, lt=2**63, description="of samples")
    mbr: Literal["chrf", "bleu"] | None = Field(None, description="choose what is most like the others found")
    batch_tokens: PositiveInt = Field(8192, description="padded source tokens x hypotheses of a batch")
    precision: Precision = Field("auto", description="as in training; on a CPU of large products alone")
    workers: Workers = Field(
        "auto", description="batches decoded side by side, by processes that each hold the model"
    )

    @model_validator(mode="after")
    def _search_or_sample(self) -> Self:
        if self.min_length_ratio > self.max_length_ratio or self.min_length_offset > self.max_length_offset:
            raise ValueError("min_length_ratio and min_length_offset must not exceed those of max_length")
        if self.samples is None and (self.temperature != 1 or self.top_k or self.top_p != 1):
            raise ValueError("temperature, top_k and top_p are for drawing; give samples too")
        if self.mbr and self.hypotheses == 1:
            raise ValueError("mbr needs a choice: samples, or beam_size, of 2 or more")
        return self

    @property
    def hypotheses(self) -> int:
        """How many translations of a sentence are decoded side by side."""
        return self.samples or self.beam_size


class ExportConfig(Section):
    """What the model is to be exported to one day."""

    require: list[Format] = Field([], description="formats that `mtrain export` must be able to write")


class Config(Section):
    """A whole experiment."""

    run_dir: str = Field(pattern=r"^[^\x00]+$", description="folder of the run: checkpoints, metrics, model")
    seed: int = Field(1, ge=0, lt=2**63, description="of weights, batch order, dropout and held-out pairs")
    data: DataConfig = Field(description="the corpora")
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="the subword vocabulary")
    model: Architecture = Field(Architecture(), description="the shape of the Transformer")
    training: TrainingConfig = Field(description="the recipe")
    decoding: DecodingConfig = Field(DecodingConfig(), description="the search for translations")
    export: ExportConfig = Field(ExportConfig(), description="other programs that are to use the model")

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        taken = self.tokenizer.path or self.training.init_from  # what is given must agree with that
        if self.training.init_from and self.model.preset:
            raise ValueError("model.preset: auto and training.init_from both choose the sizes; give one")
        if self.model.tie_embeddings == "all" and not self.tokenizer.joint and not taken:
            raise ValueError("model.tie_embeddings: all needs tokenizer.joint: true; use decoder with two")
        longest, budget = self.data.max_length, self.training.micro_batch_limit
        known = "max_length" in self.data.model_fields_set or not self.training.init_from
        if known and longest > budget:
            places = "training.batch_tokens, micro_batch_tokens" + (" / 2" if self.training.r_drop else "")
            raise ValueError(f"data.max_length ({longest}) must fit {places} ({budget})")
        return self


class ModelFolderConfig(Section):
    """`config.yaml` of a model folder: what a translator needs to know."""

    source_lang: str = Field(min_length=1, description="language code of the source")
    target_lang: str = Field(min_length=1, description="language code of the target")
    max_length: int = Field(ge=2, le=65536, description="longest source, tokens; longer lines are split")
    tokenizer: TokenizerConfig = Field(description="how the vocabulary was made")
    model: ModelConfig = Field(description="the network")
    decoding: DecodingConfig = Field(description="default search for translations")
