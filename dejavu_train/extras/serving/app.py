"""The application: routes, checks before them, and the way from a request to the line and back."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from dejavu_train.extras.serving.line import BUG, Event, Full, Line, LineEnd, Ticket
from dejavu_train.extras.serving.logprobs import ChoiceScores, TokenTexts
from dejavu_train.extras.serving.replies import Choice, Refusal, Reply, error_body, event
from dejavu_train.extras.serving.requests import SHOWN, CallFields, Chat, Completion, Reader, TextOrder
from dejavu_train.extras.serving.text import Decoder, Text

LISTEN_SECONDS = 0.2  # between two looks whether a client is still there
MOST_BYTES = 8 * 2**20  # of a request's body


class RequestGuard:
    """Refuses bodies that are too large, and clients without the key, before anything is read."""

    def __init__(self, app: Any, key: str | None) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        refusal = None
        length = headers.get("content-length", b"")
        if length.isdigit() and int(length) > MOST_BYTES:
            refusal = 413, f"a request has at most {MOST_BYTES} bytes"
        elif b"chunked" in headers.get("transfer-encoding", b""):
            refusal = 411, "a request must say its content-length"
        elif self.key is not None and scope["path"].startswith("/v1/"):
            kind, _, given = headers.get("authorization", b"").partition(b" ")
            given = given.strip() if kind.lower() == b"bearer" else b""
            if not hmac.compare_digest(given, self.key.encode()):
                refusal = 401, "the key is missing or wrong; send it as Authorization: Bearer KEY"
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await JSONResponse(error_body(*refusal), refusal[0])(scope, receive, send)


def make_app(
    line: Line,
    reader: Reader,
    name: str,
    density: dict[str, float],
    key: str | None = None,
    origins: Sequence[str] = (),
) -> FastAPI:
    """The application of a line that was started. name: of the model. origins: of web pages that may ask."""
    app = FastAPI(title="dejavu serve", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestGuard, key=key)
    if origins:  # around the other: a page reads refusals too, and asks without a key whether it may ask
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.state.reader = reader
    texts = TokenTexts(reader.tokenizer, reader.vocabulary)
    model = {"id": name, "object": "model", "created": 0, "owned_by": "dejavu"}

    @app.exception_handler(Refusal)
    async def refuse(_: Request, error: Refusal) -> JSONResponse:
        waits = {"retry-after": "1"} if error.status == 429 else None
        return JSONResponse(error_body(error.status, str(error), error.param, error.code), error.status, waits)

    @app.exception_handler(HTTPException)
    async def tell(request: Request, error: HTTPException) -> JSONResponse:
        said = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_body(error.status_code, said), error.status_code)

    @app.exception_handler(Exception)
    async def apologise(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, BUG), 500)

    @app.get("/health")
    async def health() -> JSONResponse:
        failed = line.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(line.metrics.write(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{asked:path}")
    async def one_model(asked: str) -> dict[str, Any]:
        check_model(asked)
        return model

    def check_model(asked: str) -> None:
        if asked != name:
            raise Refusal(404, f"there is no model {asked[:SHOWN]} here; ask for {name}", "model", "model_not_found")

    def look(n: int) -> None:
        """Refuse n texts that have no room, before anything of them is tokenised."""
        try:
            line.look(n)
        except Full:
            raise no_room(n) from None
        except LineEnd as error:
            raise Refusal(503, str(error)) from None

    def no_room(n: int) -> Refusal:
        if n > line.reach:
            said = f"this server has rows and places for {line.reach} texts, got {n} at once; ask for fewer"
            return Refusal(400, said, "n")
        return Refusal(429, "too many texts wait; ask again later", code="queue_full")

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        asked = await parsed(Completion, request)
        return await answer(asked, await asyncio.to_thread(reader.completion, asked), request, False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = await parsed(Chat, request)
        return await answer(asked, await asyncio.to_thread(reader.chat, asked), request, True)

    async def parsed(kind: Any, request: Request) -> Any:
        body, content_type = await request.body(), request.headers.get("content-type", "")
        asked = await asyncio.to_thread(reader.parse, kind, body, content_type)
        check_model(asked.model)
        look(reader.count(asked))
        return asked

    async def answer(asked: CallFields, wanted: Sequence[TextOrder], request: Request, is_chat: bool) -> Response:
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def deliver(hand_out: Callable[[], Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(hand_out)

        def ticket(i: int, each: TextOrder) -> Ticket:
            def hear(what: Event) -> None:
                heard.put_nowait((i, what))

            row, new = each.row, asked.min_tokens
            ends = line.stops | each.ends
            text = Text(reader.tokenizer, row.tokens, asked.stop, ends, reader.vocabulary, not asked.stream, new)
            return Ticket(row, text, hear, asked.stream, each.echo or "")

        line.deliver = deliver  # there is one loop
        tickets = [ticket(i, each) for i, each in enumerate(wanted)]
        try:
            line.submit(tickets)
        except Full:
            raise no_room(len(tickets)) from None
        except LineEnd as error:
            raise Refusal(503, str(error)) from None
        prompts = sum(len(each.row.tokens) for each in wanted if each.row.number == 0)
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        exchange = Exchange(line, tickets, heard, Reply(name, prompts, density, is_chat, usage))
        if asked.top is not None:
            for choice, each in zip(exchange.choices, wanted, strict=True):
                choice.keep(
                    ChoiceScores(texts, before(each), is_chat), each.row.tokens[0] if each.echo is not None else None
                )
        if asked.stream:
            return StreamingResponse(exchange.stream(), media_type="text/event-stream")
        return await exchange.whole(request)

    def before(each: TextOrder) -> Decoder:
        return Decoder(reader.tokenizer, each.row.tokens if each.echo is None else (), reader.vocabulary)

    return app


class Exchange:
    """A request whose texts are in the line."""

    def __init__(
        self, line: Line, tickets: Sequence[Ticket], heard: "asyncio.Queue[tuple[int, Event]]", reply: Reply
    ) -> None:
        self.line, self.tickets, self.heard, self.reply = line, tickets, heard, reply
        self.choices = [Choice() for _ in tickets]

    @property
    def done(self) -> bool:
        """Whether every text has its end."""
        return all(choice.finish for choice in self.choices)

    def take(self, i: int, event: Event) -> None:
        """Add an event to its choice. Raises Refusal for an error."""
        if event.error is not None:
            raise Refusal(event.status, event.error)
        choice = self.choices[i]
        choice.scores += event.scores
        choice.text, choice.tokens = choice.text + event.text, choice.tokens + event.tokens
        choice.finish = event.finish
        self.reply.acceptance = event.acceptance
        choice.cached = event.cached

    async def whole(self, request: Request) -> Response:
        """The answer when all texts are there. A client that has gone frees its rows."""
        try:
            while not self.done:
                try:
                    self.take(*await asyncio.wait_for(self.heard.get(), LISTEN_SECONDS))
                except TimeoutError:
                    if await request.is_disconnected():
                        return Response(status_code=499)
            for choice in self.choices:
                choice.logprobs = await choice.told()
            return JSONResponse(self.reply.body(self.choices))
        finally:
            self.line.cancel(self.tickets)

    async def stream(self) -> AsyncIterator[str]:
        """Events of the texts as they come. A client that goes ends the generator, which frees its rows."""
        try:
            begun = not self.reply.chat
            while not self.done:
                i, what = await self.heard.get()
                self.take(i, what)
                if not begun:
                    yield self.reply.first_chunks(len(self.choices))
                    begun = True
                if what.text or what.finish:
                    yield self.reply.chunk(i, what.text, what.finish, await self.choices[i].told())
            if self.reply.tells_usage:
                yield self.reply.last_chunk(self.choices)
            yield "data: [DONE]\n\n"
        except Refusal as error:
            yield event(error_body(error.status, str(error)))
        finally:
            self.line.cancel(self.tickets)
