"""`mtrain report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mtrain.cli.console import options, terminal
from mtrain.cli.console.output import is_stream, open_output, print_to_stdout, require_writable


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Run folders.")],
    output_file: Annotated[
        Path, Option("-o", "--output", metavar="FILE", help="HTML file, replaced once it is complete.")
    ] = Path("report.html"),
    sentence: Annotated[
        list[str] | None,
        Option(metavar="TEXT", help="Sentence whose attention is drawn; repeatable. Default: three samples."),
    ] = None,
    set_: options.Set = None,
    device: options.Device = "cpu",
) -> None:
    """Write a page about one or more runs.

    The page shows curves, differences between the configs, statistics of the data, translations of
    validation sentences and attention maps. The page is a single file that needs no network. Runs can be
    shown while they are still training.

    Examples:
        mtrain report runs/mine
        mtrain report runs/mine runs/other -o compared.html
    """
    require_writable(output_file, ())
    sentences = [terminal.require_unicode(text) for text in sentence or []]
    from mtrain.progress_bar import waiting_for
    from mtrain.report.report import report_page

    with waiting_for("writing the report"):
        page = report_page(runs, sentences, device, options.overrides(set_))
    with open_output(output_file) as out:
        out.write(page)
    if not is_stream(output_file):
        print_to_stdout(output_file)
        terminal.suggest("report saved; open it in a browser", str(output_file.resolve()))
