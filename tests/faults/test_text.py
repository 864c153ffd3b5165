"""Faults of text: unequal line counts, invalid bytes, huge lines, unusual line ends."""

import fcntl
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from mtrain import Translator
from mtrain.data.reading.blocks import read_corpus, read_pairs
from mtrain.data.reading.lines import read_text
from mtrain.errors import DataError
from mtrain.storage.manifest import write_manifest
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.cli import changed, one_line, run_forked, start_forked
from tests.support.corpora import BAD_BYTES, DATA, read, text_pair, write
from tests.support.encoding import TOY, config, dropped, prepare_data, text_of
from tests.support.encoding import write as write_tsv
from tests.support.training import PAIRS

pytestmark = pytest.mark.usefixtures("logs")


def test_17_unequal_line_counts_are_a_data_error_with_both(mtrain, config_file, tmp_path, corpus):
    (tmp_path / "short.de").write_text("Eine Katze schläft.\n")
    files = {"source": str(corpus / "train.en"), "target": str(tmp_path / "short.de")}
    code, _, err = mtrain("fit", changed(config_file, "data", train=files))
    assert code == 3 and "has 8 lines but" in one_line(err) and "short.de has 1" in err


@pytest.mark.parametrize(("sources", "targets"), [(3, 5), (5, 3), (0, 2), (1, 0), (999, 1000)])
def test_17_unequal_counts_name_both(tmp_path: Path, sources: int, targets: int):
    texts = text_pair(tmp_path, b"x\n" * sources, b"y\n" * targets)
    with pytest.raises(DataError) as caught:
        list(read_corpus(texts))
    message = str(caught.value)
    longer, shorter = ("s.en", "s.fr") if sources > targets else ("s.fr", "s.en")
    assert f"{longer} has {max(sources, targets)} lines" in message
    assert f"{shorter} has {min(sources, targets)}" in message


def test_17_unequal_counts_are_an_error_even_if_bad_lines_are_skipped(tmp_path: Path):
    with pytest.raises(DataError, match="3 lines"):
        list(read_pairs(text_pair(tmp_path, b"a\n\xff\nb\n", b"a\nb\n"), "skip"))


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("final", [True, False], ids=["final newline", "no final newline"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
def test_18_only_lf_ends_a_line(tmp_path: Path, end: str, final: bool, mark: bytes):
    numbers = [str(i) for i in range(len(DATA))]
    source = write(tmp_path / "a.en", DATA, end, final)
    source.write_bytes(mark + source.read_bytes())
    target = write(tmp_path / "a.fr", numbers)
    assert read(source=source, target=target) == list(zip(DATA, numbers, strict=True))
    tsv = write(tmp_path / "a.tsv", [f"{s}\t{n}" for s, n in zip(DATA, numbers, strict=True)], end, final)
    tsv.write_bytes(mark + tsv.read_bytes())
    assert read(tsv=tsv) == list(zip(DATA, numbers, strict=True))


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\r\n", [""]),
        (b"a", ["a"]),
        (b"a\r", ["a\r"]),  # no LF, so the CR is data
        (b"a\r\r\n", ["a\r"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\xef\xbb\xbf", [""]),
        (
            b"\xef\xbb\xbf\xef\xbb\xbfa\n\xef\xbb\xbfb",
            ["\ufeffa", "\ufeffb"],
        ),  # one mark, at the start of the file
    ],
)
def test_18_line_ends(tmp_path: Path, content: bytes, lines: list[str]):
    (tmp_path / "a").write_bytes(content)
    assert read_text(tmp_path / "a") == lines


def test_18_a_final_newline_on_one_side_only_makes_no_difference(tmp_path: Path):
    assert list(read_corpus(text_pair(tmp_path, b"a\nb", b"c\nd\n"))) == [("a", "c"), ("b", "d")]


@pytest.mark.parametrize("bad", BAD_BYTES, ids=repr)
@pytest.mark.parametrize("side", ["s.en", "s.fr"])
def test_19_bad_text_names_file_and_line_or_is_skipped(tmp_path: Path, bad: bytes, side: str):
    good, broken = b"1\n2\n3\n", b"1\n" + bad + b"\n3\n"
    spec = text_pair(tmp_path, *((broken, good) if side == "s.en" else (good, broken)))
    with pytest.raises(DataError, match=rf"{side}:2: ") as caught:
        list(read_pairs(spec, "error"))
    assert "bad_lines" in str(caught.value)
    assert list(read_pairs(spec, "skip")) == [("1", "1"), None, ("3", "3")]


def test_19_both_sides_bad_is_one_bad_pair(tmp_path: Path):
    assert list(read_pairs(text_pair(tmp_path, b"\xff\na\n", b"\0\nb\n"), "skip")) == [None, ("a", "b")]


def test_19_invalid_input_is_a_data_error_with_its_line(mtrain, run_dir, stdin):
    stdin(b"It rains.\nbad \xff byte\n")
    code, _, err = mtrain("translate", run_dir, "--device", "cpu")
    assert code == 3 and "<stdin>:2: not valid UTF-8" in one_line(err)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("x" * 2_000_000, id="one word"),
        pytest.param("I like " * 143_000, id="many words", marks=pytest.mark.slow),
    ],
)
def test_20_a_line_of_megabytes_is_dropped(tmp_path: Path, tokenizer: Tokenizer, text: str, caplog):
    train = write_tsv(tmp_path / "t.tsv", [TOY[0], (text, "short"), ("short", text), TOY[1]])
    prepared = prepare_data(config(tmp_path, train), tokenizer, tmp_path / "data", seed=1)
    assert text_of(prepared, tokenizer) == TOY[:2]
    assert dropped(caplog) == {"too long": 2}


