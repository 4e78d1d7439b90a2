"""Where a prompt is cut changes no token, and no KV beyond rounding, in float32.

Three real prefill workers compute the same prompts: in semantic chunks, in fixed ones, whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.api.kvstore.v1 import kvstore_pb2
from baton.api.prefill.v1 import prefill_pb2
from baton.capability import DEV_KEY, CapabilitySigner, Claims, Right
from baton.client_blobs import BlobClient
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.launcher.ports import PortReservation
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.harness import (
    BLOCK_TOKENS,
    Direct,
    Gateway,
    OpenedLog,
    Processes,
    all_ready,
    event_shape,
    gateway_to,
    running_workers,
    shape,
)

pytestmark = pytest.mark.cluster

SEMANTIC, FIXED, WHOLE = 32, 48, 512
GREEDY = SamplingParameters(temperature=0.0, max_tokens=24, ignore_eos=True)
CLASS_ERROR = 1e-5
"""Relative L2 of KV that float32 rounding may make; the class's logits may differ by 1e-3."""

PROSE = "The river is cold until July. Nobody swims! Do they? She left.\n\n## Then\n- salt\n- oil\n"
SCRIPTS = "河水很冷。是吗？ नदी ठंडी है। هل هي باردة؟ เย็นมาก 👩\u200d👧 e\u0301e\u0301 "
CODE = "See:\n```py\nx = [1. , 2.]\nprint(x)\n```\nDone. <a><b>1</b><b>2</b></a>\n"


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """The three, and a decode worker."""
    where = tmp_path_factory.mktemp("chunking")
    with running_workers(where, (FIXED, WHOLE), arena_bytes=32 << 20) as running:
        start_semantic(running)
        yield running


def start_semantic(running: Processes) -> None:
    """A third worker, which cuts at edges of the text."""
    ports, name = PortReservation("127.0.0.1"), f"prefill-{SEMANTIC}"
    running.at[name] = running.addresses.prefill[SEMANTIC] = f"127.0.0.1:{ports.next_port()}"
    ports.release()
    own = ("--worker-id", name, "--chunk-tokens", str(SEMANTIC), "--chunking", "semantic")
    common = running.flags[f"prefill-{FIXED}"]
    at = common.index("--worker-id")
    running.flags[name] = (*common[:at], *own, *common[at + 4 :])
    running.start(name)
    asyncio.run(all_ready({name: running.at[name]}, running.run_dir))


@pytest.fixture(scope="module")
def direct(processes: Processes) -> Direct:
    """The same model in this process, which computes prompts whole."""
    return Direct(processes.addresses.model)


@pytest.fixture
async def gateway(processes: Processes, direct: Direct) -> AsyncIterator[Gateway]:
    """A gateway's side."""
    async with gateway_to(processes.addresses, direct) as side:
        yield side


def prompt_of(gateway: Gateway, text: str, tokens: int) -> list[int]:
    """So many tokens of a text that goes on."""
    ids = gateway.direct.bundle.tokenizer.encode(text * 20)
    assert len(ids) >= tokens
    return ids[:tokens]


async def kv_of(gateway: Gateway, log: OpenedLog) -> NDArray[np.float32]:
    """A log's KV as its store gives it out, verified."""
    signer = CapabilitySigner(DEV_KEY, SystemClock())
    claims = Claims(
        tenant="acme",
        scope="acme",
        rights=frozenset({Right.BLOB_GET}),
        expiry_wall_s=signer.expiry_after(60.0),
        request_id="test",
        log_id=log.log_id,
    )

    def fetch() -> NDArray[np.float32]:
        with BlobClient(gateway.addresses.kvstore) as store:
            blob = store.get_blob(log.log_id, capability=signer.sign(claims))
            return np.concatenate([np.frombuffer(page.tobytes(), "<f4") for page in blob.pages])

    return await asyncio.to_thread(fetch)


