"""The gateway on gRPC: the same business as over REST, with generated stubs alone.

Owns the translation of GatewayService. Every call but none is without a credential; refusals are
ServiceErrors that the interceptor sends.
"""

from __future__ import annotations

from typing import Any, Final

import grpc

from baton.api.common.v1 import common_pb2
from baton.api.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.ids import LOG_ID_BYTES, new_log_id, new_request_id
from baton.tracing import span
from baton.wire.durations import duration_from_proto, duration_to_proto, timestamp_to_proto
from baton.wire.finish import finish_to_proto
from baton.wire.sampling import sampling_from_proto
from services.gateway.auth import Authenticator
from services.gateway.core import Ask, GatewayCore
from services.gateway.events import Admitted, Completed, TokenDelta
from services.gateway.hub import WorkerHub
from services.gateway.measures import RequestLine
from services.gateway.prefix_desk import PrefixView
from services.gateway.publishing import PublishOrder
from services.gateway.registry import WorkerRole
from services.gateway.request import (
    ID_CHARS_MAX,
    ChatPrompt,
    ChatTurn,
    Continues,
    Prompt,
    Role,
    Tenant,
    TextPrompt,
    TokensPrompt,
)
from services.gateway.rest.serve import accounted
from services.gateway.timing import FirstSends
from services.gateway.wire import (
    cache_mode_from_proto,
    delta_to_proto,
    exactness_to_proto,
    kv_source_to_proto,
    label_message,
    usage_to_proto,
)

_Context = grpc.aio.ServicerContext[Any, Any]

TIMEOUT_S: Final = 600.0
CAPABILITY_TTL_S: Final = 600.0
MESSAGES_MAX: Final = 4096
TENANTS_MAX: Final = 1024

