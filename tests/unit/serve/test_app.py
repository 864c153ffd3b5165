"""The routes of the server, as clients of LibreTranslate and of OpenAI use them."""

import asyncio
import json
import os
import signal
import tempfile
from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.training import PAIRS

pytest.importorskip("starlette")
from mtrain.serve import app
from mtrain.serve.requests import digest_of
from tests.support.serving import asked, served

TRANSLATE = {"source": "en", "target": "de"}
KNOWN = dict(PAIRS)


@pytest.fixture(scope="module")
def server(run_dir):
    return served(run_dir, origins=["https://pages.example"], hosts=["testserver"])


@pytest.fixture(scope="module")
def client(server):
    with asked(server) as opened:
        yield opened


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("kind", ["json", "data", "files"])
def test_text_arrives_as_json_or_as_a_form(client, kind):
    fields = {"q": "A cat sleeps.", **TRANSLATE}
    sent = {name: (None, value) for name, value in fields.items()} if kind == "files" else fields
    assert client.post("/translate", **{kind: sent}).json() == {"translatedText": "Eine Katze schläft."}
    assert client.post("/translate", params=TRANSLATE, json={"q": "It rains."}).json()["translatedText"]


def test_a_list_is_answered_with_lists(client):
    fields = {"q": [*KNOWN, ""], "source": "auto", "target": "de", "alternatives": 2, "api_key": ""}
    answer = client.post("/translate", json=fields).json()
    assert answer["translatedText"] == [*KNOWN.values(), ""]
    assert answer["detectedLanguage"] == [{"language": "en", "confidence": 100.0}] * 9
    assert [len(others) for others in answer["alternatives"]] == [2] * 8 + [0]
    assert all(
        best not in others for best, others in zip(KNOWN.values(), answer["alternatives"], strict=False)
    )
    form = client.post("/translate", data={**TRANSLATE, "q": ["It rains.", "The sun shines."]}).json()
    assert form["translatedText"] == ["Es regnet.", "Die Sonne scheint."]


def test_paragraphs_keep_their_line_breaks(client):
    answer = client.post("/translate", json={**TRANSLATE, "q": "It rains.\n\nThe sun shines.\r\n"}).json()
    assert answer["translatedText"] == "Es regnet.\n\nDie Sonne scheint.\r\n"


def test_tags_of_html_are_put_back(client):
    fields = {**TRANSLATE, "q": "<h1>It <b>rains</b>.</h1>\n<p>The sun shines.</p>", "format": "html"}
    answer = client.post("/translate", json={**fields, "alternatives": 1}).json()
    assert [answer["translatedText"].count(tag) for tag in ("<b>", "</b>", "</h1>\n<p>")] == [1, 1, 1]
    assert answer["translatedText"].replace("<b>", "").replace("</b>", "").strip() == (
        "<h1>Es regnet.</h1>\n<p>Die Sonne scheint.</p>"
    )
    assert len(answer["alternatives"]) == 1
    assert client.post("/translate", json={**fields, "q": ["<br>", ""]}).json()["translatedText"] == [
        "<br>",
        "",
    ]


def test_html_may_be_plain_text(client):
    fields = {**TRANSLATE, "q": "It rains.\nA cat sleeps.\n", "format": "html"}
    answer = client.post("/translate", json=fields).json()
    assert answer["translatedText"] == "Es regnet.\nEine Katze schläft.\n"


def test_alignments_are_positions_of_words(client):
    answer = client.post("/translate", json={**TRANSLATE, "q": "It 😀rains.", "alignments": True}).json()
    source, target = [(0, 2), (3, 10)], answer["translatedText"]
    for begin, end, start, stop in answer["alignments"]:
        assert (begin, end) in source
        assert target[start:stop] in target.split()


