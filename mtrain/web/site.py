"""The folder of a translator page: the page, the engine, and models, for any static web server."""

from collections.abc import Sequence
from pathlib import Path

from mtrain.checkpoint.model_folder import read_settings, tokenizer_folder
from mtrain.checkpoint.model_info import ExportInfo, is_run, read_info
from mtrain.config.language_names import language_name
from mtrain.errors import ModelError, UsageError
from mtrain.interop.bergamot.write import MODEL, arithmetic, languages_of, vocabularies_in
from mtrain.interop.export import export_model
from mtrain.interop.formats import problem_of
from mtrain.storage.atomic import copy_files, require_new_folder, write_new_folder, write_text
from mtrain.storage.manifest import MANIFEST, sha256, verify_folder
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.web.engine import copy_engine
from mtrain.web.page import translator_page


def write_site(models: Sequence[Path], out: Path, package: Path | None = None) -> None:
    """Write the folder of a page with models. Each is a run folder, a model folder, or a
    Bergamot export.

    `package` is a folder with the npm package of the engine; by default, it is downloaded. Raises UsageError
    if `out` exists, if two models have the same direction or the package is missing, ModelError if a model
    cannot be exported, StorageError if the engine cannot be downloaded or `out` cannot be written.
    """
    require_new_folder(out)
    described = {_direction(model): model for model in models}
    if len(described) < len(models):
        raise UsageError("MODEL: several models have the same direction; give one for each")

    def fill(temporary: Path) -> None:
        copy_engine(temporary / "engine", package)  # which fails early if the package cannot be had
        found = []
        for (source, target), model in described.items():
            folder = temporary / "models" / f"{source}-{target}"
            site = {"source": source, "target": target, "folder": f"models/{folder.name}", "model": MODEL}
            site["arithmetic"] = _write_model(model, folder)
            site["version"] = sha256(folder / MODEL)[:12]  # so that browsers do not use older files
            found.append(site | {"vocabularies": vocabularies_in(folder)})
        targets = {code: [t for s, t in described if s == code] for pair in described for code in pair}
        languages = [
            {"code": code, "name": language_name(code), "targets": codes} for code, codes in targets.items()
        ]
        page = translator_page("engine", {"models": found, "languages": languages})
        write_text(temporary / "index.html", page)

    write_new_folder(out, fill)


def _export_of(model: Path) -> ExportInfo | None:
    """What an exported model is; None for a run or model folder, or a checkpoint."""
    own = is_run(model) or (model / "config.yaml").exists()
    return None if own else read_info(model).export


def _direction(model: Path) -> tuple[str, str]:
    """The codes of the languages of a model. Raises ModelError if they are unknown, or if the engine does not
    support the model."""
    exported = _export_of(model)
    config = read_settings(model) if exported is None else exported.config
    if exported is not None and (exported.format != "bergamot" or any(model.glob("*.bin.gz"))):
        form = "for Firefox" if exported.format == "bergamot" else "in another format"
        raise ModelError(f"{model}: is exported {form}; give the model that it was exported from")
    if exported is None:
        tokenizer = Tokenizer(tokenizer_folder(model))
        if problem := problem_of(config, "bergamot", tokenizer, other="use `mtrain serve`"):
            raise ModelError(f"{model}: {problem}")
    try:
        return languages_of(config)
    except ModelError as error:
        raise ModelError(f"{model}: {error}") from None


def _write_model(model: Path, folder: Path) -> str:
    """Copy an exported model, or export a model in int8. Returns the arithmetic of the engine."""
    exported = _export_of(model)
    if exported is None:
        export_model(model, folder, "bergamot", "int8")
        return arithmetic(int8=True)
    verify_folder(model, [MODEL])
    copy_files(model, folder, {MANIFEST})
    return arithmetic(exported.quantization is not None)
