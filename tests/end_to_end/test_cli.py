"""The command line as a user meets it: outputs, exit codes, one clear line for each mistake."""

import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from mtrain import __version__
from tests.support.cli import one_line
from tests.support.training import PAIRS

SOURCES, TARGETS = ([pair[side] for pair in PAIRS] for side in (0, 1))


COMMANDS = ("check", "tokenize", "fit", "translate", "score", "evaluate", "import", "export")


def test_help_and_version(mtrain):
    code, out, _ = mtrain("--help")
    assert code == 0 and all(command in out for command in COMMANDS)
    assert mtrain("--version") == (0, f"mtrain {__version__}\n", "")
    for command in COMMANDS:
        code, out, _ = mtrain(command, "--help")
        assert code == 0
        assert all(option in out for option in ("--set", "--device", "--quiet", "--debug", "--help"))


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("command", ["fit", "tokenize"])
def test_a_missing_config_is_a_usage_error(mtrain, command):
    code, out, err = mtrain(command, "nowhere.yaml")
    assert (code, out) == (2, "") and "nowhere.yaml: no such config file" in one_line(err)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["fit", "{config}", "--set", "model.dropout=2"],
            2,
            "model.dropout: expected a number of at least 0 and below 1",
        ),
        (["fit", "{config}", "--set", "model"], 2, "expected section.key=value"),
        (["fit", "{config}", "--device", "tpu"], 2, "no such device"),
        (["tokenize", "{config}", "--device", "tpu"], 2, "no such device"),
        (["tokenize", "{config}", "--set", "data.train.target=nowhere.de"], 3, "nowhere.de: no such file"),
        (["fit", "{config}", "--set", "data.train.source=nowhere.en"], 3, "nowhere.en: no such file"),
        (["fit", "{config}", "--set", "tokenizer.vocab_size=9999"], 2, "the largest possible is"),
        (["fit"], 2, "Missing argument 'CONFIG'"),
        (["check", "nowhere.yaml"], 2, "nowhere.yaml: no such config file"),
        (["trian"], 2, "No such command 'trian'"),
        (["translate", "nowhere", "Hi"], 4, "nowhere: no such model or run folder"),
        (["translate", "{run}", "Hi", "-i", "{corpus}/train.en"], 2, "give one of them"),
        (["translate", "{run}", "-i", "nowhere.en"], 3, "nowhere.en: no such file"),
        (["translate", "{run}", "Hi", "--n-best", "9"], 2, "9 translations of each line: only 5 are decoded"),
        (["translate", "{run}", "Hi", "--beam-size", "0"], 2, "beam-size"),
        (["translate", "{run}", "Hi", "--set", "decoding.beam=3"], 2, "did you mean 'beam_size'?"),
        (["translate", "{run}", "Hi", "-o", "/nowhere/out"], 6, "/nowhere/out: cannot write"),
        (["translate", "{corpus}", "Hi"], 4, "not a complete checkpoint or model folder"),
        (["translate", "{run}", "Hi", "--continue"], 2, "--continue needs the -o FILE"),
        (["translate", "{run}", "Hi", "-o", "{corpus}"], 6, "cannot write: a folder, not a file"),
        (["translate", "{run}", "Hi", "--prefix", "nowhere.de"], 3, "nowhere.de: no such file"),
        (["translate", "{run}", "Hi", "--prefix", "{corpus}/train.de"], 2, "more prefixes than lines"),
        (["translate", "{run}", "Hi", "--prefix", "-"], 2, "--prefix -: give a file"),
        (["score", "{run}", "-i", "-", "--target", "{corpus}/train.de"], 2, "score reads files"),
        (["translate", "{run}", "Hi", "--ensemble", "nowhere"], 4, "nowhere: no such model"),
        (["translate", "{run}", "Hi", "--top-k", "5"], 2, "affect sampling only; set samples, too"),
        (["translate", "{run}", "Hi", "--sample", "--top-p", "0"], 2, "decoding.top_p"),
        (["score", "{run}", "-i", "nowhere.en", "--target", "{corpus}/train.de"], 3, "no such file"),
        (["score", "{run}", "-i", "{corpus}/train.en"], 2, "Missing option '--target'"),
        (["evaluate", "{run}", "--source", "{corpus}/train.en"], 2, "give --reference"),
        (
            [
                "evaluate",
                "{run}",
                "--hypotheses",
                "a",
                "--reference",
                "{corpus}/train.de",
                "--set",
                "data.x=1",
            ],
            2,
            "--set data.x=1: files were given",
        ),
        (["evaluate", "{run}", "--metrics", "rouge"], 2, "choose from bleu, chrf, ter"),
        (["evaluate", "{run}", "--bleu-tokenize", "moses"], 2, "choose from"),
        (["evaluate", "{run}/model"], 2, "no test sets are configured"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_mistake_ends_in_one_clear_line(mtrain, run_dir, corpus, config_file, arguments, code, message):
    places = {"config": config_file, "run": run_dir, "corpus": corpus}
    given, out, err = mtrain(
        *(argument.format(**places) for argument in arguments), *([] if len(arguments) == 1 else ["--quiet"])
    )
    assert (given, out) == (code, "") and message in one_line(err)


def test_a_bug_is_called_a_bug_and_debug_shows_where(mtrain, run_dir, monkeypatch):
    from mtrain.decoding.translate import Translator

    def broken(*_, **__):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Translator, "stream", broken)
    code, _, err = mtrain("translate", run_dir, "Hi", "--device", "cpu")
    assert code == 1 and "bug in mtrain: ZeroDivisionError: oops" in one_line(err)
    code, _, err = mtrain("translate", run_dir, "Hi", "--device", "cpu", "--debug")
    assert code == 1 and "Traceback" in err


