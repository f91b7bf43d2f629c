"""The server as its clients see it: texts, streams, errors, a full queue, clients that leave."""

import asyncio
import concurrent.futures
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from serving_helpers import NAME, Running
from transformers import AutoTokenizer

from benchmarks.serve import Load
from dejavu_train.extras.serving.command import listen
from dejavu_train.extras.serving.log import LogFile
from dejavu_train.extras.serving.requests import Reader
from dejavu_train.ground.errors import UserError
from dejavu_train.sparse.model import SparseOPTForCausalLM

PROMPT = "the model reads a token"
DRAWN = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 1.3, "seed": 7}


@pytest.fixture(scope="module")
def server(tiny_opt, bundle_folder):
    return Running(tiny_opt, bundle_folder, rows=4, queue=6, context=400)


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_an_answer_does_not_wait_for_its_headers_to_be_acknowledged(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert server.listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_greedy_text_is_that_of_generate(server, tiny_opt, bundle_folder):
    found = server.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=20, temperature=0)
    model = SparseOPTForCausalLM.from_pretrained(tiny_opt, bundle_folder, "cpu", sparse_from="prompt")
    tokenizer = AutoTokenizer.from_pretrained(tiny_opt)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert found.choices[0].text == tokenizer.decode(made, skip_special_tokens=True)
    usage = found.usage.model_dump()
    assert usage["prompt_tokens"] == ids.shape[1] and usage["completion_tokens"] == len(made)
    density = usage["density"]["mlp"]
    assert density == pytest.approx(0.3, abs=0.05) and density == round(density, 4) and usage["acceptance"] is None


