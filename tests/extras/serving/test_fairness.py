"""Many clients, slow readers, huge bodies: who waits for whom, as the guide promises it."""

import asyncio
import concurrent.futures
import json
import socket
import threading

import httpx
import pytest
from serving_helpers import NAME, Running
from transformers import AutoTokenizer

from dejavu_train.extras.serving import requests
from dejavu_train.extras.serving.replies import Refusal
from dejavu_train.extras.serving.requests import Chat, Completion, Reader

CLIENTS = 200
HUGE = 8 * 2**20 - 200  # characters of a prompt: with its quotes and its fields it is just let in
CONTEXT = 200


@pytest.fixture(scope="module")
def server(tiny_opt, bundle_folder):
    return Running(tiny_opt, bundle_folder, rows=4, queue=CLIENTS, context=CONTEXT)


@pytest.fixture(scope="module")
def reader(tiny_opt):
    tokenizer = AutoTokenizer.from_pretrained(tiny_opt)
    return Reader(tokenizer, CONTEXT, len(tokenizer), False, True)


def ask(server, **body):
    body = {"model": NAME, "prompt": "the model", "max_tokens": 6, "temperature": 0} | body
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def test_two_hundred_clients_have_their_texts_in_the_order_in_which_they_came(server, monkeypatch):
    """Rows are given in the order of asking, and each text is what it is alone."""
    line, asked, given = server.served.line, [], []
    submit, join = line.submit, line.rows.join
    alone = [ask(server, prompt=[2, 5 + i], max_tokens=1 + i % 7).json()["choices"][0]["text"] for i in range(20)]

    def submits(tickets):
        submit(tickets)
        asked.extend(ticket.row for ticket in tickets)

    def joins(row):
        given.append(row)
        return join(row)

    with line._changed:
        monkeypatch.setattr(line, "submit", submits)
        monkeypatch.setattr(line.rows, "join", joins)

    async def all_of_them():
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

            async def one(i):
                body = {"model": NAME, "prompt": [2, 5 + i % 20], "max_tokens": 1 + i % 20 % 7, "temperature": 0}
                answer = await client.post("/v1/completions", json=body)
                return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text

            return await asyncio.gather(*map(one, range(CLIENTS)))

    assert asyncio.run(all_of_them()) == [alone[i % 20] for i in range(CLIENTS)]
    assert len(given) == CLIENTS and [id(row) for row in given] == [id(row) for row in asked]


def test_clients_that_do_not_read_hold_up_nobody(server):
    """Their texts are written all the same, and their rows go to others."""
    body = {"model": NAME, "prompt": "the model", "max_tokens": 190, "min_tokens": 190, "stream": True, "n": 4}
    content = json.dumps(body | {"logprobs": 5}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    sockets = []
    try:
        for _ in range(6):
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            slow.connect(server.listening.getsockname())
            slow.sendall(head.encode() + b"\r\n\r\n" + content)
            sockets.append(slow)
        assert ask(server).status_code == 200
        server.wait_for("rows_active", 0, 60)
        assert ask(server).status_code == 200, "they have read nothing"
    finally:
        for slow in sockets:
            slow.close()


def test_what_is_refused_is_neither_tokenised_nor_read_on_the_loop(server, monkeypatch):
    """Ten prompts of 8 MB at once, while another client is answered."""
    threads, tokenised, parse, completion = [], [], Reader.parse, Reader.completion

    def parses(self, kind, body, *rest):
        threads.append(threading.current_thread().name)
        return parse(self, kind, body, *rest)

    def completes(self, asked):
        tokenised.append(len(asked.prompt))
        return completion(self, asked)

    monkeypatch.setattr(Reader, "parse", parses)
    monkeypatch.setattr(Reader, "completion", completes)
    with concurrent.futures.ThreadPoolExecutor(11) as pool:
        huge = [pool.submit(ask, server, prompt="the model " * (HUGE // 10)) for _ in range(10)]
        small = pool.submit(ask, server)
        assert small.result().status_code == 200
        for each in huge:
            error = each.result().json()["error"]
            assert each.result().status_code == 400 and error["code"] == "context_length_exceeded"
    assert tokenised == [len("the model")] and len(threads) == 11
    assert all("asyncio" in name or "ThreadPool" in name for name in threads) and len(set(threads)) > 1


def bodies():
    """Large bodies that are wrong, and what is said of each."""
    base = {"model": NAME, "prompt": "a"}
    chat = {"model": NAME}
    yield (
        Completion,
        base | {"prompt": [0] * 150_000 + [None]},
        "the body has more than 9000 values, which no request has",
    )
    yield Completion, base | {"prompt": [0] * 1000}, "the prompt's 1000 tokens do not fit the context of 200"
    yield Completion, base | {"prompt": ["a"] * 300}, "at most 32 choices a request, got 300"
    yield Completion, base | {"prompt": [[0]] * 300}, "at most 32 choices a request, got 300"
    yield Completion, base | {"stop": ["a"] * 5000}, "stop must be .*got a list of 5000"
    yield Completion, base | {"stop_token_ids": ["a"] * 5000}, r"stop_token_ids(\.0)? (must be|list)"
    yield Completion, base | {f"field{i}": 1 for i in range(5000)}, "this server has no field0; leave it out"
    yield Completion, base | {"user": "x" * 100_000, "prompt": "a," * 100_000}, "prompt has 200000 characters"
    yield Completion, base | {"model": "x" * 10**6, "n": "x" * 10**6}, "n must be a valid integer, got .x{10,60}"
    yield Chat, chat | {"messages": [{"role": "user", "content": "a"}] * 300}, "300 messages have more tokens than"
    yield Chat, chat | {"messages": [1] * 150}, "messages.0 must be an object, got 1"
    yield Chat, chat | {"messages": [{"role": "user", "content": [1] * 5000}]}, "messages.0.content must be a text, or"
    yield Chat, chat | {"messages": [{"role": "user", "content": "a" * 10**6}]}, "messages has 1000000 characters"


@pytest.mark.parametrize("kind, body, said", bodies())
def test_a_large_body_that_is_wrong_is_one_line(reader, kind, body, said):
    with pytest.raises(Refusal, match=said) as refused:
        reader.parse(kind, json.dumps(body).encode())
    assert len(str(refused.value)) < 300 and refused.value.status == 400


def test_a_body_is_counted_before_it_becomes_objects(reader, monkeypatch):
    monkeypatch.setattr(requests.json, "loads", lambda *_, **__: pytest.fail("it was read"))
    for part in (b"0,", b"[],", b"{},", b'"",', b'"\\"[",', b'"\\\\",'):
        with pytest.raises(Refusal, match="the body has more than 9000 values, which no request has; send fewer"):
            reader.parse(Completion, b'{"model": "m", "prompt": [' + part * 20_000 + b"0]}")


def test_marks_within_texts_are_no_values(reader):
    text = 'a, [b], {c} \\ " ' * 600
    body = json.dumps({"model": NAME, "prompt": [text[:1900]], "user": text}).encode()
    assert reader.parse(Completion, body).prompts == [text[:1900]]


@pytest.mark.parametrize(
    "raw", [b"[" * 10**5, b'{"a":' * 10**4 + b"1" + b"}" * 10**4, b"9" * 5000, b'{"n": ' + b"9" * 5000 + b"}"]
)
def test_depth_and_digits_are_one_line(reader, raw):
    with pytest.raises(Refusal, match="^the body") as refused:
        reader.parse(Completion, raw)
    assert refused.value.status == 400 and len(str(refused.value)) < 200
