"""Who may do what: capabilities checked against logs, once per call.

Owns the checks. Never mints. Tenant and scope come from the verified claims, never from a body.
"""

from __future__ import annotations

from baton.capability import CapabilityVerifier, Claims, Right
from baton.errors import Reason, ServiceError
from services.kvstore.core import Core
from services.kvstore.keeper import require_tenant
from services.kvstore.state import LogState


class Access:
    """Checks one store's calls."""

    def __init__(self, verifier: CapabilityVerifier, core: Core) -> None:
        self._verifier = verifier
        self._core = core

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
        return self.log_of(self.any_of(capability, rights, log_id=log_id), log_id)

    def log_of(self, claims: Claims, log_id: bytes) -> LogState:
        """As `log`, for claims that are verified already."""
        log = self._core.logs.get(log_id)
        if log is None:
            if log_id in self._core.tombstones:
                self._core.current(log_id, 0)
            return self._core.find(log_id)
        self._require_log(claims, log)
        return log

    def own(self, claims: Claims, log_id: bytes) -> None:
        """As `log_of`, for calls that are harmless on a log that is gone."""
        log = self._core.logs.get(log_id)
        if log is not None:
            self._require_log(claims, log)

    def writer(self, capability: str, right: Right, log_id: bytes, generation: int) -> Claims:
        """A writer shows its capability with every call: who only knows a log's id and its
        generation writes nothing.
        """
        claims = self._verifier.verify(
            capability, right=right, log_id=log_id, generation=generation
        )
        self.own(claims, log_id)
        return claims

    def genuine(self, capability: str) -> None:
        """Any capability that is signed and not over."""
        self.any_of(capability, tuple(Right))

    def operator(self, capability: str) -> Claims:
        """Claims of an operator: the right ADMIN, and no tenant whose logs alone they are for."""
        claims = self._verifier.verify(capability, right=Right.ADMIN)
        if claims.tenant is not None:
            raise ServiceError(
                Reason.PERMISSION_DENIED,
                "the capability is a tenant's; show an operator's",
                field="capability",
                metadata={"failed": "tenant"},
            )
        return claims

    def worker(self, capability: str) -> Claims:
        """Claims of a worker: they allow to attach."""
        return self._verifier.verify(capability, right=Right.ATTACH)

    def _require_log(self, claims: Claims, log: LogState) -> None:
        """The log's own tenant, and its generation where the claims are bound to one. An operator's
        capability names no tenant and passes.
        """
        if claims.tenant is not None or Right.ADMIN not in claims.rights:
            require_tenant(log, claims.tenant_scope()[0])
        if claims.generation not in (None, log.generation):
            raise ServiceError(
                Reason.PERMISSION_DENIED,
                "the capability is for another generation of this log",
                field="capability",
                metadata={"failed": "generation"},
            )
