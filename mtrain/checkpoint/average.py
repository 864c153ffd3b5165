"""The average of several models' weights (Wortsman et al., "Model soups", ICML 2022, section 2)."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from mtrain.checkpoint.model_folder import LoadedModel, load_model, save_model_folder
from mtrain.config.yaml_io import to_yaml
from mtrain.errors import ModelError, StorageError
from mtrain.storage.atomic import require_new_folder


def average_models(paths: Sequence[Path], out: Path, overrides: Sequence[str] = ()) -> None:
    """Write the average of models, given as run or model folders, as the model folder `out`.

    Its settings are those of the first model, changed by `overrides` (`decoding.key=value`).

    Raises UsageError if `out` exists, ModelError if a model is damaged or its architecture, vocabulary or
    languages differ from those of the first.
    """
    require_new_folder(out)
    first = load_model(paths[0], overrides)
    total = {name: tensor.double() for name, tensor in first.model.state_dict().items()}
    for path in paths[1:]:
        other = load_model(path)
        if _kind(other) != _kind(first):
            reason = "its languages, vocabulary or architecture differ from those of"
            raise ModelError(f"{path}: {reason} {paths[0]}; only similar models can be averaged")
        for name, tensor in other.model.state_dict().items():
            total[name] += tensor
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model.safetensors"
        try:
            save_file({name: (tensor / len(paths)).float() for name, tensor in total.items()}, weights)
        except SafetensorError as error:
            raise StorageError(f"cannot write a temporary file: {error}") from None
        save_model_folder(out, weights, to_yaml(first.config), first.tokenizer)


def _kind(loaded: LoadedModel) -> tuple[object, ...]:
    """What averaged models must have in common: all but dropout rates and, unless positions are learned, the
    number of positions."""
    network = loaded.config.model
    free = {key for key in type(network).model_fields if "dropout" in key}
    if network.positions != "learned":
        free.add("max_positions")
    languages = loaded.config.source_lang, loaded.config.target_lang
    return *languages, loaded.tokenizer.fingerprint(), network.model_dump(exclude=free)
