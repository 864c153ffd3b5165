"""What `mtrain translate` writes: the format of translations, and output files that can be resumed."""

import logging
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mtrain.cli.console import terminal
from mtrain.cli.console.output import is_on_screen, is_stream, open_output, write_lines
from mtrain.data import COMPRESSION
from mtrain.distributed.launch import read_launch
from mtrain.duration import format_duration
from mtrain.errors import DataError, UsageError

if TYPE_CHECKING:
    from mtrain.decoding.problems import ProblemCounter
    from mtrain.decoding.translate import Translator
    from mtrain.decoding.translation import Translation
    from mtrain.progress_bar import ProgressBar

log = logging.getLogger(__name__)

REPORT_AFTER = 1.0  # seconds after which a translation ends with a message about its speed


class OutputFormat(NamedTuple):
    """The output format of translations."""

    n_best: int
    scores: bool
    alignments: bool
    json: bool

    @property
    def lines_each(self) -> int:
        """Number of output lines for each input line."""
        return 1 if self.json else self.n_best

    def render(self, translation: "Translation") -> str:
        """The output lines of a translation."""
        if self.json:
            return translation.as_json()
        return translation.answer(self.n_best, self.scores, self.alignments)


class TranslationJob(NamedTuple):
    """What to do with each input line."""

    translator: "Translator"
    prefix: Path | None
    form: OutputFormat
    progress: "ProgressBar"
    problems: "ProblemCounter"
    paused: Callable[[float], bool]  # see `Translator.stream`

    def answers(
        self, lines: Iterable[str], first: int = 0, waiting: Callable[[], object] = lambda: None
    ) -> Generator[str, None, None]:
        """Yield the output for `lines`, the first of which has the number `first`. `waiting` is called often
        while they are translated."""

        def count(lines: int, tokens: int) -> None:
            self.progress.add(lines, tokens)
            waiting()

        from mtrain.decoding.split import PrefixError

        prefixes = None if self.prefix is None else islice(terminal.read_lines(self.prefix), first, None)
        form, scored = self.form, self.form.scores or self.form.json
        sources, lines = tee(lines)
        found = self.translator.stream(
            lines, form.n_best, form.alignments, prefixes, first, scored, progress=count, paused=self.paused
        )
        try:
            with closing(found):
                for number, (source, best) in enumerate(zip(sources, found, strict=True), start=first + 1):
                    # Broken characters of a sample that is not the best one matter: all samples are written.
                    broken = (one.text for one in best.n_best if "\ufffd" in one.text)
                    text = next(broken, best.text) if best.n_best else best.text
                    self.problems.add(number, source, text, best.finished)
                    yield form.render(best)
        except PrefixError as error:
            raise DataError(f"{self.prefix}:{error.index + 1}: {error.reason}") from None

    def description(self) -> dict[str, Any]:
        """Everything that determines the output, besides the lines."""
        from mtrain.storage.manifest import sha256

        prefix, decoding = self.prefix, self.translator.decoding
        description: dict[str, Any] = {
            "model": self.translator.fingerprint,
            "decoding": decoding.model_dump(mode="json", exclude={"batch_tokens", "workers"}),
            "prefix": None if prefix is None else sha256(prefix) if prefix.is_file() else "a pipe",
            "form": list(self.form),
            "lines_each": self.form.lines_each,
        }
        if self.translator.workers.ensemble.search is not None:
            description["engine"] = "ctranslate2"
        if any(tags := self.translator.splitter.tags):  # the model could also translate into other languages
            description["tag"] = [*tags.source, *tags.after_source, *tags.target]
        if self.translator.direction != self.translator.own_direction:  # lines are split by its rules
            description["direction"] = list(self.translator.direction)
        return description


def write_translations(
    translator: "Translator",
    typed: Sequence[str],
    input_file: Path | None,
    output_file: Path | None,
    prefix: Path | None,
    form: OutputFormat,
    continue_: bool,
) -> None:
    """Translate the typed sentences, or a file or stdin, and write the results to stdout or a file. A file is
    written so that `--continue` can resume it."""
    from mtrain.cli.console.pipe import answered_pipe
    from mtrain.decoding.problems import ProblemCounter
    from mtrain.progress_bar import ProgressBar

    total = len(typed) if typed else count_lines(input_file)
    prefixes = None if total is None else count_lines(prefix)
    if total is not None and prefixes is not None and prefixes != total:
        counts = f"has {prefixes:,} lines but the input has {total:,}"
        raise UsageError(f"{prefix}: {counts}; give one prefix for each line (it may be empty)")
    from_stdin = not typed and (input_file is None or str(input_file) == "-")
    pipe = answered_pipe() if from_stdin and is_stream(output_file) else None
    lines = iter(typed) if typed else iter(pipe or terminal.read_lines(input_file or Path("-")))
    paused: Callable[[float], bool] = (lambda _: False) if pipe is None else pipe.paused
    hidden = bool(typed) or is_on_screen(output_file)
    with ProgressBar("translated", "lines", total, hidden) as progress:
        job = TranslationJob(translator, prefix, form, progress, ProblemCounter(), paused)
        if output_file is None or is_stream(output_file):
            in_columns = form.scores or form.alignments
            with open_output(output_file, in_columns) as out, closing(job.answers(lines)) as answers:
                write_lines(answers, out, flush_every=0)  # the next input may take long to arrive
        else:
            _write_resumable(job, lines, output_file, continue_)
    if problems := job.problems.summary(progress.count):
        log.warning("%s", problems)
    if progress.count and progress.seconds >= REPORT_AFTER and not typed:
        done = f"{progress.count:,} lines in {format_duration(progress.seconds)}"
        log.info("translated %s: %s", done, progress.speed())
        if not is_stream(output_file) and form == OutputFormat(1, False, False, False):
            file = shlex.quote(str(output_file))
            terminal.suggest("next", f"mtrain evaluate --hypotheses {file} --reference FILE")


def count_lines(file: Path | None) -> int | None:
    """The number of lines of an input, and None for a pipe. Raises DataError for a line that is not valid
    text, so that it does not end a long translation."""
    from mtrain.data.reading.lines import count_valid_lines

    return count_valid_lines(file) if file is not None and is_regular(file) else None


def is_regular(file: Path) -> bool:
    """Whether an input is a regular file, not stdin (`-`) or a pipe."""
    return str(file) != "-" and file.is_file()


def _write_resumable(job: TranslationJob, lines: Iterator[str], path: Path, continue_: bool) -> None:
    """Write the translations of `lines` to a file which --continue can resume after an interruption."""
    from mtrain.data.reading.lines import open_blocks
    from mtrain.storage.resumable import ResumableOutput

    resume = continue_ or read_launch().restarts > 0  # torchrun has started the same command again
    file = ResumableOutput(path.resolve(), job.description(), resume, COMPRESSION.get(path.suffix))
    if continue_ and not file.part.exists() and path.exists():
        expected = sum(1 for _ in lines) * job.form.lines_each
        with open_blocks(path) as blocks:
            if blocks.count_all() != expected:
                problem = "there is nothing to resume; leave out --continue to replace the file"
                raise UsageError(f"{path}: {problem}")
        log.warning("%s is already complete; whether this model and input produced it was not checked", path)
        return
    with file:
        file.skip(lines)
        job.progress.set_done_before(file.lines_done)
        inputs, remaining = tee(lines)
        with closing(job.answers(remaining, file.lines_done, file.save_if_due)) as answers:
            for line, answer in zip(inputs, answers, strict=True):
                file.write(line, answer)
