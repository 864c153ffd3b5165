"""Public test sets that sacreBLEU downloads and caches."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

from mtrain.errors import DataError

log = logging.getLogger(__name__)


@cache
def sacrebleu_files(name: str, langs: str) -> list[Path]:
    """The file of the sources of a test set, then that of each reference, with one sentence per line. They
    are downloaded unless they are in sacreBLEU's folder.

    Raises DataError if that fails, or if the test set has no reference.
    """
    from sacrebleu.dataset import DATASETS
    from sacrebleu.utils import SACREBLEU_DIR

    log.info("data: test set %s of sacreBLEU, cached in %s", name, SACREBLEU_DIR)
    dataset: Any = DATASETS[name]
    try:
        references, source = dataset.get_reference_files(langs), dataset.get_source_file(langs)
    except (Exception, SystemExit) as error:  # a wrong checksum ends in SystemExit
        is_exit = isinstance(error, SystemExit)
        reason = "sacreBLEU gave up; see its message above" if is_exit else " ".join(str(error).split())
        raise DataError(
            f"{name}: cannot download the test set: {reason}; run "
            f"`sacrebleu -t {name} -l {langs} --echo src` on a machine with a network, and copy its folder "
            f"~/.sacrebleu to {SACREBLEU_DIR} on this machine"
        ) from None
    if not references:
        raise DataError(f"{name}: this test set has no reference for {langs}; choose another one")
    return [Path(source), *map(Path, references)]