@pytest.mark.parametrize("size", [100_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_20_a_line_of_megabytes_is_translated_into_one_line(
    translator: Translator, monkeypatch, size: int
) -> None:
    """Decoding is replaced: only the splitting of the line is tested."""
    sizes = []

    def count(task, *_):
        sizes.extend(len(part.source) for part in task.parts)
        return [[short] for _ in task.parts]

    [short] = translator.translate(["It rains."])
    fast = translator.with_settings()
    monkeypatch.setattr(fast.workers, "decode", count)
    for text in ("It rains. " * (size // 10), "x" * size):
        [found] = fast.translate([text])
        assert found.text.startswith("Es regnet. Es regnet.") and max(sizes) <= 64


@pytest.mark.slow
@pytest.mark.parametrize("bad_lines", ["error", "skip"])
def test_44_a_compressed_line_of_gigabytes_does_not_fill_the_memory(config_file, tmp_path, bad_lines: str):
    """The second line has 2 GiB, or 2 MB compressed. The whole process with PyTorch has less."""
    bomb = tmp_path / "bomb.tsv.gz"
    with bomb.open("wb") as raw, gzip.open(raw, "wb", compresslevel=1) as file:
        file.write(b"It rains.\tEs regnet.\n")
        for _ in range(2**11):
            file.write(b"a" * 2**20)
    program = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], capture_output=True);"
        "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, done.stderr.decode())"
    )
    data = {"train": {"tsv": str(bomb)}, "bad_lines": bad_lines}
    command = [sys.executable, "-c", program, sys.executable, "-m", "mtrain"]
    command += ["tokenize", changed(config_file, "data", **data), "--set", f"run_dir={tmp_path / 'run'}"]
    found = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout
    code, memory, error = found.split(maxsplit=2)
    assert int(memory) < 2**20  # KiB
    assert (code == "3" and "bomb.tsv.gz:2: longer than 16,777,216 bytes" in error) == (bad_lines == "error")


def test_44_a_line_that_is_too_long_is_an_error_in_a_pipe(run_dir, monkeypatch, mtrain, stdin):
    monkeypatch.setattr("mtrain.data.reading.lines.MAX_LINE", 100)
    stdin(b"It rains.\n" + b"x" * 1000 + b"\nIt rains.\n")
    code, _, err = mtrain("translate", run_dir, "--device", "cpu")
    assert code == 3 and "<stdin>:2: longer than 100 bytes" in one_line(err)


def test_22_a_closed_pipe_is_not_an_error_and_a_full_device_is(run_dir, tmp_path):
    many = tmp_path / "many"
    many.write_text("It rains.\n" * 600)
    job = ["translate", run_dir, "--device", "cpu", "--beam-size", 1]
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)  # less than the output
    with Path(os.devnull).open() as stdin, (tmp_path / "stderr").open("w") as stderr:
        child = start_forked(*job, "-i", many, streams=[stdin.fileno(), write_end, stderr.fileno()])
    os.close(write_end)
    assert os.read(read_end, 11) == b"Es regnet.\n"
    os.close(read_end)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert (code, (tmp_path / "stderr").read_text()) == (0, "")
    with Path("/dev/full").open("w") as full:
        for command in ([*job, "It rains."], ["--help"]):
            code, _, err = run_forked(*command, stdout=full.fileno())
            assert code == 6 and "No space left" in one_line(err)


