"""Loading the models of an ensemble."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from mtrain.checkpoint.model_folder import LoadedModel, load_model
from mtrain.errors import ModelError


def load_ensemble(folders: Sequence[Path], overrides: tuple[str, ...]) -> list[LoadedModel]:
    """Load a model or an ensemble. Raises ModelError if a folder is missing or damaged, or if the models
    cannot decode together."""
    loaded = [load_model(folder, overrides) for folder in folders]
    for (path, first), (folder, other) in combinations(zip(folders, loaded, strict=True), 2):
        if other.tokenizer.fingerprint() != first.tokenizer.fingerprint():
            raise ModelError(f"{folder}: its vocabulary is not the same as in {path}; an ensemble shares one")
        if first.config.language_tags != other.config.language_tags:
            found = f"is {other.config.language_tags}, but {first.config.language_tags} in {path}"
            cure = "the models of an ensemble must have the same"
            raise ModelError(f"{folder}: language_tags {found}; {cure}")
        ours, theirs = first.config.direction, other.config.direction
        if not ours.agrees_with(theirs):
            found = f"translates {theirs}, but {path} {ours}"
            raise ModelError(f"{folder}: {found}; the models of an ensemble need the same languages")
    return loaded
