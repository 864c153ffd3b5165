"""`mtrain import` and `mtrain export`."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from mtrain.cli.console import options, terminal
from mtrain.cli.console.output import open_stdout
from mtrain.errors import DataError, UsageError
from mtrain.invisible_characters import is_blank

ExportFormat = Literal["transformers", "marian", "pegasus", "m2m_100", "ctranslate2", "argos", "bergamot"]
Quantization = Literal["int8", "int8_float32", "float16", "bfloat16"]


def import_(
    source: Annotated[
        str,
        Argument(
            metavar="SOURCE",
            help="MarianMT, M2M-100 or NLLB-200 model: a folder, or a name on the Hugging Face Hub; or a "
            "folder with a Marian model.",
        ),
    ],
    out: Annotated[Path, Argument(metavar="MODEL", help="Model folder to create.")],
    set_: options.Set = None,
) -> None:
    """Import a MarianMT, M2M-100 or NLLB-200 model from Hugging Face, or a Marian model.

    Converts it to a model folder, which you can translate with or fine-tune.

    Examples:
        mtrain import Helsinki-NLP/opus-mt-en-de models/opus-en-de
        mtrain import facebook/nllb-200-distilled-600M models/nllb
        mtrain import opus-mt models/opus --set source_lang=en --set target_lang=de
    """
    from mtrain.checkpoint.model_info import read_model_config
    from mtrain.interop.import_model import import_model

    import_model(source, out, options.overrides(set_))
    use = terminal.use_command(str(out), False, read_model_config(out).example)
    terminal.suggest("model saved; next", use)


def export(
    model: options.ModelFolder,
    out: Annotated[Path, Argument(metavar="OUT", help="Folder to create.")],
    format: Annotated[
        ExportFormat,
        Option(
            help="transformers: for Hugging Face Transformers, as marian, pegasus or m2m_100, whichever "
            "supports the model; ctranslate2: for CTranslate2; argos: for Argos Translate and "
            "LibreTranslate; bergamot: for Firefox, translateLocally and web pages."
        ),
    ],
    quantization: Annotated[
        Quantization | None,
        Option(help="Data type of the weights; for ctranslate2 and argos, and int8 for bergamot."),
    ] = None,
    input_file: Annotated[
        Path | None,
        Option(
            "-i",
            "--input",
            metavar="FILE",
            help="Sentences to compare both models on, one per line; - is stdin. Default: generated ones.",
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="For bergamot: folder with the npm package @browsermt/bergamot-translator; the exported "
            "model is also tested with this engine. Default: the working directory, if it is there.",
        ),
    ] = None,
    firefox: Annotated[
        bool, Option("--firefox", help="For bergamot: compressed files with the names of Firefox's models.")
    ] = False,
    set_: options.Set = None,
) -> None:
    """Export MODEL for another program.

    Verifies that mtrain and the other program give the same translations and probabilities.

    Examples:
        mtrain export runs/mine exported --format ctranslate2 --quantization int8
        mtrain export runs/mine exported --format transformers
        mtrain export runs/mine exported --format bergamot --quantization int8
    """
    if quantization is not None and format not in ("ctranslate2", "argos", "bergamot"):
        raise UsageError("--quantization requires --format ctranslate2, argos or bergamot")
    if format == "bergamot" and quantization not in (None, "int8"):
        raise UsageError(f"--quantization {quantization}: bergamot supports int8; leave it out for fp32")
    if format != "bergamot" and (engine or firefox):
        raise UsageError(f"--{'engine' if engine else 'firefox'} requires --format bergamot")
    if firefox and quantization is None:
        raise UsageError("--firefox requires --quantization int8")
    terminal.require_file(input_file)
    from mtrain.interop.export import export_model

    texts = list(terminal.read_lines(input_file)) if input_file else []
    if input_file and all(map(is_blank, texts)):
        raise DataError(f"{input_file}: has no text to compare; give another file, or leave out --input")
    lines = export_model(model, out, format, quantization, texts, options.overrides(set_), engine, firefox)
    with open_stdout() as stdout:
        stdout.writelines(f"{terminal.wrap(line, stdout)}\n" for line in lines)
    if format == "bergamot":
        terminal.suggest("model saved; the files for the engine are in", str(out))
        return
    loaders = {"ctranslate2": "ctranslate2.Translator", "argos": "argostranslate.package.install_from_path"}
    loader = loaders.get(format, "transformers.AutoModelForSeq2SeqLM.from_pretrained")
    [place] = out.glob("*.argosmodel") if format == "argos" else [out]
    terminal.suggest("model saved; load it in Python", f"{loader}({str(place)!r})")
