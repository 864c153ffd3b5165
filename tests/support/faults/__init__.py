"""Faults injected into mtrain: killed processes, signals, full disks, failing writes, damaged files.

`tests/faults` and `tests/properties` inject each kind a few times; `scripts/torture.sh` injects them at full
size (`__main__.py`) and prints a table.
"""
