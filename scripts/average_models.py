"""Write the mean of several models' weights as a model folder, which translates as fast as one of them.

    python scripts/average_models.py MODEL MODEL... -o FOLDER

The models, run or model folders, have the same vocabulary and sizes and stem from one another: a model, and
what went on from it with `training.init_from`. The mean of such is often better than each (Wortsman et al.,
"Model soups", ICML 2022, section 2, uniform soup). The settings are those of the first.
"""

import argparse
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from mtrain.checkpoint.model_folder import LoadedModel, load_model, save_model_folder
from mtrain.cli import failures_as_exits
from mtrain.config.yaml_io import to_yaml
from mtrain.errors import ModelError, StorageError
from mtrain.storage.atomic import require_new_folder


def average_models(paths: list[Path], out: Path) -> None:
    """Write the mean of the models at `paths` as the model folder `out`.

    Raises UsageError if `out` is there already; ModelError if a model is damaged or not like the first.
    """
    require_new_folder(out)
    first = load_model(paths[0])
    total = {name: tensor.double() for name, tensor in first.model.state_dict().items()}
    for path in paths[1:]:
        other = load_model(path)
        if _nature(other) != _nature(first):
            raise ModelError(f"{path}: its languages, vocabulary or architecture are not those of {paths[0]}")
        for name, tensor in other.model.state_dict().items():
            total[name] += tensor
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model.safetensors"
        try:
            save_file({name: (tensor / len(paths)).float() for name, tensor in total.items()}, weights)
        except SafetensorError as error:
            raise StorageError(f"cannot write a temporary file: {error}") from None
        save_model_folder(out, weights, to_yaml(first.config), first.tokenizer)


def _nature(loaded: LoadedModel) -> tuple[object, ...]:
    """What models must have in common. Dropouts may differ, and the longest sentence unless it is learned."""
    network = loaded.config.model
    free = {key for key in type(network).model_fields if "dropout" in key}
    if network.positions != "learned":
        free.add("max_positions")
    languages = loaded.config.source_lang, loaded.config.target_lang
    return *languages, loaded.tokenizer.fingerprint(), network.model_dump(exclude=free)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="run or model folders")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="a new folder")
    given = parser.parse_args()
    if len(given.models) < 2:
        parser.error("give two models or more")
    with failures_as_exits():
        average_models(given.models, given.output)


if __name__ == "__main__":
    main()
