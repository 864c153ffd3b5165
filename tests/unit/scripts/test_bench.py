"""The benchmark measures real steps, counts correctly, and gives all tools the same tokens."""

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import bench
import pytest
import torch
from benchmark import peer_environment, profile, report, train, translate
from benchmark.job import JobFailed, TrainingJob, start
from benchmark.matrix_products import Product, products_of
from benchmark.meter import Meter
from benchmark.mtrain_training import open_trainer
from benchmark.peers.batches import Streams
from benchmark.rounds import Contestant

from mtrain.config.load import load_config
from mtrain.config.sections.model import ModelConfig
from mtrain.data.epochs.batching import collate
from mtrain.planning.cost import Shape, flops_of
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.encoding import prepare_data
from tests.support.paths import ROOT

SMALL = ["tokenizer.vocab_size=450", "model.preset=tiny", "model.encoder_layers=1", "model.decoder_layers=1"]
SMALL += ["training.batch_tokens=512", "training.precision=fp32"]
SHORT = ["--seconds", "0.5", "--warmup", "0", "--repeats", "1", "--device", "cpu", "--json"]
SHORT += [word for override in SMALL for word in ("--set", override)]
CONFIG = str(ROOT / "configs" / "toy-en-fr.yaml")
R_DROP = str(ROOT / "configs" / "multi30k-en-de.yaml")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> TrainingJob:
    folder = tmp_path_factory.mktemp("bench")
    config = load_config(CONFIG, [*SMALL, f"run_dir={folder}/run"])
    options = bench.parse(["train", CONFIG, "--seconds", "0", "--warmup", "0"])
    return train.prepare(config, torch.device("cpu"), options, folder / "streams.npz")


def test_an_automatic_recipe_is_chosen_before_training_is_measured(tmp_path):
    config = load_config(CONFIG, [f"run_dir={tmp_path}/run"])
    options = bench.parse(["train", CONFIG, "--seconds", "0", "--warmup", "0"])
    job = train.prepare(config, torch.device("cpu"), options, tmp_path / "streams.npz")
    chosen = load_config(tmp_path / "run/config.yaml")
    assert config.model.preset == "auto" and chosen.model.preset != "auto"
    assert job.model["d_model"] == chosen.model.d_model and job.training["learning_rate"]


@pytest.mark.slow
def test_training_of_mtrain_and_the_bound_are_measured(capsys):
    bench.main(["train", CONFIG, *SHORT])
    result = json.loads(capsys.readouterr().out)
    assert {"date", "mtrain", "commit", "config", "overrides", "machine", "malloc"} <= result.keys()
    assert result["overrides"] == SMALL
    (row,), (bound,) = result["rows"], result["bounds"]
    assert (row["tool"], row["precision"], row["malloc"]) == ("mtrain", "fp32", "default")
    for name in ("target_tokens_per_second", "ms_per_step", "peak_mib", "model_gflops"):
        assert row[name]["min"] == row[name]["median"] == row[name]["max"] > 0
    assert 0 < row["target_tokens_per_step"]["median"] <= 512
    assert 0 <= row["padding"]["median"] < 0.2
    assert row["fraction_of_bound"] == pytest.approx(
        row["target_tokens_per_second"]["median"] / bound["target_tokens_per_second"]["median"]
    )
    run = row["runs"][0]
    assert run["steps"] * run["target_tokens_per_step"] / run["seconds"] == pytest.approx(
        row["target_tokens_per_second"]["median"]
    )
    table = report.training_table(result)
    assert "matrix products alone" in table and "--set training.batch_tokens=512" in table