# ------------------------------------------------------------------------------------------------ commands


def test_tokenize_then_fit_then_again(mtrain, config_file, tmp_path):
    code, out, _ = mtrain("tokenize", config_file, "--run-dir", tmp_path / "other")
    assert code == 0 and out == f"{tmp_path / 'other/tokenizer/joint.model'}\n"
    made = (tmp_path / "other/tokenizer/joint.model").stat().st_mtime_ns
    code, out, err = mtrain("fit", config_file, "--run-dir", tmp_path / "other", "--device", "cpu")
    assert (code, out) == (0, "")
    for said in (
        "8 training pairs",
        "device: cpu",
        "million parameters",
        "planned: 8 steps",
        "target tokens/s",
        "BLEU",
    ):
        assert said in err
    assert (tmp_path / "other/tokenizer/joint.model").stat().st_mtime_ns == made
    code, _, err = mtrain("fit", config_file, "--run-dir", tmp_path / "other", "--device", "cpu")
    assert code == 0 and "already finished" in err
    assert yaml.safe_load((tmp_path / "other/config.yaml").read_text())["run_dir"] == str(tmp_path / "other")
    code, out, err = mtrain("tokenize", config_file, "--run-dir", tmp_path / "third", "--force", "--quiet")
    assert code == 0 and err == ""


def test_translate_arguments_files_and_pipes(mtrain, run_dir, corpus, stdin, tmp_path):
    on_cpu = ["--device", "cpu"]
    assert mtrain("translate", run_dir, *SOURCES[:2], *on_cpu)[:2] == (
        0,
        "".join(f"{t}\n" for t in TARGETS[:2]),
    )
    expected = "".join(f"{target}\n" for target in TARGETS)
    assert mtrain("translate", run_dir, "-i", corpus / "train.en", *on_cpu)[:2] == (0, expected)
    stdin((corpus / "train.en").read_bytes())
    assert mtrain("translate", run_dir, *on_cpu)[:2] == (0, expected)
    stdin(b"\xef\xbb\xbf" + SOURCES[0].encode() + b"\r\n\n   \n" + SOURCES[1].encode())
    assert mtrain("translate", run_dir, "-i", "-", *on_cpu)[:2] == (0, f"{TARGETS[0]}\n\n\n{TARGETS[1]}\n")
    (tmp_path / "out").write_text("old")
    code, out, _ = mtrain("translate", run_dir, "-i", corpus / "train.en", "-o", tmp_path / "out", *on_cpu)
    assert (code, out) == (0, "") and (tmp_path / "out").read_text() == expected


