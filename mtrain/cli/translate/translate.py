"""`mtrain translate`."""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from mtrain.cli.console import options, terminal
from mtrain.cli.console.output import is_stream, open_output, require_writable
from mtrain.cli.translate.translation_output import OutputFormat, is_regular, write_translations
from mtrain.distributed.launch import read_launch, require_repeatable
from mtrain.errors import UsageError

if TYPE_CHECKING:
    from mtrain.decoding.translate import Translator

_MAPS = 20  # maximum number of sentences of --attention
# Seconds for which a Python thread may run while others wait; Python's default is 5 ms. On a GPU, the thread
# that starts the kernels of a step must not wait long for the threads that read and write.
_SWITCH_INTERVAL = 0.0002


def translate(
    model: options.ModelFolder,
    text: Annotated[
        list[str] | None, Argument(metavar="TEXT", help="Lines to translate; - is stdin.", show_default=False)
    ] = None,
    input_file: options.InputFile = None,
    output_file: options.OutputFile = None,
    continue_: Annotated[
        bool, options.file("--continue", help="Resume the output file of an interrupted command.")
    ] = False,
    from_: options.From = None,
    to: options.To = None,
    beam_size: options.BeamSize = None,
    n_best: Annotated[
        int, options.result(min=1, max=1024, metavar="N", help="Number of translations for each sentence.")
    ] = 1,
    length_penalty: options.LengthPenalty = None,
    batch_tokens: options.BatchTokens = None,
    workers: Annotated[
        str | None,
        options.speed(
            parser=partial(options.number_or_auto, largest=64),
            metavar="N|auto",
            help="Number of processes that translate on a CPU; each holds a copy of the model.",
        ),
    ] = None,
    engine: options.Engine = "mtrain",
    ensemble: options.FurtherModels = None,
    prefix: Annotated[
        Path | None, options.path(help="File with a prefix for each translation, one per line.")
    ] = None,
    sample: Annotated[
        bool, options.sampling("--sample", help="Sample translations instead of using beam search.")
    ] = False,
    temperature: Annotated[
        float | None,
        options.sampling(metavar="T", help="Sampling temperature; values below 1 sharpen the distribution."),
    ] = None,
    top_k: Annotated[
        int | None,
        options.sampling(min=0, metavar="K", help="Sample from the K most probable tokens; 0: from all."),
    ] = None,
    top_p: Annotated[
        float | None,
        options.sampling(
            metavar="P", help="Sample from the smallest set of tokens with at least this probability."
        ),
    ] = None,
    seed: Annotated[int | None, options.sampling(min=0, metavar="N", help="Random seed of sampling.")] = None,
    scores: Annotated[bool, options.result("--scores", help="Append a tab and the score.")] = False,
    alignments: Annotated[
        bool, options.result("--alignments", help="Append a tab and word alignments such as 0-0 1-2.")
    ] = False,
    json_: Annotated[
        bool, options.result("--json", help="Print one JSON object per line, with all details.")
    ] = False,
    attention: Annotated[
        Path | None, options.result(metavar="FILE", help="Also write a page with the attention maps of TEXT.")
    ] = None,
    set_: options.Set = None,
    device: options.Device = "auto",
) -> None:
    """Translate text with MODEL.

    The input is TEXT, a file, or stdin; at a terminal, a prompt opens. One line is printed for each input
    line, in order. If stdin and stdout are pipes, a program can read the translation of a line before it
    writes the next one. Put -- before TEXT that begins with a hyphen.

    Examples:
        mtrain translate runs/mine 'A dog runs.'
        mtrain translate runs/mine -- '- A dog runs.'
        mtrain translate runs/mine -i new.en -o new.de
        mtrain translate runs/mine -i new.en --beam-size 8 --n-best 4 --json
    """
    launch = read_launch()
    is_first = launch.rank == 0  # of several ranks, the first alone reads and writes
    typed, input_file = terminal.typed_input(text, input_file)
    prompted = is_first and not typed and input_file is None and sys.stdin.isatty()
    if prompted and (output_file or prefix or scores or alignments or json_ or launch.size > 1):
        raise UsageError("nothing to translate; give TEXT, --input or a pipe")
    if scores and json_:
        raise UsageError("--scores has no effect with --json, which contains the scores; give one of them")
    if is_first:
        _check_input(input_file, prefix)
        require_writable(output_file, (input_file, prefix))
        if attention is not None:
            _check_attention(attention, typed, output_file, prefix)
        inputs = (prefix,) if typed else (prefix, input_file or Path("-"))
        reads_streams = any(file is not None and not is_regular(file) for file in inputs)
        cure = "start it again with files: -i FILE -o FILE"
        require_repeatable(reads_streams or is_stream(output_file), cure)
        if continue_:
            _check_continue(output_file, prefix)
    if ensemble and engine != "mtrain":
        raise UsageError(f"--ensemble: not supported by --engine {engine}; use --engine mtrain")
    search = {"beam_size": beam_size, "length_penalty": length_penalty}
    speed = {"batch_tokens": batch_tokens, "workers": workers}
    samples_set = any(assignment.startswith("decoding.samples=") for assignment in set_ or [])
    samples = n_best if sample and not samples_set else None
    settings = options.overrides(set_, "decoding.", **search, **speed)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    given = {name: value for name, value in sampling.items() if value is not None}
    from mtrain.distributed.many_ranks import joined_ranks

    with joined_ranks(device) as ranks:
        translator = load_translator(model, str(ranks.device), settings, ensemble, engine, beam_size, samples)
        translator = translator.between(from_, to)
        if sample and translator.decoding.samples is None:
            raise UsageError("--sample has no effect with --set decoding.samples=null; leave out one of them")
        if given:
            if translator.decoding.samples is None:
                option = next(iter(given)).replace("_", "-")
                raise UsageError(f"--{option} has no effect without --sample; add --sample")
            translator = translator.with_settings(**given)
        if prompted:
            from mtrain.cli.translate.prompt import Prompt

            Prompt(translator, n_best).run()
            return
        form = OutputFormat(n_best, scores, alignments, json_)
        job = partial(write_translations, translator, typed, input_file, output_file, prefix, form, continue_)
        translator.lead(ranks, job)
        if attention is not None and is_first:
            from mtrain.report.attention import attention_page

            prefixes = None if prefix is None else terminal.read_lines(prefix)
            found = translator.translate(typed, prefixes=prefixes, scored=False)
            with open_output(attention) as out:
                out.write(attention_page(translator, typed, [each.text for each in found], str(model)))


