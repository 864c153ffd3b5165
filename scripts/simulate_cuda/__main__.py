"""Run a module or a script on the simulated device, or check mtrain with it; see `simulate_cuda`."""

import runpy
import sys
from pathlib import Path

USAGE = (
    "usage: python scripts/simulate_cuda {run [-m] NAME [ARGUMENT...] | counts [others] | check [PART...]}"
)

if not __package__:  # python scripts/simulate_cuda
    sys.path[0] = str(Path(__file__).parents[1])


def run(arguments: list[str], is_module: bool) -> None:
    """Run a script or a module with arguments as the interpreter does."""
    import simulate_cuda.device  # noqa: F401  # makes the device available

    sys.argv = arguments
    if is_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    match sys.argv[1:]:
        case ["run", "-m", _, *_]:
            run(sys.argv[3:], is_module=True)
        case ["run", _, *_]:
            run(sys.argv[2:], is_module=False)
        case ["counts"] | ["counts", "others"]:
            from simulate_cuda import counts

            sys.exit(counts.main(others=len(sys.argv) > 2))
        case ["check", *parts]:
            from simulate_cuda import check

            sys.exit(check.main(parts))
        case _:
            print(USAGE, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
