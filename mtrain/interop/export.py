"""`mtrain export`: writes a model in another format, and verifies it with the program that uses the
format."""

import logging
from collections.abc import Sequence
from pathlib import Path

from mtrain.checkpoint.model_card import write_exported_card
from mtrain.checkpoint.model_folder import folder_fingerprint, load_model
from mtrain.checkpoint.model_info import ExportInfo, model_folder_of
from mtrain.config.schema import Format, ModelFolderConfig
from mtrain.decoding.search.constraints import check_forbidden_ids
from mtrain.errors import ModelError
from mtrain.interop.argos import decode_argos, pack_argos, write_argos
from mtrain.interop.bergamot.engine import compare_with_engine, find_engine
from mtrain.interop.bergamot.write import name_for_firefox, write_bergamot
from mtrain.interop.ctranslate2 import write_ctranslate2
from mtrain.interop.formats import concrete_format, problem_of
from mtrain.interop.to_transformers import write_m2m_100, write_marian, write_pegasus
from mtrain.interop.verify import open_bergamot, open_ctranslate2, open_transformers, sentences_of, verify
from mtrain.storage.atomic import require_new_folder, write_new_folder

log = logging.getLogger(__name__)

# The settings of `decoding` that a model contains in these formats. The other formats name what they lack.
_SETTINGS_IN_MODEL = {
    **dict.fromkeys(("ctranslate2", "argos"), ("forbidden_ids", "max_length_ratio", "max_length_offset")),
    "bergamot": ("forbidden_ids", "alignment_layer"),
}


def export_model(
    model: Path,
    out: Path,
    format: Format,
    quantization: str | None = None,
    texts: Sequence[str] = (),
    overrides: Sequence[str] = (),
    engine: Path | None = None,
    firefox: bool = False,
) -> list[str]:
    """Write a model or run folder to `out`, compare both models on `texts`, and return a summary.

    Without `texts`, they are compared on generated sentences. `overrides` are `decoding.key=value`. For
    bergamot, `engine` is the folder to find the engine in (see `find_engine`), and `firefox` chooses the file
    names of Firefox. Raises UsageError if `out` exists or a package is missing, StorageError if `out` cannot
    be written, and ModelError if the format does not support the model, the exported model gives other
    results, or `fit` has replaced the model meanwhile. If an error is raised, `out` is not created.
    """
    require_new_folder(out)
    engine = find_engine(engine) if format == "bergamot" else None
    described_by = model_folder_of(model)
    fingerprint = folder_fingerprint(described_by)
    loaded = load_model(model, overrides)
    if problem := problem_of(loaded.config, format, loaded.tokenizer, "use --format {}"):
        raise ModelError(f"{model}: {problem}")
    format = concrete_format(loaded.config, format)
    keys = [each.partition("=")[0].strip().removeprefix("decoding.") for each in overrides]
    if ignored := [key for key in keys if key not in _SETTINGS_IN_MODEL.get(format, keys)]:
        log.warning("models for %s have no setting for decoding.%s", format, ", decoding.".join(ignored))
    check_forbidden_ids(loaded.config.decoding, loaded.model.config.target_vocab_size)
    given = sentences_of(loaded, texts)
    lines: list[str] = []

    def fill(temporary: Path) -> None:
        if format == "argos":
            exported = open_ctranslate2(write_argos(loaded, temporary, quantization), loaded, quantization)
            exported = exported._replace(decode=decode_argos(loaded))
        elif format == "ctranslate2":
            write_ctranslate2(loaded, temporary, quantization)
            exported = open_ctranslate2(temporary, loaded, quantization)
        elif format == "bergamot":
            write_bergamot(loaded, temporary, quantization is not None, [row for _, row in given])
            exported = open_bergamot(temporary, loaded)
        else:
            writers = {"marian": write_marian, "pegasus": write_pegasus, "m2m_100": write_m2m_100}
            writers[format](loaded, temporary)
            exported = open_transformers(temporary, loaded)
        lines.extend(verify(loaded, exported, given, exact=quantization is None))
        if engine is not None:
            lines.append(compare_with_engine(engine, temporary, loaded, given, quantization is not None))
        parameters = sum(tensor.numel() for tensor in loaded.model.parameters())
        described = ExportInfo(
            format=format,
            folder=out.name,
            quantization=quantization,
            parameters=parameters,
            config=_publishable(loaded.config),
            changed=bool(overrides),
        )
        if folder_fingerprint(described_by) != fingerprint:  # `fit` publishes better models
            raise ModelError(f"{described_by}: was replaced while it was exported; try again")
        write_exported_card(described_by, temporary, described)
        if format == "argos":
            pack_argos(loaded.config, temporary)
        if firefox:
            name_for_firefox(loaded, temporary)

    write_new_folder(out, fill)
    return lines


def _publishable(config: ModelFolderConfig) -> ModelFolderConfig:
    """The settings of a model without the folder of a reused tokenizer, which is of this machine only."""
    path = config.tokenizer.path
    if path is None or not Path(path).exists():
        return config
    tokenizer = config.tokenizer.model_copy(update={"path": Path(path).name})
    return config.model_copy(update={"tokenizer": tokenizer})
