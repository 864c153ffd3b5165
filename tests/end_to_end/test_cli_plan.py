"""`mtrain plan`: what it prints, from which data, and what it says if a run does not fit."""

import json
import math
import shutil

import pytest
import yaml

from mtrain.training.setup import timing
from mtrain.training.setup.timing import Speed
from tests.support.cli import changed, one_line


@pytest.fixture(autouse=True)
def short_timing(monkeypatch):
    """Time few steps."""
    monkeypatch.setattr(timing, "TIMED_STEPS", 1)
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.0)
    monkeypatch.setattr(timing, "STEADY", math.inf)


@pytest.fixture
def plan(mtrain, config_file):
    """Run the command on the small config; returns what it prints as JSON."""

    def run(*arguments: object) -> dict:
        code, out, err = mtrain("plan", config_file, "--json", "--quiet", *arguments)
        assert code == 0, err
        return json.loads(out)

    return run


def test_the_table_has_every_cost_and_nothing_is_written(mtrain, config_file, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    arguments = ("--hardware", "h100", "--devices", 8, "--price", 2.5)
    code, out, err = mtrain("plan", config_file, *arguments)
    assert code == 0 and sorted(tmp_path.rglob("*")) == before
    for part in ("parameters", "steps per epoch", "FLOPs per step", "memory per device", "weights"):
        assert part in out and part not in err
    for part in ("gradients", "optimizer", "activations", "logits", "fits: 67.06 GiB usable of 74.51 GiB"):
        assert part in out
    for part in ("NVLink", "Ethernet", "scaling efficiency", "target tokens/s", "cost", "8 steps"):
        assert part in out
    assert "assumed, not measured: 30% of peak FLOP/s, 70% of peak bandwidth\n" in out


def test_steps_are_timed_on_this_machine_by_default(mtrain, config_file):
    code, out, err = mtrain("plan", config_file)
    assert code == 0 and "timing some training steps" in err and "memory of the process" in out
    assert "assumed, not measured" not in out
    assert "NVLink" not in out and "cost" not in out


def test_steps_without_r_drop_are_not_predicted(mtrain, config_file):
    late = ["--set", "training.r_drop=5", "--set", "training.r_drop_after=2"]
    code, _, err = mtrain("plan", config_file, "--hardware", "h100", *late)
    assert code == 0 and "warning: training.r_drop_after is ignored" in err


def test_the_steps_of_one_of_several_devices_are_timed(plan, monkeypatch):
    """With its share of the batch, because each device updates all weights."""
    shares = {}

    def measure(architecture, training, device, steps_of, alone):
        step = next(iter(steps_of(None)))
        shares[alone] = sum(int(batch.target_tokens) for batch in step.batches) / step.tokens
        return Speed(1000.0 if alone else 1600.0)

    monkeypatch.setattr("mtrain.planning.plan.measure_speed", measure)
    [run] = plan("--devices", 2)["runs"]
    assert run["link"] == "100 Gbit/s Ethernet" and run["efficiency"] == pytest.approx(0.8, rel=0.01)
    assert shares[True] == 1 and 0.3 < shares[False] < 0.7


def test_an_automatic_vocabulary_suits_the_speed_of_all_devices(mtrain, tmp_path):
    (tmp_path / "train.tsv").write_text("a\tb\n" * 100_000)
    (tmp_path / "validation.tsv").write_text("c\td\n")
    data = {name: {"tsv": str(tmp_path / f"{name}.tsv")} for name in ("train", "validation")}
    config = {
        "run_dir": str(tmp_path / "run"),
        "data": {"source_lang": "en", "target_lang": "de", **data},
        # On a GPU about 4.8 million tokens; 12,000 entries need 7.2 million.
        "training": {"max_minutes": 0.4},
    }
    (tmp_path / "auto.yaml").write_text(yaml.safe_dump(config))
    for devices, vocabulary in ((1, 8000), (2, 12_000)):
        arguments = ("--hardware", "h100", "--devices", devices, "--json")
        code, out, err = mtrain("plan", tmp_path / "auto.yaml", *arguments)
        assert code == 0 and "tokenizer.vocab_size" in err
        found = json.loads(out)
        assert found["parameters"]["embeddings"] == vocabulary * found["model"]["d_model"]


@pytest.mark.slow
def test_held_out_pairs_are_not_training_pairs(mtrain, plan, config_file):
    changed(config_file, "data", train={"toy": "train"}, validation={"holdout": 1000}, test={})
    changed(config_file, "tokenizer", vocab_size=400)  # then no pair is too long
    estimated = plan("--hardware", "cpu")["epoch"]["pairs"]
    assert mtrain("prepare", config_file)[0] == 0
    assert plan("--hardware", "cpu")["epoch"]["pairs"] == estimated == 4000


def test_a_model_that_cannot_be_smaller_does_not_fit(mtrain, config_file):
    raw = yaml.safe_load(config_file.read_text())
    del raw["tokenizer"], raw["training"]
    raw |= {
        "model": {"preset": "auto", "d_model": 16384, "ffn_dim": 65536},
        "training": {"max_minutes": 60.0},
    }
    config_file.write_text(yaml.safe_dump(raw))
    code, out, _ = mtrain("plan", config_file, "--hardware", "h100")
    assert code == 0 and "DOES NOT FIT" in out


def test_a_run_that_trains_nothing_is_an_error(mtrain, config_file):
    frozen = "training.freeze=[embeddings, encoder, decoder]"
    failed = mtrain("plan", config_file, "--hardware", "h100", "--devices", 2, "--set", frozen)
    message = "training.freeze: embeddings, encoder, decoder leave nothing to train"
    assert failed[0] == 2 and message in one_line(failed[2])


@pytest.mark.parametrize(
    ("option", "value", "code", "message"),
    [
        ("--devices", 100_000, 2, "no step has as many pairs as there are devices (100000); give fewer"),
        (
            "--set",
            "data.validation={holdout: 1000}",
            3,
            "data.validation.holdout takes all of them; lower it",
        ),
    ],
)
def test_a_run_without_pairs_for_a_device_is_an_error(mtrain, config_file, option, value, code, message):
    failed = mtrain("plan", config_file, "--hardware", "h100", option, value)
    assert failed[0] == code and message in one_line(failed[2])


def test_a_run_that_starts_from_another_has_its_sizes_and_tokenizer(plan, config_file, run_dir):
    raw = yaml.safe_load(config_file.read_text())
    del raw["model"], raw["tokenizer"]
    raw["training"]["init_from"] = str(run_dir)
    config_file.write_text(yaml.safe_dump(raw))
    found = plan("--hardware", "cpu", "--set", "training.freeze=[embeddings]")
    assert found["model"]["d_model"] == 64 and found["epoch"]["origin"] == "8 of 8 pairs segmented"
    assert found["memory"]["gradients"] < found["memory"]["weights"]


def test_the_sizes_of_an_initial_model_are_known_without_its_weights(plan, config_file, run_dir, tmp_path):
    """A model of several gigabytes need not be read, nor be complete."""
    shutil.copytree(run_dir / "model", tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    raw = yaml.safe_load(config_file.read_text())
    del raw["model"], raw["tokenizer"], raw["training"]
    raw["training"] = {"init_from": str(tmp_path / "model"), "max_minutes": 10.0}
    config_file.write_text(yaml.safe_dump(raw))
    found = plan("--hardware", "cpu")
    assert found["model"]["d_model"] == 64 and found["parameters"]["total"] > 0


@pytest.mark.parametrize(
    ("hardware", "precision"), [("a100", "bf16"), ("h100", "bf16"), ("h200", "bf16"), ("cpu", "fp32")]
)
def test_each_hardware_is_known(plan, hardware, precision):
    recipe = ["training.precision=fp32"] if hardware == "cpu" else ["training.precision=auto"]
    found = plan("--hardware", hardware, "--set", *recipe)
    assert found["hardware"] == hardware and found["precision"] == precision and found["fits"]
    if hardware == "cpu":
        assert found["process_memory"] > found["memory"]["total"]
    else:
        assert found["process_memory"] is None
    [run] = found["runs"]
    assert run["link"] is None and run["efficiency"] == 1 and run["cost"] is None
    assert run["target_tokens_per_second"] > 0 and run["hours"] == pytest.approx(
        8 * run["step_seconds"] / 3600
    )


def test_several_devices_share_the_batch_and_communicate(plan):
    arguments = ("--hardware", "a100", "--price", 2)
    one, four = (plan(*arguments, "--devices", devices) for devices in (1, 4))
    assert one["step"]["target_tokens"] == four["step"]["target_tokens"]
    nvlink, ethernet = four["runs"]
    assert (nvlink["link"], ethernet["link"]) == ("NVLink", "100 Gbit/s Ethernet")
    gradients = 4 * four["parameters"]["total"]
    assert nvlink["sent_bytes"] == pytest.approx(2 * 3 / 4 * gradients)
    assert 1 > nvlink["efficiency"] > ethernet["efficiency"] > 0
    assert nvlink["cost"] == pytest.approx(4 * 2 * nvlink["hours"])
    assert any("fewer devices" in advice for advice in four["advice"])


def test_the_lengths_are_those_of_the_best_data_at_hand(mtrain, plan, config_file, tmp_path):
    """Lengths of the text, of the tokens of the text, and of the encoded corpus."""
    hardware = ("--hardware", "cpu")
    estimated = plan(*hardware)["epoch"]
    assert estimated["origin"] == "estimated at 4 characters per token" and estimated["pairs"] == 8
    assert mtrain("tokenize", config_file)[0] == 0
    segmented = plan(*hardware)["epoch"]
    assert segmented["origin"] == "8 of 8 pairs segmented"
    assert mtrain("prepare", config_file)[0] == 0
    encoded = plan(*hardware)["epoch"]
    assert encoded.pop("origin") == f"encoded pairs in {tmp_path / 'run/data'}"
    del segmented["origin"]
    assert encoded == segmented
    changed_length = plan(*hardware, "--set", "data.max_length=63")["epoch"]
    assert changed_length["origin"] == "8 of 8 pairs segmented"
    other = plan(*hardware, "--run-dir", tmp_path / "other")["epoch"]
    assert other["origin"] == estimated["origin"]
    (tmp_path / "run/data/summary.json").write_text("damaged")
    assert plan(*hardware)["epoch"]["origin"] == "8 of 8 pairs segmented"


def test_a_shared_data_folder_is_used_without_the_raw_files(mtrain, plan, config_file, corpus, tmp_path):
    folder, raw = tmp_path / "encoded", tmp_path / "raw"
    shutil.copytree(corpus, raw)
    files = {"source": str(raw / "train.en"), "target": str(raw / "train.de")}
    changed(config_file, "data", folder=str(folder), train=files, validation=files, test={})
    assert mtrain("prepare", config_file)[0] == 0
    shutil.rmtree(raw)
    found = plan("--hardware", "cpu", "--run-dir", tmp_path / "other")
    assert found["epoch"]["origin"] == f"encoded pairs in {folder}"


def test_weights_count_once_the_corpus_is_encoded(mtrain, plan, config_file):
    raw = yaml.safe_load(config_file.read_text())
    changed(config_file, "data", train={**raw["data"]["train"], "weight": 3.0})
    code, out, err = mtrain("plan", config_file, "--hardware", "cpu", "--json")
    assert code == 0 and json.loads(out)["epoch"]["pairs"] == 8
    assert "warning: the weights of data.train are ignored; run `mtrain prepare` first" in err
    assert mtrain("prepare", config_file)[0] == 0
    assert plan("--hardware", "cpu")["epoch"]["pairs"] == 24


def test_an_automatic_recipe_is_planned_and_logged(mtrain, config_file):
    raw = yaml.safe_load(config_file.read_text())
    del raw["model"], raw["training"], raw["tokenizer"]
    config_file.write_text(yaml.safe_dump(raw | {"training": {"max_minutes": 5.0, "precision": "fp32"}}))
    code, out, err = mtrain("plan", config_file, "--hardware", "h100", "--json")
    assert code == 0 and "mtrain chose these values" in err
    found = json.loads(out)
    assert found["model"]["d_model"] == 128
    [run] = found["runs"]
    assert run["hours"] <= 5 / 60 * 1.01


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({"max_steps": 8}, "max_steps 8"),
        ({"max_steps": None, "max_epochs": 2}, "max_epochs 2"),
        ({"max_steps": None, "max_minutes": 1.0}, "max_minutes 1"),
        ({"max_steps": None, "patience": 3}, "none is given"),
    ],
)
def test_the_limit_that_ends_the_run_is_named(plan, config_file, limits, limit):
    changed(config_file, "training", **limits)
    found = plan("--hardware", "h100")
    [run] = found["runs"]
    assert run["limit"].startswith(limit)
    if "max_epochs" in limits:
        assert run["steps"] == 2 * found["epoch"]["steps"]
    if "max_minutes" in limits:
        assert run["hours"] == pytest.approx(1 / 60, rel=0.01)