def error(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Relative L2."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


async def closed(gateway: Gateway, log: OpenedLog) -> None:
    """The log is gone."""
    request = kvstore_pb2.CloseRequest(log_id=log.log_id, capability=log.capability, drop=True)
    await gateway.store.Close(request, timeout=5.0)


@pytest.mark.parametrize("text", [PROSE, SCRIPTS, CODE], ids=["prose", "scripts", "code"])
@pytest.mark.parametrize("length", [33, 100, 257, 400])
async def test_semantic_fixed_and_whole_prompts_are_one(
    gateway: Gateway, text: str, length: int
) -> None:
    """The same greedy tokens through decode, and the same KV in the store."""
    prompt = prompt_of(gateway, text, length)
    expected = shape(gateway.direct.tokens(prompt, GREEDY))
    found = []
    for size in (WHOLE, FIXED, SEMANTIC):
        log = await gateway.open(prompt, GREEDY, f"prefill-{size}")
        chunks, sealed = await gateway.prefill(log, size)
        found.append(await kv_of(gateway, log))
        async with gateway.stream() as stream:
            await stream.start(log, next_index=1)
            rest = await stream.until(log.request_id)
        assert rest.error is None, rest.error
        assert [event_shape(sealed.first_token), *rest.shapes()] == expected, size
        await closed(gateway, log)
        if size == WHOLE:
            assert len(chunks) == 1
    whole, fixed, semantic = found
    assert error(fixed, whole) < CLASS_ERROR
    assert error(semantic, whole) < CLASS_ERROR


async def test_chunks_end_with_sentences_inside_pages(gateway: Gateway) -> None:
    """What the worker says it committed: at edges of the text, within the bounds, few of them at a
    page's end.
    """
    prompt = prompt_of(gateway, PROSE, 400)
    log = await gateway.open(prompt, GREEDY, f"prefill-{SEMANTIC}")
    chunks, _ = await gateway.prefill(log, SEMANTIC)
    ends = [chunk.to_position for chunk in chunks]
    assert [chunk.from_position for chunk in chunks] == [0, *ends[:-1]]
    assert ends[-1] == len(prompt)
    assert all(16 <= end - first <= 48 for first, end in pairwise([0, *ends]))
    decode = gateway.direct.bundle.tokenizer.decode
    assert all(decode(prompt[:end]).rstrip(" ")[-1] in ".!?\n" for end in ends[:-1])
    assert any(end % BLOCK_TOKENS for end in ends[:-1])
    await closed(gateway, log)


async def test_a_cut_inside_a_page_is_taken_over_where_it_is(gateway: Gateway) -> None:
    """The worker stops behind a chunk that ends inside a page; another one adopts what is
    committed, the partial page too, and goes on with the same tokens.
    """
    prompt = prompt_of(gateway, PROSE, 400)
    log = await gateway.open(prompt, GREEDY, f"prefill-{SEMANTIC}")
    committed = await stopped_inside_a_page(gateway, log)
    take = kvstore_pb2.TakeRequest(
        log_id=log.log_id,
        generation=log.generation,
        worker_id=f"prefill-{FIXED}",
        capability=log.capability,
        pages=2,
        request_id=f"{log.request_id}-take",
    )
    log.generation = (await gateway.store.Take(take, timeout=5.0)).generation
    chunks, sealed = await gateway.prefill(log, FIXED)
    assert chunks[0].from_position >= committed
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        rest = await stream.until(log.request_id)
    assert rest.error is None, rest.error
    got = [event_shape(sealed.first_token), *rest.shapes()]
    assert got == shape(gateway.direct.tokens(prompt, GREEDY))
    await closed(gateway, log)


async def stopped_inside_a_page(gateway: Gateway, log: OpenedLog) -> int:
    """Runs the prompt until a chunk ended inside a page, and cancels it; where that was."""
    request = prefill_pb2.RunRequest(
        request_id=log.request_id,
        log_id=log.log_id,
        generation=log.generation,
        capability=log.capability,
    )
    worker, ends = gateway.prefills[SEMANTIC], [0]

    async def follow() -> None:
        async for message in worker.Run(request, timeout=30.0):
            assert not message.HasField("sealed"), "it was too fast"
            ends.append(message.chunk_committed.to_position)
            if ends[-1] % BLOCK_TOKENS:
                cancel = prefill_pb2.CancelRequest(request_id=log.request_id)
                await worker.Cancel(cancel, timeout=5.0)

    with pytest.raises(ServiceError) as caught:
        await follow()
    assert caught.value.reason is Reason.CANCELLED
    return ends[-1]


@pytest.mark.parametrize("cached", [1, 17, 40, 90])
async def test_a_cached_prefix_is_cut_behind(gateway: Gateway, cached: int) -> None:
    """The suffix of a prompt whose beginning lies in the store, at any token."""
    prompt = prompt_of(gateway, SCRIPTS, 160)
    kept = await gateway.open(prompt[:cached], GREEDY, f"prefill-{WHOLE}", is_cached=True)
    await gateway.prefill(kept, WHOLE)
    request = kvstore_pb2.CloseRequest(log_id=kept.log_id, capability=kept.capability)
    await gateway.store.Close(request, timeout=5.0)
    log = await gateway.open(prompt, GREEDY, f"prefill-{SEMANTIC}", is_cached=True)
    assert log.cached_tokens == cached
    chunks, sealed = await gateway.prefill(log, SEMANTIC)
    assert chunks[0].from_position == cached
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        rest = await stream.until(log.request_id)
    got = [event_shape(sealed.first_token), *rest.shapes()]
    assert got == shape(gateway.direct.tokens(prompt, GREEDY))
    for one in (log, kept):
        await closed(gateway, one)
