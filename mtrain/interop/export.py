"""Writing a model for another program, and asking that program whether it is the same."""

from collections.abc import Sequence
from pathlib import Path

from mtrain.checkpoint.model_folder import load_model
from mtrain.config.schema import Format
from mtrain.errors import ModelError
from mtrain.interop.ctranslate2 import write_ctranslate2
from mtrain.interop.formats import obstacle
from mtrain.interop.marian import write_marian
from mtrain.interop.verify import open_ctranslate2, open_marian, verify
from mtrain.storage.atomic import require_new_folder, write_folder


def export_model(
    model: Path,
    out: Path,
    format: Format,
    quantization: str | None = None,
    texts: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> list[str]:
    """Write a model or run folder as `out`, and compare both by the `texts`, or some of its own if there are
    none: a summary of it, in lines. `overrides` are `decoding.key=value`.

    Raises UsageError if `out` is there already or a package is missing; ModelError if the format cannot hold
    the model, or if what was written does not say the same, of which nothing is left then.
    """
    require_new_folder(out)
    loaded = load_model(model, overrides)
    if reason := obstacle(loaded.model.config, format):
        raise ModelError(
            f"{model}: cannot be written as {format}: {reason}; --format ctranslate2 can hold it"
        )
    lines: list[str] = []

    def fill(temporary: Path) -> None:
        if format == "marian":
            write_marian(loaded, temporary)
            exported = open_marian(temporary, loaded)
        else:
            write_ctranslate2(loaded, temporary, quantization)
            exported = open_ctranslate2(temporary, loaded, quantization)
        lines.extend(verify(loaded, exported, texts, exact=quantization is None))

    write_folder(out, fill)
    return lines
