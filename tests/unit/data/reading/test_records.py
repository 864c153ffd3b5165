"""Fields that a csv writer has put in quotes are told apart from text with quotation marks."""

import csv
import io

import pytest

from mtrain.data.reading.records import count_signs, show_csv

QUOTATIONS = ['He said "no", then left.', "It rains.", '"Hello!"', "12", '"Yes," he said.', 'A 5" pipe']


def as_written(rows, quoting):
    text = io.StringIO()
    csv.writer(text, delimiter="\t", lineterminator="\n", quoting=quoting).writerows(rows)
    return [field for line in text.getvalue().splitlines() for field in line.split("\t")]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_fields_with_doubled_quotes_are_quoted(quoting):
    assert show_csv(count_signs(as_written(zip(QUOTATIONS, QUOTATIONS[::-1], strict=True), quoting)))


def test_a_table_of_only_quoted_fields_is_quoted():
    rows = [(f"It is {n}.", n, f"Es ist {n}.") for n in range(10)]
    assert show_csv(count_signs(as_written(rows, csv.QUOTE_NONNUMERIC)))
    assert not show_csv(count_signs(as_written(rows, csv.QUOTE_MINIMAL)))


@pytest.mark.parametrize(
    "fields",
    [
        QUOTATIONS * 10,
        ['"Hello."', "„Hallo.“"] * 30,
        ['"Hello."', '"Hallo."'] * 5,  # a few quotations
        ['"Hello," he said.', '"Hallo", sagte er.'] * 30,
        ['He said ""no"".', "x"] * 30,
        ['"a ""b"""', *['"Yes," he said.'] * 5],
        ["It rains."],
        [],
    ],
)
def test_text_with_quotation_marks_is_not_quoted(fields):
    assert not show_csv(count_signs(fields))
