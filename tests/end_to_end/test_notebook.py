"""docs/colab.ipynb goes from two files to a translation; here on a CPU, with less text and few steps."""

import json
import shlex

from mtrain.data.reading.files import toy_pairs
from tests.support.documentation import run_mtrain
from tests.support.paths import ROOT


def test_the_notebook_trains_and_translates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for side, name in enumerate(("train.en", "train.fr")):
        lines = [f"{pair[side]}\n" for pair in toy_pairs("train")[:400]]
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    notebook = json.loads((ROOT / "docs/colab.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(notebook["cells"]) <= 10
    for cell in cells:
        if "set-up" in cell["metadata"].get("tags", ()):
            continue
        lines = "".join(cell["source"]).splitlines()
        commands = [line[1:] for line in lines if line.startswith("!")]
        for command in commands:
            run_mtrain(shlex.split(command)[1:])
        if not commands:
            exec(compile("\n".join(lines), "colab.ipynb", "exec"), {})
    assert "BLEU" in capsys.readouterr().out
    assert (tmp_path / "runs/mine/model/model.safetensors").exists()
