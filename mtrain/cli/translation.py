"""`mtrain translate`."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from mtrain.cli import terminal
from mtrain.cli.attention import check_attention, write_attention
from mtrain.cli.options import (
    FILES,
    RESULTS,
    SAMPLING,
    SPEED,
    BatchTokens,
    BeamSize,
    Debug,
    Device,
    Ensemble,
    InputFile,
    LengthPenalty,
    ModelFolder,
    OutputFile,
    Quiet,
    Set,
    overrides,
)
from mtrain.cli.output import is_stream, open_output, require_writable, write_lines
from mtrain.data import COMPRESSION
from mtrain.distributed.launch import read_launch
from mtrain.errors import UsageError

if TYPE_CHECKING:
    from mtrain.decoding.translate import Translator
    from mtrain.decoding.translation import Translation
    from mtrain.progress_bar import ProgressBar

log = logging.getLogger(__name__)

REPORT_AFTER = 1.0  # seconds after which a translation ends with a message about its speed


class Format(NamedTuple):
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


class Job(NamedTuple):
    """What to do with each input line."""

    translator: "Translator"
    prefix: Path | None
    form: Format
    progress: "ProgressBar"

    def answers(
        self, lines: Iterable[str], first: int = 0, waiting: Callable[[], object] = lambda: None
    ) -> Iterator[str]:
        """Yield the output for `lines`, the first of which has the number `first`. `waiting` is called often
        while they are translated."""

        def count(lines: int, tokens: int) -> None:
            self.progress.add(lines, tokens)
            waiting()

        prefixes = None if self.prefix is None else islice(terminal.read_lines(self.prefix), first, None)
        form, scored = self.form, self.form.scores or self.form.json
        for best in self.translator.stream(
            lines, form.n_best, form.alignments, prefixes, first, scored=scored, progress=count
        ):
            yield form.render(best)

    def description(self) -> dict[str, Any]:
        """Everything that determines the output, besides the lines."""
        from mtrain.storage.manifest import sha256

        prefix, decoding = self.prefix, self.translator.decoding
        return {
            "model": self.translator.fingerprint,
            "decoding": decoding.model_dump(mode="json", exclude={"batch_tokens", "workers"}),
            "prefix": None if prefix is None else sha256(prefix) if prefix.is_file() else "a pipe",
            "form": list(self.form),
            "lines_each": self.form.lines_each,
        }


def translate(
    model: ModelFolder,
    text: Annotated[
        list[str] | None, Argument(metavar="TEXT", help="Sentences to translate.", show_default=False)
    ] = None,
    input_file: InputFile = None,
    output_file: OutputFile = None,
    continue_: Annotated[
        bool,
        Option("--continue", help="Resume the output file of an interrupted command.", rich_help_panel=FILES),
    ] = False,
    beam_size: BeamSize = None,
    n_best: Annotated[
        int,
        Option(
            min=1,
            max=1024,
            metavar="N",
            help="Number of translations for each sentence.",
            rich_help_panel=RESULTS,
        ),
    ] = 1,
    length_penalty: LengthPenalty = None,
    batch_tokens: BatchTokens = None,
    workers: Annotated[
        int | None,
        Option(
            min=1,
            max=64,
            metavar="N",
            help="Number of processes that translate on a CPU; each holds a copy of the model.",
            rich_help_panel=SPEED,
        ),
    ] = None,
    ensemble: Ensemble = None,
    prefix: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="File with a prefix for each translation, one per line.",
            rich_help_panel=FILES,
        ),
    ] = None,
    sample: Annotated[
        bool,
        Option(
            "--sample", help="Sample translations instead of using beam search.", rich_help_panel=SAMPLING
        ),
    ] = False,
    temperature: Annotated[
        float | None,
        Option(
            metavar="T",
            help="Sampling temperature; values below 1 sharpen the distribution.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        Option(
            min=0,
            metavar="K",
            help="Sample from the K most probable tokens; 0: from all.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        Option(
            metavar="P",
            help="Sample from the smallest set of tokens with at least this probability.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None, Option(min=0, metavar="N", help="Random seed of sampling.", rich_help_panel=SAMPLING)
    ] = None,
    scores: Annotated[
        bool, Option("--scores", help="Append a tab and the score.", rich_help_panel=RESULTS)
    ] = False,
    alignments: Annotated[
        bool,
        Option(
            "--alignments", help="Append a tab and word alignments such as 0-0 1-2.", rich_help_panel=RESULTS
        ),
    ] = False,
    json_: Annotated[
        bool,
        Option("--json", help="Print one JSON object per line, with all details.", rich_help_panel=RESULTS),
    ] = False,
    attention: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Also write a page with the attention maps of TEXT.", rich_help_panel=RESULTS
        ),
    ] = None,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Translate text with MODEL.

    The input is TEXT, a file, or stdin; at a terminal, a prompt opens. One line is printed for each input
    line, in order.

    Examples:
        mtrain translate runs/mine 'A dog runs.'
        mtrain translate runs/mine -i new.en -o new.de
        mtrain translate runs/mine -i new.en --beam-size 8 --n-best 4 --json
    """
    terminal.start_logging(quiet, debug)
    launch = read_launch()
    is_first = launch.rank == 0  # of several ranks, the first alone reads and writes
    prompted = is_first and not text and input_file is None and sys.stdin.isatty()
    if prompted and (output_file or prefix or scores or alignments or json_ or launch.size > 1):
        raise UsageError("nothing to translate; give TEXT, --input or a pipe")
    if scores and json_:
        raise UsageError("--scores has no effect with --json, which contains the scores; give one of them")
    if is_first:
        _check_input(text, input_file, prefix)
        require_writable(output_file, (input_file, prefix))
        check_attention(attention, text, output_file, prefix)
        if continue_:
            _check_continue(output_file, prefix)
    typed = [terminal.require_unicode(sentence) for sentence in text or []]
    search = {"beam_size": beam_size, "length_penalty": length_penalty}
    speed = {"batch_tokens": batch_tokens, "workers": workers}
    samples_set = any(assignment.startswith("decoding.samples=") for assignment in set_ or [])
    samples = n_best if sample and not samples_set else None
    settings = overrides(set_, "decoding.", samples=samples, **search, **speed)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    given = {name: value for name, value in sampling.items() if value is not None}
    from mtrain.distributed.many_ranks import joined_ranks

    with joined_ranks(device) as ranks, terminal.cleaning_up_after_sigterm():
        translator = load_translator(model, str(ranks.device), settings, ensemble)
        refuse_beam_size_of_sampling(translator, beam_size)
        if given and translator.decoding.samples is None:
            raise UsageError(
                f"--{next(iter(given)).replace('_', '-')} has no effect without --sample; add --sample"
            )
        if given:
            translator = translator.with_settings(**given)
        if prompted:
            from mtrain.cli.prompt import Prompt

            Prompt(translator, n_best).run()
            return
        form = Format(n_best, scores, alignments, json_)
        files = input_file, output_file, prefix
        translator.lead(ranks, lambda: _translate(translator, typed, *files, form, continue_, quiet))
        if attention is not None and is_first:
            prefixes = None if prefix is None else terminal.read_lines(prefix)
            write_attention(translator, typed, prefixes, str(model), attention)


