"""Quotas at a real kvstore: refusals over gRPC, a file that changes, a start that recounts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    Model,
    Site,
    capability,
    connected,
    running_store,
)

PROMPT = list(range(4, 4 + 2 * BLOCK))
CHANGED_TIMEOUT_S = 30.0


def write_quotas(path: Path, model: Model, **pages: int) -> None:
    """A quota file in pages of the host tier."""
    size = model.geometry.slot_bytes
    lines = [f"  {tenant}: {{host: {count * size}}}\n" for tenant, count in pages.items()]
    path.write_text("tenants:\n" + "".join(lines))


async def open_as(site: Site, tenant: str, tokens: list[int]) -> FakeLog:
    """A log of a tenant."""
    log_id = new_log_id()
    text = capability(log_id, tenant=tenant)
    return await site.open(site.workers[-1], tokens, log_id=log_id, capability=text)


async def refusal(site: Site, tenant: str, tokens: list[int]) -> ServiceError:
    """Why the tenant gets no log."""
    with pytest.raises(ServiceError) as caught:
        await open_as(site, tenant, tokens)
    return caught.value


async def fill_and_be_refused(site: Site, model: Model) -> None:
    """Red's quota is 4 pages: a prompt of two pages and one for output fit once."""
    worker = await site.attach()
    log = await open_as(site, "red", PROMPT)
    await worker.prefill(log)
    error = await refusal(site, "red", [9] * BLOCK)
    size = model.geometry.slot_bytes
    assert error.reason is Reason.QUOTA_EXCEEDED
    assert error.field == "tenant"
    assert error.metadata is not None
    assert error.metadata["used_bytes"] == str(3 * size)
    assert error.metadata["quota_bytes"] == str(4 * size)
    assert "raise tenants.<name>.host in the quota file" in error.message
    await open_as(site, "grey", [9] * 12 * BLOCK)


async def be_let_in(site: Site) -> None:
    """The changed file is seen within seconds; what was charged before the kill still is."""
    deadline_s = SystemClock().monotonic_s() + CHANGED_TIMEOUT_S
    while True:
        try:
            await open_as(site, "red", [9] * BLOCK)
        except ServiceError as error:
            assert error.reason is Reason.QUOTA_EXCEEDED  # noqa: PT017 - until it is let in
            assert SystemClock().monotonic_s() < deadline_s
        else:
            break
    too_much = await refusal(site, "red", [7] * 3 * BLOCK)
    assert too_much.reason is Reason.QUOTA_EXCEEDED


@pytest.mark.more
def test_a_tenant_is_held_to_its_quota_across_a_restart(model: Model, tmp_path: Path) -> None:
    """Refused at 4 pages; after kill -9 the recovered logs are charged; a larger quota lets it
    have two pages more, and no more than that.
    """
    quotas = tmp_path / "quotas.yaml"
    write_quotas(quotas, model, red=4)
    flags = ("--quotas", str(quotas), "--lease-s", "300")
    with running_store(model, tmp_path, *flags) as store:

        async def live() -> None:
            async with connected(store) as site:
                await fill_and_be_refused(site, model)
                await site.restart()
                await site.attach("w1")
                assert (await refusal(site, "red", [9] * BLOCK)).reason is Reason.QUOTA_EXCEEDED
                write_quotas(quotas, model, red=6)
                await be_let_in(site)

        asyncio.run(live())


def test_quotas_that_do_not_fit_stop_the_start_naming_both_numbers(
    model: Model, tmp_path: Path
) -> None:
    """Exit code 2, before anything is served."""
    quotas = tmp_path / "quotas.yaml"
    write_quotas(quotas, model, red=300, blue=300)
    size = model.geometry.slot_bytes
    argv = [sys.executable, "-m", "services.kvstore", "--model", str(model.path)]
    argv += ["--dtype", "float32", "--arena-bytes", str(500 * size)]
    argv += ["--arena-dir", str(tmp_path / "a"), "--log-dir", str(tmp_path / "l")]
    ended = subprocess.run(
        [*argv, "--quotas", str(quotas)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert f"{600 * size} bytes together" in ended.stderr + ended.stdout
    assert f"the tier has {500 * size}" in ended.stderr + ended.stdout
