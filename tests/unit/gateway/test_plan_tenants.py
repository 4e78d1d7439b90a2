"""Whatever computes a prompt says whose it is: full queues still take what is of few."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.testing.tiny_models import TinyModel, write_directory
from services.gateway.__main__ import load_model
from services.gateway.assignments import Assignment, Assignments
from services.gateway.opening import SequenceParts
from services.gateway.planner import PlanRequest
from services.gateway.prompts import ServedModel
from services.gateway.publishing import Publisher, PublishOrder
from services.gateway.request import ParentLog, Tenant
from services.gateway.reuse import ReuseHints
from services.gateway.session_compute import HistoryComputer

FEW = Tenant(name="few")
BASE = ParentLog(log_id=bytes(16), position=3, address="store:1")


@dataclass(slots=True)
class FullPlanner:
    """Has room for nobody, and remembers who asked."""

    tenants: list[str] = field(default_factory=list)
    reuse: ReuseHints = field(default_factory=ReuseHints)

    def context_max(self) -> None:
        """Not known."""

    def assignment(self) -> Assignment:
        """Of nothing yet."""
        return Assignment(Assignments())

    def plan(self, request: PlanRequest) -> None:
        """Refused."""
        self.tenants.append(request.tenant)
        raise ServiceError(Reason.QUEUE_FULL, "full", retry_after_s=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """The tiny model's tokenizer and chat template."""
    return load_model(str(write_directory(tmp_path_factory.mktemp("model"), TinyModel())))


async def test_histories_and_publications_are_planned_for_their_tenant(model: ServedModel) -> None:
    """Near the base first, then anywhere; and a prefix."""
    planner = FullPlanner()
    parts = cast("SequenceParts", SimpleNamespace(
        planner=planner, prefix_client=None, clock=SystemClock(), template_digest=b""
    ))  # fmt: skip
    with pytest.raises(ServiceError):
        await HistoryComputer(parts, model).computed(FEW, (1, 2, 3, 4), BASE)
    assert planner.tenants == ["few", "few"]
    order = PublishOrder(name="brief", turns=(), text="Be brief.", tenants=(), ttl_s=None)
    with pytest.raises(ServiceError):
        await Publisher(parts, model, lambda: "request").publish(FEW, order)
    assert planner.tenants == ["few", "few", "few"]
