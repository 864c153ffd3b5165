"""The documentation: links resolve, generated parts are current, commands work, and what is named exists."""

import copy
import json
import re
import shlex
import shutil
import subprocess
from contextlib import chdir
from pathlib import Path
from typing import Any

import draw_benchmarks
import generate_docs
import pytest
import typer.main
from torch.distributed.run import get_args_parser

from mtrain.cli.app import app
from mtrain.config import choices, fine_tuning_recipe, recipe
from mtrain.config.load import load_config
from mtrain.config.schema import Config
from mtrain.config.sections.presets import PRESETS
from mtrain.errors import MtrainError
from tests.support.documentation import CONNECTED_GUIDES, PAGES, blocks, prepare, run
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
BLOCKS = [block for page in PAGES for block in blocks(page)]
PROGRAM: Any = typer.main.get_command(app)
COMMANDS = PROGRAM.commands
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(page: Path) -> list[str]:
    """The inline code of a page."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_generated_parts_are_current():
    assert not generate_docs.stale(), "run python scripts/generate_docs.py"


def test_tables_and_chart_follow_the_figures():
    data = json.loads(draw_benchmarks.DATA.read_text(encoding="utf-8"))
    changed = copy.deepcopy(data)
    name, column = changed["chart"]["table"], changed["chart"]["label"]
    rows = changed["tables"][name]["rows"]
    rows[0][rows[0].index(next(cell for cell in rows[0] if isinstance(cell, int)))] = 7_654_321
    page = f"<!-- table: {name} -->\n<!-- end -->"
    for old, new in ((data, False), (changed, True)):
        assert ("7,654,321" in generate_docs.with_tables(page, old)) is new
        assert ("7,654,321" in draw_benchmarks.chart(old)) is new
    assert column in generate_docs.with_tables(f"<!-- table: {name} | {column} -->\n<!-- end -->", data)


def test_the_numbers_of_the_automatic_recipe_are_stated():
    section = " ".join((DOCS / "explanation" / "automatic-recipe.md").read_text(encoding="utf-8").split())
    pairs = [*recipe.VOCABULARIES, *recipe.LARGEST]
    thresholds = [number for row in pairs for number in row if isinstance(number, int)]
    epochs = [f"{recipe.useful_epochs(number):.0f} for {number:,}" for number in (29_000, 1_000_000)]
    share = fine_tuning_recipe.USEFUL_SHARE
    tuning = [f"{share * recipe.useful_epochs(number):.0f} for {number:,}" for number in (1_000, 1_000_000)]
    rate, doubling = recipe.PEAK_RATE * 128, recipe.dropout(20) - recipe.dropout(10)
    low, high = recipe.VALIDATIONS
    stated = [
        *(f"{number:,}" for number in thresholds),
        *epochs,
        *tuning,
        f"{recipe.TOKENS_PER_PARAMETER} target tokens per parameter",
        f"A size above {recipe.SUFFICIENT_VOCABULARY:,} needs {recipe.TOKENS_PER_ENTRY} target tokens",
        *(
            "| `{}` | {d_model} | {ffn_dim} | {heads} | {encoder_layers} + {decoder_layers} |".format(
                name, **sizes
            )
            for name, sizes in PRESETS.items()
            if not name.endswith("_deep")
        ),
        f"from {recipe.choose_batch(1):,} to {recipe.choose_batch(1e15):,}",
        f"{rate:.3f} / `model.d_model`",
        f"{rate * fine_tuning_recipe.RATE:.3f} / `model.d_model`, half of",
        f"{recipe.WARMUP:.0%} of the steps",
        f"{recipe.dropout(10)} for 10 epochs, {doubling:.2f} more for each doubling",
        f"{low} to {high} validations",
        f"{recipe.TOKENS_PER_PAIR} target tokens per pair",
        *(f"{speed:,.0f}" for speed in recipe.ASSUMED_SPEEDS.values()),
        f"every {choices.CHECKPOINT_STEPS:,} steps",
    ]
    assert [phrase for phrase in stated if not re.search(rf"(?<![\d,]){re.escape(phrase)}", section)] == []


@pages
def test_links_and_anchors_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def test_every_page_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[\w/-]+\.md)\)", prose(ROOT / "README.md")))
    records = {f"docs/experiments/{page.name}" for page in (DOCS / "experiments").glob("*.md")}
    pages = {str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")} - records
    assert linked == {*pages, "docs/experiments/README.md"}
    index = set(re.findall(r"\]\(([\w-]+\.md)\)", prose(DOCS / "experiments" / "README.md")))
    assert {f"docs/experiments/{name}" for name in {*index, "README.md"}} == records


@pages
def test_files_that_are_named_exist(page):
    for name in code(page):
        file = name.rstrip("/")
        if re.fullmatch(r"(configs|docs|scripts|tests|mtrain)/[\w./-]*", name):
            assert (ROOT / file).exists(), name
        elif re.fullmatch(r"[a-z_]+(/[a-z_]*)+(\.py)?", name) and page.name == "architecture.md":
            assert (ROOT / "mtrain" / file).exists(), name
        elif re.fullmatch(r"multi30k-[a-z-]+|(en|de|fr)-(en|de|fr)-[a-z-]+", name):
            assert list((ROOT / "configs").glob(f"**/{name}.yaml")), name


def test_every_package_is_in_the_architecture():
    page = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
    for folder in (ROOT / "mtrain").iterdir():
        if (folder / "__init__.py").exists():
            assert f"| `{folder.name}/` |" in page, folder.name


@pages
def test_config_keys_that_are_named_exist(page):
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    for name in code(page):
        match = re.match(r"(data|tokenizer|model|training|decoding|export)\.(\w+)", name)
        if match and not name.endswith((".py", ".safetensors", ".arrow", ".bin")):
            section, key = match.groups()
            known = sections[section].model_fields
            assert key in known or (key.endswith("_") and any(field.startswith(key) for field in known)), name


@pages
def test_commands_and_options_that_are_named_exist(page):
    options = {name for command in (PROGRAM, *COMMANDS.values()) for p in command.params for name in p.opts}
    options |= set(re.findall(r"--[a-z][a-z-]*", get_args_parser().format_help()))  # of torchrun
    programs = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests" / "support").rglob("*.py")]
    scripts = "".join(file.read_text(encoding="utf-8") for file in programs)
    for name in code(page):
        if match := re.match(r"mtrain ([a-z]+)", name):
            assert match[1] in COMMANDS, name
        others = ("ruff", "sacrebleu", "pip", "docker")
        if page.name == "come-from-another-toolkit.md":  # has options of other programs
            others += ("--",)
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", name):
            known = options | {"--help"}
            assert option in known or f'"{option}"' in scripts or name.startswith(others), name


def test_every_block_has_a_known_language_and_mark():
    for block in BLOCKS:
        assert block.language in {"bash", "python", "yaml", "text"}, block.place
        assert block.mark in {"", "needs-data", "set-up", "script"}, block.place
    fences = sum(page.read_text(encoding="utf-8").count("```") for page in PAGES)
    assert fences == 2 * len(BLOCKS), "a code block without a language"


BASH = [block for block in BLOCKS if block.language == "bash"]


@pytest.mark.parametrize("block", [b for b in BASH if b.mark == "script"], ids=lambda block: block.place)
def test_scripts_can_be_parsed(block):
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


@pytest.mark.parametrize("block", [b for b in BASH if "torchrun -" in b.text], ids=lambda block: block.place)
def test_options_of_torchrun_can_be_parsed(block):
    for command in block.commands:
        if "torchrun -" in command and not command.startswith("#"):
            arguments = get_args_parser().parse_args(shlex.split(command.split("torchrun ", 1)[1]))
            assert (arguments.module, arguments.training_script) == (True, "mtrain")
            name, *given = arguments.training_script_args
            COMMANDS[name].make_context(name, given)


@pytest.mark.parametrize("block", [b for b in BASH if b.mark != "script"], ids=lambda block: block.place)
def test_commands_can_be_parsed(block):
    for command in block.commands:
        words = shlex.split(command)
        for word in words:
            if re.match(r"(configs|scripts)/", word):
                assert (ROOT / word).exists(), command
        if "scripts/" in command:
            script = next(ROOT / word for word in words if word.startswith("scripts/"))
            for option in re.findall(r" (--[a-z-]+)", command):
                takes_pytest_options = script.name == "check.sh"
                assert option in script.read_text(encoding="utf-8") or takes_pytest_options, command
        if words[0] == "mtrain" and words[1] in COMMANDS:
            arguments = words[2 : words.index(">")] if ">" in words else words[2:]
            COMMANDS[words[1]].make_context(words[1], arguments)  # raises if they are wrong
        elif words[0] == "mtrain":
            assert words[1:] in (["--version"], ["--help"]), command


def is_run(page: Path) -> bool:
    """Whether a page has code that is run here."""
    runnable = [block for block in blocks(page) if block.language in ("bash", "python") and not block.mark]
    return bool(runnable) and page not in CONNECTED_GUIDES  # which test_recipes.py runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The run folders after a command with which several pages begin."""
    folder = tmp_path_factory.mktemp("trained")
    prepare(folder)
    with chdir(folder):
        run("mtrain fit configs/toy-en-fr.yaml")
    return folder / "runs"