def test_options_of_the_search_reach_it(mtrain, run_dir):
    code, out, _ = mtrain(
        "translate", run_dir, "It rains.", "", "--n-best", 3, "--beam-size", 4, "--device", "cpu"
    )
    lines = out.split("\n")[:-1]
    assert code == 0 and len(lines) == 6 and lines[0] == "Es regnet." and lines[3:] == ["", "", ""]
    assert len(set(lines[:3])) == 3
    same = ["--length-penalty", "0.5", "--batch-tokens", "1", "--set", "decoding.stop=exact"]
    assert mtrain("translate", run_dir, *SOURCES, *same, "--device", "cpu")[1].split("\n")[:-1] == TARGETS


def test_scores_alignments_and_json(mtrain, run_dir):
    arguments = ["translate", run_dir, "It rains.", "", "--device", "cpu"]
    code, out, _ = mtrain(*arguments, "--scores", "--alignments")
    first, empty = (line.split("\t") for line in out.split("\n")[:-1])
    assert code == 0 and first[0] == "Es regnet." and float(first[1]) < 0 and empty == ["", "0.000000", ""]
    assert [pair.split("-")[1] for pair in first[2].split()] == ["0", "1"]
    code, out, _ = mtrain(*arguments, "--json", "--n-best", 2, "--alignments")
    first, empty = map(json.loads, out.split("\n")[:-1])
    assert code == 0 and first["text"] == "Es regnet." and first["finished"] and first["log_prob"] < 0
    assert len(first["n_best"]) == 2 and len(first["alignment"]) == 2 and empty["text"] == ""
    assert first["n_best"][0].keys() == first.keys() - {"n_best"} == empty.keys() - {"n_best"}


def test_prefixes_ensembles_and_samples(mtrain, run_dir, tmp_path):
    (tmp_path / "begins").write_text("Der Hund\n\n")
    both, on_cpu = ["It rains.", "The sun shines."], ["--device", "cpu"]
    code, out, _ = mtrain("translate", run_dir, *both, "--prefix", tmp_path / "begins", *on_cpu)
    assert code == 0 and out.startswith("Der Hund") and out.endswith("\nDie Sonne scheint.\n")
    code, out, _ = mtrain("translate", run_dir, *both, "--ensemble", run_dir / "model", *on_cpu)
    assert (code, out) == (0, "Es regnet.\nDie Sonne scheint.\n")
    hot = ["--sample", "--temperature", 3, "--top-k", 50, "--top-p", 0.9, "--n-best", 4, *on_cpu]
    drawn = [mtrain("translate", run_dir, *both, *hot, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0].split("\n"))) > 5
    likely = ["--sample", "--top-k", 1, "--set", "decoding.samples=3", "--set", "decoding.mbr=chrf"]
    assert mtrain("translate", run_dir, *both, *likely, *on_cpu)[1] == "Es regnet.\nDie Sonne scheint.\n"


def test_an_interrupted_output_is_gone_on_with(mtrain, run_dir, corpus, tmp_path, monkeypatch):
    from mtrain.decoding.decode import Decoder

    monkeypatch.setattr("mtrain.decoding.split.WINDOW_CHARACTERS", 60)
    real, calls = Decoder.__call__, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(Decoder, "__call__", interrupted)
    job = ["translate", run_dir, "-i", corpus / "train.en", "-o", tmp_path / "out", "--device", "cpu"]
    code, _, err = mtrain(*job)
    assert code == 130 and "out.part answers 5 lines; --continue goes on from there" in err
    code, _, err = mtrain(*job, "--beam-size", 2, "--continue")
    assert code == 2 and "another model or other settings" in one_line(err)
    code, _, err = mtrain(*job, "--continue")
    assert code == 0 and "going on after 5 lines" in err
    assert (tmp_path / "out").read_text() == "".join(f"{target}\n" for target in TARGETS)
    code, _, err = mtrain(*job, "--continue")
    assert code == 0 and "warning: " in err and "is complete; that it answers" in err and len(calls) == 4