def test_what_no_request_is_gets_its_status_and_the_server_goes_on(server):
    """Bodies that are wrong are asked at random, in tests/asked."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get("/v1/completions").status_code == 405
        large = client.post("/v1/completions", content=b"x" * (9 * 2**20))
        assert large.status_code == 413 and "bytes" in large.json()["error"]["message"]
        assert client.get("/health").json() == {"status": "ok"}
    with pytest.raises(openai.BadRequestError, match="do not fit the context of 400") as refused:
        server.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=400)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "body, field, said",
    [
        (r'{"model": "tiny", "prompt": "cut \ud83d"}', "prompt", r"prompt has \ud83d, half of a character"),
        (r'{"model": "tiny", "prompt": ["a", "\ude42"]}', "prompt", r"prompt has \ude42, half of a character"),
        (r'{"model": "\ud83d", "prompt": "a"}', "model", r"model has \ud83d, half of a character"),
        (r'{"model": "tiny", "prompt": "a", "stop": "\ud83d"}', "stop", r"stop has \ud83d, half of a character"),
    ],
)
def test_half_a_character_is_refused(server, body, field, said):
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field and error["message"].startswith(said)


@pytest.mark.parametrize("most, limit", [({"max_tokens": 9}, 9), ({}, 16)])
def test_more_tokens_at_least_than_at_most_are_refused(server, most, limit):
    body = {"model": NAME, "prompt": PROMPT, "min_tokens": 17, **most}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "min_tokens"
    assert error["message"] == f"min_tokens must be at most max_tokens, here {limit}, got 17; raise max_tokens"
    assert httpx.post(f"{server.url}/v1/completions", json={**body, "min_tokens": limit}).status_code == 200


def test_a_body_that_is_not_marked_as_json_is_told_the_header(server):
    error = httpx.post(f"{server.url}/v1/completions", data={"model": NAME}).json()["error"]
    assert error["message"] == "the body is not marked as JSON; send the header Content-Type: application/json"


@pytest.mark.parametrize("host, family", [("127.0.0.1", "AF_INET"), ("localhost", "AF_INET"), ("::1", "AF_INET6")])
def test_a_server_listens_at_addresses_of_both_kinds(host, family):
    if family == "AF_INET6" and not has_ipv6():
        pytest.skip("no IPv6 here")
    with listen(host, 0) as listening:
        assert listening.family == getattr(socket, family)
        socket.create_connection(listening.getsockname()[:2], 5).close()


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1", ""])
def test_an_address_of_another_machine_is_one_line(host):
    with pytest.raises(UserError, match=f"--host must be an address of this machine, got '{host}'; give 127"):
        listen(host, 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_for_the_log_is_told_once(tiny_opt, bundle_folder, tmp_path, capfd):
    running = Running(tiny_opt, bundle_folder, rows=1, context=128, log="/dev/full")
    asked = [running.client().completions.create(**DRAWN).choices[0].text for _ in range(3)]
    assert len(set(asked)) == 1
    told = [line for line in capfd.readouterr().err.splitlines() if "log" in line]
    assert told == [
        "cannot write the log /dev/full: [Errno 28] No space left on device;"
        " requests are answered, and some are not logged"
    ]
    with pytest.raises(UserError, match="cannot write the log .*: Is a directory; give --log another file"):
        LogFile(str(tmp_path))


def test_a_log_has_a_line_for_each_request(tiny_opt, bundle_folder, tmp_path):
    running = Running(tiny_opt, bundle_folder, rows=1, context=128, log=str(tmp_path / "log"))
    running.client().completions.create(**DRAWN)
    httpx.get(f"{running.url}/nothing")
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2 and '"POST /v1/completions HTTP/1.1" 200' in lines[0] and lines[1].endswith("404")


def test_a_full_queue_is_told_and_who_leaves_makes_room(server):
    client = server.client()
    long = {"model": NAME, "prompt": PROMPT, "max_tokens": 380, "extra_body": {"min_tokens": 380}}
    before, sampled = server.metric("requests_total"), DRAWN | {"max_tokens": 4}
    streams = []
    try:
        with pytest.raises(openai.RateLimitError, match="too many texts wait"):
            for _ in range(30):
                streams.append(client.completions.create(**long, n=2, stream=True))
    finally:
        for stream in streams:
            stream.close()
    server.wait_for("rows_active", 0)
    assert client.completions.create(**sampled).choices[0].finish_reason
    assert server.metric('requests_total{outcome="cancelled"}') > 0 and server.metric("requests_total") > before


def test_more_texts_than_there_are_places_are_told_the_number(server):
    with pytest.raises(openai.BadRequestError, match="rows and places for 10 texts, got 11 at once; ask for fewer"):
        server.client().completions.create(**DRAWN | {"n": 11})


def test_a_prompt_that_is_read_for_long_does_not_hold_up_others(server, monkeypatch):
    may_end, read = threading.Event(), Reader.completion
    monkeypatch.setattr(Reader, "completion", lambda *given: may_end.wait(30) and read(*given))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(server.client().completions.create, **DRAWN)
        try:
            assert httpx.get(f"{server.url}/health", timeout=10).json() == {"status": "ok"}
        finally:
            may_end.set()
        assert asked.result().choices[0].text


def test_a_server_that_is_ending_says_so(tiny_opt, bundle_folder):
    running = Running(tiny_opt, bundle_folder, rows=1, context=128)
    running.served.line.close()
    with pytest.raises(openai.InternalServerError, match="the server is ending; ask again later") as refused:
        running.client().completions.create(**DRAWN)
    assert refused.value.status_code == 503


def test_a_key_and_a_chat(tiny_opt, bundle_folder):
    running = Running(tiny_opt, bundle_folder, rows=1, context=128, key="secret", lossless=True)
    with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
        running.client().models.list()
    client = running.client(api_key="secret")
    tokenizer = running.served.app.state.reader.tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    asked = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30, "temperature": 0}
    found = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(part.choices[0].delta.content for part in parts) == found.choices[0].message.content
    assert 0 <= found.usage.model_dump()["acceptance"] <= 1
    assert max(running.served.line.rows.pair.pace.seconds) > 0, "drafts are tried, and what they take is learned"
    with pytest.raises(openai.BadRequestError, match="lossless, which has no penalties"):
        client.chat.completions.create(**asked, presence_penalty=1)
    assert httpx.get(f"{running.url}/health").status_code == 200, "for whoever watches, without a key"


def test_a_bug_in_the_thread_ends_the_server_with_errors(tiny_opt, bundle_folder):
    running = Running(tiny_opt, bundle_folder, rows=1, context=128)

    def break_down(n):
        raise ZeroDivisionError("planted")

    running.served.line.rows.step = break_down
    with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
        running.client().completions.create(**DRAWN)
    assert isinstance(running.served.line.failure, ZeroDivisionError)


def test_after_the_drain_requests_end_in_an_error_and_streams_too(tiny_opt, bundle_folder, capfd):
    running = Running(tiny_opt, bundle_folder, rows=2, context=400, drain=0.2)
    step = running.served.line.rows.step
    running.served.line.rows.step = lambda n: time.sleep(0.05) or step(1)
    asked = DRAWN | {"max_tokens": 380, "extra_body": {"min_tokens": 380}}
    stream = running.client().completions.create(**asked, stream=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        whole = pool.submit(running.client().completions.create, **asked)
        running.wait_for("rows_active", 2)
        running.served.line.failed()  # ends the server as SIGTERM does
        with pytest.raises(openai.APIError, match="the server is ending; ask again later"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the server is ending; ask again later") as refused:
            whole.result()
    assert refused.value.status_code == 503
    said = capfd.readouterr().err
    assert "after 0.2 seconds; give --drain more" in said and "Traceback" not in said


@pytest.mark.parametrize("lossless", [False, pytest.param(True, marks=pytest.mark.long)])
def test_many_clients_for_some_seconds(request, tiny_opt, bundle_folder, lossless):
    """Every request ends in a text or in an error of OpenAI's form, and nothing is left behind."""
    if lossless:
        server = Running(tiny_opt, bundle_folder, rows=1, queue=6, context=400, lossless=True)
    else:
        server = request.getfixturevalue("server")
    load = Load(f"{server.url}/v1", NAME, most=40)
    row = asyncio.run(load.run(64, 20 if lossless else 3))
    assert {"text", "left", "queue full", "refused 400"} <= set(load.ends), row
    assert not [end for end in load.ends if end.startswith(("lost", "strange", "refused 5"))], row
    assert row["first_p99"] < 60 and load.ends["text"] > 20
    server.wait_for("rows_active", 0)
    server.wait_for("rows_waiting", 0)
    assert server.served.line.rows.taken == 0 and not server.served.line._served
