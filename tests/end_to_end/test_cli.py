"""The command line as a whole: help, exit codes, standard streams, and one clear line for each mistake."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

from mtrain import __version__
from mtrain.invisible_characters import escape_control_characters
from tests.support.cli import CLOSED, handling, one_line, run_forked

COMPUTE = ("demo", "fit", "translate", "score", "evaluate", "rerank", "report")
COMMANDS = (*COMPUTE, "plan", "check", "tokenize", "average", "import", "export")


def test_a_full_stdout_is_an_error_of_any_command(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Path("/dev/full").open("w") as full:
        job = [sys.executable, "-m", "mtrain", "--version"]
        done = subprocess.run(job, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 6 and one_line(done.stderr) == "error: output: No space left on device\n"


def test_texts_are_shown_with_joiners_and_without_control_characters():
    kept = "می\u200cخواهم क्\u200dष 5\u00a0km\u3000é\n"
    assert escape_control_characters(kept) == kept
    assert escape_control_characters("\x1b[1m\u202eab\u2028\udcff") == r"\x1b[1m\u202eab\u2028\udcff"


def test_help_and_version(mtrain):
    code, out, _ = mtrain("--help")
    assert code == 0 and all(command in out for command in COMMANDS)
    assert mtrain("--version") == (0, f"mtrain {__version__}\n", "")
    for command in COMMANDS:
        code, out, _ = mtrain(command, "--help")
        assert code == 0 and all(option in out for option in ("--set", "--quiet", "--debug", "--help"))
        assert ("--device " in out) == (command in COMPUTE)


def test_commands_that_compute_nothing_refuse_device(mtrain, config_file):
    for command in sorted(set(COMMANDS) - set(COMPUTE)):
        code, _, err = mtrain(command, config_file, "--device", "cpu")
        assert code == 2 and "--device: no such option" in one_line(err)


def test_links_in_a_circle_are_an_error_of_one_line(mtrain, run_dir, tmp_path):
    (loop := tmp_path / "loop").symlink_to(loop)
    for job in (["translate", run_dir, "It rains.", "-o", loop], ["average", run_dir, run_dir, "-o", loop]):
        code, _, err = mtrain(*job)
        assert code == 6 and f"{loop}: Too many levels of symbolic links" in one_line(err)


@pytest.mark.parametrize("command", ["fit", "plan", "tokenize"])
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
        (["fit", "{config}", "--device", "tpu"], 2, "--device tpu: not supported"),
        (["tokenize", "{config}", "--set", "data.train.target=nowhere.de"], 3, "nowhere.de: no such file"),
        (["fit", "{config}", "--set", "data.train.source=nowhere.en"], 3, "nowhere.en: no such file"),
        (["fit", "{config}", "--set", "tokenizer.vocab_size=9999"], 2, "the largest possible is"),
        (["fit"], 2, "Missing argument 'CONFIG'"),
        (["check", "nowhere.yaml"], 2, "nowhere.yaml: no such config file"),
        (["trian"], 2, "trian: no such command; mtrain --help lists the commands"),
        (["tarnslate"], 2, "tarnslate: no such command; did you mean translate?"),
        (["fit", "{config}", "--resum", "never"], 2, "--resum: no such option; did you mean --resume?"),
        (["fit", "{config}", "--xyzzy"], 2, "--xyzzy: no such option; mtrain fit --help lists them"),
        (
            ["translate", "{run}", "- It rains."],
            2,
            "mtrain translate --help lists them; put -- before TEXT that begins with a hyphen",
        ),
        (
            ["segment", "{run}", "-5"],
            2,
            "-5: no such option; mtrain segment --help lists them; put -- before",
        ),
        (["report", "{run}", "--foo"], 2, "--foo: no such option; mtrain report --help lists them\n"),
        (["translate", "{run}", "-", "-i", "nowhere.en"], 2, "give one of them"),
        (["translate", "{run}", "Hi", "-o", "out.xz"], 2, "out.xz: cannot write .xz files; give a name that"),
        (["segment", "{run}", "Hi", "-o", "out.GZ"], 2, "out.GZ: cannot write .GZ files; give a name that"),
        (["report", "{run}", "-o", "out.zip"], 2, "out.zip: cannot write .zip files"),
        (["segment", "{run}", "--side", "left"], 2, "'left' is not one of 'source', 'target'"),
        (["translate", "nowhere", "Hi"], 4, "nowhere: no such model or run folder"),
        (["translate", "{run}", "Hi", "-i", "{corpus}/train.en"], 2, "give one of them"),
        (["translate", "{run}", "-i", "nowhere.en"], 3, "nowhere.en: no such file"),
        (["translate", "{run}", "-i", "{corpus}"], 3, "a folder, not a file"),
        (
            ["translate", "{run}", "Hi", "--n-best", "9"],
            2,
            "9 translations of each line were requested, but only 5 are decoded",
        ),
        (["translate", "{run}", "Hi", "--beam-size", "0"], 2, "beam-size"),
        (
            ["translate", "{run}", "Hi", "--length-penalty", "50"],
            2,
            "'--length-penalty': Input should be less than",
        ),
        (["translate", "{run}", "Hi", "--set", "decoding.beam=3"], 2, "did you mean 'beam_size'?"),
        (["translate", "{run}", "Hi", "-o", "/nowhere/out"], 6, "/nowhere/out: cannot write"),
        (["translate", "{corpus}", "Hi"], 4, "not a complete checkpoint or model folder"),
        (["translate", "{run}", "Hi", "--continue"], 2, "--continue requires -o FILE"),
        (["translate", "{run}", "Hi", "-o", "{corpus}"], 6, "cannot write: a folder, not a file"),
        (["translate", "{run}", "Hi", "--prefix", "nowhere.de"], 3, "nowhere.de: no such file"),
        (["translate", "{run}", "Hi", "--prefix", "{corpus}/train.de"], 2, "give one prefix for each line"),
        (
            ["translate", "{run}", "Hi", "--prefix", "-"],
            2,
            "--prefix -: reading prefixes from stdin is not supported",
        ),
        (
            ["score", "{run}", "-i", "-", "--target", "{corpus}/train.de"],
            2,
            "score cannot read from stdin; give files",
        ),
        (["translate", "{run}", "-i", "a", "-i", "b"], 2, "--input: given 2 times; give it once"),
        (["translate", "{run}", "-i=nowhere.en"], 3, "error: nowhere.en: no such file"),
        (
            ["plan", "{config}", "--set", "data.test={{source: a.en, target: a.de}}"],
            2,
            "give each test set a name, such as test: {mine: {source: a.en, target: a.de}}",
        ),
        (["translate", "{run}", "Hi", "--ensemble", "nowhere"], 4, "nowhere: no such model"),
        (["translate", "{run}", "Hi", "--sample", "--top-p", "0"], 2, "decoding: top_p"),
        (["score", "{run}", "-i", "nowhere.en", "--target", "{corpus}/train.de"], 3, "no such file"),
        (["score", "{run}", "-i", "{corpus}/train.en"], 2, "give both -i and --target"),
        (
            ["export", "{run}", "out", "--format", "marian", "--quantization", "int8"],
            2,
            "--format ctranslate2",
        ),
        (["export", "{run}", "out", "--format", "marian", "-i", "nowhere.en"], 3, "nowhere.en: no such file"),
        (["evaluate", "{run}", "--metrics", "rouge"], 2, "choose from bleu, chrf, chrf++, ter"),
        (["evaluate", "{run}", "--bleu-tokenize", "moses"], 2, "choose from"),
        (["evaluate", "{run}", "--set", "data.test={{}}"], 2, "no test sets are configured"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_mistake_ends_in_one_clear_line(mtrain, run_dir, corpus, config_file, arguments, code, message):
    places = {"config": config_file, "run": run_dir, "corpus": corpus}
    given, out, err = mtrain(
        *(argument.format(**places) for argument in arguments), *([] if len(arguments) == 1 else ["--quiet"])
    )
    assert (given, out) == (code, "") and message in one_line(err)


def test_the_config_of_a_run_that_was_moved_does_not_begin_another_run(mtrain, run_dir, tmp_path):
    run = Path(shutil.copytree(run_dir, tmp_path / "moved run"))
    for command in ("fit", "plan"):
        code, _, err = mtrain(command, run / "config.yaml")
        message = f"belongs to a run that began in {run_dir}; if it was moved, add --set 'run_dir={run}'"
        assert code == 2 and message in one_line(err)
    code, _, err = mtrain("fit", run / "config.yaml", "--set", f"run_dir={run}", "--device", "cpu")
    assert code == 0 and "already finished" in err


def test_a_code_that_is_no_language_is_noticed(mtrain, config_file):
    _, _, err = mtrain("plan", config_file, "--hardware", "h100", "--set", "data.target_lang=jp")
    assert "warning: language jp is not known; use codes of ISO 639, such as ja for Japanese\n" in err
    _, _, err = mtrain(
        "plan", config_file, "--hardware", "h100", "--set", "data.target_lang=iw"
    )  # once Hebrew
    assert "is not known" not in err


def test_a_text_that_is_a_file_is_translated_with_a_warning(mtrain, run_dir, corpus):
    code, out, err = mtrain("translate", run_dir, corpus / "train.en", "--device", "cpu")
    name = f"{corpus}/train.en"
    assert code == 0 and out.count("\n") == 1
    assert f"warning: {name} is translated as text, but is a file; to read its lines, give -i {name}" in err


def test_a_run_without_a_model_and_a_lone_checkpoint_are_named(mtrain, config_file, run_dir, tmp_path):
    assert mtrain("prepare", config_file, "--run-dir", tmp_path / "prepared")[0] == 0
    code, _, err = mtrain("translate", tmp_path / "prepared", "Hi")
    assert code == 4 and "prepared: this run has no model yet; `mtrain fit` saves the first one" in err
    checkpoint = next((run_dir / "checkpoints").glob("step-*"))
    shutil.copytree(checkpoint, tmp_path / "best")
    code, _, err = mtrain("translate", tmp_path / "best", "Hi")
    assert code == 4 and "best: is a checkpoint outside of its run; give the run folder" in one_line(err)


@pytest.mark.parametrize("kind", [ZeroDivisionError, EOFError])  # the second one is an `Abort` to Typer
def test_a_bug_is_reported_as_such_and_debug_shows_the_traceback(mtrain, run_dir, monkeypatch, kind):
    from mtrain.decoding.translate import Translator

    def broken(*_, **__):
        raise kind("oops")

    monkeypatch.setattr(Translator, "stream", broken)
    code, _, err = mtrain("translate", run_dir, "Hi", "--device", "cpu")
    assert code == 1 and f"error: bug in mtrain: {kind.__name__}: oops" in one_line(err.lstrip("\n"))
    code, _, err = mtrain("translate", run_dir, "Hi", "--device", "cpu", "--debug")
    assert code == 1 and "Traceback" in err


@pytest.mark.parametrize("shown", [False, True])
def test_warnings_of_libraries_are_shown_only_if_python_is_told_to(
    mtrain, run_dir, monkeypatch, recwarn, shown
):
    from mtrain.decoding.translate import Translator

    def warning(*_, **__):
        warnings.warn("deprecated", stacklevel=1)
        return iter(())

    monkeypatch.setattr(Translator, "stream", warning)
    monkeypatch.setattr(sys, "warnoptions", ["default"] if shown else [])
    mtrain("translate", run_dir, "Hi", "--device", "cpu")
    assert [str(each.message) for each in recwarn] == ["deprecated"] * shown


def test_tokenize_and_fit_say_what_to_do_next_and_repeat_no_work(mtrain, config_file, tmp_path):
    code, out, err = mtrain("tokenize", config_file, "--run-dir", tmp_path / "other")
    assert code == 0 and out == f"{tmp_path / 'other/tokenizer/joint.model'}\n"
    assert f"tokenizer saved; next: mtrain fit {config_file} --run-dir {tmp_path / 'other'}\n" in err
    made = (tmp_path / "other/tokenizer/joint.model").stat().st_mtime_ns
    code, out, err = mtrain("fit", config_file, "--run-dir", tmp_path / "other", "--device", "cpu")
    assert code == 0 and out.startswith("seen (8 sentences)\n  BLEU|") and "\n  chrF2|" in out
    for message in (
        "8 training pairs",
        "device: cpu",
        "million parameters",
        "planned: 8 steps",
        "target tokens/s",
        "BLEU",
        f"model saved; next:\n  mtrain translate {tmp_path / 'other'} 'Hello.'\n"
        f"  mtrain report {tmp_path / 'other'}\n",
    ):
        assert message in err
    assert (tmp_path / "other/tokenizer/joint.model").stat().st_mtime_ns == made
    code, _, err = mtrain("fit", config_file, "--run-dir", tmp_path / "other", "--device", "cpu")
    assert code == 0 and "already finished" in err
    assert yaml.safe_load((tmp_path / "other/config.yaml").read_text())["run_dir"] == str(tmp_path / "other")
    code, out, err = mtrain("tokenize", config_file, "--run-dir", tmp_path / "third", "--force", "--quiet")
    assert code == 0 and err == ""


@pytest.mark.parametrize("key", ["model.heads=2", "tokenizer.joint=false", "max_length=9"])
def test_a_trained_model_is_not_changed_by_set(mtrain, run_dir, key):
    code, _, err = mtrain("translate", run_dir, "Hi", "--set", key, "--device", "cpu")
    assert code == 2 and "only decoding.* can be set" in one_line(err)


def test_the_shell_completion_of_typer_can_be_installed(mtrain, monkeypatch, tmp_path):
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, _ = mtrain("--install-completion")
    assert code == 0 and "completion installed" in out and ".bash" in (tmp_path / ".bashrc").read_text()
    monkeypatch.setenv("_MTRAIN_COMPLETE", "complete_bash")
    for words, expected in (("mtrain trans", "translate"), ("mtrain translate --bea", "--beam-size")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        assert mtrain()[1].split() == [expected]


def test_the_help_is_printed_without_a_command(mtrain):
    assert mtrain() == mtrain("--help")


def test_text_that_is_not_unicode_is_a_data_error(mtrain, run_dir):
    code, _, err = mtrain("translate", run_dir, "caf\udce9", "--device", "cpu")
    assert code == 3 and "not valid UTF-8" in one_line(err)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("could not create a primitive"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_running_out_of_memory_has_its_own_code(mtrain, run_dir, monkeypatch, error):
    from mtrain.decoding.translate import Translator

    def full(*_, **__):
        raise error

    monkeypatch.setattr(Translator, "stream", full)
    code, _, err = mtrain("translate", run_dir, "Hi", "--device", "cpu")
    assert code == 8 and "in a new run, or decoding.batch_tokens to translate" in one_line(err)


def test_results_that_cannot_be_written_are_an_error(run_dir):
    expected = (6, "error: output: not writable\n")
    code, _, err = run_forked("translate", run_dir, "It rains.", "--device", "cpu", stdout=CLOSED)
    assert (code, err) == expected
    command = f"{sys.executable} -m mtrain --help >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == expected


def test_help_whose_reader_is_gone_is_no_failure():
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "mtrain", "translate", "--help"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_while_data_is_prepared_is_one_line(mtrain, config_file, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("mtrain.data.scanning.scanner.read_blocks", interrupted)
    assert mtrain("fit", config_file, "--quiet") == (130, "", "stopped by SIGINT\n")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_signal_while_data_is_prepared_is_one_line(mtrain, config_file, monkeypatch, name):
    number = signal.Signals[name]

    def stopped(*_, **__):
        for _ in range(2 if name in ("SIGHUP", "SIGXCPU") else 1):  # which are sent more than once
            os.kill(os.getpid(), number)
        yield

    monkeypatch.setattr("mtrain.data.scanning.scanner.read_blocks", stopped)
    with handling({number: signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL}):
        assert mtrain("fit", config_file, "--quiet") == (128 + number, "", f"stopped by {name}\n")
