"""Run one part: `python -m gpu PART ...`, with this repository and its folder `scripts` on PYTHONPATH."""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu import decoding, equality, machine, profiling, resume, training
from gpu.scale import CheckFailed, Scale
from mtrain.config.sections.presets import PRESETS
from mtrain.device import resolve_device
from mtrain.errors import MtrainError


def parse(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line. `run` is the function of the part, the rest are its arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu", description="Check and measure mtrain on a device."
    )
    parser.add_argument("--device", default="cuda", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the parts on a CPU")
    parts = parser.add_subparsers(required=True, metavar="PART")
    function: Callable[..., None]
    for name, function, text in (
        ("environment", machine.environment, "versions and the device"),
        ("ceiling", machine.ceiling, "the speed of matrix products, copies and launches"),
    ):
        parts.add_parser(name, help=text).set_defaults(run=function)
    part = parts.add_parser("resume", help="kill and resume a run")
    part.add_argument("work", type=Path, metavar="FOLDER", help="folder for the runs")
    part.add_argument("--python", nargs="+", default=[sys.executable], help="what starts the interpreter")
    part.set_defaults(run=resume.check)
    for name, function, text in (
        (
            "check-training",
            equality.check_training,
            "whether training with CUDA graphs gives the same losses",
        ),
        ("check-decoding", equality.check_decoding, "whether decoding with CUDA graphs gives the same text"),
        ("train", training.measure, "the speed of training"),
        ("peers", training.measure_peers, "the speed of training of other tools"),
        ("decode", decoding.measure, "the speed of mtrain's search"),
        ("decode-transformers", decoding.measure_transformers, "the speed of Transformers' generate"),
        ("profile-training", profiling.profile_training, "where the time of training goes"),
        ("profile-decoding", profiling.profile_decoding, "where the time of the search goes"),
    ):
        part = parts.add_parser(name, help=text)
        part.add_argument("preset", choices=PRESETS, metavar="PRESET", help=f"one of {', '.join(PRESETS)}")
        part.set_defaults(run=function)
        if "decod" not in name:
            part.add_argument("batch_tokens", type=int, nargs="+", metavar="TOKENS", help="tokens per batch")
    return vars(parser.parse_args(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part. If its check fails, prints the reason and returns 1."""
    warnings.filterwarnings("ignore")  # of other libraries, which would hide the results
    options = parse(arguments)
    run, name, tiny = options.pop("run"), options.pop("device"), options.pop("tiny")
    try:
        run(Scale(resolve_device(name), tiny), **options)
    except (CheckFailed, MtrainError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
