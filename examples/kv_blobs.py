"""KV in and out of a running cluster with Baton's own client: over the network, and in place.

    baton up                                      in another terminal
    python examples/kv_blobs.py [gateway host:port] [model]

Generates an answer, fetches its KV, stores it under another log id and fetches that. Where the
cluster's key can be read (its run directory, by the same user on the same host) the KV is also
mapped where it stands, without a copy. The gateway's gRPC port is 8081 unless it was started with
another `--port`; the model is only needed to say whose KV we expect (default smollm2).
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import grpc

from baton.api.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from baton.arena.client import WorkerIdentity
from baton.capability import CapabilitySigner, Claims, Right
from baton.client_blobs import BlobClient
from baton.client_shm import ShmClient
from baton.clock import SystemClock
from baton.engine.config import read_config
from baton.engine.label import build_label, torch_numeric_class
from baton.ids import new_incarnation, new_request_id
from baton.kv.blob import Blob
from baton.launcher.rundir import KEY_FILE, default_run_dir
from baton.models import locate
from baton.text.bundle import TextBundle

GATEWAY = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
TIMEOUT_S = 60.0


def answered(gateway: gateway_pb2_grpc.GatewayServiceStub) -> gateway_pb2.Completed:
    """One short answer; returns what closed its stream."""
    message = gateway_pb2.ChatMessage(role="user", content="Name three rivers of Europe.")
    request = gateway_pb2.GenerateRequest(chat=gateway_pb2.ChatMessages(messages=[message]))
    request.sampling.max_tokens = 24
    for response in gateway.Generate(request, timeout=TIMEOUT_S):
        if response.WhichOneof("event") == "token":
            print(response.token.text, end="", flush=True)
        elif response.WhichOneof("event") == "completed":
            print()
            return response.completed
    raise SystemExit("the stream ended without `completed`: the answer failed")


def capability(
    gateway: gateway_pb2_grpc.GatewayServiceStub, log_id: bytes, *rights: str
) -> gateway_pb2.GetCapabilityResponse:
    """The right to one of our logs; to a new one, which it names, when `log_id` is empty."""
    request = gateway_pb2.GetCapabilityRequest(log_id=log_id, rights=rights)
    return gateway.GetCapability(request, timeout=TIMEOUT_S)


def over_the_network(
    gateway: gateway_pb2_grpc.GatewayServiceStub, address: str, blob: Blob
) -> None:
    """Stores a blob as a log of its own and fetches it back."""
    fresh = capability(gateway, b"", "blob_put", "blob_get")
    with BlobClient(address) as store:
        stored = store.put_blob(
            replace(blob.header, log_id=fresh.log_id),
            blob.pages,
            blob.token_ids,
            capability=fresh.capability,
        )
        again = store.get_blob(stored.log_id, capability=fresh.capability)
        is_same = all(
            (one == other).all() for one, other in zip(blob.pages, again.pages, strict=True)
        )
        print(f"stored as {stored.log_id.hex()}, {stored.tokens} tokens; fetched again: {is_same}")


def in_place(key: bytes, address: str, blob: Blob, text: str) -> None:
    """Maps the log's pages and compares them with what came over the network."""
    path = locate(MODEL)
    config, geometry = read_config(path), blob.header.geometry
    numeric_class = torch_numeric_class(config, geometry.dtype)
    tokenizer_hash = TextBundle.load(path).tokenizer_hash
    signer = CapabilitySigner(key, SystemClock())
    claims = Claims(
        tenant=None,
        scope=None,
        rights=frozenset({Right.ATTACH}),
        expiry_wall_s=signer.expiry_after(60.0),
        request_id=new_request_id(),
    )
    identity = WorkerIdentity(
        worker_id="example-kv-blobs",
        incarnation=new_incarnation(),
        label=build_label(path, config, tokenizer_hash, geometry, numeric_class),
        geometry=geometry,
        capability=signer.sign(claims),
        software_version="example",
    )
    with ShmClient.attach(address, identity) as store:
        began_s = time.perf_counter()
        with store.get_blob(blob.header.log_id, capability=text) as kv:
            took_ms = (time.perf_counter() - began_s) * 1e3
            kv.verify()
            full = kv.tokens // geometry.block_tokens
            is_same = all(
                bytes(kv.page(index)) == bytes(blob.pages[index]) for index in range(full)
            )
            print(f"mapped {kv.tokens} tokens in {took_ms:.1f} ms; whole pages equal: {is_same}")


def main() -> None:
    """The tour."""
    with grpc.insecure_channel(GATEWAY) as channel:
        gateway = gateway_pb2_grpc.GatewayServiceStub(channel)
        completed = answered(gateway)
        log_id, address = completed.log.log_id, completed.kvstore_address
        mine = capability(gateway, log_id, "blob_get")
        with BlobClient(address) as store:
            blob = store.get_blob(log_id, capability=mine.capability)
        print(
            f"fetched {blob.header.payload_bytes} bytes: {blob.header.total_tokens} tokens "
            f"in {len(blob.pages)} pages"
        )
        over_the_network(gateway, address, blob)
        key_file = Path(default_run_dir()) / KEY_FILE
        if key_file.is_file():
            key = bytes.fromhex(key_file.read_text("ascii").strip())
            in_place(key, address, blob, mine.capability)


if __name__ == "__main__":
    main()
