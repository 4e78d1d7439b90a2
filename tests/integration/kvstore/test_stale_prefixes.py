"""A kvstore that comes back under another tokenizer keeps published prefixes and serves none."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import Right
from baton.engine.config import read_config
from baton.engine.label import build_label
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id, new_request_id
from baton.kv.splice import splice
from baton.text.bundle import TextBundle
from baton.wire.segments import manifest_to_proto, segment_from_proto
from tests.integration.kvstore.harness import (
    BLOCK,
    Model,
    StoreProcess,
    capability,
    connected,
    running_store,
    tiny_model,
)

PROMPT = [3 + index % 90 for index in range(3 * BLOCK)]


def retokenised(model: Model, directory: Path) -> Model:
    """The same weights beside a tokenizer with one merge less."""
    other = tiny_model(directory)
    file = other.path / "tokenizer.json"
    definition = json.loads(file.read_text(encoding="utf-8"))
    del definition["model"]["merges"][-1]
    file.write_text(json.dumps(definition), encoding="utf-8")
    config = read_config(other.path)
    label = build_label(
        other.path,
        config,
        TextBundle.load(other.path).tokenizer_hash,
        other.geometry,
        model.label.numeric_class,
    )
    assert label.tokenizer != model.label.tokenizer
    assert label.kv_digest() == model.label.kv_digest()
    return replace(other, label=label)


def operator_capability() -> str:
    """Signed when it is used."""
    return capability(tenant=None, rights=frozenset({Right.READ, Right.ADMIN}))


async def publish(store: StoreProcess) -> None:
    """Two blocks of PROMPT, for a guest; the log is gone."""
    async with connected(store) as site:
        worker = await site.attach("w0")
        log = await site.open(worker, PROMPT)
        await worker.prefill(log, 5, "stop")
        await site.stub.Publish(
            kvstore_pb2.PublishRequest(
                prefix=kvstore_pb2.PublishedPrefix(
                    name="system",
                    log=common_pb2.LogPosition(log_id=log.log_id, position=2 * BLOCK),
                    segment=common_pb2.Segment(text_hash=b"t" * 32),
                    tenants=["guest"],
                    text_bytes=99,
                    version=3,
                    pinned=True,
                ),
                capability=log.capability,
                request_id=new_request_id(),
            )
        )
        await site.close(log, drop=True)


async def listed(store: StoreProcess) -> kvstore_pb2.PublishedPrefix:
    """The one prefix there is."""
    async with connected(store) as site:
        request = kvstore_pb2.ListPrefixesRequest(capability=operator_capability())
        (prefix,) = (await site.stub.ListPrefixes(request)).prefixes
        return prefix


async def used(
    store: StoreProcess, prefix: kvstore_pb2.PublishedPrefix | None
) -> int | ServiceError:
    """Tokens that the guest's prompt begins with: by a manifest of the prefix, or by lookup."""
    async with connected(store) as site:
        worker = await site.attach(f"w-{new_request_id()}")
        log_id = new_log_id()
        request = site.open_request(
            worker, [*PROMPT, 9], log_id=log_id, capability=capability(log_id, tenant="guest")
        )
        if prefix is not None:
            segments = [segment_from_proto(prefix.segment)]
            request.manifest.CopyFrom(manifest_to_proto(splice(segments)))
        try:
            answer = await site.stub.Open(request)
        except ServiceError as error:
            return error
        await site.stub.Cancel(
            kvstore_pb2.CancelRequest(log_id=log_id, capability=request.capability)
        )
        return int(answer.cached_tokens)


def test_a_prefix_of_another_tokenizer_is_listed_refused_and_back_with_it(
    model: Model, tmp_path: Path
) -> None:
    """Both hashes are named; nothing of it is found by its ids; going back does no harm."""
    other = retokenised(model, tmp_path / "other")
    ours, theirs = other.label.tokenizer.hex(), model.label.tokenizer.hex()
    with running_store(model, tmp_path) as store:
        asyncio.run(publish(store))
        made = asyncio.run(listed(store))
        assert (made.version, made.pinned, made.host_tokens) == (3, True, 2 * BLOCK)
        assert made.kv_bytes == 2 * model.geometry.page_bytes
        assert asyncio.run(used(store, made)) == 2 * BLOCK
        store.stop()
        store.model = other
        store.start()
        stale = asyncio.run(listed(store))
        assert stale.segment.tokenizer_hash == model.label.tokenizer
        assert (stale.prefix_id, stale.version, stale.pinned) == (made.prefix_id, 3, True)
        assert asyncio.run(used(store, None)) == 0
        refused = asyncio.run(used(store, stale))
        assert isinstance(refused, ServiceError)
        assert refused.reason is Reason.TOKENIZER_MISMATCH
        assert ours in refused.message
        assert theirs in refused.message
        store.stop()
        store.model = model
        store.start()
        assert asyncio.run(used(store, made)) == 2 * BLOCK
