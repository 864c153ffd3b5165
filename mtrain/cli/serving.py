"""`mtrain serve` and `mtrain web`."""

import logging
import os
import re
import shlex
import signal
import socket
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from typer import Argument, Option

from mtrain.cli.console import options, terminal
from mtrain.cli.console.interruption import exit_at_once
from mtrain.cli.console.output import print_to_stdout
from mtrain.cli.translate.translate import load_translator
from mtrain.errors import DataError, UsageError
from mtrain.processes.stop_signals import STOP_SIGNALS

log = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Names of this machine in containers. They cannot be registered as domains.
_FROM_CONTAINERS = ("host.docker.internal", "host.containers.internal")
_KEPT_ALIVE = 130  # seconds that a connection may be idle: longer than reverse proxies keep theirs
_LARGEST_HEADERS = 2**18  # bytes; some clients send texts in the address
_PACKAGES = ("starlette", "uvicorn", "python_multipart")


def serve(
    models: Annotated[
        list[Path], Argument(metavar="MODEL", help="Run folder or model folder; several for more directions.")
    ],
    host: Annotated[str, Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, metavar="N", help="Port; 0: any free one.")] = 5000,
    engine: options.Engine = "mtrain",
    api_keys: Annotated[
        Path | None, options.path(help="File with the API keys that may be used, one per line.")
    ] = None,
    insecure: Annotated[
        bool, Option("--insecure", help="Let everyone who can reach an address other than loopback ask.")
    ] = False,
    cors: Annotated[
        list[str] | None, Option(metavar="ORIGIN", help="Web pages that may ask, or *; repeatable.")
    ] = None,
    char_limit: Annotated[
        int, Option(min=1, max=10_000_000, metavar="N", help="Maximum number of characters of a request.")
    ] = 100_000,
    set_: options.Set = None,
    device: options.Device = "auto",
) -> None:
    """Serve MODELs to clients of LibreTranslate and of OpenAI's chat API, and on a web page.

    SIGTERM, Ctrl-C and other stop signals end the server after the current requests, within 330 seconds.
    /docs describes the API.

    Examples:
        mtrain serve runs/en-de runs/de-en
        mtrain serve runs/en-de --host 0.0.0.0 --api-keys keys.txt
    """
    if host not in _LOOPBACK and not (api_keys or insecure):
        reason = "others can reach this address; give --api-keys FILE, or --insecure if everyone may ask"
        raise UsageError(f"--host {host}: {reason}")
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise UsageError(f"mtrain serve needs {', '.join(missing)}; run `pip install 'mtrain[serve]'`")
    keys = [] if api_keys is None else _read_keys(api_keys)
    origins = [_origin(each) for each in cors or ()]
    settings = ["decoding.split=sentences", *options.overrides(set_)]  # clients send paragraphs
    import uvicorn

    from mtrain.serve.app import make_app
    from mtrain.serve.models import Models, served_models
    from mtrain.serve.requests import SECONDS_TO_SEND, digest_of
    from mtrain.serve.server import Server

    with _listen(host, port) as listener:
        loaded = [(path, load_translator(path, device, settings, engine=engine)) for path in models]
        catalog = Models(served_models(loaded))
        # Connections inherit it. Otherwise, a body waits for the acknowledgment of its headers, up to 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        logging.getLogger("mtrain.decoding.split").setLevel(logging.ERROR)  # long lines concern the client
        names = [*_LOOPBACK, "[::1]", *_FROM_CONTAINERS, *map(_host_of, origins)]
        hosts = names if host in _LOOPBACK and not keys else ["*"]  # see `_host_of`
        server = Server(catalog, char_limit, [digest_of(key) for key in keys], origins, hosts)
        shown = f"[{host}]" if ":" in host else host
        log.info("serving %s at http://%s:%d", catalog.names, shown, listener.getsockname()[1])
        config = uvicorn.Config(
            make_app(server),
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=round(SECONDS_TO_SEND + server.seconds),
            timeout_keep_alive=_KEPT_ALIVE,
            h11_max_incomplete_event_size=_LARGEST_HEADERS,
            forwarded_allow_ips="*",  # a proxy may tell that clients use HTTPS, for the URLs of files
        )
        # uvicorn has no setting for further signals. Under `nohup`, SIGHUP is ignored.
        stopping = {each for each in STOP_SIGNALS if signal.getsignal(each) not in (signal.SIG_IGN, None)}
        handled: Any = (*stopping.union(uvicorn.server.HANDLED_SIGNALS),)
        uvicorn.server.HANDLED_SIGNALS = handled

        class Runner(uvicorn.Server):
            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                if self.should_exit and sig == signal.SIGINT:  # the second; Python would wait for threads
                    exit_at_once(sig, frame)
                super().handle_exit(sig, frame)

        Runner(config).run([listener])


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address. Raises UsageError if it cannot."""
    try:
        family, is_any = socket.AF_INET6 if ":" in host else socket.AF_INET, host == "::"
        both = is_any and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except (OSError, TypeError) as error:  # TypeError: the name is not one of a host
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else error
        raise UsageError(f"--host {host} --port {port}: {reason}; give another one") from None


def _origin(text: str) -> str:
    """An origin as browsers send it, or `*`. Raises UsageError if the text is not one."""
    origin = text.rstrip("/").lower()
    if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z\d+.-]*://[!-)+-.0-~]+", origin):
        problem = "not an origin as browsers send it, in ASCII"
        raise UsageError(f"--cors {text}: {problem}; give one such as https://example.org, or *")
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", origin)


def _host_of(origin: str) -> str:
    """The host of an origin. A server on loopback without API keys answers only if it is addressed by a name
    of loopback or by such a host. Otherwise, any web page could ask it, whose own name is made to resolve to
    127.0.0.1 (DNS rebinding)."""
    return re.sub(r":\d*$", "", origin.rpartition("/")[2])


def _read_keys(file: Path) -> list[str]:
    """The API keys in a file. Lines that are empty or begin with # are skipped."""
    terminal.require_file(file)
    lines = [line.strip() for line in terminal.read_lines(file)]
    if not (keys := [line for line in lines if line and not line.startswith("#")]):
        raise DataError(f"{file}: no API keys; write one per line")
    return keys


def web(
    models: Annotated[
        list[Path],
        Argument(
            metavar="MODEL",
            help="Run folder, model folder, or exported Bergamot model; repeat for more directions.",
        ),
    ],
    out: Annotated[Path, options.file("-o", "--output", metavar="FOLDER", help="Folder to create.")],
    engine: Annotated[
        Path | None,
        options.file(
            metavar="FOLDER",
            help="Where the npm package @browsermt/bergamot-translator is. Default: it is downloaded.",
        ),
    ] = None,
) -> None:
    """Write a web page that translates with MODELs in the browser.

    The folder holds the page, the Bergamot engine, and the models, in int8 unless they were exported
    before. It can be put on any web server.
    Texts do not leave the browser, and the page loads nothing from elsewhere.

    Examples:
        mtrain web runs/en-de -o page
        mtrain web runs/en-de runs/de-en -o page
    """
    from mtrain.progress_bar import waiting_for
    from mtrain.web.site import write_site

    with waiting_for("writing the page"):
        write_site(models, out, engine)
    print_to_stdout(out)
    command = f"python -m http.server --bind 127.0.0.1 --directory {shlex.quote(str(out))}"
    terminal.suggest("page saved; to open http://127.0.0.1:8000, run", command)
