"""What holds whatever is drawn: a few examples by default, the same each time; as slow tests fifty times as
many, others each time (`conftest.py`).

Two more that need no drawing are elsewhere: accumulations are one batch (`test_fit.py`), and beams are those
of a reference (`test_search.py`).
"""
