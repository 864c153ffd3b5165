"""`mtrain segment`."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from mtrain.cli.console import options, terminal
from mtrain.cli.console.output import FLUSH_EVERY, is_stream, open_output, require_writable, write_lines
from mtrain.cli.console.pipe import answered_pipe
from mtrain.errors import DataError

if TYPE_CHECKING:
    from mtrain.tokenizer.vocabulary import Vocabulary

_LINE_BREAKERS = str.maketrans("\n\r\0", "   ")  # which byte pieces can decode to


def segment(
    model: options.ModelFolder,
    text: Annotated[
        list[str] | None,
        Argument(metavar="TEXT", help="Lines to segment, or to join; - is stdin.", show_default=False),
    ] = None,
    input_file: options.InputFile = None,
    output_file: options.OutputFile = None,
    ids: Annotated[bool, Option("--ids", help="Print or read token ids instead of pieces.")] = False,
    join: Annotated[bool, Option("--join", help="Join pieces or ids into text.")] = False,
    side: Annotated[
        Literal["source", "target"], Option(help="Vocabulary to use, if MODEL has one for each language.")
    ] = "source",
) -> None:
    """Split text into the subword pieces of MODEL, or join them.

    Prints the pieces of each line, separated by spaces. Reads stdin if neither TEXT nor a file is given. EOS,
    which mtrain appends to each sentence, is not shown. Text is normalized as in training, so that joining
    the pieces of a line restores the normalized line.

    Examples:
        mtrain segment runs/mine 'A dog runs.'
        mtrain segment runs/mine -i new.en --ids -o new.ids
    """
    typed, input_file = terminal.typed_input(text, input_file)
    terminal.require_file(input_file)
    require_writable(output_file, [input_file])
    from mtrain.checkpoint.model_folder import tokenizer_folder
    from mtrain.tokenizer.tokenizer import Tokenizer

    vocabulary: Vocabulary = getattr(Tokenizer(tokenizer_folder(model)), side)
    convert = _conversion(vocabulary, ids, join)
    from_stdin = not typed and input_file in (None, Path("-"))
    lines = iter(typed) if typed else terminal.read_lines(input_file or Path("-"))
    place = "TEXT" if typed else "<stdin>" if from_stdin else str(input_file)
    with open_output(output_file) as out:
        converted = _convert_lines(lines, convert, place)
        # A program may wait for the answer to a line before it writes the next one.
        flush_every = 0.0 if from_stdin and is_stream(output_file) and answered_pipe() else FLUSH_EVERY
        write_lines((f"{line}\n" for line in converted), out, flush_every)


def _conversion(vocabulary: "Vocabulary", ids: bool, join: bool) -> Callable[[str], str]:
    """The function that segments or joins a line. It raises ValueError for a line that cannot be joined."""
    if not join:
        rows: Callable[[list[str]], list[list[int]] | list[list[str]]]
        rows = vocabulary.encode if ids else vocabulary.segment
        return lambda line: " ".join(map(str, rows([line])[0]))
    if not ids:
        return lambda line: vocabulary.join([line.split(" ")])[0].translate(_LINE_BREAKERS)
    last = len(vocabulary) - 1

    def join_ids(line: str) -> str:
        for word in line.split():
            # Python limits the length of the numbers that it converts.
            if not (word.isascii() and word.isdigit() and len(word) <= 4000 and int(word) <= last):
                raise ValueError(f"{word} is not a token id; ids are integers from 0 to {last}")
        return vocabulary.decode([[int(word) for word in line.split()]])[0].translate(_LINE_BREAKERS)

    return join_ids


def _convert_lines(lines: Iterable[str], convert: Callable[[str], str], place: str) -> Iterator[str]:
    """Yield the converted lines. Raises DataError with the place of a line that cannot be converted."""
    for number, line in enumerate(lines, 1):
        try:
            yield convert(line)
        except ValueError as error:
            raise DataError(f"{place}:{number}: {error}") from None
