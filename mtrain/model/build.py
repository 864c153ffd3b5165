"""Builds the model of a config. Training calls a model with the tensors of a batch, and passes what it
returns to `loss`."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mtrain.config.sections.model import ModelConfig
from mtrain.model.classifier import PairClassifier
from mtrain.model.transformer import Transformer

AnyModel = Transformer | PairClassifier


def build_model(config: ModelConfig) -> AnyModel:
    """The model that a config describes, with random weights."""
    return PairClassifier(config) if config.is_classifier else Transformer(config)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in evaluation mode. At the end, it has its previous mode again."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
