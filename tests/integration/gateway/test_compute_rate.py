"""What Open is told of how fast its writer computes: a store must not let a request wait for its
disk longer than computing takes, and so has to know that.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.policy import PrefillMode
from tests.integration.gateway.conftest import running_gateway

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
STEPS, PROMPTS, PREFILL = 55.5, 444.0, 777.0


@pytest.mark.parametrize(
    ("mode", "told"), [(PrefillMode.LOCAL, PROMPTS), (PrefillMode.REMOTE, PREFILL)]
)
async def test_open_is_told_how_fast_its_writer_computes_prompts(
    tiny_model: Path, tmp_path: Path, mode: PrefillMode, told: float
) -> None:
    """A decode worker's `token_rate` is that of its steps: another work, a wrong patience."""
    async with running_gateway(tiny_model, tmp_path, prefill_mode=mode) as gateway:
        for name, record in gateway.workers.records.items():
            is_decode = name.startswith("decode")
            record.load.token_rate = STEPS if is_decode else PREFILL
            record.load.prefill_token_rate = PROMPTS if is_decode else 0.0
        await gateway.beat()
        answer = await gateway.post("/v1/chat/completions", BODY)
        assert answer.status_code == 200, answer.text
        (log,) = gateway.workers.store.logs.values()
        assert log.request.compute_tokens_per_s == told


async def test_a_rate_that_nobody_measured_is_said_as_unknown(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Zero: the store bounds the wait by a constant then; it never takes the steps' rate for it."""
    async with running_gateway(tiny_model, tmp_path, prefill_mode=PrefillMode.LOCAL) as gateway:
        for record in gateway.workers.records.values():
            record.load.token_rate = STEPS
        await gateway.beat()
        assert (await gateway.post("/v1/chat/completions", BODY)).status_code == 200
        (log,) = gateway.workers.store.logs.values()
        assert log.request.compute_tokens_per_s == 0.0
