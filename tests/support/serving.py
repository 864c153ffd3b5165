"""Servers of models, as applications in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtrain import Translator


def served(*folders: Path, workers: int = 1, **limits: Any) -> Any:
    """A server of models."""
    from mtrain.serve.models import Models, ServedModel
    from mtrain.serve.server import Server

    models = [ServedModel.of(folder, Translator.load(folder, "cpu", workers=workers)) for folder in folders]
    return Server(Models(models), **limits)


@contextmanager
def asked(server: Any) -> Iterator[Any]:
    """A client of a server's application, which is ended afterwards."""
    from starlette.testclient import TestClient

    from mtrain.serve.app import make_app

    with TestClient(make_app(server), raise_server_exceptions=False) as client:
        yield client
