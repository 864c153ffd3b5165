"""The interactive prompt of `mtrain translate`."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from mtrain.cli.console.output import shown_on
from mtrain.cli.console.terminal import print_to_stderr, require_unicode, shown_in_line
from mtrain.decoding.scoring.score import attention
from mtrain.decoding.translate import Translator
from mtrain.errors import MtrainError, UsageError
from mtrain.invisible_characters import show_piece

HELP = """\
Type a sentence and press Enter to translate it.
  :n 5        show the 5 best translations
  :beam 8     use beam search with 8 beams
  :attention  show the attention weights of the last translation
  :help       show this help
  :quit       quit (or press Ctrl-D)"""
_SHADES = " ░▒▓█"


class Prompt:
    """Translates typed sentences. Translations go to stdout, everything else to stderr."""

    def __init__(self, translator: Translator, n_best: int = 1):
        self.translator, self.n_best = translator, n_best
        self.last: tuple[str, str] | None = None  # source and translation
        self.commands: dict[str, Callable[[str], None]] = {
            "n": self._set_n_best,
            "beam": self._set_beam_size,
            "attention": self._show_attention,
            "help": lambda _: print_to_stderr(HELP),
        }

    def run(self) -> None:
        """Read and answer lines until Ctrl-D or `:quit`."""
        print_to_stderr(HELP)
        for line in _typed_lines():
            if line.strip() in (":quit", ":q"):
                return
            try:
                self._answer(line)
            except MtrainError as error:  # concerns this line only
                print_to_stderr(f"error: {error}")

    def _answer(self, line: str) -> None:
        line = require_unicode(line)
        name, _, argument = line.strip().partition(" ")
        if name[:1] == ":":
            if name[1:] not in self.commands:
                known = ", ".join(f":{command}" for command in self.commands)
                raise UsageError(f"{name}: no such command; use {known} or :quit")
            self.commands[name[1:]](argument.strip())
            return
        start = time.perf_counter()
        [best] = self.translator.translate([line], n_best=self.n_best)
        milliseconds = 1000 * (time.perf_counter() - start)
        for translation in best.n_best or (best,):
            print(translation.text, file=shown_on(sys.stdout), flush=True)
            log_prob = f"log-probability {translation.log_prob:.2f} nats"
            print_to_stderr(f"    score {translation.score:.3f}, {log_prob}")
        print_to_stderr(f"    {milliseconds:.0f} ms")
        self.last = (line, best.text)

    def _set_n_best(self, argument: str) -> None:
        count = _number(":n", argument)
        decoding = self.translator.decoding
        if decoding.samples is not None:
            self.translator = self.translator.with_settings(samples=max(count, decoding.samples))
        elif count > decoding.beam_size:
            self._set_beam_size(argument)
        self.n_best = count

    def _set_beam_size(self, argument: str) -> None:
        size = _number(":beam", argument)
        searched = {"samples": None, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        self.translator = self.translator.with_settings(beam_size=size, **searched)
        self.n_best = min(self.n_best, size)
        print_to_stderr(f"    {size} beams")

    def _show_attention(self, _: str) -> None:
        if self.last is None:
            raise UsageError(":attention: translate a sentence first")
        source, target, weights = attention(self.translator, self.last[0], self.last[1])
        print(draw_attention(source, target, weights), file=sys.stderr)


def draw_attention(source: list[str], target: list[str], weights: npt.NDArray[np.floating]) -> str:
    """Draw attention weights (T, S) as text, with a row per target token and a column per source token."""
    from rich.cells import cell_len

    source, target = ([shown_in_line(show_piece(piece)) for piece in side] for side in (source, target))
    width = max(map(cell_len, target))
    lines = [" ".join(f"{number}:{piece}" for number, piece in enumerate(source, start=1))]
    lines.append(" " * width + "".join(f"{number:>3}" for number in range(1, len(source) + 1)))
    for piece, row in zip(target, weights, strict=True):
        cells = (_SHADES[min(int(weight * len(_SHADES)), len(_SHADES) - 1)] * 2 for weight in row)
        lines.append(" " * (width - cell_len(piece)) + piece + "".join(f" {cell}" for cell in cells))
    return "\n".join(lines)


def _number(command: str, argument: str) -> int:
    if argument not in map(str, range(1, 129)):
        raise UsageError(f"{command} {argument}".strip() + ": give a number from 1 to 128")
    return int(argument)


def _typed_lines() -> Iterator[str]:
    """Yield typed lines, with editing and history where available, until Ctrl-D."""
    with suppress(ImportError):  # not available on every platform
        import readline  # noqa: F401  (input() uses it)
    while True:
        try:
            yield input("> " if sys.stdout.isatty() else "")  # a redirected stdout gets results only
        except EOFError:
            print_to_stderr("")
            return
