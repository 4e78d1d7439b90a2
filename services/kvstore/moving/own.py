"""The right that one kvstore shows to another, of its own and for one log.

Owns its claims. A kvstore has the cluster's key anyway; a tenant never gets such a capability.
"""

from __future__ import annotations

from typing import Final

from baton.capability import CapabilitySigner, Claims, Right
from baton.errors import Reason, ServiceError

OWN_TTL_S: Final = 60.0


class OwnRight:
    """Mints them."""

    def __init__(self, signer: CapabilitySigner) -> None:
        self._signer = signer

    def mint(self, log_id: bytes, purpose: str = "move") -> str:
        """A tenant-less capability to speak of one log's move; `purpose` stands in it."""
        return self._signer.sign(
            Claims(
                tenant=None,
                scope=None,
                rights=frozenset({Right.MOVE}),
                expiry_wall_s=self._signer.expiry_after(OWN_TTL_S),
                request_id=purpose,
                log_id=log_id,
            )
        )


def require_kvstore(claims: Claims) -> None:
    """PERMISSION_DENIED for a tenant's capability, or one that is not bound to a log."""
    if claims.tenant is not None or claims.log_id is None:
        raise ServiceError(
            Reason.PERMISSION_DENIED,
            "only the kvstores of a move may say or ask this",
            field="capability",
        )
