"""`mtrain segment`: pieces and ids of lines, and the way back."""

import json
import os
import shutil
import time
from select import select

import pytest
from sentencepiece import SentencePieceProcessor

from tests.support.cli import one_line, start_forked
from tests.support.marian import pieces, spm
from tests.support.tokenizers import SOURCE, TARGET, train


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    """A model folder with nothing but a joint tokenizer, as in a run that has not been trained yet."""
    folder = tmp_path_factory.mktemp("joint")
    train(folder / "tokenizer", vocab_size=400)
    return folder


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """The same with a vocabulary for each language."""
    folder = tmp_path_factory.mktemp("separate")
    train(folder / "tokenizer", vocab_size=340, joint=False)
    return folder


@pytest.mark.parametrize("ids", [False, True])
def test_lines_are_segmented_as_sentencepiece_does_and_joined_again(mtrain, stdin, joint, tmp_path, ids):
    lines = [*SOURCE[:20], "", "日本 \U0001f600", " a  b ", "e\u0301"]
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    option = ["--ids"] * ids
    code, out, _ = mtrain("segment", joint, "-i", tmp_path / "in", *option)
    processor = SentencePieceProcessor(model_file=str(joint / "tokenizer/joint.model"))
    rows = processor.encode(lines, out_type=int if ids else str)
    assert code == 0 and out == "".join(" ".join(map(str, row)) + "\n" for row in rows)
    stdin(out.encode())
    code, joined, _ = mtrain("segment", joint, "--join", *option)
    assert code == 0 and joined.split("\n")[:-1] == [*SOURCE[:20], "", "日本 \U0001f600", "a b", "e\u0301"]


def test_a_program_can_read_the_pieces_of_a_line_before_it_writes_the_next_one(joint):
    processor = SentencePieceProcessor(model_file=str(joint / "tokenizer/joint.model"))
    (stdin, to_child), (from_child, stdout) = os.pipe(), os.pipe()
    child = start_forked("segment", joint, streams=[stdin, stdout, 2])
    os.close(stdin)
    os.close(stdout)
    with os.fdopen(to_child, "wb", buffering=0) as writer, os.fdopen(from_child, "rb") as answers:
        for line in SOURCE[:5]:
            writer.write(line.encode() + b"\n")
            assert select([answers], [], [], 60)[0], "no answer"
            assert answers.readline().decode().split() == processor.encode(line, out_type=str)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_streams_in_non_blocking_mode_are_waited_for(joint, tmp_path):
    (stdin, to_child), (from_child, stdout) = os.pipe(), os.pipe()
    for stream in (stdin, stdout):
        os.set_blocking(stream, False)
    child = start_forked("segment", joint, "-o", tmp_path / "out", streams=[stdin, stdout, 2])
    time.sleep(0.5)  # the command waits for its first line
    for line in (b"one\ntw", b"o\nthree\n"):
        os.write(to_child, line)
        time.sleep(0.1)
    os.close(to_child)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.set_blocking(stdout, False)
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in SOURCE) * 40)  # more than a pipe holds
    with (tmp_path / "in").open() as lines:
        child = start_forked("segment", joint, streams=[lines.fileno(), stdout, 2])
    os.close(stdout)
    with os.fdopen(from_child, "rb") as answers:
        time.sleep(0.5)
        found = answers.read().splitlines()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len((tmp_path / "out").read_text().splitlines()) == 3 and len(found) == 40 * len(SOURCE)


def test_typed_lines_and_an_output_file(mtrain, joint, tmp_path, stdin):
    code, out, _ = mtrain("segment", joint, SOURCE[0], SOURCE[1])
    assert code == 0 and out.count("\n") == 2
    assert mtrain("segment", joint, SOURCE[0], SOURCE[1], "-o", tmp_path / "out")[:2] == (0, "")
    assert (tmp_path / "out").read_text(encoding="utf-8") == out
    assert mtrain("segment", joint, *out.splitlines(), "--join")[1].splitlines() == SOURCE[:2]
    assert mtrain("segment", joint, f"{SOURCE[0]}\r\n{SOURCE[1]}\n")[1] == out
    stdin(f"{SOURCE[0]}\n{SOURCE[1]}\n".encode())
    assert mtrain("segment", joint, "-")[1] == out


