"""OpenAI's protocol as clients speak it: fields that ask for nothing, chats, streams, log-probabilities, addresses."""

import json
import shutil

import httpx
import openai
import pytest
import torch
from bundles import make_bundle
from serving_helpers import NAME, Running
from transformers import AutoTokenizer, GenerationConfig, OPTForCausalLM

from dejavu_train.extras.serving.config import ServeConfig
from dejavu_train.ground.errors import UserError
from dejavu_train.sparse.model import SparseOPTForCausalLM

PROMPT = "the model reads a token"
IDS = [2, 30, 31, 200, 33]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}END\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture(scope="module")
def folder(tiny_opt, tmp_path_factory):
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chats") / "model"
    shutil.copytree(tiny_opt, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE.replace("END", "")
    tokenizer.save_pretrained(folder)
    make_bundle(folder).at(0.3, 0.75).save_pretrained(folder / "predictors")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    return Running(folder, folder / "predictors", rows=4, queue=40, context=200)


@pytest.fixture(scope="module")
def dense(folder):
    return SparseOPTForCausalLM.from_pretrained(folder, folder / "predictors", "gather", sparse_from="prompt")


def post(server, path, **body):
    return httpx.post(f"{server.url}/v1/{path}", json={"model": NAME, **body}, timeout=60)


def complete(server, **body):
    answer = post(server, "completions", **{"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(server, content="the model reads", **body):
    messages = [{"role": "user", "content": content}]
    answer = post(server, "chat/completions", **{"messages": messages, "max_tokens": 6, "temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


NOTHING = [
    {"logit_bias": {}}, {"logit_bias": None}, {"stop": ""}, {"stop": []}, {"stop": None}, {"temperature": None},
    {"seed": None}, {"user": "somebody"}, {"metadata": {"a": "b"}}, {"metadata": None}, {"stream": None},
    {"stream_options": None}, {"n": None}, {"top_p": None}, {"logprobs": None}, {"logprobs": False},
    {"presence_penalty": None}, {"store": False}, {"service_tier": "auto"}, {"nothing_known": None}, {"top_k": None},
]  # fmt: skip
OF_COMPLETIONS = [{"suffix": None}, {"suffix": ""}, {"echo": None}, {"echo": False}, {"best_of": None}, {"best_of": 1}]
OF_CHATS = [
    {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"tool_choice": "auto"}, {"tool_choice": None},
    {"functions": []}, {"function_call": None}, {"parallel_tool_calls": True}, {"response_format": None},
    {"response_format": {"type": "text"}}, {"modalities": ["text"]}, {"top_logprobs": None}, {"reasoning_effort": None},
    {"max_completion_tokens": None},
]  # fmt: skip


def test_what_asks_for_nothing_is_no_reason_to_refuse(server):
    text = complete(server)["choices"][0]["text"] if (plain := chat(server)["choices"][0]["message"]) else ""
    for field in NOTHING:
        found = complete(server, **field | ({"temperature": 0} if "temperature" not in field else {}))
        assert found["choices"][0]["text"] == text or "temperature" in field, field
        assert chat(server, **{"temperature": 0} | field)["choices"][0]["message"] == plain or "temperature" in field
    for field in OF_COMPLETIONS:
        assert complete(server, **field)["choices"][0]["text"] == text, field
    for field in OF_CHATS:
        assert chat(server, **field)["choices"][0]["message"] == plain, field


@pytest.mark.parametrize(
    "path, field",
    [
        ("completions", {"logit_bias": {"5": 1}}),
        ("completions", {"suffix": "end"}),
        ("completions", {"best_of": 3}),
        ("chat/completions", {"tools": [{"type": "function"}]}),
        ("chat/completions", {"tool_choice": "required"}),
        ("chat/completions", {"response_format": {"type": "json_object"}}),
        ("chat/completions", {"top_logprobs": 2}),
        ("chat/completions", {"echo": True}),
        ("chat/completions", {"store": True}),
        ("completions", {"seed": 0.5}),
        ("completions", {"\ud83d": 1}),
    ],
)
def test_what_asks_for_something_else_is_refused_by_its_name(server, path, field):
    body = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    content = json.dumps({"model": NAME, **body, **field})
    answer = httpx.post(f"{server.url}/v1/{path}", content=content, headers={"content-type": "application/json"})
    error, name = answer.json()["error"], next(iter(field)).encode("ascii", "backslashreplace").decode()
    assert answer.status_code == 400 and error["param"] == name and name in error["message"], error


def test_a_message_of_another_kind_is_refused(server):
    """Messages in parts, and from a developer, are asked at random, in tests/asked."""
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    refused = post(server, "chat/completions", messages=[{"role": "user", "content": image}]).json()["error"]
    assert refused["param"] == "messages.0.content" and "must be a text, or parts such as" in refused["message"]
    refused = post(server, "chat/completions", messages=[{"role": "tool", "content": "a"}]).json()["error"]
    assert refused["message"] == 'messages.0.role must be system, developer, user or assistant, got "tool"'


def events(server, path, **body):
    with httpx.stream("POST", f"{server.url}/v1/{path}", json={"model": NAME, "stream": True, **body}) as answer:
        raw = answer.read().decode()
    return [json.loads(part[6:]) for part in raw.split("\n\n") if part.startswith("data: {")]


def test_a_stream_tells_the_role_once_and_usage_last(server):
    messages = [{"role": "user", "content": "the model"}]
    asked = {"messages": messages, "max_tokens": 12, "temperature": 0, "n": 2}
    for options in ({}, {"stream_options": {"include_usage": True}}, {"stream_options": {"include_usage": False}}):
        parts = events(server, "chat/completions", **asked, **options)
        for choice in (0, 1):
            deltas = [each["delta"] for part in parts for each in part["choices"] if each["index"] == choice]
            assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        told = options.get("stream_options", {}).get("include_usage", False)
        assert [part.get("usage") is not None for part in parts] == [False] * (len(parts) - 1) + [told]
        assert all(("usage" in part) == told for part in parts)
    with server.client().chat.completions.stream(model=NAME, messages=messages, max_tokens=12, n=2) as answer:
        for _ in answer:
            pass
        assert {c.message.role for c in answer.current_completion_snapshot.choices} == {"assistant"}


@pytest.mark.parametrize("of", ["template", "tokenizer"])
def test_a_chat_ends_at_the_end_of_its_template_and_of_its_tokenizer(folder, tmp_path, of):
    """The model likes a token best that its generation_config does not know as an end."""
    made = tmp_path / "model"
    shutil.copytree(folder, made)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    if of == "template":
        tokenizer.chat_template = TEMPLATE.replace("END", "<|im_end|>")
    else:
        tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(made)
    messages = [{"role": "user", "content": "a"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    model = OPTForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
        weight = model.get_input_embeddings().weight
        weight[-1] = 1.2 * weight[best]
    model.generation_config = GenerationConfig(eos_token_id=2, bos_token_id=2, pad_token_id=1)
    model.save_pretrained(made)
    shutil.rmtree(made / "predictors")
    make_bundle(made).at(0.3, 0.75).save_pretrained(made / "predictors")
    running = Running(made, made / "predictors", rows=1, context=64)
    found = post(running, "chat/completions", messages=messages, max_tokens=12, temperature=0).json()
    assert found["choices"][0]["message"]["content"] == "" and found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 1
    assert complete(running, prompt=ids[0].tolist())["usage"]["completion_tokens"] > 1, "a completion has no turns"


def test_ids_may_end_a_text(server):
    free = complete(server, max_tokens=12, logprobs=0)["choices"][0]
    ids = server.served.app.state.reader.tokenizer
    written = complete(server, max_tokens=12)["choices"][0]["text"]
    third = free["logprobs"]["tokens"][2]
    token = ids.convert_tokens_to_ids(ids.tokenize(third))[0]
    ended = complete(server, max_tokens=12, stop_token_ids=[token])
    assert ended["choices"][0]["finish_reason"] == "stop" and written.startswith(ended["choices"][0]["text"])
    assert ended["usage"]["completion_tokens"] <= 3


# ------------------------------------------------------------------------------------------------ log-probabilities


def nats(dense, ids, prompt):
    """Of every token but the first, its log-probability, from a forward pass that is dense up to a position."""
    dense.sparse_from = prompt
    found = dense(torch.tensor([ids])).logits[0].detach().double().log_softmax(-1)
    return [float(found[at - 1, token]) for at, token in enumerate(ids) if at], found


@pytest.mark.parametrize("new", [0, 1, 6])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_a_prompt_that_is_echoed_is_scored(server, dense, new, top):
    answer = complete(server, prompt=[IDS, IDS[:3]], max_tokens=new, echo=True, logprobs=top)
    tokenizer = server.served.app.state.reader.tokenizer
    for choice, ids in zip(answer["choices"], (IDS, IDS[:3]), strict=True):
        said = choice["logprobs"]
        assert choice["text"].startswith(tokenizer.decode(ids, skip_special_tokens=True))
        assert len(said["tokens"]) == len(said["token_logprobs"]) == len(said["text_offset"]) == len(ids) + new
        assert said["token_logprobs"][0] is None and said["top_logprobs"][0] is None
        expected, _ = nats(dense, ids, len(ids))
        assert said["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        for value, likely in zip(said["token_logprobs"][1:], said["top_logprobs"][1:], strict=True):
            assert max(likely.values()) >= value and 1 <= len(likely) <= top + 1
        assert all(value == max(t.values()) for value, t in list(zip(said["token_logprobs"], said["top_logprobs"],
            strict=True))[len(ids):]), "what greedy decoding wrote is the likeliest"  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 2 * new and answer["usage"]["prompt_tokens"] == len(IDS) + 3


def test_scores_of_a_text_are_those_of_the_model_also_in_parts(server, dense):
    whole = complete(server, prompt=IDS, max_tokens=9, logprobs=3)["choices"][0]
    said = whole["logprobs"]
    dense.sparse_from = "prompt"
    written = dense.generate(torch.tensor([IDS]), max_new_tokens=9, do_sample=False)[0].tolist()
    expected, _ = nats(dense, written, len(IDS))
    assert said["token_logprobs"] == pytest.approx(expected[len(IDS) - 1 :], abs=1e-4)
    assert said["text_offset"][0] == 0 and len(said["tokens"]) == 9
    for text, start, stop in zip(said["tokens"], said["text_offset"], [*said["text_offset"][1:], None], strict=True):
        assert whole["text"][start:stop] in (text, ""), "a token that is not shown, or a part of a character, adds none"
    parts = events(server, "completions", prompt=IDS, max_tokens=9, logprobs=3, temperature=0)
    joined = {name: [] for name in said}
    for part in parts:
        for name, values in (part["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == said
    echoed = events(server, "completions", prompt=IDS, max_tokens=2, logprobs=1, echo=True, temperature=0)
    assert (
        "".join(part["choices"][0]["text"] for part in echoed)
        == complete(server, prompt=IDS, max_tokens=2, echo=True)["choices"][0]["text"]
    )
    assert sum(len(part["choices"][0]["logprobs"]["tokens"]) for part in echoed) == len(IDS) + 2


def test_scores_of_a_chat(server):
    client = server.client()
    asked = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "temperature": 0}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    assert len(found.logprobs.content) == 5
    for entry in found.logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert entry.token.startswith("bytes:") or bytes(entry.bytes).decode() == entry.token
    assert client.chat.completions.create(**asked).choices[0].logprobs is None
    plain = client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs.content
    assert [entry.token for entry in plain] == [entry.token for entry in found.logprobs.content]


def test_a_server_that_is_sparse_from_zero_scores_the_sparse_model(folder, dense):
    running = Running(folder, folder / "predictors", rows=2, context=64, sparse_from=0)
    said = complete(running, prompt=IDS, max_tokens=4, echo=True, logprobs=0)["choices"][0]["logprobs"]
    dense.sparse_from = 0
    written = dense.generate(torch.tensor([IDS]), max_new_tokens=4, do_sample=False)[0].tolist()
    expected, _ = nats(dense, written, 0)
    assert said["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    different, _ = nats(dense, written, len(IDS))
    assert said["token_logprobs"][1:] != pytest.approx(different, abs=1e-2)
    for wrong in ({"sparse_from": -1}, {"sparse_from": 0, "lossless": True}):
        with pytest.raises(UserError, match="sparse_from"):
            ServeConfig(str(folder), str(folder / "predictors"), **wrong).check()


def test_a_lossless_server_gives_no_scores(folder):
    running = Running(folder, folder / "predictors", rows=1, context=64, lossless=True)
    refused = post(running, "completions", prompt="a", logprobs=1).json()["error"]
    assert refused["message"] == "a lossless server gives no log-probabilities; leave logprobs out"
    assert complete(running, prompt="the model", echo=True, max_tokens=0)["choices"][0]["text"] == "the model"


# ------------------------------------------------------------------------------------------------ addresses and keys


def test_a_model_is_found_by_its_name(server):
    assert server.client().models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="there is no model other/one here; ask for tiny"):
        server.client().models.retrieve("other/one")


def test_a_page_may_ask_where_its_origin_is_named(folder):
    running = Running(
        folder, folder / "predictors", rows=1, context=64, key="secret", allow_origin=("https://a.example",)
    )
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type"
    may = httpx.options(f"{running.url}/v1/chat/completions", headers=asks)
    assert may.status_code == 200 and may.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in may.headers["access-control-allow-headers"].lower()
    refused = httpx.get(f"{running.url}/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
    other = httpx.get(f"{running.url}/health", headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    with pytest.raises(UserError, match="--allow_origin must be"):
        ServeConfig(str(folder), str(folder / "predictors"), allow_origin=("a.example",)).check()


# --------------------------------------------------------------------------------------------- errors of a single row


def test_an_error_of_a_row_ends_this_row_alone(folder, capfd):
    """Whatever it is, and wherever: where the row begins, and where its tokens become text."""
    running = Running(folder, folder / "predictors", rows=2, queue=8, context=100)
    rows, line = running.served.line.rows, running.served.line
    placing, submit = rows.engine.placing, line.submit

    def breaks_place(b, row, reused):
        if row.tokens[-1] == 33:
            raise ZeroDivisionError("planted")
        return placing(b, row, reused)

    def break_text(*_):
        raise OverflowError("planted")

    def submits(tickets):
        for ticket in tickets:
            if ticket.row.tokens == [2, 200]:
                ticket.text.add = break_text
        submit(tickets)

    rows.engine.placing, line.submit = breaks_place, submits
    stream = running.client().completions.create(
        model=NAME, prompt=[2, 5], max_tokens=90, stream=True, extra_body={"min_tokens": 90}
    )
    next(stream)
    for prompt in ([2, 5, 33], [2, 200]):
        broken = post(running, "completions", prompt=prompt, max_tokens=4)
        assert broken.status_code == 500
        assert broken.json()["error"]["message"] == "the server has a bug; its log has the traceback"
    for part in stream:
        assert part.choices[0].finish_reason in (None, "length")
    assert post(running, "completions", prompt=[2, 5], max_tokens=4, n=2).status_code == 200
    assert running.served.line.failure is None and rows.free == 2 and httpx.get(f"{running.url}/health").is_success
    assert "ZeroDivisionError: planted" in capfd.readouterr().err
