"""Measure mtrain against other tools and against the machine.

    python scripts/bench.py train CONFIG [--against joeynmt --against marian-hf --against torch] [--json]
    python scripts/bench.py translate MODEL SOURCE [--against joeynmt --against ctranslate2] [--json]

Every measurement is a fresh process, and the tools take turns: mtrain, peer, peer, mtrain, peer, peer. All
train on, or translate, the same tokens, with the sizes of the same model.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmark import environment, train, translate
from benchmark.job import JobFailed
from benchmark.report import decoding_table_of, table_of

from mtrain.errors import MtrainError


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is answered in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; {self.prog} --help lists the options\n")


def seconds(text: str) -> float:
    """A length of time on the command line."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def count(text: str) -> int:
    """A number of repetitions on the command line."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train(commands.add_parser("train", help="training speed, memory, padding, share of the bound"))
    add_translate(commands.add_parser("translate", help="decoding speed, latency, memory"))
    return parser


def add_train(parser: argparse.ArgumentParser) -> None:
    """The options of `train`."""
    option = parser.add_argument
    option("config", type=Path, metavar="CONFIG", help="a YAML file")
    option("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    option("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    option("--seconds", type=seconds, default=20.0, help="measured span of a run, s (20)")
    option("--warmup", type=seconds, default=6.0, help="before it, s, one step at least (6)")
    option("--repeats", type=count, default=3, help="runs of each tool (3)")
    option("--against", action="append", default=[], choices=list(train.PEERS), help="repeatable")
    add_peers(parser)
    option(
        "--malloc",
        choices=["default", "kept"],
        default="default",
        help="kept: measure all tools a second time with glibc told to keep freed memory",
    )
    option("--profile", action="store_true", help="also say where mtrain's steps spend their time")
    option("--json", action="store_true", help="print everything that was measured as JSON")
    parser.set_defaults(command=run_train)


def add_translate(parser: argparse.ArgumentParser) -> None:
    """The options of `translate`."""
    option = parser.add_argument
    option("model", type=Path, metavar="MODEL", help="a run or model folder")
    option("source", type=Path, metavar="SOURCE", help="lines to translate")
    option("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    option("--length", type=count, default=20, help="tokens of every translation, for all tools (20)")
    option("--repeats", type=count, default=3, help="runs of each tool (3)")
    option(
        "--precision",
        action="append",
        choices=["auto", "fp32", "bf16"],
        help="numbers that mtrain computes in, a row for each; ratios are of the first; repeatable (auto)",
    )
    option("--against", action="append", default=[], choices=list(translate.PEERS), help="repeatable")
    add_peers(parser)
    option("--json", action="store_true", help="print everything that was measured as JSON")
    parser.set_defaults(command=run_translate)


def add_peers(parser: argparse.ArgumentParser) -> None:
    """The options about the other tools."""
    parser.add_argument(
        "--peer-precision",
        action="append",
        choices=["fp32", "bf16"],
        help="numbers that the others compute in, a row for each; repeatable (fp32)",
    )
    parser.add_argument(
        "--peer-env",
        type=Path,
        default=environment.default_folder(),
        metavar="DIR",
        help="Python environment of the others; made if it has no bin/python (%(default)s)",
    )


def run_translate(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    result = translate.run(
        translate.Options(
            model=arguments.model,
            source=arguments.source,
            device=arguments.device,
            length=arguments.length,
            repeats=arguments.repeats,
            precisions=list(dict.fromkeys(arguments.precision or ["auto"])),
            peers=list(dict.fromkeys(arguments.against)),
            peer_precisions=list(dict.fromkeys(arguments.peer_precision or ["fp32"])),
            peer_env=arguments.peer_env,
        )
    )
    print(json.dumps(result, indent=1) if arguments.json else decoding_table_of(result))


def run_train(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    result = train.run(
        train.Options(
            config=arguments.config,
            overrides=arguments.set,
            device=arguments.device,
            seconds=arguments.seconds,
            warmup=arguments.warmup,
            repeats=arguments.repeats,
            peers=list(dict.fromkeys(arguments.against)),
            peer_precisions=list(dict.fromkeys(arguments.peer_precision or ["fp32"])),
            keep_memory=arguments.malloc == "kept",
            peer_env=arguments.peer_env,
            profile=arguments.profile,
        )
    )
    print(json.dumps(result, indent=1) if arguments.json else table_of(result))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a failure that has a name becomes one line on stderr."""
    parsed = make_parser().parse_args(arguments)
    try:
        parsed.command(parsed)
    except (MtrainError, JobFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
