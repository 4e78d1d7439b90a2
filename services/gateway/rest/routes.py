"""The routes: each reads its request, asks the core, and answers in the shape its callers expect.

Owns the table of paths. Every path but the health checks needs a credential (see `application`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.routing import Route

from baton.errors import Reason, ServiceError
from baton.stages import RECEIVE
from baton.tracing import span
from services.gateway.answers import Member
from services.gateway.core import Ask, GatewayCore
from services.gateway.measures import RequestLine
from services.gateway.request import CacheMode, ChatPrompt, TextPrompt
from services.gateway.rest.answer import AnswerFrame
from services.gateway.rest.chat_answer import ChatShape
from services.gateway.rest.chat_request import CONTENT_CHARS_MAX, read_chat_request, read_messages
from services.gateway.rest.completion_answer import CompletionShape
from services.gateway.rest.completion_request import PROMPT_TOKENS_MAX, read_completion_request
from services.gateway.rest.context import RequestContext
from services.gateway.rest.exchange import (
    Receive,
    Scope,
    Send,
    header,
    read_body,
    send_bytes,
    send_json,
)
from services.gateway.rest.json_body import invalid, parse_object
from services.gateway.rest.prefix_routes import PREFIX_HEADER, PrefixRoutes
from services.gateway.rest.reader import ObjectReader, checked_whole
from services.gateway.rest.sampling_fields import CommonFields, read_model
from services.gateway.rest.serve import Served, accounted, serve
from services.gateway.rest.session_routes import SessionRoutes
from services.gateway.traces import TraceGatherer

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
IGNORED_HEADER_CHARS_MAX: Final = 1024
TRACE_ID_CHARS_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RestLimits:
    """Bounds on one request over HTTP."""

    body_bytes_max: int
    answers_max: int
    timeout_s: float
    timeout_s_max: float


class _Endpoint:
    """An ASGI application made of one method, so that starlette leaves receive and send to us."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the exchange on."""
        await self._handler(scope, receive, send)


