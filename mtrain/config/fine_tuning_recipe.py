"""What `model.preset: auto` chooses differently if training starts from a trained model
(`training.init_from`), whose sizes and vocabulary are kept.

docs/experiments/recipes.md records the runs.
"""

from collections.abc import Sequence

from mtrain.config import recipe
from mtrain.config.choices import Choice
from mtrain.config.recipe import Budget, CorpusSize

RATE = 0.5  # of the peak rate of a new model
# Of the epochs that are useful for a new model: 42 of 166 for a thousand pairs, 2 of 9 for 20 million;
# assumed, not measured.
USEFUL_SHARE = 0.25


def plan(size: CorpusSize, budget: Budget) -> tuple[CorpusSize, Budget]:
    """The corpus and the budget to pass to the recipe for new models. Without a limit, the useful epochs
    limit the run, so that its learning rate ends at zero."""
    size = size._replace(useful_share=USEFUL_SHARE)
    if budget.unlimited:
        epochs = recipe.useful_epochs(size.pairs) * size.useful_share
        budget = budget._replace(epochs=max(1, round(epochs)))
    return size, budget


def adapt(choices: Sequence[Choice], given: Budget, steps: int, width: int) -> list[Choice]:
    """The `choices` for a new model of width `width` (`d_model`), changed for a trained model. `steps` are
    planned; `given` are the limits of the config."""
    rate = Choice("training.learning_rate", peak_rate(width), f"fine-tuning, model width {width}")
    adapted = [rate if choice.key == rate.key else choice for choice in choices]
    if given.unlimited:
        adapted.append(Choice("training.max_steps", steps, "as many as the useful epochs take"))
    return adapted


def peak_rate(width: int) -> float:
    """The peak learning rate for a trained model of width `width`: 0.002 for `tiny`, 0.0005 for `base`."""
    return recipe.peak_rate(width) * RATE
