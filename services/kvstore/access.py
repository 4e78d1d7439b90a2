"""Who may do what: capabilities checked against logs, once per call.

Owns the checks. Never mints. Tenant and scope come from the verified claims, never from a body.
"""

from __future__ import annotations

from typing import Final

from baton.capability import CapabilityVerifier, Claims, Right
from baton.errors import ServiceError
from services.kvstore.core import Core
from services.kvstore.keeper import require_tenant
from services.kvstore.state import LogState

SHOWN_MAX: Final = 65_536


class Access:
    """Checks one store's calls."""

    def __init__(self, verifier: CapabilityVerifier, core: Core) -> None:
        self._verifier = verifier
        self._core = core
        # (log, generation) pairs whose writer has shown its capability on this store.
        self._shown: dict[tuple[bytes, int], None] = {}

    def tenant(self, capability: str, right: Right, *, log_id: bytes | None = None) -> Claims:
        """Claims of a tenant that allow `right`, bound to `log_id` if they are bound."""
        claims = self._verifier.verify(capability, right=right, log_id=log_id)
        claims.tenant_scope()
        return claims

    def any_of(
        self, capability: str, rights: tuple[Right, ...], *, log_id: bytes | None = None
    ) -> Claims:
        """Claims that allow one of `rights`; the first right's refusal when none does."""
        refusal: ServiceError | None = None
        for right in rights:
            try:
                return self._verifier.verify(capability, right=right, log_id=log_id)
            except ServiceError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def log(self, capability: str, rights: tuple[Right, ...], log_id: bytes) -> LogState:
        """The log, if the capability allows one of `rights` on it and its tenant is the log's.

        A dropped log's id passes to the core, which knows what to say of it.
        """
        claims = self.any_of(capability, rights, log_id=log_id)
        log = self._core.logs.get(log_id)
        if log is None:
            if log_id in self._core.tombstones:
                self._core.current(log_id, 0)
            return self._core.find(log_id)
        self._require_tenant(claims, log)
        return log

    def own(self, capability: str, rights: tuple[Right, ...], log_id: bytes) -> None:
        """As `log`, for calls that are harmless on a log that is gone."""
        claims = self.any_of(capability, rights, log_id=log_id)
        log = self._core.logs.get(log_id)
        if log is not None:
            self._require_tenant(claims, log)

    def writer(self, capability: str, right: Right, log_id: bytes, generation: int) -> None:
        """A writer shows its capability once per log and generation; later calls may omit it."""
        if not capability and (log_id, generation) in self._shown:
            return
        claims = self._verifier.verify(capability, right=right, log_id=log_id)
        log = self._core.logs.get(log_id)
        if log is not None:
            self._require_tenant(claims, log)
        if len(self._shown) >= SHOWN_MAX:
            self._shown.clear()
        self._shown[log_id, generation] = None

    def worker(self, capability: str) -> Claims:
        """Claims of a worker: they allow to attach."""
        return self._verifier.verify(capability, right=Right.ATTACH)

    def _require_tenant(self, claims: Claims, log: LogState) -> None:
        """An operator's capability names no tenant and passes."""
        if claims.tenant is None and Right.ADMIN in claims.rights:
            return
        require_tenant(log, claims.tenant_scope()[0])