def test_an_output_does_not_replace_what_is_read(mtrain, run_dir, tmp_path):
    file = tmp_path / "in.en"
    file.write_text("It rains.\n")
    (tmp_path / "link").symlink_to(file)
    other = [tmp_path / "other.en", "--prefix", tmp_path / "link"]
    other[0].write_text("It rains.\n")
    for job in ([file, "-o", tmp_path / "link"], [*other, "-o", file]):
        code, _, err = mtrain("translate", run_dir, "-i", *job, "--device", "cpu")
        assert code == 2 and "is read here, too" in one_line(err)
    command = [sys.executable, "-m", "mtrain", "translate", str(run_dir), "-o", str(file)]
    with file.open() as stdin:
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True)
    assert done.returncode == 2 and "is read here, too" in one_line(done.stderr)
    assert file.read_text() == "It rains.\n"


def test_dev_stdout_is_stdout(run_dir, tmp_path):
    command = f"{sys.executable} -m mtrain translate {run_dir} 'It rains.' -o /dev/stdout --device cpu"
    out = tmp_path / "out"
    out.write_text("before\n")
    done = subprocess.run(
        f"{command} >> {out}; echo after >> {out}", shell=True, capture_output=True, text=True
    )
    assert done.returncode == 0 and out.read_text() == "before\nEs regnet.\nafter\n"


def test_pipes_are_read_as_files_are(mtrain, run_dir, tmp_path):
    def pipe(name: str, contents: str) -> Path:
        os.mkfifo(tmp_path / name)
        write = threading.Thread(target=lambda: (tmp_path / name).write_text(contents), daemon=True)
        write.start()
        return tmp_path / name

    job = ["translate", run_dir, "--device", "cpu", "-i", pipe("in", "It rains.\nThe sun shines.\n")]
    job += ["--prefix", pipe("prefix", "Es\nDie\n"), "-o", tmp_path / "out"]
    code, _, err = mtrain(*job, "--continue")
    assert code == 2 and "--continue needs a --prefix that can be read again" in one_line(err)
    assert mtrain(*job)[0] == 0
    assert (tmp_path / "out").read_text() == "Es regnet.\nDie Sonne scheint.\n"


def test_score_prints_what_each_given_translation_has(mtrain, run_dir, corpus, tmp_path):
    job = ["score", run_dir, "-i", corpus / "train.en", "--device", "cpu", "--batch-tokens", 50]
    code, out, _ = mtrain(*job, "--target", corpus / "train.de")
    rows = [line.split("\t") for line in out.split("\n")[:-1]]
    assert code == 0 and len(rows) == 8
    for log_prob, tokens, steps in rows:
        assert float(log_prob) == pytest.approx(sum(map(float, steps.split())), abs=1e-2)
        assert int(tokens) == len(steps.split())
    code, out, _ = mtrain(*job, "--target", corpus / "train.en", "--json", "--ensemble", run_dir)
    wrong = [json.loads(line) for line in out.split("\n")[:-1]]
    assert code == 0 and all(w["tokens"][-1] == "</s>" for w in wrong)
    assert all(w["log_prob"] < float(row[0]) for w, row in zip(wrong, rows, strict=True))
    (tmp_path / "short").write_text("Eine Katze\n")
    code, _, err = mtrain(*job, "--target", tmp_path / "short", "--quiet")
    assert code == 3 and "has 8 lines but" in one_line(err)


def test_long_lines_are_translated_in_parts_and_stay_one_line(mtrain, run_dir, stdin):
    stdin(b"cat " * 500 + b"\nIt rains.\n")
    code, out, err = mtrain("translate", run_dir, "--device", "cpu")
    assert code == 0 and out.count("\n") == 2 and out.endswith("Es regnet.\n")
    assert "warning: 1 line(s), longer than the model's 64 tokens, were translated in parts" in err


def test_the_prompt_translates_what_is_typed(run_dir):
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "mtrain", "translate", str(run_dir), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:strict"}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    os.write(main_end, b"It rains\xff.\nIt rains.\n\x04")
    out, err = process.communicate(timeout=60)
    os.close(main_end)
    os.close(terminal)
    assert process.returncode == 0 and out == "Es regnet.\n" and "Type a sentence" in err
    assert "error: It rains\\udcff.: not valid UTF-8" in err


