"""The limit on micro-batches that a rank leaves behind."""

import math

from mtrain.training.memory_limit import FILE, read_limit, write_limit


def test_a_limit_holds_for_the_same_micro_batches(tmp_path):
    assert read_limit(tmp_path, 512) == math.inf
    write_limit(tmp_path, 512, 260.0)
    assert read_limit(tmp_path, 512) == 260.0 and read_limit(tmp_path, 1024) == math.inf
    (tmp_path / FILE).write_text("[")
    assert read_limit(tmp_path, 512) == math.inf


def test_a_limit_that_cannot_be_written_is_logged(tmp_path, caplog):
    write_limit(tmp_path / "missing", 512, 260.0)
    assert "the next start does not know that memory ran out" in caplog.text
