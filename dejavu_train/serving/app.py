"""The application: routes, checks before them, and the way from a request to the line and back."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from dejavu_train.engine.inputs import Row
from dejavu_train.serving.line import Ended, Event, Full, Line, Ticket
from dejavu_train.serving.replies import Choice, Refusal, Reply, error_body, event
from dejavu_train.serving.requests import Asked, Chat, Completion, Reader, explain
from dejavu_train.serving.text import Text

LISTEN_SECONDS = 0.2  # between two looks whether a client is still there
MOST_BYTES = 8 * 2**20  # of a request's body


class Guarded:
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
            given = headers.get("authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self.key.encode()):
                refusal = 401, "the key is missing or wrong; send it as Authorization: Bearer KEY"
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await JSONResponse(error_body(*refusal), refusal[0])(scope, receive, send)


def make_app(line: Line, reader: Reader, name: str, density: dict[str, float], key: str | None = None) -> FastAPI:
    """The application of a line that was started. name: of the model."""
    app = FastAPI(title="dejavu serve", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guarded, key=key)
    app.state.reader = reader

    @app.exception_handler(Refusal)
    async def refuse(_: Request, error: Refusal) -> JSONResponse:
        waits = {"retry-after": "1"} if error.status == 429 else None
        return JSONResponse(error_body(error.status, str(error), error.param, error.code), error.status, waits)

    @app.exception_handler(RequestValidationError)
    async def correct(_: Request, error: RequestValidationError) -> JSONResponse:
        field, said = explain(error.errors(), error.body)
        return JSONResponse(error_body(400, said, field), 400)

    @app.exception_handler(HTTPException)
    async def tell(request: Request, error: HTTPException) -> JSONResponse:
        said = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_body(error.status_code, said), error.status_code)

    @app.exception_handler(Exception)
    async def apologise(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, "the server has a bug; its log has the traceback"), 500)

    @app.get("/health")
    async def health() -> JSONResponse:
        failed = line.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(line.metrics.write(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "dejavu"}]}

    @app.post("/v1/completions")
    async def complete(asked: Completion, request: Request) -> Response:
        return await answer(asked, await asyncio.to_thread(reader.completion, asked), request, False)

    @app.post("/v1/chat/completions")
    async def chat(asked: Chat, request: Request) -> Response:
        return await answer(asked, await asyncio.to_thread(reader.chat, asked), request, True)

    async def answer(asked: Asked, rows: Sequence[Row], request: Request, is_chat: bool) -> Response:
        if asked.model != name:
            raise Refusal(404, f"there is no model {asked.model} here; ask for {name}", "model", "model_not_found")
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def deliver(hand_out: Callable[[], Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(hand_out)

        def ticket(i: int, row: Row) -> Ticket:
            def hear(what: Event) -> None:
                heard.put_nowait((i, what))

            return Ticket(row, Text(reader.tokenizer, asked.stops, not asked.stream), hear, bool(asked.stream))

        line.deliver = deliver  # there is one loop
        tickets = [ticket(i, row) for i, row in enumerate(rows)]
        try:
            line.submit(tickets)
        except Full:
            if len(rows) > line.reach:
                said = f"this server has rows and places for {line.reach} texts, got {len(rows)} at once; ask for fewer"
                raise Refusal(400, said, "n") from None
            raise Refusal(429, "too many texts wait; ask again later", code="queue_full") from None
        except Ended as error:
            raise Refusal(503, str(error)) from None
        prompts = sum(len(row.tokens) for row in rows if row.number == 0)
        exchange = Exchange(line, tickets, heard, Reply(name, prompts, density, is_chat))
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            return StreamingResponse(exchange.stream(usage), media_type="text/event-stream")
        return await exchange.whole(request)

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
            raise Refusal(503 if "server" in event.error else 500, event.error)
        choice = self.choices[i]
        choice.text, choice.tokens = choice.text + event.text, choice.tokens + event.tokens
        choice.finish = event.finish
        self.reply.acceptance = event.acceptance

    async def whole(self, request: Request) -> Response:
        """The answer when all texts are there. A client that has gone frees its rows."""
        try:
            while not self.done:
                try:
                    self.take(*await asyncio.wait_for(self.heard.get(), LISTEN_SECONDS))
                except TimeoutError:
                    if await request.is_disconnected():
                        return Response(status_code=499)
            return JSONResponse(self.reply.body(self.choices))
        finally:
            self.line.cancel(self.tickets)

    async def stream(self, usage: bool) -> AsyncIterator[str]:
        """Events of the texts as they come. A client that goes ends the generator, which frees its rows."""
        try:
            while not self.done:
                i, what = await self.heard.get()
                self.take(i, what)
                if what.text or what.finish:
                    yield self.reply.chunk(i, what.text, what.finish)
            if usage:
                yield self.reply.last_chunk(self.choices)
            yield "data: [DONE]\n\n"
        except Refusal as error:
            yield event(error_body(error.status, str(error)))
        finally:
            self.line.cancel(self.tickets)
