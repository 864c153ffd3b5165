"""The structure of the package: imports point downward, nothing is pickled, `--help` imports little."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "mtrain"
# Each module may import from the rows above its own and, in a package, from its own package.
ORDER = [
    ["duration", "errors", "invisible_characters", "regular_files", "templates"],
    ["kernels", "processes"],
    ["paths", "progress_bar", "version"],
    ["device"],
    ["graph_capture"],
    ["distributed"],
    ["config", "storage"],
    ["tokenizer"],
    ["data", "model"],
    ["checkpoint", "inspection"],
    ["decoding"],
    ["evaluation", "documents"],
    ["interop", "runs"],
    ["web"],
    ["training", "report", "serve"],
    ["planning"],
    ["cli"],
    ["__main__"],
]
# The same inside packages that have sub-packages. "" stands for the modules of the package itself.
INSIDE = {
    "data": [
        ["text"],
        ["reading"],
        ["pairs"],
        ["store"],
        ["scanning", "rewriting"],
        ["preparing", "epochs"],
        [""],
    ],
    "training": [["step"], ["setup", "validation"], ["records"], [""]],
    "config": [["language_names", "section"], ["languages"], ["sections"], [""]],
    "decoding": [["batches"], ["search"], ["sessions"], [""], ["scoring"]],
    "cli": [["console"], ["translate"], ["evaluate", "init"], [""]],
}


def rows(order: list[list[str]]) -> dict[str, int]:
    """The row of each name."""
    return {name: number for number, names in enumerate(order) for name in names}


def module_of(path: Path) -> str:
    """The dotted name of a file below `mtrain`, without a trailing `.__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, which no test may change."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of that tree."""
    return list(ast.walk(parsed(path)))


def imports_of(path: Path) -> Iterator[str]:
    """The mtrain modules that a file imports, as `module_of` names them: also inside functions, and for type
    checking."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "mtrain":
            module = node.module.removeprefix("mtrain").removeprefix(".")
            for alias in node.names:
                name = f"{module}.{alias.name}".lstrip(".")
                yield name if name in MODULES else module
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names if alias.name.partition(".")[0] == "mtrain")
            yield from (name.removeprefix("mtrain").removeprefix(".") for name in names)


def place_of(module: str, order: dict[str, int], package: str = "") -> tuple[str, int]:
    """The part of a package that a module belongs to, and its row. A package that has no row imports what it
    likes, and nothing imports it."""
    part = module.removeprefix(package).removeprefix(".").partition(".")[0]
    return (part, order[part]) if part in order else ("", order.get("", len(order)))


def imports_upward(importing: str, imported: str) -> bool:
    """Whether an import does not point downward, in the order of the packages or inside of one of them."""
    package, row = place_of(importing, rows(ORDER))
    imported_package, imported_row = place_of(imported, rows(ORDER))
    if package != imported_package:
        return imported_row >= row
    if package not in INSIDE:
        return False
    part, row = place_of(importing, rows(INSIDE[package]), package)
    imported_part, imported_row = place_of(imported, rows(INSIDE[package]), package)
    return part != imported_part and imported != package and imported_row >= row


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module):
    upward = [name for name in imports_of(MODULES[module]) if imports_upward(module, name)]
    assert not upward, f"{module} imports {upward}"


def test_every_package_has_its_place():
    for order, folder in [(ORDER, PACKAGE), *((INSIDE[name], PACKAGE / name) for name in INSIDE)]:
        packages = {path.parent.name for path in folder.glob("*/__init__.py")}
        assert packages <= rows(order).keys(), folder


def test_imports_are_absolute():
    for path in MODULES.values():
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes_of(path)), path


def test_no_import_cycle_between_files():
    graph = {module: {*imports_of(path)} - {module} for module, path in MODULES.items()}
    while leaves := {module for module, imported in graph.items() if not imported & graph.keys()}:
        graph = {module: imported for module, imported in graph.items() if module not in leaves}
    assert not graph, f"these files are part of an import cycle or import one: {sorted(graph)}"


def test_the_model_depends_on_kernels_and_configuration_only():
    for path in (PACKAGE / "model").glob("*.py"):
        imported = {name.partition(".")[0] for name in imports_of(path)}
        assert imported <= {"model", "kernels", "config"}, path


def is_suspect(function: ast.expr) -> bool:
    """Whether the last name of a called function is one that `test_nothing_is_pickled_or_evaluated` rejects
    in some modules."""
    name = getattr(function, "attr", getattr(function, "id", None))
    return name in {"eval", "save", "load", "unsafe_load", "full_load"}


def test_nothing_is_pickled_or_evaluated():
    for path in PACKAGE.rglob("*.py"):
        names = {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes_of(path) if isinstance(node, ast.Name)}
        found = [node for node in nodes_of(path) if isinstance(node, ast.Call) and is_suspect(node.func)]
        calls = {ast.unparse(node.func) for node in found}
        between_own_processes = path == PACKAGE / "processes/messages.py"  # no files
        names |= {node.module or "" for node in nodes_of(path) if isinstance(node, ast.ImportFrom)}
        assert "pickle" not in names or between_own_processes, path
        assert "allow_pickle=True" not in path.read_text(encoding="utf-8"), path
        assert "exec" not in names and "eval" not in calls, path  # `model.eval()` is no call of `eval`
        assert not calls & {"torch.save", "yaml.unsafe_load", "yaml.full_load"}, path
        loads = [node for node in found if "torch.load" in ast.unparse(node.func)]
        assert not loads or path.name == "huggingface.py", path  # only `mtrain import` reads foreign files
        assert all("weights_only=True" in ast.unparse(load) for load in loads), path


def test_help_imports_nothing_heavy():
    heavy = {"torch", "datasets", "pydantic", "sacrebleu", "numpy", "rich", "tqdm", "jinja2"}
    code = "import sys; from mtrain.cli.app import run; run(['--help']); "
    code += f"print(sorted({heavy} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert shown.startswith("Usage: ") and shown.endswith("\n[]\n")


def test_workers_that_read_text_need_little_memory():
    """Neither PyTorch nor pyarrow, which takes tens of megabytes in each of them."""
    code = "import sys, mtrain.data.scanning.scanner, mtrain.data.preparing.encode_shards; "
    code += "print(sorted({'torch', 'pyarrow', 'datasets'} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert shown == "[]\n"


def test_public_functions_and_classes_are_documented():
    missing = []
    for path in PACKAGE.rglob("*.py"):
        tree = parsed(path)
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                missing += [] if ast.get_docstring(node) else [f"{path.name}:{node.name}"]
    assert not missing