BIG = ["model.preset=null", "model.d_model=8192", "model.ffn_dim=32768", "model.heads=64"]
LONG = ["data.max_length=4096", "training.batch_tokens=1000000", "training.micro_batch_tokens=1000000"]


def settings(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


def test_a_micro_batch_that_is_too_large_is_advised_against(mtrain, plan, config_file, tmp_path):
    """The pairs are repeated so often that a step has as many tokens as it may have."""
    lines = ("a b c d e f g h i j " * 10 + "\n") * 10_000
    for side in ("en", "de"):
        (tmp_path / f"large.{side}").write_text(lines)
    files = {"source": str(tmp_path / "large.en"), "target": str(tmp_path / "large.de")}
    changed(config_file, "data", train=files, test={})
    sizes = settings("model.d_model=1024", "model.ffn_dim=4096", "model.heads=16", *LONG)
    found = plan("--hardware", "a100", *sizes)
    assert not found["fits"]
    [advice] = [advice for advice in found["advice"] if "micro_batch_tokens" in advice]
    smaller = int(advice.rsplit(maxsplit=1)[1])
    again = plan("--hardware", "a100", *sizes, *settings(f"training.micro_batch_tokens={smaller}"))
    assert again["fits"] and again["step"]["micro_batches"] > found["step"]["micro_batches"]
    automatic = plan("--hardware", "a100", *sizes, *settings("training.micro_batch_tokens=auto"))
    assert automatic["fits"]


def test_a_model_that_is_too_large_is_advised_against(mtrain, config_file):
    layers = ("model.encoder_layers=24", "model.decoder_layers=24", "training.ema_decay=0.999")
    arguments = (*settings(*BIG, *layers), "--hardware", "h100", "--quiet")
    code, out, _ = mtrain("plan", config_file, *arguments)
    assert code == 0 and "DOES NOT FIT: 67.06 GiB usable of 74.51 GiB" in out
    assert "advice: choose a smaller model.preset" in out and "training.ema_decay to null" in out
    assert "training.parallel" not in out
    assert (
        "advice: training.parallel: fsdp may fit"
        in mtrain("plan", config_file, *arguments, "--devices", 8)[1]
    )
    _, out, err = mtrain("plan", config_file, *arguments, "--devices", 8, *settings("training.parallel=fsdp"))
    assert "training.parallel" not in out and "warning: training.parallel: fsdp is ignored" in err


def test_steps_that_do_not_fit_in_memory_are_not_timed(mtrain, config_file, set_memory):
    set_memory(2**20)
    code, out, err = mtrain("plan", config_file)
    assert code == 0 and "DOES NOT FIT: 0.5 MiB usable of 1.0 MiB" in out and "timing" not in err
    assert "epoch  " not in out.replace("tokens per epoch  ", "").replace("steps per epoch  ", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--hardware", "tpu"], 2, "--hardware"),
        (["--devices", "0"], 2, "--devices"),
        (["--price", "-1"], 2, "--price -1.0: must be a number from 0 to 1000000000"),
        (["--price", "nan"], 2, "--price nan"),
        (["--set", "data.train.target=nowhere.de"], 3, "nowhere.de: no such file"),
        (["--set", "data.max_length=2"], 3, "no training pair is left"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_mistake_ends_in_one_clear_line(mtrain, config_file, arguments, code, message):
    given, out, err = mtrain("plan", config_file, *arguments, "--quiet")
    assert (given, out) == (code, "") and message in one_line(err)
