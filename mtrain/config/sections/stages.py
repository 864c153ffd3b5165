"""The stages of training: how the corpora are mixed, one mixture after another."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated

from pydantic import Field

from mtrain.config.section import PositiveInt, Section, Weight


class Stage(Section):
    """A stage of training, with a mixture of corpora of its own. Corpora without a share are left out."""

    shares: Annotated[dict[str, Weight], Field(min_length=1)] = Field(
        description="share of each corpus among the pairs of the stage, by the name of the corpus; only the "
        "proportions matter"
    )
    of: str | None = Field(
        None,
        description="the corpus whose pairs each occur once in an epoch of the stage; null: the first corpus "
        "of `train` that has a share",
    )
    max_epochs: PositiveInt | None = Field(
        None, description="epochs of the stage, after which the next one begins; not for the last stage"
    )
    max_steps: PositiveInt | None = Field(
        None,
        description="optimizer steps of the stage, after which the next one begins; not for the last stage",
    )

    def counted(self, names: Sequence[str]) -> str:
        """The corpus that an epoch counts, given the names of all corpora."""
        return self.of or next(name for name in names if name in self.shares)


def check_stages(stages: Sequence[Stage], names: Sequence[str]) -> None:
    """Raise ValueError if stages name a corpus that is not among `names`, or if one does not end when it
    should."""
    for number, stage in enumerate(stages, start=1):
        for name in (*stage.shares, *([] if stage.of is None else [stage.of])):
            if name not in names:
                near = get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]}?" if near else f"the names are {', '.join(names)}"
                raise ValueError(f"stage {number}: no corpus of data.train has the name {name}; {hint}")
        if stage.of is not None and stage.of not in stage.shares:
            problem = f"`of` names {stage.of}, which has no share in this stage"
            raise ValueError(f"stage {number}: {problem}; give it one")
        is_limited = stage.max_epochs is not None or stage.max_steps is not None
        if number < len(stages) and not is_limited:
            reason = "only the last stage has neither"
            raise ValueError(f"stage {number}: needs max_epochs or max_steps; {reason}")
        if number == len(stages) and is_limited:
            cure = "give training.max_epochs or training.max_steps instead"
            raise ValueError(f"stage {number}: the last stage ends with the training; {cure}")
