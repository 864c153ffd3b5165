"""The entry point of the command line."""

import subprocess
import sys


def test_the_interpreter_ends_without_a_search_for_cycles():
    """`atexit` calls the functions in reverse order: the first one sees what `main` has left."""
    program = """
import atexit, gc
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 0))
from mtrain.cli import main
main(["--version"])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("frozen: True\n")
