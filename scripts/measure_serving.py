"""Measures `mtrain serve` on the loopback interface: latency and throughput with several numbers of clients,
against `mtrain translate` of the same lines; lost or changed answers; memory; and hostile requests.

    python scripts/measure_serving.py MODEL LINES --from en --to de [--clients 1 8 64 256] [--requests 512]

The number of requests and the time (`--seconds` for each part) are limited. What follows `--` is passed to
both commands, such as `--set decoding.beam_size=1`, but `--engine` only to the server. Prints one JSON
object.
"""

import argparse
import asyncio
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

COMMAND = [sys.executable, "-m", "mtrain"]
HEADERS = "Host: localhost\r\nContent-Type: application/json\r\n"


class Served(NamedTuple):
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    ready_seconds: float

    def folders(self) -> list[Path]:
        """The folders in /proc of the server and its worker processes."""
        own = Path(f"/proc/{self.process.pid}")
        workers = (pid for file in own.glob("task/*/children") for pid in file.read_text().split())
        return [own, *(Path("/proc", pid) for pid in workers)]

    def cpu_seconds(self) -> float:
        """The CPU time that it and its worker processes have used, including those that have ended."""
        stats = [(each / "stat").read_text().rpartition(")")[2].split() for each in self.folders()]
        return sum(int(ticks) for fields in stats for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> list[int]:
        """The memory of each process in MB."""
        statuses = ((each / "status").read_text() for each in self.folders())
        return [int(status.partition("VmRSS:")[2].split()[0]) // 1024 for status in statuses]


@contextmanager
def served(model: str, options: list[str]) -> Iterator[Served]:
    """Start a server, and end it with SIGTERM."""
    start = time.monotonic()
    command = [*COMMAND, "serve", model, "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen: list[str] = []
        for line in process.stderr:
            seen.append(line)
            if found := re.search(r"http://\S+:(\d+)", line):
                break
        else:
            raise SystemExit("".join(seen))  # the server has refused to start
        port = int(found[1])
        asyncio.run(ask(port, "GET", "/health"))
        try:
            yield Served(process, port, round(time.monotonic() - start, 2))
        finally:
            process.send_signal(signal.SIGTERM)


async def exchange(port: int, data: bytes, seconds: float = 60.0) -> tuple[int, bytes]:
    """Send bytes on a connection of their own; returns the status and the body of the answer."""
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            return await read_answer(reader)
        finally:
            writer.close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = re.search(r"content-length: (\d+)", head)
    return int(head.split()[1]), await reader.readexactly(int(length[1]) if length else 0)


def request(method: str, path: str, body: bytes = b"", headers: str = HEADERS) -> bytes:
    return f"{method} {path} HTTP/1.1\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(port: int, method: str, path: str, **fields: Any) -> tuple[int, Any]:
    status, body = await exchange(port, request(method, path, json.dumps(fields).encode() if fields else b""))
    return status, json.loads(body) if body[:1] in b"[{" else body


class Load:
    """Clients that each keep a connection and ask for one line at a time."""

    def __init__(self, port: int, lines: list[str], direction: tuple[str, str]):
        self.port, self.lines, self.direction = port, lines, direction
        self.latencies: list[float] = []
        self.answers: list[tuple[str, str]] = []
        self.failures = 0

    async def _client(self, numbers: Iterator[int], deadline: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        source, target = self.direction
        for number in numbers:
            if time.monotonic() > deadline:
                break
            line = self.lines[number % len(self.lines)]
            body = json.dumps({"q": line, "source": source, "target": target}).encode()
            start = time.perf_counter()
            writer.write(request("POST", "/translate", body))
            status, answer = await read_answer(reader)
            self.latencies.append(time.perf_counter() - start)
            self.failures += status != 200
            if status == 200:
                self.answers.append((line, json.loads(answer)["translatedText"]))
        writer.close()

    async def run(self, clients: int, requests: int, seconds: float) -> dict[str, float]:
        """Ask `requests` times, for at most `seconds`."""
        numbers, start = iter(range(requests)), time.monotonic()
        await asyncio.gather(*(self._client(numbers, start + seconds) for _ in range(clients)))
        wall, ordered = time.monotonic() - start, sorted(self.latencies)
        return {
            "clients": clients,
            "requests": len(ordered),
            "failures": self.failures,
            "per_second": round(len(ordered) / wall, 1),
            "median_ms": round(1000 * ordered[len(ordered) // 2]),
            "p99_ms": round(1000 * ordered[int(0.99 * (len(ordered) - 1))]),
        }


def hostile() -> list[bytes]:
    """Requests that must be refused, each in a way of its own."""
    post, good = ("POST", "/translate"), '{"q":"x","source":"en","target":"de"%s}'
    form = HEADERS.replace("application/json", "application/x-www-form-urlencoded")
    multipart = HEADERS.replace("application/json", "multipart/form-data; boundary=x")
    bodies = [
        b"no JSON", b"", b"[" * 100_000, b'{"q":' * 100_000, b"\xff\xfe\x00", b'"text"', b"null", b"[]",
        b"1" * 50_000,
        json.dumps({"q": ["x"] * 50_000, "source": "en", "target": "de"}).encode(),
        json.dumps({"q": "x" * 1_000_000, "source": "en", "target": "de"}).encode(),
        b'{"q":{"a":1},"source":"en","target":"de"}', b'{"q":[1,2],"source":"en","target":"de"}',
        b'{"q":"x","source":"en"}', b'{"q":"x","source":"\\ud800","target":"de"}',
        (good % ',"alternatives":"many"').encode(), (good % ',"format":"pdf"').encode(),
    ]  # fmt: skip
    return [
        *(request(*post, body) for body in bodies),
        request(*post, b"&" * 5000 + b"a=b&" * 5000, form),
        request(*post, b"--x\r\nbroken", multipart),
        request("PUT", "/translate", b"{}"),
        request("GET", "/../../etc/passwd"),
        b"POST /translate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
        request("GET", "/" + "x" * 100_000),
    ]


async def refused(port: int) -> list[int]:
    """The statuses of all hostile requests, sent at once; the last one never ends its body."""
    slow = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nslow"
    answers = await asyncio.gather(
        *(exchange(port, data) for data in [*hostile(), slow]), return_exceptions=True
    )
    return [0 if isinstance(answer, BaseException) else answer[0] for answer in answers]


def translated(model: str, lines: list[str], options: list[str]) -> tuple[tuple[float, float], list[str]]:
    """The wall time and the CPU time of `mtrain translate` in seconds, and its translations."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [*COMMAND, "translate", model, "-i", "-", "--quiet", *options]
    text = "".join(f"{line}\n" for line in lines)
    output = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (time.monotonic() - start, cpu), output.stdout.split("\n")[:-1]


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = sys.argv[split + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("lines", type=Path)
    parser.add_argument("--from", dest="source", default="en")
    parser.add_argument("--to", dest="target", default="de")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--hostile", action="store_true", help="also send hostile requests")
    given = parser.parse_args(sys.argv[1:split])
    lines = given.lines.read_text(encoding="utf-8").split("\n")[: given.requests]
    lines = [line for line in lines if line.strip()]
    random.Random(1).shuffle(lines)

    of_server = argparse.ArgumentParser(allow_abbrev=False)
    of_server.add_argument("--engine")
    plain = ["--set", "decoding.split=sentences", *of_server.parse_known_args(options)[1]]
    alone, _ = translated(given.model, lines[:1], plain)
    measured, translations = translated(given.model, lines, plain)
    expected = dict(zip(lines, translations, strict=True))
    # Without the start of the program; unknown for few lines.
    wall, cpu = ((after - before) / len(lines) for before, after in zip(alone, measured, strict=True))
    results: dict[str, Any] = {}
    if wall > 0 and cpu > 0:
        results["translate"] = {"per_second": round(1 / wall, 1), "cpu_ms": round(1000 * cpu)}
    results["loads"], answers = [], list[tuple[str, str]]()
    with served(given.model, options) as server:
        results |= {"ready_seconds": server.ready_seconds, "ready_cpu_seconds": server.cpu_seconds()}
        results |= {"memory_mb": [server.resident()]}
        for clients in given.clients:
            load, start = Load(server.port, lines, (given.source, given.target)), time.monotonic()
            before = server.cpu_seconds()
            figures = asyncio.run(load.run(clients, given.requests, given.seconds))
            cpu = server.cpu_seconds() - before
            figures["cores"] = round(cpu / (time.monotonic() - start), 2)
            figures["cpu_ms"] = round(1000 * cpu / max(1, len(load.latencies)))
            results["loads"].append(figures)
            results["memory_mb"].append(server.resident())
            answers += load.answers
        if given.hostile:
            results["hostile"] = asyncio.run(refused(server.port))
            results["healthy"] = asyncio.run(ask(server.port, "GET", "/health"))[0] == 200
        results["changed"] = sum(expected[line] != answer for line, answer in answers)
    results["exit_code"] = server.process.returncode
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
