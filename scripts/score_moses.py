"""Score translations as the Multi30k literature does: on lowercased, Moses-tokenized text, by sacreBLEU.

    python scripts/score_moses.py --lang de HYPOTHESES REFERENCES

Both sides are lowercased, punctuation-normalised and tokenized by sacremoses, as the files `*.lc.norm.tok.*`
of Multi30k were made, then scored with `-tok none`, as Wu et al. ("Good for Misconceived Reasons", ACL 2021)
scored theirs. The number is not comparable with the cased, detokenized 13a score that `mtrain evaluate`
prints: state which of the two a figure is.
Needs `pip install sacremoses`.
"""

import argparse
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU


def prepare(lines: list[str], language: str) -> list[str]:
    """Lowercase, normalise, tokenize, in the order in which those files were made."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normaliser, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    return [tokenizer.tokenize(normaliser.normalize(line.lower()), return_str=True) for line in lines]


def score(hypotheses: list[str], references: list[str], language: str) -> str:
    """BLEU with its signature."""
    if len(hypotheses) != len(references):
        raise SystemExit(f"error: {len(hypotheses)} hypotheses but {len(references)} references")
    metric = BLEU(tokenize="none", force=True)
    result = metric.corpus_score(prepare(hypotheses, language), [prepare(references, language)])
    return str(result.format(signature=str(metric.get_signature())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hypotheses", type=Path, help="translations, one a line, detokenized")
    parser.add_argument("references", type=Path, help="references, one a line, raw")
    parser.add_argument("--lang", required=True, help="language code of the target, such as de")
    given = parser.parse_args()
    sides = []
    for path in (given.hypotheses, given.references):
        if not path.is_file():
            raise SystemExit(f"error: {path}: no such file")
        sides.append(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    print(score(*sides, given.lang))


if __name__ == "__main__":
    main()
