"""What scores find in noisy pairs."""

import measure_filters


def test_the_table_of_scores_has_recalls_and_areas(tmp_path, capsys):
    """101 good pairs have the scores 0 to 100, two of three misaligned pairs lower ones."""
    rows: list[tuple] = [("s", "t", "", score) for score in range(101)]
    rows += [("s", "t", "misaligned", score) for score in (-5, 0.5, 101)]
    rows += [("s", "t", "garbled", "nan"), ("s", "t", "repeated", 50)]
    file = tmp_path / "scored.tsv"
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    measure_filters.score_table(file)
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header == "| `min_score` | garbled | misaligned | original pairs | precision |"
    assert lines[0] == "| 1 | 100.0% | 66.7% | 0.99% | 75.0% |"
    assert lines[1].startswith("| 5 | 100.0% | 66.7% | 4.95% |")
    assert lines[2] == f"| AUC | 1.000 | {(1 + 100 / 101 + 0) / 3:.3f} | | |"