def _translate(
    translator: "Translator",
    typed: Sequence[str],
    input_file: Path | None,
    output_file: Path | None,
    prefix: Path | None,
    form: Format,
    continue_: bool,
    quiet: bool,
) -> None:
    """Translate the typed sentences, or a file or stdin."""
    from mtrain.progress_bar import ProgressBar

    total = len(typed) if typed else _count_lines(input_file)
    if prefix is not None and total is not None:
        _check_prefixes(prefix, total)
    lines = iter(typed) if typed else terminal.read_lines(input_file or Path("-"))
    with ProgressBar("translated", "lines", total, quiet or bool(typed)) as progress:
        job = Job(translator, prefix, form, progress)
        if output_file is None or is_stream(output_file):
            with open_output(output_file) as out:
                write_lines(job.answers(lines), out)
        else:
            _write_resumable(job, lines, output_file, continue_)
    if progress.count and progress.seconds >= REPORT_AFTER and not typed:
        done = f"{progress.count:,} lines in {progress.seconds:,.1f} s"
        log.info("translated %s: %s", done, progress.speed())


def _count_lines(file: Path | None) -> int | None:
    """The number of lines of an input, and None for a pipe. Raises DataError for a line that is not valid
    text, so that it does not end a long translation."""
    from mtrain.data.lines import count_valid_lines

    return count_valid_lines(file) if file is not None and file.is_file() else None


