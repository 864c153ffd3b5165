"""Properties that hold for any input that hypothesis draws.

Each is tried on a few examples by default, the same ones in every run, and on a hundred times as many random
ones with `-m slow` (`conftest.py`). Two more properties need no random input and are elsewhere: accumulated
micro-batches equal one batch (`end_to_end/test_fit.py`), and beam search equals a reference
(`unit/decoding/test_search.py`).
"""
