"""Measure mtrain against other tools and against the matrix products that the machine can do.

    python scripts/bench.py train CONFIG [--against joeynmt --against marian-hf --against torch] [--json]
    python scripts/bench.py translate MODEL SOURCE [--against joeynmt --against ctranslate2] [--json]

Each measurement runs in a new process, and the tools take turns: mtrain, peer, peer, mtrain, peer, peer. All
of them train on, or translate, the same tokens with a model of the same sizes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmark import peer_environment, train, translate
from benchmark.job import JobFailed
from benchmark.report import decoding_table, training_table

from mtrain.errors import MtrainError


class Parser(argparse.ArgumentParser):
    """argparse with one-line error messages."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"error: {message}; {self.prog} --help lists the options\n")


def seconds(text: str) -> float:
    """A duration in seconds."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def count(text: str) -> int:
    """A positive number."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. All options and their defaults are declared here."""
    parser = Parser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="training speed, memory, padding, share of the bound")
    command.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
    _add_shared_options(command, list(train.PEERS))
    option = command.add_argument
    option("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    option("--seconds", type=seconds, default=20.0, help="measured seconds of each run (20)")
    option("--warmup", type=seconds, default=6.0, help="seconds before that, at least one step (6)")
    option(
        "--malloc",
        choices=["default", "kept"],
        default="default",
        help="kept: measure all tools again with glibc set to keep freed memory",
    )
    option("--profile", action="store_true", help="also profile the operations of mtrain's steps")
    command.set_defaults(measure=train.measure, table=training_table)

    command = commands.add_parser("translate", help="decoding speed, latency, memory")
    command.add_argument("model", type=Path, metavar="MODEL", help="a run folder or a model folder")
    command.add_argument("source", type=Path, metavar="SOURCE", help="a file of lines to translate")
    _add_shared_options(command, list(translate.PEERS))
    option = command.add_argument
    option("--length", type=count, default=20, help="tokens of every translation, for all tools (20)")
    option(
        "--precision",
        action="append",
        choices=["auto", "fp32", "bf16"],
        help="precision of mtrain, a row for each; ratios refer to the first; repeatable (auto)",
    )
    command.set_defaults(measure=translate.measure, table=decoding_table)

    options = parser.parse_args(arguments)
    for name, default in (("against", []), ("peer_precision", ["fp32"]), ("precision", ["auto"])):
        if hasattr(options, name):  # repeated values are measured once
            setattr(options, name, list(dict.fromkeys(getattr(options, name) or default)))
    return options


def _add_shared_options(command: argparse.ArgumentParser, peers: list[str]) -> None:
    option = command.add_argument
    option("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    option("--repeats", type=count, default=3, help="runs of each tool (3)")
    option("--against", action="append", choices=peers, help="another tool to measure; repeatable")
    option(
        "--peer-precision",
        action="append",
        choices=["fp32", "bf16"],
        help="precision of the other tools, a row for each; repeatable (fp32)",
    )
    option(
        "--peer-env",
        type=Path,
        default=peer_environment.default_folder(),
        metavar="DIR",
        help="Python environment of the other tools, made if it has no bin/python (%(default)s)",
    )
    option("--json", action="store_true", help="print all measurements as JSON")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the result; errors end in one line on stderr."""
    options = parse(arguments)
    try:
        result = options.measure(options)
        print(json.dumps(result, indent=1) if options.json else options.table(result))
    except (MtrainError, JobFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
