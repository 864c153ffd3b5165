"""Every key of the configuration: its type, default, range and meaning, in one place."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mtrain.config.corpora import Corpora, Corpus, Validation
from mtrain.config.presets import PRESETS
from mtrain.config.section import Section

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
MicroBatchTokens = PositiveInt | Literal["auto"]
Normalization = Literal["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"]
Preset = Literal["auto", "tiny", "small", "base", "big", "tiny_deep", "small_deep", "base_deep", "big_deep"]
Positions = Literal["sinusoidal", "sinusoidal_interleaved", "learned", "rotary"]
TiedEmbeddings = Literal["none", "decoder", "all"]
Schedule = Literal["inverse_sqrt", "cosine", "linear", "constant"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Switch = Literal["auto", "on", "off"]
Stop = Literal["default", "first_k", "exact"]
Format = Literal["marian", "ctranslate2"]
Workers = Annotated[int, Field(ge=1, le=64)] | Literal["auto"]
Samples = Annotated[int, Field(ge=1, le=1024)]
Part = Literal["encoder", "decoder", "embeddings"]


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
    test: dict[str, Corpus] = Field({}, description="test sets by name, for `mtrain evaluate`")
    max_length: int = Field(
        256,
        ge=2,
        le=65536,
        description="longest source and target, in tokens with EOS; longer pairs are dropped",
    )
    bad_lines: Literal["error", "skip"] = Field(
        "error", description="what to do with invalid UTF-8, NUL characters and missing fields"
    )
    subword_sampling: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="sample new segmentations in each epoch: alpha of unigram, dropout of BPE; null: never",
    )

    @model_validator(mode="after")
    def _weights_are_for_training(self) -> Self:
        validation = self.validation if isinstance(self.validation, list) else []
        if any(corpus.weight != 1 for corpus in (*validation, *self.test.values())):
            raise ValueError("weight is allowed in data.train only; other corpora use each pair once")
        return self


class TokenizerConfig(Section):
    """The SentencePiece subword tokenizer."""

    type: Literal["unigram", "bpe"] = Field("unigram", description="subword algorithm")
    vocab_size: int = Field(
        8000, ge=8, le=1_000_000, description="vocabulary size, including special tokens and bytes"
    )
    joint: bool = Field(True, description="one vocabulary for both languages; false: one for each")
    character_coverage: float = Field(
        1.0, ge=0.98, le=1, description="share of all characters in the text that the vocabulary covers"
    )
    byte_fallback: bool = Field(
        True, description="encode characters outside the vocabulary as bytes, not as <unk>"
    )
    normalization: Normalization = Field(
        "nmt_nfkc", description="SentencePiece's Unicode normalization; `_cf` also lowercases"
    )
    symbols: list[str] = Field([], description="user-defined tokens that are never split, such as `<bt>`")
    path: str | None = Field(
        None, description="run or model folder whose tokenizer is reused; the other keys must agree with it"
    )

    @model_validator(mode="after")
    def _symbols_are_usable(self) -> Self:
        if len(set(self.symbols)) < len(self.symbols) or any(s.split() != [s] for s in self.symbols):
            raise ValueError("symbols must be distinct, non-empty and without whitespace")
        if taken := [s for s in self.symbols if re.fullmatch(r"<(s|/s|pad|unk|0x[0-9A-F]{2})>", s)]:
            raise ValueError(f"symbols: {taken[0]} is a reserved token")
        return self


class Architecture(Section):
    """The architecture of the Transformer. A preset fills in the sizes that are not given."""

    preset: Preset | None = Field(
        None, description="sizes by name; `_deep`: one decoder layer; auto: by the number of training pairs"
    )
    d_model: int = Field(128, ge=2, le=16384, description="model width; must be a multiple of `heads`")
    heads: int = Field(4, ge=1, le=256, description="number of attention heads per layer")
    encoder_layers: int = Field(4, ge=1, le=256, description="number of encoder layers")
    decoder_layers: int = Field(4, ge=1, le=256, description="number of decoder layers")
    ffn_dim: int = Field(256, ge=1, le=65536, description="inner width of the feed-forward sublayers")
    dropout: Fraction = Field(0.1, description="dropout rate of embeddings and sublayer outputs")
    attention_dropout: Fraction = Field(0.0, description="dropout rate of attention weights")
    activation_dropout: Fraction | None = Field(
        None, description="dropout rate inside the feed-forward sublayers; null: same as `dropout`"
    )
    word_dropout: Fraction = Field(
        0.0, description="dropout rate of whole token embeddings, source and target"
    )
    activation: Literal["relu", "gelu", "silu", "swiglu"] = Field(
        "relu", description="activation function of the feed-forward sublayers"
    )
    norm: Literal["pre", "post"] = Field(
        "pre", description="layer normalization before or after each sublayer"
    )
    positions: Positions = Field(
        "sinusoidal", description="positional encoding; `sinusoidal` has all sines first, then all cosines"
    )
    tie_embeddings: TiedEmbeddings = Field(
        "all", description="shared weights; decoder: target embedding and output; all: source embedding, too"
    )
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
    """The architecture with the vocabulary sizes and token ids: all that is needed to build the model."""

    source_vocab_size: PositiveInt = Field(description="size of the source vocabulary")
    target_vocab_size: PositiveInt = Field(description="size of the target vocabulary")
    max_positions: PositiveInt = Field(description="number of learned positional embeddings")
    pad_id: int = Field(0, ge=0, description="id of the padding token; may equal bos_id")
    unk_id: int = Field(1, ge=0, description="id of the unknown token")
    bos_id: int = Field(2, ge=0, description="id of the token that begins every target")
    eos_id: int = Field(3, ge=0, description="id of the token that ends every sentence")


class TrainingConfig(Section):
    """The training recipe."""

    init_from: str | None = Field(
        None, description="run or model folder to start from; its weights, tokenizer and sizes are used"
    )
    freeze: list[Part] = Field(
        [], description="parts that are not trained; embeddings: positions and a tied output projection, too"
    )
    max_steps: PositiveInt | None = Field(
        None, description="optimizer steps; training ends at whichever limit is reached first"
    )
    max_epochs: PositiveInt | None = Field(None, description="passes over the training corpus")
    max_minutes: PositiveFloat | None = Field(
        None, description="minutes of training and validation, summed over resumed runs"
    )
    batch_tokens: PositiveInt = Field(
        4096, description="padded tokens per optimizer step, of the longer side; the effective batch size"
    )
    micro_batch_tokens: MicroBatchTokens = Field(
        "auto", description="padded tokens per forward and backward pass; auto: as many as fit in memory"
    )
    learning_rate: PositiveFloat = Field(
        0.001, le=10, description="peak learning rate, reached at the end of warm-up"
    )
    schedule: Schedule = Field(
        "inverse_sqrt", description="decay of the learning rate after warm-up; cosine and linear end at zero"
    )
    warmup_steps: int = Field(
        2000, ge=0, description="steps over which the learning rate rises linearly from zero"
    )
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.98), strict=False, description="AdamW's decay rates of the first and second moments"
    )
    weight_decay: float = Field(
        0.0, ge=0, le=10, description="AdamW's decoupled weight decay, applied to matrices only"
    )
    clip_norm: float = Field(1.0, ge=0, le=1e9, description="maximum norm of the gradient; 0: no clipping")
    label_smoothing: Fraction = Field(0.1, description="probability mass spread evenly over the vocabulary")
    r_drop: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="R-Drop's weight alpha, such as 5; each pair is processed twice; 0: off",
    )
    ema_decay: Fraction | None = Field(
        None, description="decay per step of an exponential moving average of the weights; null: off"
    )
    average_checkpoints: PositiveInt = Field(
        1, description="number of latest checkpoints whose weights are averaged for validation and the model"
    )
    precision: Precision = Field(
        "auto", description="precision of matrix products; auto: the fastest available"
    )
    compile: Switch = Field("auto", description="use torch.compile; auto: on GPUs that Triton supports")
    validate_every: PositiveInt = Field(
        500, description="steps between validations; the last one is at the end of training"
    )
    validation_beam_size: int = Field(
        1, ge=1, le=128, description="beam size in validation; 1: greedy search"
    )
    checkpoint_every: PositiveInt = Field(
        500, description="steps between checkpoints; the last one is at the end of training"
    )
    keep_checkpoints: PositiveInt = Field(
        3,
        description="number of newest checkpoints to keep; as many newest ones at multiples of "
        "checkpoint_every and the best one are also kept",
    )
    log_every: PositiveInt = Field(50, description="steps between lines of metrics.jsonl")
    best_metric: Literal["bleu", "chrf", "nll"] = Field(
        "bleu", description="validation metric that selects the best model"
    )
    patience: PositiveInt | None = Field(
        10, description="validations without improvement after which training ends; null: never"
    )

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if self.max_steps is None and self.max_epochs is None:
            if self.max_minutes is None:
                raise ValueError("set at least one of max_steps, max_epochs, max_minutes")
            if self.schedule in ("cosine", "linear"):
                raise ValueError(f"schedule: {self.schedule} needs max_steps or max_epochs")
        if self.average_checkpoints > 1 and self.ema_decay is not None:
            raise ValueError("ema_decay and average_checkpoints are mutually exclusive; set only one")
        if self.average_checkpoints > self.keep_checkpoints + 1:
            raise ValueError(
                f"average_checkpoints ({self.average_checkpoints}) needs keep_checkpoints of at least "
                f"{self.average_checkpoints - 1}"
            )
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
    """How translations are decoded."""

    beam_size: int = Field(5, ge=1, le=128, description="number of hypotheses per sentence; 1: greedy search")
    length_penalty: float = Field(
        1.0, ge=-10, le=10, description="alpha: scores are divided by length ** alpha; larger: longer output"
    )
    coverage_penalty: float = Field(
        0.0, ge=0, le=10, description="beta of GNMT's coverage penalty against untranslated words; 0: off"
    )
    stop: Stop = Field(
        "default",
        description="when beam search ends; default: Hugging Face's rule; first_k: once beam_size hypotheses "
        "are finished; exact: once no hypothesis can improve",
    )
    max_length_ratio: float = Field(
        1.5,
        ge=0,
        le=100,
        description="longest output, in tokens per source token; the limit is "
        "max_length_ratio x source length + max_length_offset",
    )
    max_length_offset: int = Field(
        10, ge=1, le=65536, description="tokens added to the longest output; see max_length_ratio"
    )
    min_length_ratio: float = Field(
        0.0,
        ge=0,
        le=100,
        description="shortest output, in tokens per source token; the limit is "
        "min_length_ratio x source length + min_length_offset",
    )
    min_length_offset: int = Field(
        0, ge=0, le=65536, description="tokens added to the shortest output; see min_length_ratio"
    )
    no_repeat_ngram: int = Field(
        0, ge=0, le=100, description="n-grams of this length are never repeated; 0: off"
    )
    forbidden_ids: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="token ids that are never generated"
    )
    force_eos: bool = Field(
        False,
        description="end translations at the maximum length with EOS, which does not change their score",
    )
    renormalize: bool = Field(
        False,
        description="renormalize probabilities after forbidden tokens are removed, "
        "as renormalize_logits in Hugging Face Transformers",
    )
    samples: Samples | None = Field(
        None, description="number of translations sampled per sentence; null: search instead"
    )
    temperature: float = Field(
        1.0, gt=0, le=100, description="sampling temperature; values below 1 sharpen the distribution"
    )
    top_k: int = Field(
        0, ge=0, description="sample only from the top_k most probable tokens; 0: from all tokens"
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample from the fewest most probable tokens with at least this total probability",
    )
    seed: int = Field(1, ge=0, lt=2**63, description="seed for sampling")
    mbr: Literal["chrf", "bleu"] | None = Field(
        None,
        description="metric of minimum Bayes risk decoding, which selects among the hypotheses; null: off",
    )
    alignment_layer: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="decoder layer, starting at 0, whose attention gives word alignments; "
        "null: chosen by training",
    )
    batch_tokens: PositiveInt = Field(8192, description="padded source tokens times hypotheses per batch")
    precision: Precision = Field(
        "auto", description="precision of matrix products; on a CPU, of large ones only; auto: the fastest"
    )
    workers: Workers = Field(
        "auto",
        description="number of processes that decode in parallel on a CPU; each holds a copy of the model",
    )

    @model_validator(mode="after")
    def _search_or_sample(self) -> Self:
        if self.min_length_ratio > self.max_length_ratio or self.min_length_offset > self.max_length_offset:
            raise ValueError(
                "min_length_ratio must not exceed max_length_ratio, nor min_length_offset max_length_offset"
            )
        if self.samples is None and (self.temperature != 1 or self.top_k or self.top_p != 1):
            raise ValueError("temperature, top_k and top_p affect sampling only; set samples, too")
        if self.mbr and self.hypotheses == 1:
            raise ValueError("mbr needs several hypotheses: samples or beam_size of at least 2")
        return self

    @property
    def hypotheses(self) -> int:
        """The number of translations of a sentence that are decoded in parallel."""
        return self.samples or self.beam_size


class ExportConfig(Section):
    """The formats that the model will be exported to."""

    require: list[Format] = Field(
        [],
        description="formats that must be possible; `fit` fails at startup if the architecture rules one out",
    )


class Config(Section):
    """A complete experiment."""

    run_dir: str = Field(
        pattern=r"^[^\x00]+$", description="run folder, with checkpoints, metrics and the trained model"
    )
    seed: int = Field(
        1, ge=0, lt=2**63, description="seed of weights, batch order, dropout and held-out pairs"
    )
    data: DataConfig = Field(description="the corpora")
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="the subword tokenizer")
    model: Architecture = Field(Architecture(), description="the architecture")
    training: TrainingConfig = Field(description="the training recipe")
    decoding: DecodingConfig = Field(DecodingConfig(), description="how translations are decoded")
    export: ExportConfig = Field(ExportConfig(), description="the formats that the model will be exported to")

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        # The settings of a reused tokenizer are compared with the config later.
        reused = self.tokenizer.path or self.training.init_from
        if self.training.init_from and self.model.preset:
            raise ValueError("model.preset: auto and training.init_from both determine the sizes; give one")
        if self.model.tie_embeddings == "all" and not self.tokenizer.joint and not reused:
            raise ValueError("model.tie_embeddings: all needs tokenizer.joint: true; set it, or use decoder")
        longest, budget = self.data.max_length, self.training.micro_batch_limit
        known = "max_length" in self.data.model_fields_set or not self.training.init_from
        if known and longest > budget:
            limits = "training.batch_tokens and micro_batch_tokens" + (" / 2" if self.training.r_drop else "")
            raise ValueError(f"data.max_length ({longest}) must not exceed {limits} ({budget})")
        return self


class ModelFolderConfig(Section):
    """`config.yaml` of a model folder: all settings that translation needs."""

    source_lang: str = Field(min_length=1, description="language code of the source")
    target_lang: str = Field(min_length=1, description="language code of the target")
    max_length: int = Field(ge=2, le=65536, description="longest source, in tokens; longer lines are split")
    tokenizer: TokenizerConfig = Field(description="the settings that the tokenizer was made with")
    model: ModelConfig = Field(description="the architecture, vocabulary sizes and token ids")
    decoding: DecodingConfig = Field(description="default decoding settings")