def test_28_control_characters_never_reach_the_terminal(mtrain):
    code, _, err = mtrain("fit", "no\x1b[31mwhere.yaml")
    assert code == 2 and "\x1b" not in err and "\\x1b[31m" in err


@pytest.mark.parametrize("piece", ["<0x0A>", "<0x0D>", "<0x00>", "<0x09>", "<0x1B>", "<0x7F>"])
def test_29_byte_pieces_never_make_a_control_character(trained, piece: str):
    tokenizer = trained(type="unigram")
    word = tokenizer.encode_target(["orange"])[0]
    byte = tokenizer.target.pieces.index(piece)
    assert byte != tokenizer.special.unk
    assert tokenizer.decode([[*word, byte, *word]]) == ["orange  orange"]


def test_19_fit_names_a_bad_line_or_drops_its_pair(mtrain, config_file, tmp_path):
    for language in ("en", "de"):
        lines = [pair[language == "de"].encode() for pair in PAIRS]
        (tmp_path / f"t.{language}").write_bytes(b"\n".join([*lines[:3], b"caf\xe9", *lines[3:]]) + b"\n")
    files = {"source": str(tmp_path / "t.en"), "target": str(tmp_path / "t.de")}
    file = changed(config_file, "data", train=files)
    code, _, err = mtrain("fit", file, "--device", "cpu", "--quiet")
    assert code == 3 and "t.en:4: not valid UTF-8" in one_line(err)
    code, _, err = mtrain("fit", file, "--device", "cpu", "--set", "data.bad_lines=skip")
    assert code == 0 and "8 training pairs (dropped: 1 bad)" in err


def test_21_blank_lines_have_empty_translations(mtrain, run_dir, stdin):
    stdin(b"\n   \n\t\nIt rains.\n\xc2\xa0\n\r\n")
    code, out, _ = mtrain("translate", run_dir, "--device", "cpu")
    assert (code, out) == (0, "\n\n\nEs regnet.\n\n\n")
    stdin(b"")
    assert mtrain("translate", run_dir, "--device", "cpu")[:2] == (0, "")


def test_29_what_is_no_control_character_is_kept(trained):
    """Joiners, marks of direction, and separators other than LF may be part of a language's text."""
    tokenizer = trained(type="unigram", normalization="identity")
    text = "a\u200db\u200cc\u200ed\u2067e\u2069f\u2028g"
    assert tokenizer.decode([*tokenizer.encode_target([text, "a\tb\x85c\x9bd"])]) == [text, "a b c d"]