def test_text_in_the_target_language_is_not_changed(client):
    fields = {"source": "de", "target": "de", "alternatives": 1, "alignments": True}
    answer = client.post("/translate", json={**fields, "q": ["Es  regnet.", "x"]}).json()
    assert answer == {
        "translatedText": ["Es  regnet.", "x"],
        "alternatives": [[], []],
        "alignments": [[], []],
    }


def test_each_text_has_its_own_language(client):
    pytest.importorskip("py3langid")
    texts = ["Der Hund läuft heute mit den Kindern durch den großen Park.", "A cat sleeps."]
    answer = client.post("/translate", json={"q": texts, "source": "auto", "target": "de"}).json()
    assert [each["language"] for each in answer["detectedLanguage"]] == ["de", "en"]
    assert answer["translatedText"] == [texts[0], "Eine Katze schläft."]
    # Class names and styles are English words.
    style = '<div class="row justify-content-center"><span style="font-weight: bold; color: red">'
    html = f"{style}Der Hund läuft im Park.</span></div>"
    fields = {"q": html, "source": "auto", "target": "de", "format": "html"}
    assert client.post("/translate", json=fields).json()["detectedLanguage"]["language"] == "de"


def test_a_form_may_have_as_many_texts_as_json(client):
    answer = client.post("/translate", data={**TRANSLATE, "q": [""] * 1000})
    assert answer.json() == {"translatedText": [""] * 1000}


def test_fields_may_be_null_and_the_body_may_be_missing(client):
    answer = client.post("/translate", json={**TRANSLATE, "q": "A cat sleeps.", "format": None})
    assert answer.json()["translatedText"] == "Eine Katze schläft."
    request = client.build_request("POST", "/translate", params={**TRANSLATE, "q": "A cat sleeps."})
    assert request.headers["Content-Length"] == "0"
    assert client.send(request).json() == {"translatedText": "Eine Katze schläft."}
    del request.headers["Content-Length"]
    assert client.send(request).json() == {"translatedText": "Eine Katze schläft."}


def test_a_form_may_have_utf_8_that_is_not_percent_encoded(client):  # as curl sends it
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    body = "q=Größe+%C3%A9+%2B&source=de&target=de".encode()
    assert client.post("/translate", content=body, headers=kind).json() == {"translatedText": "Größe é +"}
    assert error_of(client.post("/translate", content=body.replace(b"\xc3", b""), headers=kind), 400)


@pytest.mark.parametrize(
    ("parts", "status"),
    [([b'{"q": "It ra', b'ins.", "source": "en", "target": "de"}'], 200), ([b" " * 500_000] * 3, 413)],
)
def test_a_body_may_be_chunked(server, parts, status):
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b""})
    assert answer_to(server, messages, [(b"transfer-encoding", b"chunked")])[0]["status"] == status


def test_a_body_that_arrives_too_slowly_is_refused(server, monkeypatch):
    monkeypatch.setattr("mtrain.serve.requests.SECONDS_TO_SEND", 0.01)
    messages = [{"type": "http.request", "body": b'{"q": "It ra', "more_body": True}]
    started, body = answer_to(server, messages, [])
    assert started["status"] == 408 and "did not arrive in time" in json.loads(body["body"])["error"]


def test_large_files_are_not_written_to_disk(client, monkeypatch):
    def fail(*_):
        raise AssertionError("the file is written to disk")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", fail)
    file = {"file": ("mine.txt", b" " * 1_200_000)}
    assert "characters" in error_of(client.post("/translate_file", data=TRANSLATE, files=file), 413)


def test_forms_may_refuse_alignments(client):
    for value in ("false", "true"):
        answer = client.post("/translate", data={**TRANSLATE, "q": "It rains.", "alignments": value}).json()
        assert ("alignments" in answer) == (value == "true")


def test_languages_and_limits_are_stated(client):
    assert client.get("/languages").json() == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "de", "name": "German", "targets": []},
    ]
    settings = client.get("/frontend/settings").json()
    assert (settings["charLimit"], settings["keyRequired"]) == (100_000, False)
    assert settings["language"]["target"] == {"code": "de", "name": "German"}
    assert client.get("/health").json() == {"status": "ok"}