@pytest.mark.parametrize("page", list(filter(is_run, PAGES)), ids=lambda page: page.name)
def test_commands_run(page, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    shutil.copytree(trained, "runs")  # that command then finds a finished run
    for block in blocks(page):
        if block.mark:
            continue
        if block.language == "bash":
            for command in block.commands:
                run(command)
        elif block.language == "python":
            exec(compile(block.text, block.place, "exec"), {})


def test_python_that_needs_data_compiles():
    for block in BLOCKS:
        if block.language == "python":
            compile(block.text, block.place, "exec")


def test_complete_configs_load(tmp_path):
    complete = [block for block in BLOCKS if block.language == "yaml" and "run_dir" in block.text]
    assert complete
    for block in complete:
        file = tmp_path / "config.yaml"
        file.write_text(block.text, encoding="utf-8")
        load_config(file)


def test_every_class_of_errors_has_its_row_and_section():
    page = (DOCS / "reference" / "exit-codes-and-errors.md").read_text(encoding="utf-8")
    for error in MtrainError.__subclasses__():
        number = str(error.exit_code)
        assert re.search(rf"^\| {number}\b[^|]*\| `{error.__name__}` \|", page, re.MULTILINE), error
        assert re.search(rf"^## Exit codes? {number}\b", page, re.MULTILINE), error
