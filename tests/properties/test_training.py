"""Training: the same seed gives the same run, with or without interruptions; saving what was loaded changes
nothing."""

import shutil

from hypothesis import strategies as st

from mtrain.training.fit import make_trainer
from tests.support.training import fit_on_cpu, last_checkpoint, losses, same_weights

STEPS = 12


def test_the_same_seed_gives_the_same_run_if_resumed_at_any_steps(tried, make_config, tmp_path):
    recipe = {"batch_tokens": 128, "micro_batch_tokens": 64, "ema_decay": 0.9, "log_every": 1}
    recipe |= {"checkpoint_every": 5, "validate_every": STEPS}
    changes = {"uppercase": 0.1, "drop_final_punctuation": 0.2, "typos": 0.2, "noise": 0.1, "merge": 0.1}
    keys = {"model": {"dropout": 0.3}, "data": {"subword_sampling": 0.2, "augment": changes}}

    def run(name: str, *stops: int, seed: int = 1):
        for steps in (*stops, STEPS):
            config = make_config(name, **keys, training={**recipe, "max_steps": steps})
            folder = fit_on_cpu(config.model_copy(update={"seed": seed}))
        return folder

    whole = run("whole")
    assert losses(run("other", seed=2)) != losses(whole)

    @tried(2, stops=st.sets(st.integers(1, STEPS - 1), max_size=3))
    def check(stops):
        shutil.rmtree(tmp_path / "parts", ignore_errors=True)
        parts = run("parts", *sorted(stops))
        assert losses(parts) == losses(whole) and same_weights(parts, whole)


def test_save_load_save_gives_the_same_bytes(tried, make_config, tmp_path):
    @tried(
        2,
        steps=st.integers(1, 5),
        ema_decay=st.none() | st.floats(0.5, 0.99),
        tie=st.sampled_from(["all", "none", "decoder"]),
    )
    def check(steps, ema_decay, tie):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        recipe = {"max_steps": steps, "validate_every": 99, "ema_decay": ema_decay}
        config = make_config(training=recipe, model={"tie_embeddings": tie})
        first = last_checkpoint(fit_on_cpu(config))
        make_trainer(config, device="cpu").saver.save(last=True)  # adds the outcome of the validation
        saved = {file.name: file.read_bytes() for file in first.iterdir()}
        make_trainer(config, device="cpu").saver.save(last=True)
        assert {file.name: file.read_bytes() for file in first.iterdir()} == saved