_CLIENT_RIGHTS: Final = {
    "blob_put": Right.BLOB_PUT,
    "blob_get": Right.BLOB_GET,
    "read": Right.READ,
    "fork": Right.FORK,
}


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Implements GatewayService over one core."""

    def __init__(self, core: GatewayCore, authenticator: Authenticator, hub: WorkerHub) -> None:
        self._core = core
        self._authenticator = authenticator
        self._hub = hub

    # A coroutine that writes, not a generator: a call that ends early must end its sequences here,
    # in this task, and a generator closed at a yield cannot wait for them.
    async def Generate(  # type: ignore[override]
        self, request: gateway_pb2.GenerateRequest, context: _Context
    ) -> None:
        """Admitted, tokens, completed."""
        tenant = self._tenant(context)
        line = RequestLine(
            route="grpc",
            request_id=new_request_id(),
            tenant=tenant.name,
            service_class=tenant.service_class,
            model=self._core.model.name,
        )
        with (
            accounted(self._core, line),
            span("request", request_id=line.request_id, tenant=tenant.name),
        ):
            members = await self._core.prepare(self._ask(request, tenant, context, line))
            sends = FirstSends(self._core.clock)
            async with self._core.run(members) as events:
                async for item in events:
                    event = item.event
                    if isinstance(event, Completed):
                        event = sends.corrected(item.index, event)
                        line.answers.append(event)
                    response = _response(event)
                    if response is not None:
                        await context.write(response)
                    if isinstance(event, TokenDelta):
                        sends.sent(item.index)

    def _ask(
        self,
        request: gateway_pb2.GenerateRequest,
        tenant: Tenant,
        context: _Context,
        line: RequestLine,
    ) -> Ask:
        continues = _continues(request)
        prompt, field = _prompt(request) if continues is None else (_new_turns(request), "chat")
        left_s = context.time_remaining()
        return Ask(
            tenant=tenant,
            prompts=[(prompt, field)],
            sampling=sampling_from_proto(request.sampling),
            answers=1,
            cache_mode=cache_mode_from_proto(request.cache_mode),
            cache_salt=request.cache_salt or None,
            is_dropped_at_end=request.drop_at_end,
            timeout_s=TIMEOUT_S if left_s is None else min(TIMEOUT_S, left_s),
            model=request.model,
            request_id=line.request_id,
            continues=continues,
        )

    async def Cancel(
        self, request: gateway_pb2.CancelRequest, context: _Context
    ) -> gateway_pb2.CancelResponse:
        """Stop a running request of the same tenant."""
        tenant = self._tenant(context)
        return gateway_pb2.CancelResponse(found=self._core.cancel(tenant, request.request_id))

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: _Context
    ) -> gateway_pb2.TokenizeResponse:
        """Show the ids of a prompt."""
        self._tenant(context)
        self._core.model.require(request.model)
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise _invalid("prompt", "must be given: chat or text")
        prompt: Prompt = TextPrompt(text=request.text)
        if kind == "chat":
            prompt = ChatPrompt(turns=turns_of(request.chat))
        encoded = await self._core.model.encode(prompt, kind)
        return gateway_pb2.TokenizeResponse(
            token_ids=encoded.token_ids, context_max=self._core.context_max()
        )

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: _Context
    ) -> gateway_pb2.ListModelsResponse:
        """The one model, with the label of its decode workers."""
        self._tenant(context)
        model = gateway_pb2.Model(id=self._core.model.name, context_max=self._core.context_max())
        for record in self._hub.routable(WorkerRole.DECODE):
            model.label.CopyFrom(label_message(record))
            break
        return gateway_pb2.ListModelsResponse(models=[model])

    async def CreatePrefix(
        self, request: gateway_pb2.CreatePrefixRequest, context: _Context
    ) -> gateway_pb2.CreatePrefixResponse:
        """Compute ahead and publish; with `no_wait` in the background."""
        tenant = self._tenant(context)
        self._core.model.require(request.model)
        kind = request.WhichOneof("content")
        if kind is None:
            raise _invalid("content", "must be given: chat or text")
        if len(request.tenants) > TENANTS_MAX:
            raise _invalid("tenants", f"may name at most {TENANTS_MAX}")
        has_ttl = request.HasField("ttl")
        order = PublishOrder(
            name=request.name,
            turns=turns_of(request.chat) if kind == "chat" else (),
            text=request.text if kind == "text" else None,
            tenants=tuple(request.tenants),
            ttl_s=duration_from_proto(request.ttl) if has_ttl else None,
            is_pinned=request.pin,
        )
        desk = self._core.prefixes
        if request.no_wait:
            view = desk.order(tenant, order)
        else:
            view = desk.view_of(await desk.publish(tenant, order))
        return gateway_pb2.CreatePrefixResponse(prefix=_prefix(view))

    async def ListPrefixes(
        self, request: gateway_pb2.ListPrefixesRequest, context: _Context
    ) -> gateway_pb2.ListPrefixesResponse:
        """Those the caller may use, and its own that are not ready."""
        found = await self._core.prefixes.visible(self._tenant(context))
        return gateway_pb2.ListPrefixesResponse(prefixes=[_prefix(one) for one in found])

    async def DeletePrefix(
        self, request: gateway_pb2.DeletePrefixRequest, context: _Context
    ) -> gateway_pb2.DeletePrefixResponse:
        """Revoke."""
        await self._core.prefixes.revoke(self._tenant(context), request.id)
        return gateway_pb2.DeletePrefixResponse()

    async def GetCapability(
        self, request: gateway_pb2.GetCapabilityRequest, context: _Context
    ) -> gateway_pb2.GetCapabilityResponse:
        """Mint a capability for the caller's own logs: the store checks whose log it is."""
        tenant = self._tenant(context)
        if len(request.log_id) not in (0, LOG_ID_BYTES):
            raise _invalid("log_id", f"must be {LOG_ID_BYTES} bytes, or empty for a new one")
        unknown = sorted(set(request.rights) - set(_CLIENT_RIGHTS))
        if unknown or not request.rights:
            raise _invalid("rights", f"must name one or more of {', '.join(_CLIENT_RIGHTS)}")
        log_id = request.log_id or new_log_id()
        capability = self._core.mint.mint(
            tenant,
            {_CLIENT_RIGHTS[name] for name in request.rights},
            ttl_s=CAPABILITY_TTL_S,
            request_id=new_request_id(),
            log_id=log_id,
        )
        expiry_wall_s = self._core.mint.expiry_wall_s(CAPABILITY_TTL_S)
        return gateway_pb2.GetCapabilityResponse(
            capability=capability,
            log_id=log_id,
            kvstore_address=self._core.kvstore_address(),
            expire_time=timestamp_to_proto(expiry_wall_s),
        )

    def _tenant(self, context: _Context) -> Tenant:
        value: str | None = None
        for key, found in context.invocation_metadata() or ():
            if key == "authorization":
                value = found if isinstance(found, str) else None
        return self._authenticator.tenant_of(value)


def _prompt(request: gateway_pb2.GenerateRequest) -> tuple[Prompt, str]:
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        return ChatPrompt(turns=turns_of(request.chat)), "chat"
    if kind == "text":
        return TextPrompt(text=request.text), "text"
    if kind == "token_ids":
        return TokensPrompt(token_ids=tuple(request.token_ids.ids)), "token_ids"
    raise _invalid("prompt", "must be given: chat, text or token_ids")


