"""What `model.preset: auto` chooses if training starts from a trained model (`training.init_from`).

Sizes and vocabulary are those of that model. All values that are not named here are chosen as for training
from scratch (`mtrain.config.recipe`). docs/experiments/fine-tuning.md records the runs.
"""

from collections.abc import Sequence

from mtrain.config import recipe
from mtrain.config.recipe import Budget, Choice, CorpusSize

RATE = 0.5  # of the peak rate of a new model
# The keys of the architecture that may differ from the initial model, and are chosen.
DROPOUT_KEYS = frozenset({"dropout", "activation_dropout"})


def useful_epochs(pairs: int) -> int:
    """The number of epochs that fine-tuning is planned for, at most."""
    return max(1, round(recipe.useful_epochs(pairs) / 4))


def limited(budget: Budget, pairs: int) -> Budget:
    """A budget that ends after the useful epochs, unless it gives steps or epochs."""
    if budget.steps is not None or budget.epochs is not None:
        return budget
    return budget._replace(epochs=useful_epochs(pairs))


def peak_rate(width: int) -> float:
    """The peak learning rate of a model of a width (`d_model`)."""
    return recipe.peak_rate(width) * RATE


def adapt(
    choices: Sequence[Choice], budget: Budget, size: CorpusSize, steps: int, width: int
) -> list[Choice]:
    """The `choices` for a new model, adapted to one that is already trained."""
    own = {
        "training.learning_rate": Choice(
            "training.learning_rate", peak_rate(width), f"half of a new model's, width {width}"
        )
    }
    return [own.pop(choice.key, choice) for choice in choices]
