"""Averages the weights of several models (Wortsman et al., "Model soups", ICML 2022, section 2)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from mtrain.checkpoint.model_folder import Loaded, disagreement, load_any_model, save_model_folder
from mtrain.checkpoint.model_info import Origin, describe_ancestor, name_of, new_info
from mtrain.config.schema import ModelFolderConfig
from mtrain.config.yaml_io import to_yaml
from mtrain.errors import ModelError
from mtrain.model.build import AnyModel
from mtrain.progress_bar import with_progress
from mtrain.storage.atomic import require_new_folder


def average_models(paths: Sequence[Path], out: Path, overrides: Sequence[str] = ()) -> ModelFolderConfig:
    """Average the weights of models (run or model folders), and write the result to the model folder `out`.

    The other settings come from the first model, changed by `overrides` (`decoding.key=value`). Returns
    them.

    Raises UsageError if `out` exists, ModelError if a model is damaged or its architecture, vocabulary or
    languages differ from the first model's, and StorageError if writing fails.
    """
    require_new_folder(out)
    first = load_any_model(paths[0], overrides)
    config = first.config
    total = {name: tensor.double() for name, tensor in first.model.state_dict().items()}
    ancestors = [describe_ancestor(paths[0], first.fingerprint)]
    for path in with_progress(paths[1:], "averaged", "models", len(paths) - 1):
        other = load_any_model(path)
        differing = disagreement(first._replace(config=config), other)
        if not differing and _architecture(first) != _architecture(other):
            differing = "model settings"
        if differing:
            reason = f"its {differing} are not the same as in the models before it"
            raise ModelError(f"{path}: {reason}; only models that share them can be averaged")
        for key in ("source_lang", "target_lang"):
            if getattr(config, key) == "und":
                config = config.model_copy(update={key: getattr(other.config, key)})
        for name, tensor in other.model.state_dict().items():
            total[name] += tensor
        ancestors.append(describe_ancestor(path, other.fingerprint))
    write_weights = partial(save_file, {name: (sum_ / len(paths)).float() for name, sum_ in total.items()})
    info = new_info(name_of(out), Origin(kind="averaged", ancestors=ancestors))
    save_model_folder(out, write_weights, to_yaml(config), first.tokenizer, info, is_new=True)
    return config


def _architecture(loaded: Loaded[AnyModel]) -> dict[str, Any]:
    """The settings of a model that the trained weights depend on: all but dropout rates and, unless positions
    are learned, the number of positions."""
    architecture = loaded.config.model
    free = {key for key in type(architecture).model_fields if "dropout" in key}
    if architecture.positions != "learned":
        free.add("max_positions")
    return architecture.model_dump(exclude=free)