def test_a_language_is_detected_among_those_of_the_server(client):
    pytest.importorskip("py3langid")
    [found] = client.post("/detect", data={"q": "Der Hund rennt im Park."}).json()
    assert found["language"] == "de" and found["confidence"] in range(81, 101)  # clients read whole numbers


def test_a_file_is_translated_and_kept_for_an_hour(client, monkeypatch):
    file = {"file": ("mine.txt", "\ufeffIt rains.\nA cat sleeps.\n".encode())}
    url = client.post("/translate_file", data={**TRANSLATE, "source": "auto"}, files=file).json()[
        "translatedFileUrl"
    ]
    assert client.get(url).text == "Es regnet.\nEine Katze schläft.\n"
    assert "attachment" in client.get(url).headers["content-disposition"]
    proxy = {"X-Forwarded-Host": "example.org", "X-Forwarded-Prefix": "/mt/"}
    answer = client.post("/translate_file", data=TRANSLATE, files=file, headers=proxy).json()
    assert answer["translatedFileUrl"].startswith("http://example.org/mt/download_file/")
    monkeypatch.setattr("mtrain.serve.server.SECONDS_KEPT", 0)
    assert "an hour" in error_of(client.get(url), 404)


def test_only_the_last_translated_files_are_kept(client, monkeypatch):
    monkeypatch.setattr("mtrain.serve.server.FILES_KEPT", 2)
    file = {"file": ("mine.txt", b"It rains.")}
    answers = [client.post("/translate_file", data=TRANSLATE, files=file).json() for _ in range(3)]
    urls = [answer["translatedFileUrl"] for answer in answers]
    assert [client.get(url).status_code for url in urls] == [404, 200, 200]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q": "x", "source": "en"}, "missing target"),
        ({"source": "en", "target": "de"}, "text, or a list of texts, is missing"),
        ({"q": [], **TRANSLATE}, "text, or a list of texts, is missing"),
        ({"q": ["x", 1], **TRANSLATE}, "text, or a list of texts, is missing"),
        ({"q": "x", "source": "en", "target": "fr"}, "language fr: the model has no such language"),
        ({"q": "x", "source": "\ud800", "target": "de"}, "language \ufffd"),
        ({"q": "x", "source": 0, "target": "de"}, "missing source parameter"),
        ({"q": "x", **TRANSLATE, "alternatives": "many"}, "alternatives must be a number"),
        ({"q": "x", **TRANSLATE, "format": "pdf"}, "format must be text or html"),
    ],
)
def test_wrong_fields_are_named(client, fields, message):
    assert message in error_of(client.post("/translate", content=json.dumps(fields)), 400)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("application/json", b"no JSON"),
        ("application/json", b"[" * 100_000),
        ("application/json", b"\xff\xfe"),
        ("application/json", b"[]"),
        ("application/json", b"1" * 50_000),
        ("multipart/form-data; boundary=x", b"--x\r\nbroken"),
        ("application/x-www-form-urlencoded", b"a=b&" * 5000),
    ],
)
def test_a_body_that_is_neither_json_nor_a_form_is_refused(client, kind, content):
    assert error_of(client.post("/translate", content=content, headers={"Content-Type": kind}), 400)


def test_what_a_multipart_form_lacks_is_said(client):
    for kind, content, missing in (
        ("multipart/form-data", b"", "boundary"),
        (
            "multipart/form-data; boundary=x",
            b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--",
            "name",
        ),
    ):
        found = error_of(client.post("/translate", content=content, headers={"Content-Type": kind}), 400)
        assert missing in found and "JSON" not in found


def test_too_much_text_is_refused(client):
    for content, found in (
        (json.dumps({**TRANSLATE, "q": "x" * 100_001}), "100001 characters"),
        (json.dumps({**TRANSLATE, "q": [""] * 1001}), "1001 texts"),
        (b" " * 1_300_000, "bytes"),
    ):
        assert found in error_of(client.post("/translate", content=content), 413)


