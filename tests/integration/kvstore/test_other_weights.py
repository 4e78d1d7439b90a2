"""Field report C53 and its kind: a log directory under a kvstore of other weights.

The name, the tokenizer and the prompt are the same; the weights are not. KV of one must never be
read by the other, and going back must not be harmed by it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from baton.api.kvstore.v1 import kvstore_pb2 as pb
from baton.engine.config import read_config
from baton.engine.label import build_label
from baton.errors import Reason, ServiceError
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    Model,
    StoreProcess,
    connected,
    running_store,
    tiny_model,
)

PROMPT = [3 + index % 90 for index in range(3 * BLOCK)]


def perturbed(model: Model, directory: Path) -> Model:
    """The same model in another place, one weight of it scaled a little."""
    other = tiny_model(directory)
    weights = next(path for path in sorted(other.path.glob("*.safetensors")))
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    changed = tiny_label(other)
    assert changed.label.model != model.label.model
    assert changed.label.tokenizer == model.label.tokenizer
    return changed


def tiny_label(model: Model) -> Model:
    """The label that follows from the files as they are now."""
    config = read_config(model.path)
    label = build_label(
        model.path, config, model.label.tokenizer, model.geometry, model.label.numeric_class
    )
    return replace(model, label=label)


async def kept_log(store: StoreProcess) -> FakeLog:
    """A log of PROMPT, answered and kept."""
    async with connected(store) as site:
        worker = await site.attach("w0")
        log = await site.open(worker, PROMPT)
        await worker.prefill(log, 5, "stop")
        await site.close(log)
        return log


async def cached_tokens(store: StoreProcess) -> int:
    """What a request with the same beginning finds."""
    async with connected(store) as site:
        worker = await site.attach("w1")
        request = site.open_request(worker, [*PROMPT, 9])
        answer = await site.stub.Open(request)
        await site.stub.Cancel(
            pb.CancelRequest(log_id=request.log_id, capability=request.capability)
        )
        return int(answer.cached_tokens)


def test_c53_kv_of_other_weights_is_not_used(model: Model, tmp_path: Path) -> None:
    """sglang#24758: pages were keyed by token ids and served name only."""
    other = perturbed(model, tmp_path / "other")
    with running_store(model, tmp_path) as store:
        asyncio.run(kept_log(store))
        assert asyncio.run(cached_tokens(store)) == 3 * BLOCK
        store.stop()
        store.model = other
        store.start()
        assert asyncio.run(cached_tokens(store)) == 0, "KV of the old weights was found"


def test_c53_a_log_of_other_weights_is_not_continued(model: Model, tmp_path: Path) -> None:
    """Its tokens stay readable; no worker of these weights goes on with its answer. Under the old
    weights it goes on.
    """
    other = perturbed(model, tmp_path / "other")
    with running_store(model, tmp_path) as store:
        log = asyncio.run(open_log(store))
        store.kill()
        store.model = other
        store.start()
        assert asyncio.run(taken(store, log)) is Reason.COMPAT_MISMATCH
        store.stop()
        store.model = model
        store.start()
        assert asyncio.run(taken(store, log)) is None


async def open_log(store: StoreProcess) -> FakeLog:
    """A sealed log whose answer has begun."""
    async with connected(store) as site:
        worker = await site.attach("w0")
        log = await site.open(worker, PROMPT)
        await worker.prefill(log, 5)
        return log


async def taken(store: StoreProcess, log: FakeLog) -> Reason | None:
    """Why the log's next writer is refused."""
    async with connected(store) as site:
        worker = await site.attach("w2")
        view = await worker.view(log)
        assert list(view.token_ids) == [*PROMPT, 5]
        log.generation = view.head.generation
        try:
            await worker.take(log)
        except ServiceError as error:
            return error.reason
        return None
