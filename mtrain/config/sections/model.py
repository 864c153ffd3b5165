"""The `model` section, and the architecture that is built from it."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mtrain.config.section import Count, Fraction, PositiveInt, Section
from mtrain.config.sections.presets import PRESETS, STUDENTS

_Sizes = Literal["micro", "tiny", "small", "base", "big", "tiny_deep", "small_deep", "base_deep", "big_deep"]
Preset = Literal["auto", _Sizes, "student_tiny", "student_base"]
Positions = Literal["sinusoidal", "sinusoidal_interleaved", "sinusoidal_marian", "learned", "rotary"]
TiedEmbeddings = Literal["none", "decoder", "all"]
Head = Literal["translation", "pair_classifier"]
# Keys that a pair classifier does not have.
DECODER_KEYS = ("decoder_layers", "tie_embeddings", "output_bias", "alignment_head")


class Architecture(Section):
    """The architecture of the Transformer. A preset fills in the sizes that are not given."""

    removed_keys = frozenset({"initialization"})

    preset: Preset | None = Field(
        None,
        description="named sizes, with one decoder layer if they end in `_deep`; auto: mtrain chooses the "
        "sizes and the recipe for your data, and with training.init_from the recipe alone; `student_*`: "
        "fixed sizes for the bergamot export, and mtrain chooses the recipe. If the key is "
        "absent: auto; null with sizes; tiny for a pair classifier",
    )
    head: Head = Field(
        "translation",
        description="what follows the encoder; translation: a decoder; pair_classifier: a layer that tells "
        "good sentence pairs from corrupted ones",
    )
    d_model: int = Field(128, ge=2, le=16384, description="model width; must be a multiple of `heads`")
    heads: int = Field(4, ge=1, le=256, description="number of attention heads per layer")
    encoder_layers: int = Field(4, ge=1, le=256, description="number of encoder layers")
    decoder_layers: int = Field(
        4, ge=0, le=256, description="number of decoder layers; 0 for a pair classifier"
    )
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
        "pre",
        description="layer normalization before or after each sublayer; post: sublayers start with small "
        "weights, and the encoder is frozen at first (`training.encoder_after`)",
    )
    positions: Positions = Field(
        "sinusoidal",
        description="positional encoding; `sinusoidal` and `sinusoidal_marian` have all sines first, then "
        "all cosines; `sinusoidal_marian` has the frequencies of M2M-100 and of the program Marian",
    )
    first_position: int = Field(0, ge=0, le=1024, description="the first sinusoidal position; 2 in M2M-100")
    tie_embeddings: TiedEmbeddings = Field(
        "all", description="shared weights; decoder: target embedding and output; all: source embedding, too"
    )
    output_bias: bool = Field(False, description="whether the output projection has a bias")
    alignment_head: bool = Field(
        False,
        description="train the first cross-attention head of the last decoder layer to match the mean of the "
        "heads of that layer; word alignments then come from this head, as in the Bergamot engine",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = str(values.get("preset"))
        sizes = (PRESETS | STUDENTS).get(name, {})
        named = {"preset": "auto" if name in STUDENTS else None} if sizes else {}
        if values.get("head") == "pair_classifier":
            sizes = {**sizes, "decoder_layers": 0}
        return {**sizes, **values, **named}

    @property
    def is_classifier(self) -> bool:
        """Whether this is a pair classifier."""
        return self.head == "pair_classifier"

    @model_validator(mode="after")
    def _head_fits(self) -> Self:
        if self.is_classifier:
            if self.preset == "auto":
                kinds = "presets auto and student_* are for translation models"
                raise ValueError(f"{kinds}; give another preset, such as tiny")
            decoder = self.decoder_layers, self.tie_embeddings, self.output_bias, self.alignment_head
            if decoder != (0, "all", False, False):
                raise ValueError(f"a pair classifier has no decoder; remove {', '.join(DECODER_KEYS)}")
        elif not self.decoder_layers:
            raise ValueError("decoder_layers must be at least 1, except for a pair classifier")
        return self

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(f"d_model ({self.d_model}) must be a multiple of heads ({self.heads})")
        if self.positions.startswith("sinusoidal") and self.d_model % 2:
            raise ValueError("sinusoidal positions need an even d_model")
        if self.positions == "sinusoidal_marian" and self.d_model < 4:
            raise ValueError("positions: sinusoidal_marian needs a d_model of at least 4")
        if self.first_position and not self.positions.startswith("sinusoidal"):
            raise ValueError(f"first_position needs sinusoidal positions, not {self.positions}; remove it")
        if self.positions == "rotary" and (self.d_model // self.heads) % 2:
            raise ValueError("rotary positions need an even d_model / heads")
        return self


class ModelConfig(Architecture):
    """The architecture with the vocabulary sizes and token ids: all that is needed to build the model."""

    source_vocab_size: PositiveInt = Field(description="size of the source vocabulary")
    target_vocab_size: PositiveInt = Field(description="size of the target vocabulary")
    max_positions: PositiveInt = Field(description="number of learned positional embeddings")
    pad_id: Count = Field(0, description="id of the padding token; may equal bos_id")
    unk_id: Count = Field(1, description="id of the unknown token")
    bos_id: Count = Field(2, description="id of the token that begins every target")
    eos_id: Count = Field(3, description="id of the token that ends every sentence")
