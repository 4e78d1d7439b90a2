"""An edit, a cut and a fork while a part ends at each step between their calls: old or new.

The history is read back from the log that the session names, to the token; afterwards the session
is edited again and nothing is held.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httpx
import pytest

from baton.api.kvstore.v1 import kvstore_pb2
from tests.faults.drill import Drill, prompt_of, until
from tests.faults.test_sessions import CONTEXT, NEW, completed, edit, named

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

AT: Final = 7
CUT: Final = 21

EDIT_POINTS: Final = (
    ("gateway-0", "session.after_read"),
    ("gateway-0", "gateway.before_open"),
    ("gateway-0", "session.after_open"),
    ("gateway-0", "session.after_seal"),
    ("gateway-0", "session.after_set"),
    ("prefill-0", "prefill.after_accept"),
    ("prefill-0", "prefill.before_commit"),
    ("prefill-0", "prefill.before_send"),
    ("prefill-0", "prefill.after_seal"),
    ("kvstore-0", "kv.before_commit"),
    ("kvstore-0", "kv.after_commit"),
    ("kvstore-0", "kv.before_session"),
    ("kvstore-0", "kv.after_session"),
)
CUT_POINTS: Final = (
    ("gateway-0", "session.after_fork"),
    ("gateway-0", "session.after_set"),
    ("kvstore-0", "kv.before_session"),
    ("kvstore-0", "kv.after_session"),
)


def seed_of(*words: str) -> int:
    """A prompt of its own for each case."""
    return 100 + sum(map(ord, "".join(words))) % 5000


async def shown(drill: Drill, session_id: str) -> dict[str, Any]:
    """The session, as soon as it is read again."""
    found: list[dict[str, Any]] = []

    async def is_read() -> bool:
        try:
            answer = await drill.client.get(f"/v1/sessions/{session_id}")
        except httpx.HTTPError:
            return False
        # Never a 404: the name must not be lost.
        assert answer.status_code in (200, 503), answer.text
        if answer.status_code == 200:
            found.append(answer.json())
        return bool(found)

    await until(is_read, 60.0, "the session is read again")
    return found[-1]


async def history(drill: Drill, session: dict[str, Any]) -> list[int]:
    """The token ids that a session names."""
    told, _ = await drill.log_image(session["log_id"])
    pieces = [kvstore_pb2.ReplayLogResponse.FromString(one) for one in told]
    ids = [token for piece in pieces for token in piece.tokens.token_ids]
    return ids[: session["tokens"]]


async def tried(call: Any) -> httpx.Response | None:
    """The answer; None where the connection ended without one."""
    try:
        answer: httpx.Response = await call
    except httpx.HTTPError:
        return None
    return answer


async def goes_on(drill: Drill, session: dict[str, Any], ids: list[int]) -> None:
    """The session is edited again, and answers as its tokens do."""
    answers: list[int] = []

    async def is_edited() -> bool:
        answer = await tried(edit(drill, session["id"], 0, 1))
        answers.append(0 if answer is None else answer.status_code)
        return answers[-1] == 200

    await until(is_edited, 60.0, lambda: f"the session is edited again: {answers}")
    now = await shown(drill, session["id"])
    new = [*NEW, *ids[1:]]
    assert await history(drill, now) == new
    mine = await completed(drill, new, is_fresh=False)
    fresh = await completed(drill, new, is_fresh=True)
    assert mine["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]


async def ended_at(drill: Drill, victim: str, point: str, call: Any) -> httpx.Response | None:
    """A call during which a part ends at a point; the cluster is whole again."""
    before = drill.pid(victim)
    await drill.arm(victim, f"{point}:exit:once")
    answer = await tried(call)

    async def is_restarted() -> bool:
        return drill.pid(victim) != before

    await until(is_restarted, 60.0, f"{victim} ended at {point} and was started again")
    await drill.is_whole()
    return answer


@pytest.mark.parametrize(("victim", "point"), EDIT_POINTS, ids=[p for _, p in EDIT_POINTS])
async def test_an_edit_that_ends_anywhere_leaves_the_old_or_the_new(
    drill: Drill, victim: str, point: str
) -> None:
    """A worker's death costs the edit a moment, not its answer."""
    ids = prompt_of(seed_of(victim, point), CONTEXT)
    session = await named(drill, ids)
    answer = await ended_at(drill, victim, point, edit(drill, session["id"], AT, AT + 1))
    after = await shown(drill, session["id"])
    new = [*ids[:AT], *NEW, *ids[AT + 1 :]]
    seen = (after["generation"], await history(drill, after))
    assert seen in ((1, ids), (2, new)), seen
    if victim == "prefill-0":
        assert answer is not None
        assert answer.status_code == 200, answer.text
    if answer is not None and answer.status_code == 200:
        assert seen == (2, new)
    if point in ("session.after_read", "gateway.before_open", "session.after_open"):
        assert seen == (1, ids)
    await goes_on(drill, after, seen[1])


@pytest.mark.parametrize(("victim", "point"), CUT_POINTS, ids=[p for _, p in CUT_POINTS])
async def test_a_cut_that_ends_anywhere_leaves_the_old_or_the_new(
    drill: Drill, victim: str, point: str
) -> None:
    """Also where the answer to its naming is lost: the cut history is not given up."""
    ids = prompt_of(seed_of("cut", victim, point), CONTEXT)
    session = await named(drill, ids)
    path = f"/v1/sessions/{session['id']}/truncate"
    call = drill.client.post(path, json={"position": CUT})
    answer = await ended_at(drill, victim, point, call)
    after = await shown(drill, session["id"])
    seen = (after["generation"], await history(drill, after))
    assert seen in ((1, ids), (2, ids[:CUT])), seen
    if answer is not None and answer.status_code == 200:
        assert seen == (2, ids[:CUT])
    await goes_on(drill, after, seen[1])


@pytest.mark.parametrize("action", ["edit", "truncate"])
async def test_a_client_who_leaves_while_it_is_named_breaks_nothing(
    drill: Drill, action: str
) -> None:
    """The store is about to record the change when the connection ends."""
    ids = prompt_of(seed_of("leave", action), CONTEXT)
    session = await named(drill, ids)
    point = "kv.before_session"
    await drill.arm("kvstore-0", f"{point}:pause:30:once")
    before = await drill.hits("kvstore-0", point)
    body: dict[str, Any] = {"position": CUT}
    if action == "edit":
        body = {
            "start": {"token": AT},
            "end": {"token": AT + 1},
            "replacement": {"token_ids": NEW},
        }
    call = drill.client.post(f"/v1/sessions/{session['id']}/{action}", json=body)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(tried(call))
        await drill.until_hit(["kvstore-0"], point, [before])
        task.cancel()
    await drill.disarm("kvstore-0")
    await drill.settles()
    after = await shown(drill, session["id"])
    new = ids[:CUT] if action == "truncate" else [*ids[:AT], *NEW, *ids[AT + 1 :]]
    seen = (after["generation"], await history(drill, after))
    assert seen in ((1, ids), (2, new)), seen
    await goes_on(drill, after, seen[1])
