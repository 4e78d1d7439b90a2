"""Who may call what of the kvstore's sessions: more rows of `rights_table`.

Owns these rows only.
"""

from __future__ import annotations

from typing import Final

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import sessions_pb2
from baton.capability import Right
from baton.ids import new_request_id
from tests.integration.kvstore.harness import BLOCK
from tests.integration.kvstore.rights_table import Build, Row


def _set_session(expected: int) -> Build:
    return lambda scene: sessions_pb2.SetSessionRequest(
        request_id=new_request_id(),
        session_id=scene.session_id,
        expected_generation=expected,
        head=common_pb2.LogPosition(log_id=scene.kept.log_id, position=BLOCK),
    )


def _delete_session(expected: int) -> Build:
    return lambda scene: sessions_pb2.DeleteSessionRequest(
        request_id=new_request_id(), session_id=scene.session_id, expected_generation=expected
    )


SESSION_ROWS: Final[dict[str, Row]] = {
    "SetSession": Row(
        rights=frozenset({Right.OPEN, Right.FORK}),
        build=_set_session(expected=2),
        stale=_set_session(expected=1),
    ),
    "GetSession": Row(
        rights=frozenset({Right.READ}),
        build=lambda scene: sessions_pb2.GetSessionRequest(session_id=scene.session_id),
        no_generation="a session is read as it is now",
    ),
    "ListSessions": Row(
        rights=frozenset({Right.READ}),
        build=lambda _scene: sessions_pb2.ListSessionsRequest(),
        harmless_for_others="everybody lists its own",
        no_generation="the call names no log",
    ),
    "DeleteSession": Row(
        rights=frozenset({Right.OPEN, Right.FORK}),
        build=_delete_session(expected=2),
        stale=_delete_session(expected=1),
    ),
    "FindAnswer": Row(
        rights=frozenset({Right.READ}),
        build=lambda scene: sessions_pb2.FindAnswerRequest(request_id=scene.kept_request_id),
        no_generation="the call names no log",
    ),
}
