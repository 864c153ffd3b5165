"""An output file with one answer per input line. After an interruption, writing it can be resumed."""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from pydantic import NonNegativeInt, TypeAdapter

from mtrain.errors import StorageError, UsageError, cannot_write
from mtrain.regular_files import read_file
from mtrain.storage.atomic import replace_durably, set_mode, write_atomically
from mtrain.storage.locks import only_writer

log = logging.getLogger(__name__)

SAVE_EVERY = 5.0  # seconds; a killed process loses at most the answers of this time
_BUFFER = 2**20  # bytes
_START_OVER = "remove it and leave out --continue to start over"


class OutputState(NamedTuple):
    """How much of the input has been answered: the contents of FILE.part.json."""

    lines: NonNegativeInt
    sha256: str  # of these input lines
    bytes: NonNegativeInt  # of FILE.part
    job: dict[str, Any]


_STATE = TypeAdapter(OutputState)


class ResumableOutput:
    """Writes answers to FILE.part, and their number and the job to FILE.part.json.

    Used as a context manager:

        with ResumableOutput(path, job, resume) as output:
            output.skip(lines)
            for line in lines:
                output.write(line, answer(line))

    On success, FILE.part is compressed if FILE is to be, and renamed to FILE. After an error or an
    interruption, FILE.part is kept if it has any answers. Raises StorageError if a file cannot be written.
    """

    def __init__(self, path: Path, job: dict[str, Any], resume: bool, compression: str | None = None):
        """`job` contains everything that determines the answers. Resuming requires an equal job.
        `compression` of FILE is `gzip`, `zstd` or None; FILE.part is never compressed."""
        self.path = path
        self.resume = resume
        self.compression = compression
        self.part = path.with_name(f"{path.name}.part")
        self.state_file = path.with_name(f"{path.name}.part.json")
        self._digest = hashlib.sha256()  # of the input lines seen so far
        self._stream: BinaryIO = BytesIO()  # until FILE.part is open
        # Written to FILE.part, and recorded in FILE.part.json.
        self._done = self._saved = OutputState(0, self._digest.hexdigest(), 0, json.loads(json.dumps(job)))
        self._saved_at = time.monotonic()

    @property
    def lines_done(self) -> int:
        """Number of input lines that have been answered, including lines before an interruption."""
        return self._done.lines

    def __enter__(self) -> Self:
        """Raises UsageError if another process is writing the file, or if there is a FILE.part that cannot
        be, or is not to be, resumed."""
        with ExitStack() as stack:
            stack.enter_context(only_writer(self.path, "file", "another output"))
            self._open()
            self._lock = stack.pop_all()
        return self

    def _open(self) -> None:
        saved = self._read_state()
        if saved and saved.lines:
            found = f"{self.part}: has the output for {saved.lines} lines"
            if saved.job != self._done.job:
                raise UsageError(f"{found}, written with another model or other settings; {_START_OVER}")
            if not self.resume:
                cure = "add --continue to resume, or remove it to start over"
                raise UsageError(f"{found}, from an interrupted command; {cure}")
            self._done = self._saved = saved
        try:
            if not self.lines_done:
                self._record()  # marks FILE.part as written by mtrain, before it is created
            self._stream = self.part.open("r+b" if self.part.exists() else "xb")
            self._stream.truncate(self._done.bytes)  # answers that are not recorded are computed again
            self._stream.seek(self._done.bytes)
        except (OSError, StorageError) as error:
            self._stream.close()
            if not self.lines_done:
                self._remove()
            raise error if isinstance(error, StorageError) else cannot_write(self.path, error) from None

    def _read_state(self) -> OutputState | None:
        """The contents of FILE.part.json, if any. Raises UsageError if mtrain did not write the files."""
        if not self.state_file.exists() and not self.part.exists():
            return None
        try:
            saved = _STATE.validate_python(json.loads(read_file(self.state_file)), strict=True)
            if not self.part.exists():
                return None  # from a finished job
            if self.part.stat().st_size >= saved.bytes:
                return saved
        except (OSError, ValueError, RecursionError):
            pass
        file = self.part if self.part.exists() else self.state_file
        raise UsageError(f"{file}: is damaged or was not written by mtrain; move it elsewhere")

    def skip(self, lines: Iterator[str]) -> None:
        """Consume the input lines that are already answered. Raises UsageError if they have changed."""
        for line in islice(lines, self.lines_done):
            self._digest.update(_encode(line))
        if self.lines_done:
            if self._digest.hexdigest() != self._done.sha256:
                raise UsageError(f"{self.part}: the input has changed; {_START_OVER}")
            log.info("resuming after %d lines", self.lines_done)

    def write(self, line: str, answer: str) -> None:
        """Write the answer to the next input line. `answer` ends with a line break."""
        contents = answer.encode("utf-8")
        self._stream.write(contents)
        self._digest.update(_encode(line))
        lines, size = self._done.lines + 1, self._done.bytes + len(contents)
        # A single assignment, so that the state is consistent if an exception interrupts this method.
        self._done = OutputState(lines, self._digest.hexdigest(), size, self._done.job)
        self.save_if_due()

    def save_if_due(self) -> None:
        """Save the answers if the last time is long ago. Call this while waiting for the next answers."""
        if self._saved != self._done and time.monotonic() - self._saved_at >= SAVE_EVERY:
            self._save()

    def _save(self) -> None:
        """Flush the answers to disk, then record their number."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._record()

    def _record(self) -> None:
        """Write the number of answers and the job to FILE.part.json."""
        write_atomically(self.state_file, json.dumps(self._done._asdict()))
        self._saved, self._saved_at = self._done, time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                self._finish()
            else:
                self._keep_answers(error)
        except OSError as failure:
            raise cannot_write(self.path, failure) from None
        finally:
            with suppress(OSError):
                self._stream.close()
            self._lock.close()
        if isinstance(error, OSError):
            raise cannot_write(self.path, error) from None

    def _finish(self) -> None:
        """Move FILE.part to FILE, compressed if requested; if that fails, --continue tries again."""
        compressed = self.part.with_name(f".{self.part.name}.tmp")
        try:
            self._save()
            self._stream.close()  # open files cannot be renamed on Windows
            if self.compression is not None:
                _compress(self.part, compressed, self.compression)
            complete = self.part if self.compression is None else compressed
            if self.path.is_file():
                set_mode(complete, self.path.stat().st_mode)
            replace_durably(complete, self.path)
            self.part.unlink(missing_ok=True)
            self.state_file.unlink(missing_ok=True)
        except BaseException as error:
            self._keep_answers(error)
            raise
        finally:
            with suppress(OSError):
                compressed.unlink()

    def _keep_answers(self, error: BaseException) -> None:
        """Keep FILE.part for --continue, or remove it if it has no answers."""
        if self._saved != self._done:
            with suppress(OSError, StorageError, ValueError):  # the answers saved before are kept
                self._save()
        if not self._saved.lines:
            self._remove()
        elif not isinstance(error, UsageError):  # its message says that --continue cannot be used
            message = "%s contains the output of %d lines; use --continue to resume"
            log.warning(message, self.part, self._saved.lines)

    def _remove(self) -> None:
        for file in (self.part, self.state_file):
            with suppress(OSError):
                file.unlink()


def _compress(file: Path, compressed: Path, compression: str) -> None:
    import pyarrow as pa  # takes long to import

    with (
        file.open("rb") as plain,
        compressed.open("wb") as raw,
        pa.output_stream(raw, compression=compression) as stream,
    ):
        shutil.copyfileobj(plain, stream, _BUFFER)


def _encode(line: str) -> bytes:
    return line.encode("utf-8", "surrogatepass") + b"\n"