def test_each_side_has_its_own_vocabulary(mtrain, separate):
    for side, text in (("source", SOURCE[0]), ("target", TARGET[0])):
        processor = SentencePieceProcessor(model_file=str(separate / f"tokenizer/{side}.model"))
        code, out, _ = mtrain("segment", separate, text, "--side", side)
        assert code == 0 and out.split() == processor.encode(text, out_type=str)


def test_unknown_text_survives_as_pieces(mtrain, tmp_path):
    train(tmp_path / "tokenizer", byte_fallback=False, vocab_size=200)
    code, out, _ = mtrain("segment", tmp_path, "I like 日本.")
    assert code == 0 and "日本" in out
    assert mtrain("segment", tmp_path, out.rstrip("\n"), "--join")[1] == "I like 日本.\n"


def test_a_marian_vocabulary_has_its_own_ids_and_tags(mtrain, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    for side in ("source", "target"):
        (tmp_path / f"tokenizer/{side}.model").write_bytes(spm(0))
    vocabulary = ["</s>", "<unk>", ">>fra<<", *reversed(pieces(0)), "<pad>"]
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    (tmp_path / "tokenizer/vocab.json").write_text(json.dumps(ids))
    code, out, _ = mtrain("segment", tmp_path, ">>fra<<I eat rice.")
    assert code == 0 and out.split()[0] == ">>fra<<"
    code, numbers, _ = mtrain("segment", tmp_path, ">>fra<<I eat rice.", "--ids")
    assert [int(number) for number in numbers.split()] == [ids[piece] for piece in out.split()]
    joined = mtrain("segment", tmp_path, numbers.strip(), "--ids", "--join")[1]
    assert joined == mtrain("segment", tmp_path, out.strip(), "--join")[1] != "\n"


@pytest.mark.parametrize("word", ["400", "-1", "1.5", "x", "²", "9" * 5000])
def test_what_is_not_an_id_is_an_error_with_its_line(mtrain, stdin, joint, tmp_path, word):
    (tmp_path / "in").write_text(f"5 6\n7 {word}\n", encoding="utf-8")
    code, out, err = mtrain("segment", joint, "--join", "--ids", "-i", tmp_path / "in")
    assert code == 3 and out.count("\n") == 1
    assert f"in:2: {word} is not a token id; ids are integers from 0 to 399" in one_line(err)
    stdin(f"{word}\n".encode())
    assert f"<stdin>:1: {word} is not" in mtrain("segment", joint, "--join", "--ids")[2]
    assert f"TEXT:1: {word} is not" in mtrain("segment", joint, "--join", "--ids", "--", word)[2]


def test_mistakes_are_one_line(mtrain, joint, tmp_path):
    (tmp_path / "in").write_text("a\n")
    for arguments, code, message in (
        ([tmp_path / "nowhere", "a"], 4, "no such model or run folder"),
        ([tmp_path, "a"], 4, "tokenizer/ is missing"),
        ([joint, "a", "-i", tmp_path / "in"], 2, "TEXT and --input were both given"),
        ([joint, "-i", tmp_path / "other"], 3, "no such file"),
        ([joint, "-i", tmp_path / "in", "-o", tmp_path / "in"], 2, "also an input"),
    ):
        found, out, err = mtrain("segment", *arguments)
        assert (found, out) == (code, "") and message in one_line(err)
    shutil.copytree(joint, tmp_path / "damaged")
    (tmp_path / "damaged/tokenizer/joint.model").write_bytes(b"x")
    code, _, err = mtrain("segment", tmp_path / "damaged", "a")
    assert code == 4 and "not a SentencePiece model" in one_line(err)
