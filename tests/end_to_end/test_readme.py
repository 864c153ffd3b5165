"""What the README says is so."""

import re

import config_reference

from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_config_reference_is_that_of_the_schema():
    assert config_reference.updated(README) == README, "run python scripts/config_reference.py"


def test_every_room_and_recipe_it_names_exists():
    for module in (ROOT / "mtrain").rglob("*.py"):
        if not module.name.startswith("__"):
            assert f"`{module.name}`" in README, f"{module.name} is not on the map"
    for word in README.replace("(", " ").split():
        if word.startswith("configs/") and word.endswith(".yaml"):
            assert (ROOT / word).exists(), word


def test_every_recipe_whose_scores_are_recorded_exists():
    record = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(\w+-[\w-]+\.yaml)`", record + README))
    assert "multi30k-en-de-second-round.yaml" in names
    assert [name for name in names if not (ROOT / "configs" / name).exists()] == []
