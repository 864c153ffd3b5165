"""Reading the files of run, data and model folders, which may be damaged or malicious.

Only regular files are read, and only if their size is plausible: reading a pipe or a device might never end,
and a huge file would fill memory.
"""

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

MAX_JSON_BYTES = 2**22  # of the JSON files that describe a folder, such as its manifest
MAX_CONFIG_BYTES = 2**18  # parsing a larger config would be slow
MAX_LINE_BYTES = 2**24  # of a line of metrics.jsonl and samples.jsonl, which may have any number of lines
UNLIMITED = 2**63
# Of other files, by suffix: records such as the translations of a validation set, the validation set itself,
# and vocabularies. Weights may have any size.
_MAX_BYTES = {".yaml": MAX_CONFIG_BYTES, ".json": 2**26}
_MAX_BYTES |= dict.fromkeys((".jsonl", ".model", ".spm", ".vocab"), 2**29)


def require_plausible(file: Path, most: int | None = None) -> os.stat_result:
    """The status of a regular file of at most `most` bytes, by default the maximum for its suffix. Raises
    OSError if it is missing, not a regular file, or larger. The file is not opened."""
    status = file.stat()
    most = _MAX_BYTES.get(file.suffix, UNLIMITED) if most is None else most
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    if status.st_size > most:
        problem = f"too large: {status.st_size:,} bytes, at most {most:,} expected"
        raise OSError(errno.EFBIG, problem, str(file))
    return status


def open_file(file: Path, most: int | None = None) -> BufferedReader:
    """Open a file for reading bytes. Raises OSError if it is not plausible or cannot be opened."""
    require_plausible(file, most)
    return file.open("rb")


def read_file(file: Path, most: int | None = None) -> bytes:
    """The contents of a file. Raises OSError if it is not plausible or cannot be read."""
    with open_file(file, most) as stream:
        return stream.read()


def read_lines(file: Path) -> Iterator[bytes]:
    """The lines of a regular file of any size, with their ends. Raises OSError if the file cannot be read,
    or if a line has more than MAX_LINE_BYTES."""
    with open_file(file, UNLIMITED) as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise OSError(errno.EFBIG, f"a line has more than {MAX_LINE_BYTES:,} bytes", str(file))
            yield line
