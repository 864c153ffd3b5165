"""The files of the Bergamot engine that a page needs, from a folder or from the npm registry."""

import base64
import hashlib
import tarfile
from http.client import HTTPException
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from urllib.request import urlopen

from mtrain.errors import StorageError
from mtrain.interop.bergamot.engine import FILES, PACKAGE, VERSION, find_package
from mtrain.storage.atomic import write_text

URL = f"https://registry.npmjs.org/{PACKAGE}/-/{PACKAGE.partition('/')[2]}-{VERSION}.tgz"
# The SHA-512 of the archive, which the registry calls `dist.integrity`.
INTEGRITY = "bNuuCwM/JnsIYQCKXcYKFT4Qc5vLMoB8Nbvz8ReIgs7xzebK8Sa+R8iEK8mLvNBe/WaZ6zrPaUQilLsRT/ea8Q=="
_SECONDS = 60  # without an answer of the registry


def copy_engine(into: Path, package: Path | None) -> None:
    """Write the files of the engine and its license to a new folder, from the npm package at or below the
    folder `package`, or from the registry. Raises UsageError if the package is not there, StorageError if it
    cannot be downloaded or is not what was expected."""
    into.mkdir()
    if package is None:
        with tarfile.open(fileobj=BytesIO(_download())) as archive:
            for name in FILES:
                member = archive.extractfile(f"package/worker/{name}")
                assert member is not None  # a regular file of this version
                (into / name).write_bytes(member.read())
    else:
        found = find_package(package)
        for name in FILES:
            (into / name).write_bytes((found / "worker" / name).read_bytes())
    # It also says where the source code is.
    write_text(into / "LICENSE.txt", (files("mtrain.web") / "bergamot.LICENSE.txt").read_text("utf-8"))


def _download() -> bytes:
    """The archive of the npm package."""
    cure = f"run npm install {PACKAGE}@{VERSION} and give --engine FOLDER"
    try:
        with urlopen(URL, timeout=_SECONDS) as answer:
            contents: bytes = answer.read()
    except (OSError, HTTPException) as error:
        raise StorageError(f"{URL}: cannot be downloaded: {error}; {cure}") from None
    if base64.b64encode(hashlib.sha512(contents).digest()).decode() != INTEGRITY:
        raise StorageError(f"{URL}: is not the file that was expected (its SHA-512 differs); {cure}")
    return contents
