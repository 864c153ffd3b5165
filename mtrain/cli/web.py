"""`mtrain web`."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument

from mtrain.cli.console import options, terminal
from mtrain.cli.console.output import print_to_stdout


def web(
    models: Annotated[
        list[Path],
        Argument(
            metavar="MODEL",
            help="Run folder, model folder, or exported Bergamot model; repeat for more directions.",
        ),
    ],
    out: Annotated[Path, options.file("-o", "--output", metavar="FOLDER", help="Folder to create.")],
    engine: Annotated[
        Path | None,
        options.file(
            metavar="FOLDER",
            help="Where the npm package @browsermt/bergamot-translator is. Default: it is downloaded.",
        ),
    ] = None,
) -> None:
    """Write a web page that translates with MODELs in the browser.

    The folder holds the page, the Bergamot engine, and the models, in int8 unless they were exported
    before. It can be put on any web server.
    Texts do not leave the browser, and the page loads nothing from elsewhere.

    Examples:
        mtrain web runs/en-de -o page
        mtrain web runs/en-de runs/de-en -o page
    """
    from mtrain.progress_bar import waiting_for
    from mtrain.web.site import write_site

    with waiting_for("writing the page"):
        write_site(models, out, engine)
    print_to_stdout(out)
    command = f"python -m http.server --bind 127.0.0.1 --directory {shlex.quote(str(out))}"
    terminal.suggest("page saved; to open http://127.0.0.1:8000, run", command)