def _check_prefixes(file: Path, lines: int) -> None:
    """Raise UsageError unless a file has a prefix for each of the input lines."""
    count = _count_lines(file)
    if count is not None and count != lines:
        raise UsageError(
            f"{file}: has {count:,} lines but the input has {lines:,}; give one prefix for each line "
            "(it may be empty)"
        )


def _check_input(text: Sequence[str] | None, input_file: Path | None, prefix: Path | None) -> None:
    if text and input_file:
        raise UsageError("TEXT and --input were both given; give one of them")
    for file in (input_file, prefix):
        if file is not None:
            terminal.require_file(file)
    if prefix == Path("-"):
        raise UsageError("--prefix -: reading prefixes from stdin is not supported; give a file")


def _check_continue(output_file: Path | None, prefix: Path | None) -> None:
    if output_file is None or is_stream(output_file):
        raise UsageError("--continue requires -o FILE, the output file to resume")
    if prefix is not None and not prefix.is_file():
        raise UsageError("--continue requires a --prefix that can be read again: a file, not a pipe")


def load_translator(
    model: Path, device: str, settings: Sequence[str], ensemble: Sequence[str] | None = None
) -> "Translator":
    """Load a model, and set the allocator of this process for decoding (see `keep_freed_memory`)."""
    from mtrain.decoding.translate import Translator
    from mtrain.device import keep_freed_memory

    keep_freed_memory()
    return Translator.load(model, device, settings, ensemble or ())


def refuse_beam_size_of_sampling(translator: "Translator", beam_size: int | None) -> None:
    """Raise UsageError if a beam size is given but translations are sampled, as the model's own config may
    have it."""
    samples = translator.decoding.samples
    if samples is not None and beam_size is not None:
        raise UsageError(
            f"--beam-size has no effect on sampling (decoding.samples is {samples}); leave it out, "
            "or disable sampling with --set decoding.samples=null"
        )


def _write_resumable(job: Job, lines: Iterator[str], path: Path, continue_: bool) -> None:
    """Write the translations of `lines` to a file which --continue can resume after an interruption."""
    from mtrain.storage.resumable import ResumableOutput

    file = ResumableOutput(path.resolve(), job.description(), continue_, COMPRESSION.get(path.suffix))
    if continue_ and not file.interrupted and path.exists():
        _require_complete(path, sum(1 for _ in lines) * job.form.lines_each)
        return
    with file:
        file.skip(lines)
        job.progress.set_done_before(file.lines_done)
        inputs, remaining = tee(lines)
        answers = job.answers(remaining, file.lines_done, file.save_if_due)
        for line, answer in zip(inputs, answers, strict=True):
            file.write(line, answer)


def _require_complete(path: Path, count: int) -> None:
    """Raise UsageError unless a file has `count` lines."""
    from mtrain.data.lines import open_blocks

    with open_blocks(path) as blocks:
        if blocks.count_all() != count:
            raise UsageError(f"{path}: there is nothing to resume; leave out --continue to replace the file")
    log.warning("%s is already complete; whether this model and input produced it was not checked", path)
