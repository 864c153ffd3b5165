"""Checks of corpora as `mtrain check` makes them."""

from mtrain.config.sections.data import DataConfig
from mtrain.data.preparing import check_report
from mtrain.data.reading.digests import RawFiles
from mtrain.data.scanning.check import Findings
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.tokenizer.tokenizer import Tokenizer


def check_data(
    data: DataConfig, tokenizer: Tokenizer | None = None, scanner: CorpusScanner | None = None
) -> Findings:
    """What `mtrain check` finds, by default without a tokenizer."""
    scanner = scanner or CorpusScanner(RawFiles(data), seed=0, check=True, strict=False, for_tokenizer=False)
    return check_report.check_data(data, tokenizer, scanner)
