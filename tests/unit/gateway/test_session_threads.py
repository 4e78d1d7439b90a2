"""Long texts of sessions: tokenised beside the loop, so that nobody else's answer waits."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.capability import DEV_KEY, CapabilitySigner
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.testing.tiny_models import TinyModel, write_directory
from services.gateway.__main__ import load_model
from services.gateway.client_sessions import LineageLog, Session, SessionClient
from services.gateway.legs import CapabilityMint
from services.gateway.opening import SequenceParts
from services.gateway.prompts import INLINE_CHARS_MAX, ServedModel
from services.gateway.request import ChatPrompt, ChatTurn, ParentLog, Role, Tenant
from services.gateway.session_calls import Sessions
from services.gateway.session_edit import Anchor, EditOrder

TENANT = Tenant(name="acme")
ADDRESS = "store:1"
LONG = "word " * INLINE_CHARS_MAX
TURNS = (
    ChatTurn(role=Role.USER, content="What is it?"),
    ChatTurn(role=Role.ASSISTANT, content="A stone."),
)


@dataclass(slots=True)
class Watched:
    """A tokenizer that remembers in which threads it was asked to encode."""

    inner: Any
    threads: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name.startswith("encode"):
            self.threads.append(threading.get_ident())
        return found


@dataclass(frozen=True, slots=True)
class OneSession:
    """A store with one session."""

    ids: tuple[int, ...]

    async def get(
        self, _address: str, session_id: str, _capability: str, *, with_lineage: bool = False
    ) -> tuple[Session, list[LineageLog]]:
        """It."""
        assert not with_lineage
        head = ParentLog(log_id=bytes(16), position=len(self.ids), address=ADDRESS)
        session = Session(
            session_id=session_id,
            generation=1,
            head=head,
            address=ADDRESS,
            create_wall_s=1.0,
            expire_wall_s=2.0,
            ttl_s=1.0,
            parent_id=None,
            parent_position=0,
        )
        return session, []

    async def tokens(self, _log: ParentLog, _capability: str) -> tuple[int, ...]:
        """Its history."""
        return self.ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """The tiny model's tokenizer and chat template."""
    return load_model(str(write_directory(tmp_path_factory.mktemp("model"), TinyModel())))


@pytest.mark.parametrize("call", ["create", "edit", "continued"])
async def test_a_long_text_is_tokenised_beside_the_loop(model: ServedModel, call: str) -> None:
    """Too long for the context is known only then; short ones are not worth a thread."""
    ids = model.encode_turns(ChatPrompt(turns=TURNS, has_assistant_header=False))
    watched = Watched(model.tokenizer)
    parts = SimpleNamespace(
        prefixes=SimpleNamespace(addresses=lambda: (ADDRESS,)),
        planner=SimpleNamespace(context_max=lambda: None),
        mint=CapabilityMint(CapabilitySigner(DEV_KEY, SystemClock())),
    )
    sessions = Sessions(
        cast("SequenceParts", parts),
        replace(model, tokenizer=cast("Any", watched)),
        cast("SessionClient", OneSession(ids)),
    )
    turn = ChatTurn(role=Role.USER, content=LONG)
    order = EditOrder(start=Anchor(message=0), end=None, text=LONG)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "create": lambda: sessions.create(TENANT, source=None, turns=(turn,), ttl_s=None),
        "edit": lambda: sessions.edit(TENANT, "sess-1", order, None),
    }
    if call == "continued":
        found = await sessions.continued(TENANT, "sess-1", (turn,), field="session")
        assert found.token_ids[: len(ids)] == ids
    else:
        with pytest.raises(ServiceError) as refused:
            await calls[call]()
        assert refused.value.reason is Reason.PROMPT_TOO_LONG
    assert watched.threads
    assert threading.get_ident() not in watched.threads