def test_forms_in_slow_encodings_are_refused(client):
    kind = {"Content-Type": "multipart/form-data; boundary=x; charset=punycode"}
    assert "UTF-8" in error_of(client.post("/translate", content=b"", headers=kind), 415)


@pytest.mark.parametrize("name", ["source", "target", "model"])
def test_names_are_short(client, name):
    path = "/v1/chat/completions" if name == "model" else "/translate"
    fields = {**TRANSLATE, "q": "x", name: "by-heart:" + "-" * 1000}
    assert "more than 500 characters" in str(error_of(client.post(path, json=fields), 400))


def test_unknown_pages_and_files_are_errors(client):
    assert error_of(client.get("/nothing"), 404) == "Not Found"
    assert error_of(client.get("/translate"), 405) == "Method Not Allowed"
    assert ".txt" in error_of(client.post("/translate_file", data=TRANSLATE), 400)
    binary = {"file": ("x.txt", b"\xff")}
    assert "UTF-8" in error_of(client.post("/translate_file", data=TRANSLATE, files=binary), 400)


def test_a_chat_translates_the_last_message_of_the_user(client):
    messages = [
        {"role": "system", "content": "Translate."},
        {"role": "user", "content": "It rains."},
        {"role": "assistant", "content": "Es regnet."},
        {"role": "user", "content": [{"type": "text", "text": "A cat sleeps."}]},
    ]
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["by-heart:en-de"]
    assert client.get("/v1/models/by-heart:en-de").json()["id"] == "by-heart:en-de"
    fields = {"model": "by-heart:en-de", "messages": messages}
    answer = client.post("/v1/chat/completions", json=fields).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Eine Katze schläft."}
    assert answer["usage"]["total_tokens"] == sum(list(answer["usage"].values())[:2])
    for model in ({}, {"model": ""}, {"model": None}):  # there is only one
        other = client.post("/v1/chat/completions", json={"messages": messages, **model}).json()
        assert (other["model"], other["choices"]) == ("by-heart:en-de", answer["choices"])
    lines = client.post("/v1/chat/completions", json={**fields, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert (
        "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "Eine Katze schläft."
    )
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert lines[-2:] == ["data: [DONE]", ""]
    counting = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    *_, last, _, _ = client.post("/v1/chat/completions", json=counting).text.split("\n\n")
    last = json.loads(last.removeprefix("data: "))
    assert (last["choices"], last["usage"]) == ([], answer["usage"])


def test_errors_below_v1_are_as_openai_clients_expect_them(client):
    fields = {"model": "by-heart:en-fr", "messages": []}
    asked = client.post("/v1/chat/completions", json=fields), client.get("/v1/models/by-heart:en-fr")
    for answer in asked:
        found = error_of(answer, 404)
        assert found["type"] == "invalid_request_error"
        assert "by-heart:en-fr does not exist" in found["message"]
    wrong = client.post("/v1/chat/completions", json={"model": "by-heart:en-de", "messages": [7]})
    assert "text" in error_of(wrong, 400)["message"]


def test_a_failing_translation_is_an_error_of_its_request_alone(run_dir, monkeypatch):
    server = served(run_dir)
    workers = server.models.served[0].translator.workers
    real = workers.decode_one

    def decode(task):
        if any(part.line == 0 and len(part.source) < 5 for part in task.parts):
            raise RuntimeError("broken")
        return real(task)

    monkeypatch.setattr(workers, "decode_one", decode)
    with asked(server) as client:
        failed = error_of(client.post("/translate", json={**TRANSLATE, "q": "A"}), 500)
        assert failed == "Cannot translate text: the log of the server says why"
        assert client.post("/translate", json={**TRANSLATE, "q": "It rains."}).json() == {
            "translatedText": "Es regnet."
        }
        assert "mtrain_failures_total 1" in client.get("/metrics").text


@pytest.mark.slow
def test_worker_processes_help_and_may_be_killed(run_dir):
    server = served(run_dir, workers=2)
    translator = server.models.served[0].translator

    def translations():
        futures = [server.batcher.submit(translator, [text]) for text in KNOWN]
        return [future.result(60)[0].text for future in futures]

    while not translator.workers.sent:  # until the process is ready
        assert translations() == [*KNOWN.values()]
    os.kill(translator.workers.pids()[0], signal.SIGKILL)
    for _ in range(5):
        assert translations() == [*KNOWN.values()]
    server.batcher.close()


def test_a_stopped_worker_process_does_not_keep_the_server_from_ending(run_dir, monkeypatch):
    monkeypatch.setattr("mtrain.serve.server.PATIENCE", 0.2)
    server = served(run_dir, workers=2)
    translator = server.models.served[0].translator
    assert translator.workers.start() == 1
    os.kill(translator.workers.pids()[0], signal.SIGSTOP)
    with translator.workers.decoding:  # so that the process has to decode
        future = server.batcher.submit(translator, ["It rains."])
        server.close()
    assert future.exception(10) is not None


def test_api_keys_are_required_of_those_who_translate(run_dir):
    with asked(served(run_dir, key_digests=[digest_of("ä secret"), digest_of("other")])) as client:
        fields = {**TRANSLATE, "q": "It rains."}
        assert error_of(client.post("/translate", json=fields), 403) == "An API key is required"
        assert error_of(client.post("/translate", json={**fields, "api_key": "no"}), 403) == "Invalid API key"
        assert client.post("/translate", json={**fields, "api_key": "ä secret"}).status_code == 200
        bearer = {"Authorization": "Bearer ä secret".encode()}
        assert client.get("/v1/models", headers=bearer).status_code == 200
        bearer = {"Authorization": "Bearer other"}
        assert client.post("/translate", json=fields, headers=bearer).status_code == 200
        assert client.get("/metrics").status_code == 403
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers=bearer).status_code == 200
        assert client.get("/languages").status_code == 200
        assert client.get("/frontend/settings").json()["keyRequired"] is True


def test_busy_and_slow_servers_say_when_to_come_back(server, client, monkeypatch):
    monkeypatch.setattr("mtrain.serve.batching.MOST_WAITING", 0)
    answer = client.post("/translate", json={**TRANSLATE, "q": "It rains."})
    assert "busy" in error_of(answer, 429)
    assert int(answer.headers["retry-after"]) >= 1
    monkeypatch.undo()
    monkeypatch.setattr(server, "seconds", 0.0)
    answer = client.post("/translate", json={**TRANSLATE, "q": "It rains."})
    assert "too long" in error_of(answer, 503)
    assert answer.headers["retry-after"]
    chat = {"model": "by-heart:en-de", "messages": [{"role": "user", "content": "It rains."}]}
    assert "too long" in error_of(client.post("/v1/chat/completions", json=chat), 503)["message"]


def answer_to(server: Any, messages: list[Any], headers: list[tuple[bytes, bytes]]) -> list[Any]:
    """What is sent to a client of `/translate` who sends messages."""
    remaining, sent = iter(messages), list[Any]()

    async def receive() -> Any:
        return next(remaining, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"testserver"), *headers]
    scope = {"type": "http", "method": "POST", "path": "/translate", "query_string": b"", "headers": headers}
    asyncio.run(asyncio.wait_for(app.make_app(server)(scope, receive, send), 10))
    return sent


