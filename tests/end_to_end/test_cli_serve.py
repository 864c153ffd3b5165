"""`mtrain serve`: mistakes on the command line, and a running server with its clients and its page."""

import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli import one_line
from tests.support.training import PAIRS
from tests.support.translator_page import check_page, open_page, text_of

KNOWN = dict(PAIRS)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--host", "0.0.0.0"], 2, "--host 0.0.0.0: others can reach this address; give --api-keys FILE, or"),
        (["--host", "example.org"], 2, "--host example.org: others can reach this address"),
        (["--host", "ü..de", "--insecure"], 2, "--host ü..de --port 5000: encoding of hostname failed; give"),
        (["--api-keys", "missing.txt"], 3, "missing.txt: no such file"),
        (["--engine", "marian"], 2, "engine"),
        (["--port", "70000"], 2, "port"),
        (["--cors", "page.example"], 2, "--cors page.example: not an origin as browsers send it, in ASCII"),
        (["--cors", "https://büro.example"], 2, "give one such as https://example.org, or *"),
        (["--set", "decoding.samples=2", "--engine", "ctranslate2"], 2, "use --engine mtrain"),
    ],
)
def test_mistakes_are_one_line(mtrain, run_dir, arguments, code, message):
    found, out, err = mtrain("serve", run_dir, *arguments)
    assert (found, out) == (code, "")
    assert message in one_line(err)


def test_a_missing_package_is_named(mtrain, run_dir, monkeypatch):
    monkeypatch.setattr("mtrain.cli.serving.find_spec", lambda name: None)
    code, _, err = mtrain("serve", run_dir)
    assert code == 2
    assert "starlette, uvicorn, python_multipart; run `pip install 'mtrain[serve]'`" in one_line(err)


def test_a_file_without_keys_and_a_taken_port_are_errors(mtrain, run_dir, tmp_path):
    (tmp_path / "keys").write_text("# none\n\n")
    code, _, err = mtrain("serve", run_dir, "--api-keys", tmp_path / "keys")
    assert code == 3
    assert "no API keys" in one_line(err)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = mtrain("serve", run_dir, "--device", "cpu", "--port", taken.getsockname()[1])
    assert code == 2
    assert "Address already in use; give another one" in one_line(err)


@pytest.fixture
def levels_of_loggers():
    """Restores the level of the logger that the server silences."""
    yield
    logging.getLogger("mtrain.decoding.split").setLevel(logging.NOTSET)


@pytest.mark.usefixtures("levels_of_loggers")
def test_no_answer_waits_for_an_acknowledgment(mtrain, run_dir, monkeypatch):
    pytest.importorskip("uvicorn")
    options = []

    def run(_, sockets):
        options.extend(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets)

    monkeypatch.setattr("uvicorn.Server.run", run)
    assert mtrain("serve", run_dir, "--device", "cpu", "--port", 0)[0] == 0
    assert len(options) == 1
    assert options[0]


@pytest.mark.usefixtures("levels_of_loggers")
def test_keys_and_the_limit_of_characters_are_those_of_the_options(mtrain, run_dir, monkeypatch, tmp_path):
    uvicorn = pytest.importorskip("uvicorn")
    client_of = pytest.importorskip("starlette.testclient").TestClient
    answers = []

    def run(self, sockets):
        with client_of(self.config.app, raise_server_exceptions=False) as client:
            for q in ("It rains.", "It rains. " * 3):
                fields = {"q": q, "source": "en", "target": "de"}
                answers.append([client.post("/translate", json=fields | key).status_code for key in keys])

    monkeypatch.setattr(uvicorn.Server, "run", run)
    (tmp_path / "keys").write_text("secret\n")
    keys = [{}, {"api_key": "secret"}]
    job = ["serve", run_dir, "--device", "cpu", "--port", 0, "--host", "0.0.0.0", "--char-limit", 20]
    assert mtrain(*job, "--api-keys", tmp_path / "keys")[0] == 0
    assert mtrain(*job, "--insecure")[0] == 0
    assert answers == [[403, 200], [403, 413], [200, 200], [413, 413]]


