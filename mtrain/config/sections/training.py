"""The `training` section."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mtrain.config.section import Count, FilePath, Fraction, PositiveFloat, PositiveInt, Precision, Section

MicroBatchTokens = PositiveInt | Literal["auto"]
Schedule = Literal["inverse_sqrt", "cosine", "linear", "wsd", "constant"]
ENDING_AT_ZERO = ("cosine", "linear", "wsd")  # schedules that depend on the number of steps
ModelPart = Literal["encoder", "decoder", "embeddings", "self_attention", "feed_forward"]


class TrainingConfig(Section):
    """The training recipe."""

    removed_keys = frozenset({"compile"})

    init_from: FilePath | None = Field(
        None,
        description="run folder, model folder or checkpoint to start from; its weights, tokenizer and sizes "
        "are used",
    )
    freeze: list[ModelPart] = Field(
        [],
        description="parts that are not trained; embeddings: positions and a tied output projection, too; "
        "self_attention, feed_forward: these sublayers of encoder and decoder, with their norms",
    )
    max_steps: PositiveInt | None = Field(
        None, description="optimizer steps; training ends at whichever limit is reached first"
    )
    max_epochs: PositiveInt | None = Field(None, description="passes over the training corpus")
    max_minutes: PositiveFloat | None = Field(
        None, description="minutes of training, validation and saving, summed over resumed runs"
    )
    planned_steps: PositiveInt | None = Field(
        None,
        description="estimate of the steps that max_minutes allow; the clock corrects it during training",
    )
    batch_tokens: PositiveInt = Field(
        4096, description="padded tokens per optimizer step, of the longer side; the effective batch size"
    )
    micro_batch_tokens: MicroBatchTokens = Field(
        "auto",
        description="padded tokens per forward and backward pass; auto: batch_tokens, on a CPU at most "
        "16,384, halved until they fit in memory",
    )
    learning_rate: Annotated[PositiveFloat, Field(le=10)] | None = Field(
        None,
        description="peak learning rate, reached at the end of warm-up; null: 0.512 / model.d_model, or with "
        "init_from 0.256 / model.d_model",
    )
    schedule: Schedule = Field(
        "inverse_sqrt",
        description="decay of the learning rate after warm-up; cosine, linear and wsd end at zero; wsd is "
        "constant for the first half of the steps after warm-up",
    )
    warmup_steps: Count | None = Field(
        None,
        description="steps over which the learning rate rises linearly from zero; null: 8% of the steps that "
        "max_steps, max_epochs and planned_steps allow, or 1,000",
    )
    encoder_after: Count | None = Field(
        None,
        description="number of initial steps in which the layers of the encoder are frozen, so that the "
        "decoder first learns to attend to the source; then the encoder has a warm-up of its own; null: for "
        "a new model with `norm: post`, the smallest of twice the warm-up, 1,000 and a quarter of the steps; "
        "otherwise 0",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: Muon for the weight matrices of the layers, AdamW for all other parameters; often "
        "better after the same number of steps, but each step takes longer",
    )
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.98), strict=False, description="AdamW's decay rates of the first and second moments"
    )
    weight_decay: float = Field(
        0.0, ge=0, le=10, description="decoupled weight decay, applied to matrices only"
    )
    clip_norm: float = Field(1.0, ge=0, le=1e9, description="maximum norm of the gradient; 0: no clipping")
    label_smoothing: Fraction = Field(
        0.1, description="probability mass spread evenly over the vocabulary; default of a pair classifier: 0"
    )
    r_drop: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="R-Drop's weight alpha, such as 5; each pair is processed twice; 0: off",
    )
    r_drop_after: Count = Field(
        0, description="steps without R-Drop at the beginning, which are about twice as fast"
    )
    ema_decay: Fraction | None = Field(
        None, description="decay per step of an exponential moving average of the weights; null: off"
    )
    average_checkpoints: PositiveInt = Field(
        1, description="number of latest checkpoints whose weights are averaged for validation and the model"
    )
    precision: Precision = Field(
        "auto",
        description="precision of matrix products; auto: bf16 or fp16 if the device has instructions for it, "
        "otherwise fp32",
    )
    parallel: Literal["auto", "ddp", "fsdp"] = Field(
        "auto",
        description="how processes of torchrun divide the work; ddp: by pairs; fsdp: also weights and "
        "optimizer states, for models that do not fit on one GPU; auto: ddp if 16 bytes per parameter (20 "
        "with ema_decay) fit in 60% of a GPU's memory",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="run training steps on a CUDA device as CUDA graphs; auto: unless weights are divided "
        "(fsdp)",
    )
    validate_every: PositiveInt = Field(
        500, description="steps between validations; the last one is at the end of training"
    )
    validation_pairs: PositiveInt | None = Field(
        None, description="number of validation pairs to use, drawn with the seed; null: all"
    )
    validation_beam_size: int = Field(
        1, ge=1, le=128, description="beam size in validation; 1: greedy search"
    )
    checkpoint_every: PositiveInt = Field(
        500, description="steps between checkpoints; the last one is at the end of training"
    )
    keep_checkpoints: PositiveInt = Field(
        3,
        description="N: keep the newest N checkpoints, the newest N at multiples of checkpoint_every, and "
        "the best one",
    )
    log_every: PositiveInt = Field(50, description="steps between lines of metrics.jsonl")
    best_metric: Literal["auto", "bleu", "chrf", "nll", "auc"] = Field(
        "auto",
        description="validation metric that selects the best model; auto: chrf if a target language is "
        "written without spaces between words, otherwise bleu, but chrf while the BLEU is below 5; chrF, "
        "then nll, break ties; auc: for pair classifiers, and their default",
    )
    patience: PositiveInt | None = Field(
        10, description="validations without improvement after which training ends; null: never"
    )

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        limits = self.max_steps, self.max_epochs, self.max_minutes, self.patience
        if all(limit is None for limit in limits):
            raise ValueError("set at least one of max_steps, max_epochs, max_minutes and patience")
        if self.planned_steps is not None and self.max_minutes is None:
            raise ValueError("planned_steps has no effect without max_minutes; remove it, or set max_minutes")
        if self.r_drop_after and not self.r_drop:
            raise ValueError("r_drop_after has no effect without r_drop; remove it, or set r_drop")
        if self.average_checkpoints > 1 and self.ema_decay is not None:
            raise ValueError("ema_decay and average_checkpoints are mutually exclusive; set only one")
        if self.average_checkpoints > self.keep_checkpoints + 1:
            needed = f"keep_checkpoints of at least {self.average_checkpoints - 1}"
            raise ValueError(f"average_checkpoints ({self.average_checkpoints}) needs {needed}")
        return self

    @property
    def micro_batch_limit(self) -> int:
        """Maximum padded tokens per side of a micro-batch; R-Drop processes each micro-batch twice."""
        if self.micro_batch_tokens == "auto":
            return self.batch_tokens
        tokens = (self.micro_batch_tokens + 1) // 2 if self.r_drop else self.micro_batch_tokens
        return min(self.batch_tokens, tokens)
