"""The torture of `scripts/torture.sh`, in a bounded form; at full size it is there for a release."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def tortured(tmp_path_factory):
    """The script, and a folder with a run that it begins from."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import torture

    folder = tmp_path_factory.mktemp("torture")
    torture.fit(folder / "start", torture.EVERY)
    return torture, folder


def test_05_every_flipped_byte_and_every_cut_is_noticed(tortured):
    torture, folder = tortured
    outcome = torture.flipped_bits(folder / "start", 400)
    assert (outcome.tries, outcome.lost, outcome.corrupt) == (400, 0, 0)


def test_flips_that_nobody_checks_are_counted(tortured, monkeypatch):
    torture, folder = tortured
    monkeypatch.setattr(torture, "verify_folder", lambda *_: None)
    assert torture.flipped_bits(folder / "start", 20).corrupt == 20


@pytest.mark.slow
def test_nothing_is_lost(tortured):
    torture, folder = tortured
    rows = torture.torture(Path(shutil.copytree(folder, folder.with_name("all"))), 20, 1000, 5, 10)
    assert [(row.lost, row.corrupt) for row in rows] == [(0, 0)] * 5
    assert rows[0].tries > 20 and rows[1].tries == 20
