"""`python -m mtrain`."""

from mtrain.cli import main

main()