def _check_input(input_file: Path | None, prefix: Path | None) -> None:
    terminal.require_file(input_file)
    terminal.require_file(prefix)
    if prefix == Path("-"):
        raise UsageError("--prefix -: reading prefixes from stdin is not supported; give a file")


def _check_attention(file: Path, text: Sequence[str], output_file: Path | None, prefix: Path | None) -> None:
    """Raise UsageError unless the page can be written, and there are a few sentences for it."""
    if not text:
        raise UsageError(f"--attention {file}: draws the sentences given as TEXT; give TEXT, not a file")
    if len(text) > _MAPS:
        raise UsageError(f"--attention {file}: draws at most {_MAPS} sentences, but {len(text)} were given")
    if output_file is not None and os.path.realpath(file) == os.path.realpath(output_file):
        raise UsageError(f"--attention {file}: this is also the output file; give another file")
    _require_rereadable(prefix, "--attention")
    require_writable(file, (prefix,))


def _check_continue(output_file: Path | None, prefix: Path | None) -> None:
    if output_file is None or is_stream(output_file):
        raise UsageError("--continue requires -o FILE, the output file to resume")
    _require_rereadable(prefix, "--continue")


def _require_rereadable(prefix: Path | None, option: str) -> None:
    if prefix is not None and not prefix.is_file():
        raise UsageError(f"{option} requires a --prefix that can be read again: a file, not a pipe")


def load_translator(
    model: Path,
    device: str,
    settings: Sequence[str],
    ensemble: Sequence[str] | None = None,
    engine: str = "mtrain",
    beam_size: int | None = None,
    samples: int | None = None,
) -> "Translator":
    """Load a model, and change settings of this process that make decoding faster. If the config of the model
    does not request samples, `samples` are drawn, if given. Raises UsageError if `beam_size` is given but
    translations are sampled.
    """
    from mtrain.decoding.translate import Translator
    from mtrain.device import keep_freed_memory, let_cuda_memory_grow

    keep_freed_memory()
    let_cuda_memory_grow()
    translator = Translator.load(model, device, settings, ensemble or ())
    if translator.device.type == "cuda":
        sys.setswitchinterval(_SWITCH_INTERVAL)
    if translator.decoding.samples is None and samples is not None:
        translator = translator.with_settings(samples=samples)
    samples = translator.decoding.samples
    if samples is not None and beam_size is not None:
        neutral = {"samples": None, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        changed = {key: value for key, value in neutral.items() if getattr(translator.decoding, key) != value}
        off = " ".join(f"--set decoding.{key}={json.dumps(value)}" for key, value in changed.items())
        found = f"--beam-size has no effect on sampling (decoding.samples is {samples})"
        raise UsageError(f"{found}; leave it out, or disable sampling with {off}")
    if engine == "mtrain":
        return translator
    from mtrain.interop.ctranslate2_engine import with_ctranslate2

    return with_ctranslate2(model, translator)
