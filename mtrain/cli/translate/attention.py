"""`mtrain translate --attention`."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.cli.console.output import open_output, require_writable
from mtrain.errors import UsageError

if TYPE_CHECKING:
    from mtrain.decoding.translate import Translator

MOST = 20  # sentences of a page


def check_attention(
    file: Path | None, text: Sequence[str] | None, output_file: Path | None, prefix: Path | None
) -> None:
    """Raise UsageError unless the page can be written, and there are a few sentences for it."""
    if file is None:
        return
    if not text:
        raise UsageError(f"--attention {file}: draws the sentences given as TEXT; give TEXT, not a file")
    if len(text) > MOST:
        raise UsageError(f"--attention {file}: draws at most {MOST} sentences, but {len(text)} were given")
    if output_file is not None and os.path.realpath(file) == os.path.realpath(output_file):
        raise UsageError(f"--attention {file}: this is also the output file; give another file")
    require_writable(file, (prefix,))


def write_attention(
    translator: "Translator", sources: Sequence[str], prefixes: Iterable[str] | None, name: str, file: Path
) -> None:
    """Write a page with the attention of the model called `name`."""
    from mtrain.report.attention import attention_page

    found = translator.translate(sources, prefixes=prefixes, scored=False)
    with open_output(file) as out:
        out.write(attention_page(translator, sources, [each.text for each in found], name))
