"""`mtrain clean`: two files with all pairs, and what it says about them."""

import gzip
import json
import os

import pytest
import yaml

from tests.support.cli import one_line, run_forked

FILTERS = {"max_words": 4, "copied": True, "duplicates": "source"}


@pytest.fixture
def clean(mtrain, tmp_path):
    """Run `mtrain clean` for some training corpora; returns the exit code, stdout, stderr and the output."""

    def clean(train, *arguments, filters=FILTERS, **keys):
        data = {
            "source_lang": "en",
            "target_lang": "de",
            "train": train,
            "validation": {"holdout": 2},
            **keys,
        }
        text = {"run_dir": "runs/x", "data": {**data, "filters": filters}, "training": {"max_steps": 1}}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
        code, out, err = mtrain("clean", tmp_path / "c.yaml", "-o", tmp_path / "out.tsv", *arguments)
        file = tmp_path / "out.tsv"
        return code, out, err, file.read_bytes().decode() if file.exists() else None

    return clean


def write(path, text):
    path.write_bytes(text.encode())
    return str(path)


def test_a_dash_is_stdout(clean, mtrain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clean({"tsv": write(tmp_path / "t.tsv", "a\tb\n")})
    code, out, _ = mtrain("clean", tmp_path / "c.yaml", "-o", "-")
    assert (code, out) == (0, "a\tb\n")
    for output in ([], ["-o", "-"]):  # both on stdout
        code, out, err = mtrain("clean", tmp_path / "c.yaml", *output, "--rejected", "-")
        assert (code, out) == (2, "") and "-: -o and --rejected would write to the same place" in err
    files = [write(tmp_path / f"x.{side}", "a house\n" * 9) for side in ("en", "de")]
    code, out, _ = mtrain("init", *files, "-o", "-")
    assert code == 0 and yaml.safe_load(out)["data"]["source_lang"] == "en"
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("rejects", [False, True])
def test_a_file_is_not_written_in_part_if_the_reader_of_stdout_exits(clean, tmp_path, rejects):
    """The file with the rejected pairs beside stdout, or the other way round."""
    text = "".join(f"a{i}\tb{i}\nc{i}\tc{i}\n" for i in range(5_000))  # every second pair is copied
    clean({"tsv": write(tmp_path / "t.tsv", text)})
    write(tmp_path / "no", "old")
    files = ["-o", tmp_path / "no", "--rejected", "-"] if rejects else ["--rejected", tmp_path / "no"]
    reader, writer = os.pipe()
    os.close(reader)
    code, _, err = run_forked("clean", tmp_path / "c.yaml", *files, stdout=writer)
    os.close(writer)
    assert code == 6 and "no: not written, because the reader of stdout has exited" in err
    assert (tmp_path / "no").read_text() == "old"


def test_all_pairs_are_in_one_of_two_files(clean, tmp_path):
    text = "a\tb\tx\ty\r\nTom\ttom\n a\tc\nd e f g h\ti\nj\tk\n\tl\na\tm\n"
    train = {"tsv": write(tmp_path / "t.tsv", text)}
    code, out, err, kept = clean(train, "--rejected", tmp_path / "no.tsv.gz")
    assert (code, out) == (0, "")
    assert kept == "a\tb\tx\ty\n a\tc\nj\tk\n"
    rejected = gzip.decompress((tmp_path / "no.tsv.gz").read_bytes()).decode()
    assert rejected == "copied\tTom\ttom\nmax_words\td e f g h\ti\nempty\t\tl\nduplicates\ta\tm\n"
    assert "clean: kept 3 of 7 pairs (42.86%)\n" in err
    assert f"clean: rejected 1 (14.29%): copied\n    {tmp_path}/t.tsv:2: Tom | tom\n" in err
    assert err.count("rejected 1 ") == 4
    assert clean(train, "--workers", 2, "--quiet")[2:] == ("", kept)


def test_directions_are_not_mixed(clean, tmp_path):
    one = {"tsv": write(tmp_path / "1.tsv", "a\tb\n")}
    code, _, err, kept = clean([one, {**one, "target_lang": "fr"}], language_tags="target")
    assert code == 2 and kept is None and "data.train has several directions" in one_line(err)


def test_columns_are_reordered_and_kept(clean, tmp_path):
    one = {"tsv": write(tmp_path / "1.tsv", "0.5\tb\tid\ta\n"), "source_column": 3, "target_column": 1}
    two = {"source": write(tmp_path / "s", "c\n\ufeffd\n"), "target": write(tmp_path / "t", "C2\nD2\u2028\n")}
    assert clean([one, two])[3] == "a\tb\t0.5\tid\nc\tC2\n\ufeffd\tD2\u2028\n"


def test_tabs_and_line_ends_in_sentences_become_spaces(clean, tmp_path):
    records = [{"s": "a\tb", "t": "c\nd"}, {"s": "e", "t": "f\rg\r"}, {"s": "h", "t": "h"}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    train = {"jsonl": write(tmp_path / "x.jsonl", text), "source_field": "s", "target_field": "t"}
    code, _, err, kept = clean(train)
    assert (code, kept) == (0, "a b\tc d\ne\tf\rg \n")
    warning = "warning: clean: a tab or a line end inside of {} sentence(s) was replaced by a space"
    assert warning.format(3) in err
    records.append({"s": "x\ty", "t": "x\ty"})  # rejected: written to the other file only
    write(tmp_path / "x.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    assert warning.format(3) in clean(train)[2]
    assert warning.format(5) in clean(train, "--rejected", tmp_path / "no")[2]


def test_quoted_fields_are_written_without_quotes(clean, tmp_path):
    lines = ['1\t"b ""x"" y"\t"a\tz"', 'id\t"g"\t"f"', '2\t"c\td', '"3"\te\tE']
    file = write(tmp_path / "q.tsv", "\n".join(lines))
    train = {"tsv": file, "source_column": 2, "target_column": 1, "quotes": True}
    code, _, err, kept = clean(train, "--rejected", tmp_path / "no", bad_lines="skip")
    assert (code, kept) == (0, 'a z\tb "x" y\t1\nf\tg\tid\n')
    assert "warning: clean: a tab or a line end inside of 1 sentence(s) was replaced" in err
    bad, copied = (tmp_path / "no").read_text().splitlines()
    assert bad.startswith(f"bad\t{file}:3: the quotes of column 1 do not end with it; ")
    assert copied == "copied\tE\te\t3"
    assert "q.tsv:3: the quotes of column 1" in one_line(clean(train)[2])


def test_blank_lines_at_the_end_are_not_written(clean, tmp_path):
    code, _, err, kept = clean({"tsv": write(tmp_path / "t.tsv", "a\tb\n\n\n")})
    assert (code, kept) == (0, "a\tb\n") and "clean: kept 1 of 1 pairs" in err


def test_unreadable_pairs(clean, tmp_path):
    (tmp_path / "bad.tsv").write_bytes(b"a\tb\nc\nd\xff\te\nf\tg\n")
    train = {"tsv": str(tmp_path / "bad.tsv")}
    code, _, err, kept = clean(train)
    assert code == 3 and kept is None and "bad.tsv:2: 1 column(s); at least 2 expected" in one_line(err)
    code, _, err, kept = clean(train, "--rejected", tmp_path / "no", bad_lines="skip")
    assert (code, kept) == (0, "a\tb\nf\tg\n") and f"    {tmp_path}/bad.tsv:2: c\n" in err
    rejected = f"bad\tc\nbad\t{tmp_path}/bad.tsv:3: not valid UTF-8 (byte 2 of the line)\n"
    assert (tmp_path / "no").read_text() == rejected


def test_the_reason_of_an_unreadable_pair_is_one_valid_line(clean, tmp_path):
    """It names the keys of the record, which can be any text."""
    lines = '{"s": "a", "t": "b"}\n{"s": "c", "a\\n\\td\\ud800": "e"}\n'
    train = {"jsonl": write(tmp_path / "x.jsonl", lines), "source_field": "s", "target_field": "t"}
    code, _, err, kept = clean(train, "--rejected", tmp_path / "no", bad_lines="skip")
    assert (code, kept) == (0, "a\tb\n"), err
    [[reason, line]] = [each.split("\t") for each in (tmp_path / "no").read_text().splitlines()]
    assert reason == "bad" and line.startswith(f"{tmp_path}/x.jsonl:2: no field 't'")
    assert line.endswith("s, a d?")


def test_a_pair_without_the_score_is_rejected_with_the_reason(clean, tmp_path):
    lines = '{"s": "a", "t": "b"}\n{"s": "c", "t": "d", "q": 1}\n'
    train = {"jsonl": write(tmp_path / "x.jsonl", lines), "source_field": "s", "target_field": "t"}
    filters = {"min_score": {"column": "q", "value": 0}}
    code, _, err, kept = clean(train, "--rejected", tmp_path / "no", bad_lines="skip", filters=filters)
    reason = f"{tmp_path}/x.jsonl:1: no field 'q'; available fields: s, t"
    assert (code, kept) == (0, "c\td\n") and reason in err
    assert (tmp_path / "no").read_text() == f"bad\t{reason}\n"


def test_if_no_pair_is_left_nothing_is_written(clean, tmp_path):
    write(tmp_path / "out.tsv", "old")
    train = {"tsv": write(tmp_path / "t.tsv", "a\ta\nb\tb\nc c c c c\td\n")}
    code, _, err, kept = clean(train, "--rejected", tmp_path / "no")
    assert code == 3 and kept == "old" and not (tmp_path / "no").exists()
    assert err.endswith("error: no pair is left; rejected: 1 max_words, 2 copied\n")
    assert f"    {tmp_path}/t.tsv:1: a | a\n" in err
    code, _, err, _ = clean({"tsv": write(tmp_path / "t.tsv", "")})
    assert code == 3 and "no pair is left; rejected: none\n" in err


@pytest.mark.parametrize(
    ("arguments", "filters", "message"),
    [
        ((), None, "data.filters has no rule; give some"),
        (
            ("--rejected", "{tmp}/out.tsv"),
            FILTERS,
            "out.tsv: -o and --rejected would write to the same place",
        ),
        (("--rejected", "{tmp}/t.tsv"), FILTERS, "t.tsv: this file is also an input"),
        (("--rejected", "{tmp}/val.tsv"), FILTERS, "val.tsv: this file is also an input"),
        (("--rejected", "{tmp}/test.so"), FILTERS, "test.so: this file is also an input"),
        ((), {"max_ratio": 0.5}, "data.filters.max_ratio: expected a number"),
        ((), {"min_word": 1}, "unknown key 'min_word'; did you mean 'min_words'?"),
        ((), {"min_score": {"column": "s", "value": 1}}, "column s needs jsonl, parquet or hub corpora"),
    ],
)
def test_mistakes(clean, tmp_path, arguments, filters, message):
    train, val = ({"tsv": write(tmp_path / name, "a\tb\n")} for name in ("t.tsv", "val.tsv"))
    test = {"x": {side: write(tmp_path / f"test.{side[:2]}", "a\n") for side in ("source", "target")}}
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    code, _, err, kept = clean(train, *arguments, filters=filters, validation=val, test=test)
    assert code == 2 and message in one_line(err) and kept is None


def test_filters_are_for_training_only(clean, tmp_path):
    train = {"tsv": write(tmp_path / "t.tsv", "a\tb\n")}
    for keys in ({"validation": {**train, "filters": "off"}}, {"test": {"x": {**train, "filters": "off"}}}):
        code, _, err, _ = clean(train, **keys)
        assert code == 2 and "filters is allowed in data.train only" in one_line(err)


def test_test_sets_are_not_needed(clean, tmp_path):
    train, missing = {"tsv": write(tmp_path / "t.tsv", "a\tb\n")}, {"tsv": str(tmp_path / "missing.tsv")}
    assert clean(train, test={"x": missing})[::3] == (0, "a\tb\n")
    code, _, err, _ = clean(train, validation=missing)
    assert code == 3 and "missing.tsv: no such file" in one_line(err)


def test_a_language_of_unknown_script(clean, tmp_path):
    train = {"tsv": write(tmp_path / "t.tsv", "a\tb\n")}
    code, _, err, _ = clean(train, filters={"script": True}, source_lang="tlh")
    assert code == 2 and "the script of tlh is not known; write tlh-Latn, for example" in one_line(err)
    assert clean(train, filters={"script": True}, source_lang="tlh-Latn")[0] == 0