@pytest.mark.slow
def test_decoding_is_measured(run_dir, corpus, capsys):
    arguments = ["--length", "4", "--repeats", "1", "--device", "cpu", "--precision", "fp32", "--json"]
    bench.main(["translate", str(run_dir), str(corpus / "train.en"), *arguments])
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert (row["tool"], row["precision"], result["sentences"], result["length"]) == ("mtrain", "fp32", 8, 4)
    assert [(cell["batch"], cell["beams"]) for cell in row["settings"]] == translate.SETTINGS
    assert all(cell["sentences_per_second"]["median"] > 0 for cell in row["settings"])
    assert row["peak_mib"]["median"] > 50
    table = report.decoding_table(result)
    assert "batch 64 beam 5/s" in table and "batch 1 beam 1 ms" in table and "4 tokens" in table


def test_decoding_ratios_compare_runs_of_the_same_round():
    def runs(*speeds):
        cells = [{"batch": b, "beams": k} for b, k in translate.SETTINGS]
        return [
            {"peak_mib": 1.0, "settings": [{**c, "sentences_per_second": s} for c in cells]} for s in speeds
        ]

    ours, theirs = (Contestant(tool, "fp32", "") for tool in ("mtrain", "joeynmt"))
    first, second = translate.rows_of({ours: runs(10, 40, 90), theirs: runs(10, 20, 30)})
    assert all("mtrain_ratio" not in cell for cell in first["settings"])
    assert all(cell["mtrain_ratio"] == 2 for cell in second["settings"])


def test_all_tools_get_the_same_batches(job):
    streams = Streams(job.streams, job.model)
    assert sorted(streams.rows.tolist()) == list(range(len(streams.source.lengths)))
    for ours, theirs in zip(open_trainer(job).steps(), islice(streams.steps(), 3), strict=False):
        assert ours.tokens == sum(int(batch.target_keep.sum()) for batch in theirs)
    config, tokenizer = load_config(f"{job.run_dir}/config.yaml"), Tokenizer(Path(job.run_dir) / "tokenizer")
    corpus = prepare_data(config.data, tokenizer, Path(job.run_dir) / "data", config.seed).train.encoded()
    rows = streams.rows[:7]
    special = tokenizer.special
    ours = collate(*corpus.fetch(rows.tolist()), special.pad, special.bos, rows.tolist())
    theirs = streams.batch(rows)
    for name in ("source", "source_keep", "target_in", "labels"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_the_mean_micro_batch_has_no_padding(job):
    streams = Streams(job.streams, job.model)
    micro_batches = len(streams.micro_batches)
    means = (len(streams.rows), streams.source.lengths.sum(), streams.target.lengths.sum())
    assert job.shape == tuple(round(total / micro_batches) for total in means)


@pytest.mark.parametrize("head", [{}, {"head": "pair_classifier"}, {"activation": "swiglu", "norm": "post"}])
def test_the_products_of_the_bound_are_those_of_the_model(head):
    sizes = {"d_model": 32, "heads": 4, "encoder_layers": 2, "ffn_dim": 80, **head}
    words = {"source_vocab_size": 90, "target_vocab_size": 90, "max_positions": 40}
    config, shape = ModelConfig(**sizes, **words), Shape.of_lengths(5, 9, 1 if "head" in head else 10)
    counts = products_of(config, shape)
    assert counts[Product(1, 45, 32, 96)] == 2  # queries, keys and values of each encoder layer
    assert counts[Product(20, 9, 8, 9)] == 2  # scores of 5 sentences in 4 heads
    assert sum(product.flops * times for product, times in counts.items()) == flops_of(config, shape)


def test_the_first_step_is_not_measured(job):
    meter = Meter(job.device, job.warmup, job.seconds)
    assert not meter.step(1000, 1000)
    assert meter.step(30, 40)
    result = meter.result()
    assert result["steps"] == 1 and result["padding"] == 0.25 and result["target_tokens_per_step"] == 30


def test_ratios_compare_runs_of_the_same_round():
    assert report.ratio_of_rounds([10, 40, 90], [10, 20, 30]) == 2
    assert report.spread([3, 1, 8]) == {"median": 3, "min": 1, "max": 8}
    run = {"ms_per_step": 1.0, "target_tokens_per_step": 1.0, "padding": 0.0, "peak_mib": 1.0}
    runs = [run | {"target_tokens_per_second": speed} for speed in (100.0, 200.0, 50.0)]
    row = report.row_of(runs, 1e9, bounds=[200, 200, 200], ours=[300, 400, 200])
    assert row["mtrain_ratio"] == 3 and row["fraction_of_bound"] == 0.5
    assert row["model_gflops"] == {"median": 100, "min": 50, "max": 200}
    assert "mtrain_ratio" not in report.row_of(runs, 1e9, bounds=[200, 200, 200], ours=None)


def test_time_counts_for_the_innermost_kind():
    def event(name, around=None):
        return SimpleNamespace(name=name, cpu_parent=around)

    loss = event("_ProjectedCrossEntropy")
    assert profile.kind_of(event("aten::mm", loss)) == "matrix products"
    assert profile.kind_of(event("aten::_softmax", event("aten::softmax", loss))) == "loss"
    assert profile.kind_of(event("aten::_softmax")) == profile.kind_of(event("aten::bmm")) == "attention"
    assert profile.kind_of(event("aten::copy_", event("_EagerAttentionBackward"))) == "attention"
    assert profile.kind_of(event("aten::mul_", event("_ReluDropout"))) == "dropout"
    assert profile.kind_of(event("aten::add_")) == "other"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "none.yaml"], "none.yaml: no such config file"),
        (["train", CONFIG, "--against", "moses"], "invalid choice"),
        (["train", CONFIG, "--repeats", "0"], "invalid count value"),
        (["train", R_DROP, "--against", "torch"], "training.r_drop: the other tools train without R-Drop"),
        (["translate", "nowhere", CONFIG], "nowhere: no such model or run folder"),
        (
            ["train", CONFIG, "--against", "torch", "--peer-env", str(ROOT / "configs")],
            "not a Python environment",
        ),
    ],
)
def test_usage_errors_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    errors = capsys.readouterr().err
    assert stop.value.code and message in errors and errors.startswith("error: ") and errors.count("\n") == 1


