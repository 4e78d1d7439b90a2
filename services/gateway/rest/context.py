"""What is known of an HTTP request before its body is read: who asks, under which ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.gateway.request import Tenant
from services.gateway.rest.exchange import Scope

CONTEXT_KEY: Final = "baton.context"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Travels in the ASGI scope. `client_request_id` is only echoed and logged; `received_s` is
    this process's monotonic time.
    """

    request_id: str
    client_request_id: str | None
    tenant: Tenant
    received_s: float

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        """The context that the application put into the scope."""
        context = scope[CONTEXT_KEY]
        assert isinstance(context, cls)
        return context
