"""`mtrain info`: models, runs and exported models, of this version and of earlier ones, whole and damaged."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.numpy import load_file

from mtrain.checkpoint.model_info import read_info, write_info
from mtrain.config.choices import Choice
from mtrain.storage.manifest import write_manifest
from mtrain.training.setup.run_folder import record_choices
from tests.support.cli import one_line
from tests.support.marian import make
from tests.support.training import read_metrics


def rows_of(out: str) -> dict[str, str]:
    """The named values in the output."""
    pairs = (line.strip().split("  ", 1) for line in out.splitlines() if line.startswith("  "))
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def described(mtrain, path: Path) -> dict:
    code, out, _ = mtrain("info", path, "--json")
    assert code == 0
    return json.loads(out)


def test_a_model_is_described(mtrain, model_copy, run_dir):
    code, out, err = mtrain("info", model_copy)
    rows = rows_of(out)
    tensors = load_file(model_copy / "model.safetensors")
    parameters = sum(tensor.size for tensor in tensors.values())
    assert (code, err) == (0, "") and out.startswith(f"by-heart ({model_copy})\n")
    assert rows["languages"] == "en to de"
    assert rows["parameters"] == f"{parameters / 1e6:.2f} million, fp32"
    assert rows["tokenizer"] == "SentencePiece unigram, 330 entries" and rows["origin"].startswith("trained")
    assert rows["files"].endswith("verified") and rows["license"].startswith("not stated")
    size = sum(file.stat().st_size for file in model_copy.rglob("*") if file.is_file())
    (model_copy / "ctranslate2-cache").mkdir()
    (model_copy / "ctranslate2-cache/model.bin").write_bytes(b"made from the model")  # not verified
    found = described(mtrain, model_copy)
    assert found["files"]["size"] == size and found["files"]["damage"] is None
    assert found["parameters"] == parameters and "progress" not in found and found["license"] is None
    assert found["config"]["model"]["d_model"] == 64 and found["training"]["target_tokens"] > 0
    summary = json.loads((run_dir / "data/summary.json").read_text())
    assert [corpus["sha256"] for corpus in found["data"]["train"]] == summary["inputs"]["contents"][:1]
    assert found["data"]["fingerprint"] == summary["fingerprint"]


def test_a_run_is_described_with_its_progress(mtrain, run_copy):
    code, out, _ = mtrain("info", run_copy)
    rows = rows_of(out)
    last = [line for line in read_metrics(run_copy) if "validation" in line][-1]
    scores = last["validation"]
    assert code == 0 and rows["steps"] == "200" and rows["state"] == "finished: max_steps (200)"
    assert rows["limits"].startswith("max_steps 200") and rows["checkpoints"] == "2"
    wanted = f"nll (nats/token) {scores['nll']:.3f}, BLEU {scores['bleu']:.2f}, chrF2 {scores['chrf']:.2f}"
    assert rows["last validation"] == f"step 200: {wanted}"
    config = run_copy / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: 200", "max_steps: 1234567"))
    assert rows_of(mtrain("info", run_copy)[1])["limits"].startswith("max_steps 1,234,567")
    config.write_text(config.read_text().replace("max_steps: 1234567", "max_steps: 200"))
    found = described(mtrain, run_copy)["progress"]
    assert found["step"] == 200 and found["limits"]["max_steps"] == 200
    best = json.loads((run_copy / "checkpoints/index.json").read_text())["best"]
    assert f"step-{found['best']['step']:08d}" == best


def test_a_run_without_checkpoints_shows_how_its_model_was_trained(mtrain, run_copy):
    before = rows_of(mtrain("info", run_copy / "model")[1])
    shutil.rmtree(run_copy / "checkpoints")
    rows = rows_of(mtrain("info", run_copy)[1])
    names = ("steps", "complete epochs", "target tokens", "time")
    assert [rows[name] for name in names] == [before[name] for name in names] and rows["steps"] != "0"
    assert rows["state"] == "its checkpoints were removed, so it cannot be resumed"


def test_the_newest_readable_state_of_a_run_is_shown(mtrain, run_copy):
    [older, newer] = sorted((run_copy / "checkpoints").glob("step-*"))
    (newer / "state.json").write_text("{")
    assert rows_of(mtrain("info", run_copy)[1])["steps"].startswith(f"{int(older.name[5:])}, and ")


def test_device_precision_and_version_of_a_run_are_shown(mtrain, run_copy):
    shown = rows_of(mtrain("info", run_copy)[1])["device"]
    version = re.escape(torch.__version__)
    assert re.fullmatch(
        rf"cpu \(.+\), fp32, torch {version}, \d workers?, micro-batches of 512 tokens", shown
    )
    assert described(mtrain, run_copy)["progress"]["arithmetic"] == shown
    for file in run_copy.glob("checkpoints/step-*/state.json"):
        state = json.loads(file.read_text())
        del state["arithmetic"]
        file.write_text(json.dumps(state))
    rows = rows_of(mtrain("info", run_copy)[1])
    assert "device" not in rows and rows["steps"] == "200"


def test_what_auto_chose_is_shown_with_reasons(mtrain, run_copy):
    assert described(mtrain, run_copy)["choices"] == []
    assert "Automatic recipe" not in mtrain("info", run_copy)[1]
    choices = [
        Choice("model.preset", "micro", "29 pairs"),
        Choice("model.dropout", 0.0, "1 epochs"),
        Choice("training.max_steps", 2148, "as many as 2 minutes allow"),
    ]
    record_choices(run_copy, choices)
    assert described(mtrain, run_copy)["choices"] == [choice._asdict() for choice in choices]
    shutil.rmtree(run_copy / "model")  # as before the first validation
    shown = mtrain("info", run_copy)[1].partition("\nAutomatic recipe\n")[2].splitlines()
    assert shown == [
        "  key                 value  reason",
        "  model.preset        micro  29 pairs",
        "  model.dropout         0.0  1 epochs",
        "  training.max_steps   2148  as many as 2 minutes allow",
    ]
    for damaged in ("[[", '[{"key": "model.preset"}]', '[{"key": "a", "value": 1e999, "reason": ""}]'):
        (run_copy / "choices.json").write_text(damaged)
        code, out, _ = mtrain("info", run_copy)
        assert code == 0 and "Automatic recipe" not in out


def test_a_run_that_goes_on_is_described(mtrain, run_copy):
    config = (run_copy / "config.yaml").read_text()
    (run_copy / "config.yaml").write_text(config.replace("max_steps: 200", "max_steps: 500"))
    with (run_copy / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 210, "loss": 1.0}\n{"step": 2')
    rows = rows_of(mtrain("info", run_copy)[1])
    assert rows["steps"] == "200, and 10 since the last checkpoint"
    assert rows["state"] == "not finished; `mtrain fit` resumes it"


def test_a_run_that_was_killed_in_its_last_validation_is_not_finished(mtrain, run_copy):
    index = run_copy / "checkpoints/index.json"
    values = json.loads(index.read_text())
    index.write_text(json.dumps({**values, "validated": None}))
    for folder in (run_copy / "checkpoints").glob("step-*"):
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, "validation_due": True}))
    assert rows_of(mtrain("info", run_copy)[1])["state"] == "not finished; `mtrain fit` resumes it"


def test_test_scores_are_those_that_fit_has_measured(mtrain, config_file, tmp_path):
    assert mtrain("fit", config_file, "--device", "cpu", "--quiet", "--set", "training.max_steps=4")[0] == 0
    [test] = json.loads((tmp_path / "run/test_scores.json").read_text())["sets"]
    signatures = mtrain("info", tmp_path / "run")[1].partition("\nSignatures\n")[2].splitlines()[:2]
    assert [line.strip() for line in signatures] == [
        each["detail"].split(" = ")[0] for each in test["scores"]
    ]
    found = [score for score in described(mtrain, tmp_path / "run")["scores"] if score["split"] == "test"]
    assert [(each["metric"], each["value"], each["signature"]) for each in found] == [
        (each["metric"], each["score"], each["signature"]) for each in test["scores"]
    ]
    card: Any = ModelCard((tmp_path / "run/model/README.md").read_text())
    assert [result.dataset_name for result in card.data.eval_results].count("seen") == 2


def test_folders_without_records_are_described(mtrain, run_copy):
    for name in ("info.json", "README.md"):
        (run_copy / "model" / name).unlink()
    for name in ("samples.jsonl", "best_validation.json", "metrics.jsonl", "checkpoints/index.json"):
        (run_copy / name).unlink()
    shutil.rmtree(run_copy / "data")
    code, out, err = mtrain("info", run_copy)
    assert (
        (code, err) == (0, "") and rows_of(out)["steps"] == "200" and rows_of(out)["languages"] == "en to de"
    )
    assert rows_of(mtrain("info", run_copy / "model")[1])["origin"] == "not recorded"


def test_a_run_without_a_model_is_described(mtrain, run_copy, tmp_path):
    shutil.rmtree(run_copy / "model")
    code, out, _ = mtrain("info", run_copy)
    assert code == 0 and out.startswith(f"{run_copy}: no model yet") and rows_of(out)["steps"] == "200"
    assert one_line(mtrain("info", run_copy, "--card")[2]) == f"error: {run_copy}: has no model yet\n"
    (tmp_path / "begun").mkdir()
    shutil.copyfile(run_copy / "config.yaml", tmp_path / "begun/config.yaml")
    assert rows_of(mtrain("info", tmp_path / "begun")[1])["steps"] == "0"
    assert described(mtrain, tmp_path / "begun")["progress"]["last"] is None


@pytest.mark.slow
def test_imported_and_exported_models_are_described(mtrain, tmp_path):
    make(tmp_path / "opus", {"num_beams": 2}, seed=31)
    assert mtrain("import", tmp_path / "opus", tmp_path / "model")[0] == 0
    rows = rows_of(mtrain("info", tmp_path / "model")[1])
    assert rows["origin"].startswith("converted from opus by mtrain")
    hints = {"marian": "can be imported", "ctranslate2": "give the model that it was exported from"}
    for format, hint in hints.items():
        assert mtrain("export", tmp_path / "model", tmp_path / format, "--format", format)[0] == 0
        exported = rows_of(mtrain("info", tmp_path / format)[1])
        assert exported["format"] == format and exported["files"].endswith("verified")
        assert exported["parameters"].partition(" million")[0] == rows["parameters"].partition(" million")[0]
        for name in ("languages", "layers", "tokenizer", "origin"):
            assert exported[name] == rows[name]
        assert f"{exported['longest source']}; longer lines are split" == rows["longest source"]
        (tmp_path / format / "info.json").unlink()
        code, _, err = mtrain("info", tmp_path / format)
        assert code == 4 and hint in one_line(err)


def test_the_license_is_that_of_the_card_and_the_card_can_be_printed_anew(mtrain, model_copy):
    generated = (model_copy / "README.md").read_text(encoding="utf-8")
    (model_copy / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n", encoding="utf-8")
    assert rows_of(mtrain("info", model_copy)[1])["license"] == "cc-by-4.0"
    assert described(mtrain, model_copy)["license"] == "cc-by-4.0"
    code, out, err = mtrain("info", model_copy, "--card")
    assert (code, err) == (0, "") and out == generated


def test_damage_is_reported_after_what_is_known(mtrain, model_copy):
    weights = model_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, out, err = mtrain("info", model_copy)
    assert code == 4 and "model.safetensors: damaged" in one_line(err)
    assert rows_of(out)["files"].endswith("damaged") and rows_of(out)["languages"] == "en to de"
    assert rows_of(out)["parameters"] == "unknown; model.safetensors cannot be read"
    code, out, _ = mtrain("info", model_copy, "--json")
    assert code == 4 and "damaged" in json.loads(out)["files"]["damage"]


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "info.json").write_text("[" * 100_000),
        lambda folder: (folder / "info.json").write_text('{"scores": [{"value": NaN}]}'),
        lambda folder: (folder / "info.json").write_text('{"training": {"steps": "many"}}'),
        lambda folder: (folder / "info.json").write_bytes(b"\xff"),
        lambda folder: (folder / "info.json").write_text(json.dumps({"name": "x" * 2000})),
        lambda folder: (folder / "info.json").write_text('{"origin": ' * 400 + "1" + "}" * 400),
        lambda folder: pipe(folder / "info.json"),
        lambda folder: (folder / "README.md").write_text("---\nlicense: [\n---\n"),
        lambda folder: pipe(folder / "README.md"),
        lambda folder: (folder / "README.md").write_bytes(b"\xff"),
    ],
)
def test_a_damaged_info_file_or_card_is_noted(mtrain, model_copy, change):
    change(model_copy)
    code, out, err = mtrain("info", model_copy)
    assert (code, err) == (0, "") and rows_of(out)["languages"] == "en to de"
    [note] = out.partition("\nNotes\n")[2].splitlines()
    assert ("info.json: damaged" in note) != ("README.md: " in note)
    assert len(described(mtrain, model_copy)["notes"]) == 1 and mtrain("info", model_copy, "--card")[0] == 0


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.yaml").write_text("{"), "not valid YAML"),
        (
            lambda folder: (folder / "config.yaml").write_text("source_lang: en\n"),
            "target_lang: this key is required",
        ),
        (lambda folder: (folder / "config.yaml").unlink(), "not a run or model folder"),
        (
            lambda folder: [(folder / "config.yaml").unlink(), (folder / "info.json").write_text("[")],
            "info.json: damaged",
        ),
        (lambda folder: pipe(folder / "config.yaml"), "config.yaml: a named pipe"),
        (lambda folder: pipe(folder / "model.safetensors"), "model.safetensors"),
        (lambda folder: pipe(folder / "manifest.json"), "manifest.json"),
        (lambda folder: pipe(folder / "tokenizer/joint.model"), "joint.model"),
        (lambda folder: shutil.rmtree(folder / "tokenizer"), "tokenizer"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (replace_by_a_file, "not a folder"),
        (lambda folder: shutil.rmtree(folder), "no such model or run folder"),
    ],
)
def test_what_is_no_model_is_an_error(mtrain, model_copy, change, message):
    change(model_copy)
    code, _, err = mtrain("info", model_copy)
    assert code == 4 and message in one_line(err)


def test_names_with_control_characters_and_markup_are_shown_as_text(mtrain, model_copy):
    info = read_info(model_copy)
    write_info(model_copy, info.model_copy(update={"name": "a\x1b[31m\n[red]b"}))
    out = mtrain("info", model_copy)[1]
    assert out.startswith("a\x1b[31m [red]b (")  # in a pipe; for terminals, see test_43
    assert "\x1b" not in mtrain("info", model_copy, "--card")[1]


def test_a_hostile_manifest_is_an_error(mtrain, model_copy):
    secret = model_copy.parent / "secret"
    secret.write_text("secret")
    (model_copy / "link").symlink_to(secret)
    write_manifest(model_copy)
    code, _, err = mtrain("info", model_copy)
    assert code == 4 and "is a link" in one_line(err)


def test_a_damaged_run_is_described_as_far_as_possible(mtrain, run_copy):
    (run_copy / "config.yaml").write_text("run_dir: [")
    (run_copy / "checkpoints/index.json").write_text(
        '{"best": ["x"], "validated": {"step": 200, "seconds": "x"}}'
    )
    (run_copy / "metrics.jsonl").write_text(
        '{"step": 1e400}\n{"step": 3, "validation": {"nll": "NaN", "bleu": []}}\n\x00'
    )
    (run_copy / "test_scores.json").write_text('{"key": 1}')
    code, out, err = mtrain("info", run_copy)
    assert (code, err) == (0, "") and rows_of(out)["steps"] == "0, and 3 since the last checkpoint"
    assert "config.yaml" in out.partition("\nNotes\n")[2]


def test_options_that_exclude_each_other_are_refused(mtrain, model_copy):
    assert one_line(mtrain("info", model_copy, "--json", "--card")[2]) == (
        "error: --json and --card were both given; give one of them\n"
    )


def test_info_does_not_import_pytorch(model_copy):
    code = "import sys\nfrom mtrain.cli import main\ntry:\n main(sys.argv[1:])\n"
    code += "finally:\n print('torch' in sys.modules)"
    arguments = [sys.executable, "-c", code, "info", str(model_copy)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.stdout.endswith("\nFalse\n"), done.stderr