def test_29_a_translation_is_always_one_line(mtrain, run_dir, tmp_path):
    """The model generates byte pieces instead of words, because their (tied) embeddings are swapped."""
    folder = Path(shutil.copytree(run_dir / "model", tmp_path / "model"))
    target = Tokenizer(folder / "tokenizer").target
    said = target.encode(["Es regnet."])[0]
    tensors = load_file(folder / "model.safetensors")
    for word, piece in zip(said, ("<0x0A>", "<0x0D>", "<0x00>"), strict=False):
        both = [word, target.pieces.index(piece)]
        for tensor in tensors.values():
            if len(tensor) == len(target.pieces):
                tensor[both] = tensor[both[::-1]]
    save_file(tensors, folder / "model.safetensors")
    write_manifest(folder)
    code, out, _ = mtrain("translate", folder, "It rains.", "--device", "cpu")
    assert code == 0 and out.count("\n") == 1 and not set(out[:-1]) & set("\r\n\0")
    assert out.strip() == target.decode([said])[0][len(target.decode([said[:3]])[0]) :].strip()


@pytest.mark.parametrize("escape", ["\x1b[31m", "\x07", "\x9b2J", "\u202e"])
def test_28_control_characters_of_the_data_are_escaped_in_messages(mtrain, config_file, tmp_path, escape):
    """A report in a pipe has them as they are; terminals: see `test_43`."""
    (tmp_path / "t.jsonl").write_text(json.dumps({f"a{escape}b": "x", "de": "y"}) + "\n", encoding="utf-8")
    corpus = {"jsonl": str(tmp_path / "t.jsonl"), "source_field": "en", "target_field": "de"}
    for command in (["fit", "--device", "cpu"], ["check"]):
        _, out, err = mtrain(*command, changed(config_file, "data", train=corpus))
        assert escape not in err
        assert f"fields: a{escape}b" in out if command == ["check"] else "available fields: a" in err


# Runs commands, each an argument with a line for each of its words.
COMMANDS = """
import sys
from mtrain.cli import main
for command in sys.argv[1:]:
    try:
        main(command.split("\\n"))
    except SystemExit as end:
        for stream in (sys.stdout, sys.stderr):
            print("exit code", end.code, file=stream, flush=True)
"""


def in_the_c_locale(*commands: list[object]) -> list[tuple[int, str, str]]:
    """The exit code, stdout and stderr of each command. Python decodes their words as ASCII."""
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = [os.fsencode("\n".join(map(str, command))) for command in commands]
    program = [sys.executable, "-c", COMMANDS, *arguments]
    done = subprocess.run(program, capture_output=True, env={**os.environ, **settings})
    out, err = (re.split(r"exit code (\d+)\n", text.decode()) for text in (done.stdout, done.stderr))
    assert out[1::2] == err[1::2] and len(out) == 2 * len(commands) + 1, done.stderr
    return list(zip(map(int, out[1::2]), out[::2], err[::2], strict=False))


def test_text_and_paths_in_the_c_locale_are_used_or_refused_in_one_line(run_dir, config_file, tmp_path):
    """Python can open a path from an argument there, but not a path from a config."""
    values = {**yaml.safe_load(config_file.read_text()), "run_dir": f"{tmp_path}/ü"}
    (tmp_path / "ü.yaml").write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    tokenize = ["tokenize", config_file.rename(tmp_path / "é.yaml"), "--quiet"]
    broken, found, refused, typed = in_the_c_locale(
        ["translate", run_dir, "caf\udce9", "--device", "cpu"],
        tokenize,
        ["tokenize", tmp_path / "ü.yaml"],
        [*tokenize, "--run-dir", tmp_path / "ü"],
    )
    assert typed[0] == 3 and "not valid UTF-8" in one_line(typed[2])
    assert broken[0] == 3 and "not valid UTF-8" in one_line(broken[2])
    assert found[0] == 0 and found[1]
    message = "ü: the locale's encoding cannot represent this path; set PYTHONUTF8=1"
    assert refused[0] == 6 and message in one_line(refused[2])