class Routes:
    """The handlers, over one core."""

    def __init__(
        self,
        core: GatewayCore,
        limits: RestLimits,
        version: str,
        traces: TraceGatherer | None = None,
    ) -> None:
        self._core = core
        self._traces = traces
        self._limits = limits
        self._version = version

    def table(self) -> list[Route]:
        """Every route."""
        gets: dict[str, Handler] = {
            "/healthz": self._alive,
            "/ping": self._alive,
            "/readyz": self._ready,
            "/health": self._ready,
            "/readyz/{service}": self._part_ready,
            "/version": self._show_version,
            "/metrics": self._show_metrics,
            "/debug/traces/{id}": self._show_trace,
            "/v1/models": self._models,
            "/v1/models/{model:path}": self._model,
        }
        posts: dict[str, Handler] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._complete,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        routes = [_route(path, handler, ("GET", "HEAD")) for path, handler in gets.items()]
        routes += [_route(path, handler, ("POST",)) for path, handler in posts.items()]
        routes.append(_route("/v1/requests/{id}", self._cancel, ("DELETE",)))
        bytes_max = self._limits.body_bytes_max
        for more in (SessionRoutes(self._core, bytes_max), PrefixRoutes(self._core, bytes_max)):
            routes += [_route(path, handler, (method,)) for path, handler, method in more.table()]
        return routes

    # --- health and facts ----------------------------------------------------------------------

    async def _alive(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, b"ok\n", {"content-type": "text/plain; charset=utf-8"})

    async def _ready(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        status, text = (200, b"ok\n") if self._core.is_ready() else (503, b"not ready\n")
        await send_bytes(send, status, text, {"content-type": "text/plain; charset=utf-8"})

    async def _part_ready(self, scope: Scope, _receive: Receive, send: Send) -> None:
        missing = self._core.missing_part(scope["path_params"]["service"])
        status, text = (200, "ok") if missing is None else (503, missing)
        body = f"{text}\n".encode()
        await send_bytes(send, status, body, {"content-type": "text/plain; charset=utf-8"})

    async def _show_version(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_json(send, {"version": self._version})

    async def _show_metrics(self, scope: Scope, _receive: Receive, send: Send) -> None:
        text, kind = self._core.measures.negotiated(header(scope, "accept"))
        await send_bytes(send, 200, text, {"content-type": kind})

    async def _show_trace(self, scope: Scope, _receive: Receive, send: Send) -> None:
        tenant, wanted = RequestContext.of(scope).tenant, scope["path_params"]["id"]
        found = None
        if self._traces is not None and len(wanted) <= TRACE_ID_CHARS_MAX:
            found = await self._traces.find_for(tenant.name, wanted)
        if found is None:
            raise ServiceError(
                Reason.NOT_FOUND,
                "no trace of yours is kept under this id; only the last ones are",
                field="id",
            )
        await send_json(send, found)

    async def _models(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_json(send, {"object": "list", "data": [self._model_body()]})

    async def _model(self, scope: Scope, _receive: Receive, send: Send) -> None:
        self._core.model.require(scope["path_params"]["model"])
        await send_json(send, self._model_body())

    def _model_body(self) -> dict[str, Any]:
        model = self._core.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_wall_s,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": self._core.context_max(),
        }

    # --- answers -------------------------------------------------------------------------------

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = self._line(scope, "chat")
        with accounted(self._core, line):
            with span(RECEIVE):
                asked = read_chat_request(
                    await self._body(scope, receive), answers_max=self._limits.answers_max
                )
            self._check_strict(scope, asked.ignored)
            ask = self._ask(scope, asked.common, [(asked.prompt, "messages")])
            ask = replace(ask, continues=asked.continues)
            members = await self._core.prepare(ask)
            await self._check_prefix(scope, members)
            frame = self._frame("chatcmpl", scope, asked.common, members)
            served = Served(
                members=members,
                frame=frame,
                shape=ChatShape(frame),
                stream=asked.common.stream,
                line=line,
                headers=_ignored_headers(asked.ignored),
            )
            await serve(self._core, served, receive, send)

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = self._line(scope, "completions")
        with accounted(self._core, line):
            with span(RECEIVE):
                asked = read_completion_request(
                    await self._body(scope, receive), answers_max=self._limits.answers_max
                )
            self._check_strict(scope, asked.ignored)
            prompts = list(zip(asked.prompts, asked.prompt_paths, strict=True))
            members = await self._core.prepare(self._ask(scope, asked.common, prompts))
            await self._check_prefix(scope, members)
            frame = self._frame("cmpl", scope, asked.common, members)
            echoes = _echoes(members[:: asked.common.answers]) if asked.has_echo else None
            served = Served(
                members=members,
                frame=frame,
                shape=CompletionShape(frame, echoes, self._core.model.tokenizer),
                stream=asked.common.stream,
                line=line,
                headers=_ignored_headers(asked.ignored),
            )
            await serve(self._core, served, receive, send)

    def _line(self, scope: Scope, route: str) -> RequestLine:
        context = RequestContext.of(scope)
        return RequestLine(
            route=route,
            request_id=context.request_id,
            tenant=context.tenant.name,
            service_class=context.tenant.service_class,
            model=self._core.model.name,
            client_request_id=context.client_request_id,
        )

    def _ask(self, scope: Scope, common: CommonFields, prompts: list[Any]) -> Ask:
        context = RequestContext.of(scope)
        is_cache_off = (header(scope, "x-cache") or "").strip().lower() == "off"
        return Ask(
            tenant=context.tenant,
            prompts=prompts,
            sampling=common.sampling,
            answers=common.answers,
            cache_mode=CacheMode.OFF if is_cache_off else CacheMode.READ_WRITE,
            cache_salt=common.cache_salt,
            is_dropped_at_end=common.is_dropped_at_end,
            timeout_s=self._timeout_s(scope),
            model=common.model,
            max_tokens_field=common.max_tokens_field,
            request_id=context.request_id,
            received_s=self._core.clock.monotonic_s() - (time.monotonic() - context.received_s),
        )

    def _frame(
        self, prefix: str, scope: Scope, common: CommonFields, members: Sequence[Member]
    ) -> AnswerFrame:
        firsts = members[:: common.answers]
        return AnswerFrame(
            answer_id=f"{prefix}-{RequestContext.of(scope).request_id}",
            model=self._core.model.name,
            created_wall_s=int(self._core.clock.wall_s()),
            samples=common.answers,
            has_logprobs=common.sampling.logprobs,
            has_top_logprobs=common.sampling.top_logprobs > 0,
            has_token_ids=common.has_token_ids,
            prompt_token_ids=tuple(one.request.prompt.token_ids for one in firsts),
        )

    async def _body(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        return parse_object(await read_body(scope, receive, self._limits.body_bytes_max))

    def _timeout_s(self, scope: Scope) -> float:
        text = header(scope, "x-request-timeout")
        if text is None:
            return self._limits.timeout_s
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0.0 < seconds <= self._limits.timeout_s_max:
            raise invalid(
                f"X-Request-Timeout must be above 0 and at most {self._limits.timeout_s_max:g} s",
                "X-Request-Timeout",
            )
        return seconds

    async def _check_prefix(self, scope: Scope, members: Sequence[Member]) -> None:
        """A request that names its published prefix is refused where that cannot be."""
        wanted = header(scope, PREFIX_HEADER)
        if wanted is None:
            return
        # The stores are asked once, however many prompts there are.
        prompts = [one.request.prompt for one in members if one.after is None]
        await self._core.prefixes.require(RequestContext.of(scope).tenant, wanted, prompts)

    def _check_strict(self, scope: Scope, ignored: tuple[str, ...]) -> None:
        if ignored and b"strict=1" in scope["query_string"].split(b"&"):
            raise invalid(f"{ignored[0]} is not known here (strict=1)", ignored[0])

    # --- tokens --------------------------------------------------------------------------------

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = ObjectReader(await self._body(scope, receive))
        self._core.model.require(read_model(reader))
        has_texts = reader.flag("return_token_strs")
        if reader.has("messages"):
            turns, _ = read_messages(reader)
            has_header = reader.flag("add_generation_prompt", default=True)
            encoded = await self._core.model.encode(
                ChatPrompt(turns=turns, has_assistant_header=has_header), "messages"
            )
            ids = encoded.token_ids
        else:
            text = reader.text("prompt", chars_max=CONTENT_CHARS_MAX)
            if text is None:
                raise invalid("give prompt (a string) or messages", "prompt")
            ids = ()
            if text:
                ids = (await self._core.model.encode(TextPrompt(text=text), "prompt")).token_ids
        spell = self._core.model.tokenizer.token_text
        body = {
            "count": len(ids),
            "max_model_len": self._core.context_max(),
            "tokens": list(ids),
            "token_strs": [spell(one) for one in ids] if has_texts else None,
        }
        await send_json(send, body)

    async def _detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = ObjectReader(await self._body(scope, receive))
        self._core.model.require(read_model(reader))
        tokens = reader.items("tokens", count_max=PROMPT_TOKENS_MAX)
        if tokens is None:
            raise invalid("tokens must be a list of token ids", "tokens")
        last = self._core.model.tokenizer.vocab_size - 1
        ids = [checked_whole(one, f"tokens[{i}]", 0, last) for i, one in enumerate(tokens)]
        text = self._core.model.tokenizer.decode(ids, skip_special=False)
        await send_json(send, {"prompt": text})

    # --- requests ------------------------------------------------------------------------------

    async def _cancel(self, scope: Scope, _receive: Receive, send: Send) -> None:
        wanted = scope["path_params"]["id"]
        if not self._core.cancel(RequestContext.of(scope).tenant, wanted):
            raise ServiceError(
                Reason.NOT_FOUND,
                "no such request runs; its id is the X-Baton-Request-Id of its response",
                field="id",
            )
        await send_json(send, {"id": wanted, "object": "request", "cancelled": True})


def _echoes(firsts: Sequence[Member]) -> list[str]:
    """The prompts as text, one per prompt."""
    return [one.request.prompt.rendered.decode("utf-8", "replace") for one in firsts]


def _ignored_headers(ignored: tuple[str, ...]) -> dict[str, str]:
    if not ignored:
        return {}
    return {"x-baton-ignored-params": ",".join(ignored)[:IGNORED_HEADER_CHARS_MAX]}


def _route(path: str, handler: Handler, methods: tuple[str, ...]) -> Route:
    return Route(path, _Endpoint(handler), methods=list(methods))
