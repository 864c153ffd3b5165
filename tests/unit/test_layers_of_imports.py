"""The walls: imports go down only, nothing is pickled, and help costs no heavy import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "mtrain"
FLOORS = [
    ["errors"],
    ["schema"],
    ["config", "vocabulary"],
    ["tokenizer", "model", "device", "storage"],
    ["data", "checkpoint", "metrics", "decoding.likeliest", "interop.formats"],
    ["decoding.hypothesis", "decoding.constraints", "decoding.sample", "decoding.predictor"],
    ["decoding.alignment", "decoding.force", "decoding.mbr", "decoding.split"],
    ["decoding.beam", "decoding.helpers"],
    ["decoding.search", "decoding.translation"],
    ["decoding.decode"],
    ["modelfolder"],
    ["decoding.translate"],
    ["decoding.score", "evaluate"],
    ["training", "interop", "terminal"],
    ["partial", "prompt"],
    ["cli"],
    ["__main__"],
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


def floor_of(module: str) -> int:
    for number, names in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    raise AssertionError(f"{module} is on no floor; add it to FLOORS")


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", [path for path in FILES if module_of(path) != "decoding"], ids=module_of)
def test_imports_go_down_only(path):
    module = module_of(path)
    room = module.partition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mtrain."):
            imported = node.module.removeprefix("mtrain.")
            same_room = imported.partition(".")[0] == room and room != "decoding"
            assert same_room or floor_of(imported) < floor_of(module), f"{module} imports {imported}"


def test_the_model_knows_nothing_but_its_config():
    for path in (PACKAGE / "model").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mtrain"):
                assert node.module.startswith(("mtrain.model", "mtrain.schema")), (
                    f"{path.name}: {node.module}"
                )


def test_nothing_is_pickled_or_evaluated():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not names & {"pickle", "eval", "exec"} - {"eval"} and "eval" not in calls, path
        assert not calls & {"torch.save", "yaml.unsafe_load", "yaml.full_load"}, path
        loads = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and "torch.load" in ast.unparse(node.func)
        ]
        assert not loads or path.name == "source.py", path  # others' models alone
        assert all("weights_only=True" in ast.unparse(load) for load in loads), path


def test_help_imports_nothing_heavy():
    heavy = {"torch", "datasets", "pydantic", "sacrebleu", "numpy"}
    code = f"import sys, mtrain, mtrain.cli; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_public_functions_and_classes_are_documented():
    missing = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "toy.py":  # a grammar in which names say it all
            continue
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                missing += [] if ast.get_docstring(node) else [f"{path.name}:{node.name}"]
    assert not missing
