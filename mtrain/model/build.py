"""Builds the model of a config."""

from mtrain.config.model import ModelConfig
from mtrain.model.classifier import PairClassifier
from mtrain.model.encoder import TransformerEncoder
from mtrain.model.transformer import Transformer


def build_model(config: ModelConfig) -> TransformerEncoder:
    """A model with random weights."""
    return PairClassifier(config) if config.is_classifier else Transformer(config)