def test_a_process_that_fails_is_reported_with_its_last_line(job, capfd):
    with pytest.raises(JobFailed, match=r"benchmark\.none: .*No module named"):
        start("benchmark.none", job)
    assert "No module named" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.network  # installs the other tools on first use, which takes minutes
@pytest.mark.parametrize("peer", train.PEERS)
def test_the_other_tools_train(peer, capfd):
    environment_of_peers = str(peer_environment.default_folder())
    bench.main(["train", CONFIG, *SHORT, "--against", peer, "--peer-env", environment_of_peers])
    ours, theirs = json.loads(capfd.readouterr().out)["rows"]
    assert theirs["tool"] == peer and 0 <= theirs["padding"]["median"] < 1
    speeds = [row["target_tokens_per_second"]["median"] for row in (ours, theirs)]
    assert theirs["mtrain_ratio"] == pytest.approx(speeds[0] / speeds[1])


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("peer", translate.PEERS)
def test_the_other_tools_translate(peer, run_dir, corpus, capfd):
    arguments = ["--length", "4", "--repeats", "1", "--device", "cpu", "--against", peer, "--json"]
    bench.main(["translate", str(run_dir), str(corpus / "train.en"), *arguments])
    ours, *theirs = json.loads(capfd.readouterr().out)["rows"]
    assert theirs and {row["tool"] for row in theirs} == {peer}
    speeds = [row["settings"][1]["sentences_per_second"]["median"] for row in (ours, theirs[0])]
    assert theirs[0]["settings"][1]["mtrain_ratio"] == pytest.approx(speeds[0] / speeds[1])


@pytest.mark.slow
def test_the_profile_adds_up(job):
    result = start("benchmark.profile", job)
    assert {"matrix products", "attention", "dropout", "other"} <= {part["kind"] for part in result["kinds"]}
    total = sum(part["ms_per_step"] for part in result["kinds"])
    assert 0 < sum(part["ms_per_step"] for part in result["operations"]) <= total * 1.001
