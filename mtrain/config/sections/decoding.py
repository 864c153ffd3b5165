"""The `decoding` section."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mtrain.config.languages import LanguageTags
from mtrain.config.section import Count, PositiveFraction, PositiveInt, Precision, Section, Seed
from mtrain.errors import UsageError

SplitMode = Literal["long", "sentences"]
Stop = Literal["default", "first_k", "exact"]
WorkerCount = Annotated[int, Field(ge=1, le=64)] | Literal["auto"]
Samples = Annotated[int, Field(ge=1, le=1024)]
LengthRatio = Annotated[float, Field(ge=0, le=100)]

AUTO_BATCH_TOKENS = 8192  # what `batch_tokens: auto` is on a CPU; it was the default of earlier versions


class DecodingConfig(Section):
    """How translations are decoded."""

    beam_size: int = Field(5, ge=1, le=128, description="number of hypotheses per sentence; 1: greedy search")
    length_penalty: float = Field(
        1.0, ge=-10, le=10, description="alpha: scores are divided by length ** alpha; larger: longer output"
    )
    coverage_penalty: float = Field(
        0.0,
        ge=0,
        le=10,
        description="beta of GNMT's coverage penalty against untranslated words; 0: off; sampling ignores it",
    )
    stop: Stop = Field(
        "default",
        description="when beam search ends; default: Hugging Face's rule; first_k: once beam_size hypotheses "
        "are finished; exact: once no hypothesis can improve",
    )
    max_length_ratio: LengthRatio = Field(
        1.5,
        description="longest output, in tokens per source token; the limit is "
        "max_length_ratio x source length + max_length_offset",
    )
    max_length_offset: int = Field(
        10, ge=1, le=65536, description="tokens added to the longest output; see max_length_ratio"
    )
    min_length_ratio: LengthRatio = Field(
        0.0,
        description="shortest output, in tokens per source token; the limit is "
        "min_length_ratio x source length + min_length_offset",
    )
    min_length_offset: int = Field(
        0, ge=0, le=65536, description="tokens added to the shortest output; see min_length_ratio"
    )
    no_repeat_ngram: int = Field(
        0, ge=0, le=100, description="n-grams of this length are never repeated; 0: off"
    )
    forbidden_ids: list[Count] = Field([], description="token ids that are never generated")
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
    top_k: Count = Field(0, description="sample only from the top_k most probable tokens; 0: from all tokens")
    top_p: PositiveFraction = Field(
        1.0, description="sample from the fewest most probable tokens with at least this total probability"
    )
    seed: Seed = Field(1, description="seed for sampling")
    mbr: Literal["chrf", "bleu"] | None = Field(
        None,
        description="metric of minimum Bayes risk decoding, which selects among the hypotheses; null: off",
    )
    alignment_layer: Count | None = Field(
        None,
        description="decoder layer, starting at 0, whose attention gives word alignments; beyond the last "
        "layer: the last one; null: chosen by training, or the last layer if the model has an alignment head",
    )
    split: SplitMode = Field(
        "long",
        description="which lines are translated sentence by sentence; long: lines with more tokens than the "
        "model's maximum; sentences: all lines, such as paragraphs",
    )
    batch_tokens: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="padded source tokens times hypotheses per batch; auto: 8192, on a CUDA device 65536 or "
        "more if memory allows; in a file, 8192 means auto",
    )
    precision: Precision = Field(
        "auto",
        description="precision of matrix products (on a CPU, of large ones only); auto: bf16 or fp16 if the "
        "device has instructions for it, otherwise fp32",
    )
    workers: WorkerCount = Field(
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

    def longest_source(self, max_length: int, tags: LanguageTags) -> int:
        """The number of tokens, with EOS, of the longest source that is translated as a whole by a model with
        this `max_length`. For NLLB-200, it is about 200, although sources may have 1,024: longer translations
        would be cut."""
        if tags.startswith("codes") and not self.max_length_ratio:
            return min(max_length, self.max_length_offset)
        return max_length

    @property
    def hypotheses(self) -> int:
        """The number of translations of a sentence that are decoded in parallel."""
        return self.samples or self.beam_size

    @property
    def moderate_batch_tokens(self) -> int:
        """`batch_tokens`, but the value of a CPU for `auto`, whatever the device."""
        return AUTO_BATCH_TOKENS if self.batch_tokens == "auto" else self.batch_tokens

    def require_hypotheses(self, count: int) -> None:
        """Raise UsageError unless that many translations of each line, at least one, are decoded."""
        requested = f"{count} translations of each line were requested"
        if count < 1:
            raise UsageError(f"{requested}; ask for 1 or more")
        if count > self.hypotheses:
            advice = "raise decoding.beam_size or decoding.samples"
            raise UsageError(f"{requested}, but only {self.hypotheses} are decoded; {advice}")