@pytest.mark.parametrize("body_arrives", [True, False])
def test_nothing_is_translated_for_clients_that_have_gone(run_dir, monkeypatch, body_arrives):
    server, waiting = served(run_dir), Future()
    monkeypatch.setattr(server.batcher, "submit", lambda *given: waiting)
    body = json.dumps({**TRANSLATE, "q": "It rains."}).encode()
    messages = [{"type": "http.request", "body": body}] * body_arrives + [{"type": "http.disconnect"}]
    assert answer_to(server, messages, [(b"content-length", str(len(body)).encode())])[0]["status"] == 400
    assert waiting.cancelled() is body_arrives
    server.batcher.close()


def test_pages_of_some_origins_may_ask(client):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    asks["Access-Control-Request-Private-Network"] = "true"
    allowed = client.options("/translate", headers={"Origin": "https://pages.example", **asks})
    assert allowed.headers["access-control-allow-private-network"] == "true"
    assert allowed.headers["access-control-allow-origin"] == "https://pages.example"
    refused = client.options("/translate", headers={"Origin": "https://other.example", **asks})
    assert "access-control-allow-origin" not in refused.headers
    for site, origin, status in (
        ("cross-site", "https://pages.example", 200),
        ("cross-site", "https://other.example", 403),
        ("same-site", "http://testserver:81", 403),
        ("same-origin", "http://testserver", 200),
        (None, "http://testserver", 200),
        (None, "https://pages.example", 200),
        (None, "https://other.example", 403),
        (None, "null", 403),
        ("none", "chrome-extension://abc", 200),
        (None, "chrome-extension://abc", 200),
        ("cross-site", "chrome-extension://abc", 403),
        ("cross-site", "moz-extension://abc", 200),
        ("cross-site", "https://moz-extension", 403),
    ):
        headers = {"Origin": origin, **({"Sec-Fetch-Site": site} if site else {})}
        form = {**TRANSLATE, "q": "It rains."}  # which browsers send without asking before
        assert client.post("/translate", data=form, headers=headers).status_code == status