@contextmanager
def running(*arguments):
    """A server in a process of its own, and its address."""
    command = [
        sys.executable,
        "-m",
        "mtrain",
        "serve",
        *map(str, arguments),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        found = next(match for line in process.stderr if (match := re.search(r"http://\S+", line)))
        try:
            yield process, found[0]
        finally:
            process.terminate()


def ask(address, **fields):
    data = json.dumps({"source": "en", "target": "de", **fields}).encode()
    request = urllib.request.Request(f"{address}/translate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["translatedText"]


@pytest.mark.slow
def test_clients_of_both_interfaces_translate(run_dir, tmp_path):
    libretranslate = pytest.importorskip("libretranslatepy")
    openai = pytest.importorskip("openai")
    (tmp_path / "keys").write_text("# of the team\nsecret\n")
    with running(run_dir, "--api-keys", tmp_path / "keys") as (process, address):
        client = libretranslate.LibreTranslateAPI(address, "secret")
        assert client.translate("A cat sleeps.", "en", "de") == "Eine Katze schläft."
        assert client.languages()[0]["targets"] == ["de"]
        assert client.detect("Der Hund rennt im Park.")[0]["language"] == "de"
        chats = openai.OpenAI(base_url=f"{address}/v1", api_key="secret")
        [model] = chats.models.list()
        messages = [{"role": "system", "content": "Translate."}, {"role": "user", "content": "It rains."}]
        answer = chats.chat.completions.create(model=model.id, messages=messages)
        assert answer.choices[0].message.content == "Es regnet."
        stream = chats.chat.completions.create(model=model.id, messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Es regnet."
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()
    assert process.returncode == 143


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_thousands_of_requests_are_answered_in_constant_memory(run_dir):
    texts = list(KNOWN) * 125
    with (
        running(run_dir, "--set", "decoding.beam_size=1") as (process, address),
        ThreadPoolExecutor(8) as pool,
    ):
        sizes = []
        for _ in range(3):
            answers = pool.map(lambda text: ask(address, q=text), texts)
            assert [*answers] == [KNOWN[text] for text in texts]
            status = Path(f"/proc/{process.pid}/status").read_text()
            sizes.append(int(status.partition("VmRSS:")[2].split()[0]))
    assert sizes[2] < 1.05 * sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_waits_for_translations(run_dir, number):
    texts = list(KNOWN) * 20
    with running(run_dir) as (process, address), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, address, q=texts)
        while b"mtrain_characters_total" not in urllib.request.urlopen(f"{address}/metrics").read():
            time.sleep(0.01)
        os.kill(process.pid, number)
        assert answer.result() == [KNOWN[text] for text in texts]
        assert process.wait() == 128 + number


@pytest.fixture(scope="module")
def address(run_dir):
    with running(run_dir) as (_, found):
        yield found


@pytest.mark.slow
def test_on_loopback_only_names_of_it_and_of_origins_are_answered(run_dir):
    origins = ["https://page.example:8443", "http://[fd00::1]:3000", "https://Other.example:443/"]
    with running(run_dir, *(f"--cors={origin}" for origin in origins)) as (_, address):
        hosts = ["localhost:5000", "[::1]:5000", "page.example", "[fd00::1]:3000"]
        for host in (*hosts, "host.docker.internal:5000"):
            request = urllib.request.Request(f"{address}/languages", headers={"Host": host})
            assert urllib.request.urlopen(request).status == 200
        headers = {"Origin": "https://other.example", "Sec-Fetch-Site": "cross-site"}  # without the port
        answer = urllib.request.urlopen(urllib.request.Request(f"{address}/languages", headers=headers))
        assert answer.headers["Access-Control-Allow-Origin"] == "https://other.example"
        request = urllib.request.Request(f"{address}/languages", headers={"Host": "rebound.example"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request)


@pytest.mark.slow
def test_every_address_includes_those_of_ipv4_and_clients_of_proxies_get_their_urls(run_dir):
    with running(run_dir, "--host", "::", "--insecure") as (_, address):
        port = urllib.parse.urlsplit(address).port
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
        text = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n\r\n--x--\r\n'
        fields = b"".join(
            f'--x\r\nContent-Disposition: form-data; name="{key}"\r\n\r\nde\r\n'.encode()
            for key in ("source", "target")
        )
        headers = {"Content-Type": "multipart/form-data; boundary=x", "X-Forwarded-Proto": "https"}
        url = f"http://127.0.0.1:{port}/translate_file"
        answer = urllib.request.urlopen(urllib.request.Request(url, fields + text, headers))
        assert json.load(answer)["translatedFileUrl"].startswith("https://127.0.0.1")


@pytest.mark.slow
def test_connections_that_proxies_keep_are_not_closed_after_some_seconds(address):
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(address).netloc)
    for wait in (0, 7):
        time.sleep(wait)
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
    connection.close()


@pytest.mark.slow
def test_a_text_in_the_address_may_be_long(address):
    text = "Идёт дождь. " * 1500
    query = urllib.parse.urlencode({"source": "de", "target": "de", "q": text})
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as connection:
        connection.sendall(f"POST /translate?{query} HTTP/1.1\r\nContent-Length: 0\r\n".encode())
        time.sleep(1)  # so that the server reads all of this before the end of the headers
        connection.sendall(b"Host: localhost\r\nConnection: close\r\n\r\n")
        answer = connection.makefile("rb").read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and json.loads(body) == {"translatedText": text}


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
def test_the_page_translates_as_one_types(address, browser, width, scheme):
    open_page(browser, address, width, scheme)
    browser.switch_to.active_element.send_keys("A cat sleeps.")  # the keyboard suffices
    assert text_of(browser, "target", "Katze") == "Eine Katze schläft."
    assert len(text_of(browser, "alternatives", "").split("\n")) == 3
    check_page(browser, address, width)