def _continues(request: gateway_pb2.GenerateRequest) -> Continues | None:
    """What the answer goes on from: then `chat` has the new turns only."""
    named = [
        (field, wanted)
        for field, wanted in (
            ("session", request.session),
            ("previous_response_id", request.previous_response_id),
        )
        if wanted
    ]
    if not named:
        return None
    if len(named) > 1:
        raise _invalid("previous_response_id", "must not be given together with session")
    ((field, wanted),) = named
    if len(wanted) > ID_CHARS_MAX:
        raise _invalid(field, f"may have {ID_CHARS_MAX} characters")
    if field == "session" and request.drop_at_end:
        raise _invalid("drop_at_end", "must not be set in a session: it names what is kept")
    return Continues(wanted=wanted, field=field)


def _new_turns(request: gateway_pb2.GenerateRequest) -> ChatPrompt:
    kind = request.WhichOneof("prompt")
    if kind not in (None, "chat"):
        raise _invalid(kind, "cannot go on from a session or an answer; give chat, or no prompt")
    turns = turns_of(request.chat) if request.chat.messages else ()
    return ChatPrompt(turns=turns)


def turns_of(chat: gateway_pb2.ChatMessages) -> tuple[ChatTurn, ...]:
    """The turns of a conversation; INVALID_REQUEST naming the path at fault."""
    if not 0 < len(chat.messages) <= MESSAGES_MAX:
        raise _invalid("chat.messages", f"must hold 1 to {MESSAGES_MAX} messages")
    turns: list[ChatTurn] = []
    for index, message in enumerate(chat.messages):
        if message.role not in {role.value for role in Role}:
            raise _invalid(f"chat.messages[{index}].role", "must be system, user or assistant")
        turns.append(ChatTurn(role=Role(message.role), content=message.content))
    return tuple(turns)


def _response(event: object) -> gateway_pb2.GenerateResponse | None:
    if isinstance(event, TokenDelta):
        return gateway_pb2.GenerateResponse(token=delta_to_proto(event))
    if isinstance(event, Admitted):
        admitted = gateway_pb2.Admitted(
            request_id=event.request_id,
            prompt_tokens=event.prompt_tokens,
            prefill_worker_id=event.prefill_worker_id or "",
            decode_worker_id=event.decode_worker_id,
        )
        return gateway_pb2.GenerateResponse(admitted=admitted)
    if isinstance(event, Completed):
        return gateway_pb2.GenerateResponse(completed=_completed(event))
    return None


def _completed(event: Completed) -> gateway_pb2.Completed:
    message = gateway_pb2.Completed(
        finish_reason=finish_to_proto(event.finish.value),
        usage=usage_to_proto(event.usage),
        exactness=exactness_to_proto(event.exactness),
        exactness_reason=event.exactness_reason,
        kv_source=kv_source_to_proto(event.kv_source),
        log=common_pb2.LogPosition(
            log_id=event.log_id, generation=event.generation, position=event.position
        ),
        time_to_first_token=duration_to_proto(max(event.time_to_first_token_s, 0.0)),
        kvstore_address=event.kvstore_address,
        stage_seconds=dict(event.stage_seconds),
        prefix_id=event.prefix_id or "",
        brought=event.brought or "",
        hidden_transfer_share=event.hidden_transfer_share,
    )
    if event.session is not None:
        mark = event.session
        message.session.id, message.session.generation = mark.session_id, mark.generation
        message.session.refusal = mark.refusal or ""
    return message


def _prefix(view: PrefixView) -> gateway_pb2.Prefix:
    message = gateway_pb2.Prefix(
        id=view.prefix_id,
        name=view.name,
        model=view.model,
        tenants=view.tenants,
        create_time=timestamp_to_proto(view.create_wall_s),
        status=view.status.value,
        detail=view.detail or "",
        pin=view.is_pinned,
        owner=view.owner,
    )
    prefix = view.prefix
    if prefix is None:
        return message
    message.tokens = prefix.tokens
    message.hits = prefix.hits
    message.version = prefix.version
    message.kv_bytes = prefix.kv_bytes
    message.text_hash = prefix.segment.text_hash or b""
    message.ids_hash = prefix.segment.ids_hash or b""
    message.tokenizer_hash = prefix.segment.tokenizer_hash
    message.template_digest = prefix.template_digest
    if prefix.expire_wall_s is not None:
        message.expire_time.CopyFrom(timestamp_to_proto(prefix.expire_wall_s))
    return message


def _invalid(field: str, remedy: str) -> ServiceError:
    return ServiceError(Reason.INVALID_REQUEST, f"{field} {remedy}", field=field)