def test_evaluate_prints_scores_with_signatures(mtrain, run_dir, corpus):
    code, out, _ = mtrain("evaluate", run_dir, "--device", "cpu")
    assert code == 0 and out.startswith("seen (8 sentences)\n")
    for signature in ("BLEU|nrefs:1|case:mixed|eff:no|tok:13a", "chrF2|", "TER|"):
        assert signature in out
    files = [
        "--source",
        corpus / "train.en",
        "--reference",
        corpus / "train.de",
        "--reference",
        corpus / "train.en",
    ]
    code, out, _ = mtrain(
        "evaluate", run_dir, *files, "--metrics", "bleu", "--lowercase", "--json", "--device", "cpu"
    )
    result = json.loads(out)["train.en"]
    assert code == 0 and result["sentences"] == 8
    assert [s["metric"] for s in result["scores"]] == ["bleu"] and result["scores"][0][
        "score"
    ] == pytest.approx(100)
    assert "nrefs:2|case:lc" in result["scores"][0]["signature"]
    files = [
        "--hypotheses",
        corpus / "train.en",
        "--reference",
        corpus / "train.de",
        "--bleu-tokenize",
        "char",
    ]
    code, out, _ = mtrain("evaluate", run_dir, *files, "--metrics", "bleu", "--device", "cpu")
    assert code == 0 and "tok:char" in out and "= 100" not in out


def test_test_sets_can_be_pointed_elsewhere(mtrain, run_dir, corpus):
    moved = f"data.test={{moved: {{source: {corpus}/train.en, target: {corpus}/train.de}}}}"
    code, out, _ = mtrain("evaluate", run_dir, "--set", moved, "--metrics", "bleu", "--device", "cpu")
    assert code == 0 and out.startswith("moved (8 sentences)\n")


@pytest.mark.parametrize("key", ["model.heads=2", "tokenizer.joint=false", "max_length=9"])
def test_a_trained_model_is_not_changed_by_set(mtrain, run_dir, key):
    code, _, err = mtrain("translate", run_dir, "Hi", "--set", key, "--device", "cpu")
    assert code == 2 and "only decoding.* can be set" in one_line(err)


def test_no_command_prints_the_help(mtrain):
    assert mtrain() == mtrain("--help")


def test_text_that_is_not_unicode_is_a_data_error(mtrain, run_dir):
    code, _, err = mtrain("translate", run_dir, "caf\udce9", "--device", "cpu")
    assert code == 3 and "not valid UTF-8" in one_line(err)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_running_out_of_memory_has_its_own_code(mtrain, run_dir, monkeypatch, error):
    from mtrain.decoding.translate import Translator

    def full(*_, **__):
        raise error

    monkeypatch.setattr(Translator, "stream", full)
    code, _, err = mtrain("translate", run_dir, "Hi", "--device", "cpu")
    assert code == 8 and "lower training.micro_batch_tokens or decoding.batch_tokens" in one_line(err)


def test_a_closed_stdout_loses_nothing_quietly(run_dir):
    for arguments in (f"translate {run_dir} 'It rains.' --device cpu", "--help"):
        command = f"{sys.executable} -m mtrain {arguments} >&-"
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (6, "error: output: not writable\n")


def test_help_that_nobody_reads_is_no_failure():
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "mtrain", "translate", "--help"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupted_preparation_says_so(mtrain, config_file, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("mtrain.training.run_folder.good_pairs", interrupted)
    assert mtrain("fit", config_file, "--quiet") == (130, "", "stopped by SIGINT\n")


def test_at_a_terminal_with_nothing_typed_a_file_of_answers_is_refused(mtrain, stdin, monkeypatch, tmp_path):
    stdin(b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    code, _, err = mtrain("translate", tmp_path / "no-model", "-o", tmp_path / "out")  # not loaded yet
    assert code == 2 and "nothing to translate; give TEXT, --input, or a pipe" in one_line(err)
