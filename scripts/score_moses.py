"""Compute BLEU as the literature on Multi30k does: on lowercased, Moses-tokenized text.

    python scripts/score_moses.py --lang de HYPOTHESES REFERENCES

Both sides are lowercased, punctuation-normalized and tokenized with sacremoses, like the files
`*.lc.norm.tok.*` of Multi30k, then scored with `--tokenize none`, as in Wu et al. ("Good for Misconceived
Reasons", ACL 2021). The score is not comparable with the cased, detokenized 13a score of `mtrain evaluate`:
always state which one a figure is. Requires `pip install sacremoses`.
"""

import argparse
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU


def prepare(lines: list[str], language: str) -> list[str]:
    """Lowercase, normalize and tokenize, in this order."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    return [tokenizer.tokenize(normalizer.normalize(line.lower()), return_str=True) for line in lines]


def score(hypotheses: list[str], references: list[str], language: str) -> str:
    """Return BLEU with its signature."""
    if len(hypotheses) != len(references):
        raise SystemExit(f"error: {len(hypotheses)} hypotheses but {len(references)} references")
    metric = BLEU(tokenize="none", force=True)
    result = metric.corpus_score(prepare(hypotheses, language), [prepare(references, language)])
    return str(result.format(signature=str(metric.get_signature())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hypotheses", type=Path, help="detokenized translations, one per line")
    parser.add_argument("references", type=Path, help="untokenized references, one per line")
    parser.add_argument("--lang", required=True, help="language code of the target, such as de")
    given = parser.parse_args()
    sides = []
    for path in (given.hypotheses, given.references):
        if not path.is_file():
            raise SystemExit(f"error: {path}: no such file")
        text = path.read_bytes().decode()  # in which a single CR does not end a line
        sides.append([line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")])
    hypotheses, references = sides
    print(score(hypotheses, references, given.lang))


if __name__ == "__main__":
    main()
