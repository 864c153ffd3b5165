"""A file that is written a line for each line read, takes its name when it is complete, and until then can be
gone on with after an interruption."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, Self

from mtrain.errors import StorageError, UsageError
from mtrain.storage.atomic import lock, write_atomically

log = logging.getLogger(__name__)


class PartialFile:
    """Writes FILE.part, and beside it FILE.part.json: how many lines of which input it answers, and for what
    job. The two are brought up to date whenever all that was read has been answered.

    As a context manager, it renames FILE.part to FILE at the end, and leaves it where it is if that was not
    reached; what cannot be written raises StorageError.
    """

    def __init__(self, path: Path, job: dict[str, Any], go_on: bool):
        """`job` is what must be the same to go on. Raises UsageError if it is another one, or another process
        writes the file."""
        self.path, self.job = path, json.loads(json.dumps(job))
        self.part = path.with_name(f"{path.name}.part")
        self.note = path.with_name(f"{path.name}.part.json")
        self.seen, self.read, self.answered = hashlib.sha256(), 0, 0
        self.claimed = self._claimed() if self.part.exists() else None
        try:
            earlier = self._noted()
            self.noted = earlier if go_on else None
            if self.noted and self.noted["job"] != self.job:
                how = "another model or other settings"
                raise UsageError(f"{self.part}: was written with {how}; leave out --continue to start again")
        except UsageError:
            if self.claimed:
                self.claimed.close()
            raise
        if earlier and not go_on:
            log.warning("%s is replaced; --continue would have gone on with it", self.part)
        self.start: int = self.noted["lines"] if self.noted else 0  # lines that are answered already
        self.saved = self.start  # lines that the note counts

    def _claimed(self) -> IO[bytes]:
        """FILE.part, opened for this process alone; made if it is not there."""
        refused = UsageError(f"{self.path}: another process writes it; wait, or give another -o")
        try:
            stream = self.part.open("r+b" if self.part.exists() else "xb")
        except FileExistsError:
            raise refused from None
        except OSError as error:
            raise StorageError(f"{self.path}: cannot write: {error.strerror}") from None
        if lock(stream) and self._is_in_place(stream):
            return stream
        stream.close()
        raise refused

    def _is_in_place(self, stream: IO[bytes]) -> bool:
        """Whether an open file is FILE.part still: who had it before may have given it its name meanwhile."""
        try:
            return os.path.samestat(os.fstat(stream.fileno()), self.part.stat())
        except FileNotFoundError:
            return False

    def _noted(self) -> dict[str, Any] | None:
        """What the note says, if there is one. Raises UsageError if a file is in the way that is not ours."""
        if not self.note.exists() and not self.part.exists():
            return None
        try:
            noted: dict[str, Any] = json.loads(self.note.read_text(encoding="utf-8"))
            if {"job", "lines", "sha256", "bytes"} <= noted.keys():
                if not self.part.exists():
                    return None  # left of a job that came to its end
                if self.part.stat().st_size >= noted["bytes"]:
                    return noted
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            pass
        file = self.part if self.part.exists() else self.note
        raise UsageError(f"{file}: is in the way; it is damaged or not mtrain's; move it elsewhere")

    def __enter__(self) -> Self:
        try:
            self.stream = self.claimed or self._claimed()
            # What was written after the note is answered again.
            kept = self.noted["bytes"] if self.noted else 0
            self.stream.truncate(kept)
            self.stream.seek(kept)
            if not self.noted:
                self._save()  # so that FILE.part is known for ours from the start
        except (OSError, StorageError) as error:
            if not self.noted:
                self._remove()
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{self.path}: cannot write: {error.strerror}") from None
        return self

    def remaining(self, lines: Iterable[str]) -> Iterator[str]:
        """The lines that are not answered yet; all are remembered in the note.

        Raises UsageError if those that are answered have changed.
        """
        iterator = iter(lines)
        if self.noted:
            for line in islice(iterator, self.start):
                self._count(line)
            if self.seen.hexdigest() != self.noted["sha256"]:
                raise UsageError(f"{self.part}: its input was another; leave out --continue to start again")
            self.answered = self.read
            log.info("going on after %d lines", self.read)
        for line in iterator:
            self._count(line)
            yield line

    def _count(self, line: str) -> None:
        self.seen.update(line.encode("utf-8", "surrogatepass") + b"\n")
        self.read += 1

    def answer(self, text: str) -> None:
        """Write what answers the next line; it ends in a line break."""
        self.stream.write(text.encode("utf-8"))
        self.answered += 1
        if self.answered == self.read:
            self._save()

    def _save(self) -> None:
        self.stream.flush()
        os.fsync(self.stream.fileno())
        state = {
            "lines": self.read,
            "bytes": self.stream.tell(),
            "sha256": self.seen.hexdigest(),
            "job": self.job,
        }
        write_atomically(self.note, json.dumps(state))
        self.saved = self.read

    def _remove(self) -> None:
        for file in (self.part, self.note):
            with suppress(OSError):
                file.unlink()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            self._leave(kind is None, error)
        finally:
            with suppress(OSError):
                self.stream.close()  # last, for the lock goes with it

    def _leave(self, complete: bool, error: BaseException | None) -> None:
        try:
            if complete:
                self.stream.flush()
                if self.path.is_file():
                    self.part.chmod(self.path.stat().st_mode)
                self.part.replace(self.path)
                self.note.unlink(missing_ok=True)
                return
        except OSError as failure:
            error = failure
        if isinstance(error, UsageError) and self.saved:  # which says that it can not be gone on with
            return
        if self.saved or complete:
            log.warning("%s answers %d lines; --continue goes on from there", self.part, self.saved)
        else:
            self._remove()
        if isinstance(error, OSError):
            raise StorageError(f"{self.path}: cannot write: {error.strerror}") from None