def test_an_address_may_end_in_a_slash(client):
    """Clients append their paths to the address of the server that a user has entered."""
    url = f"{client.base_url}//"
    assert client.post(f"{url}translate", json={**TRANSLATE, "q": "It rains."}).status_code == 200
    assert client.get(f"{url}v1//models").json()["object"] == "list"
    assert "message" in error_of(
        client.post(f"{url}v1/chat/completions", json={}), 400
    )  # for OpenAI's client


def test_a_name_that_resolves_to_loopback_is_refused(client):
    assert client.get("/languages", headers={"Host": "rebound.example:5000"}).status_code == 400
    assert client.get("/languages", headers={"Host": "testserver:5000"}).status_code == 200
    assert client.get("/health", headers={"Host": ""}).status_code == 200


def test_counters_are_in_the_format_of_prometheus(client):
    client.post("/translate", json={**TRANSLATE, "q": "It rains."})
    client.post("/translate", json={})
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    names = [line.split("{")[0].split(" ")[0] for line in lines if line[0] != "#"]
    families = list(dict.fromkeys(names))
    assert names == sorted(names, key=families.index)  # the lines of a family are not divided
    types = [line.split(" ")[2:] for line in lines if line.startswith("# TYPE ")]
    assert types == [[name, "counter" if name.endswith("_total") else "gauge"] for name in families]
    values = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    assert all(float(value) >= 0 for value in values.values())
    assert float(values['mtrain_requests_total{path="/translate"}']) >= 1
    assert values["mtrain_waiting_parts"] == "0"


def test_every_route_is_described(server, client):
    spec = client.get("/spec").json()
    described = {(path, method) for path, methods in spec["paths"].items() for method in methods}
    found: list[Any] = app.make_app(server).routes
    methods = [(route.path.replace(":path", ""), route.methods - {"HEAD"}) for route in found]
    routes = {(path, method.lower()) for path, of_path in methods for method in of_path}
    routes -= {(path, "get") for path in ("/", "/docs", "/spec")}
    assert described == routes


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere(client, path):
    page = client.get(path).text
    assert page.startswith("<!DOCTYPE html>")
    assert not any(mark in page for mark in ("http://", "https://", "//cdn", "@import", "url("))
