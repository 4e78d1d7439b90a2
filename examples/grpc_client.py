"""Generates text over gRPC, then fetches, inspects and stores the KV behind it: stubs alone.

    python examples/grpc_client.py [gateway host:port]

Nothing of Baton is imported but the generated stubs (`baton.api`), which any language can make from
`protos/`. The gateway's gRPC port is 8081 unless it was started with another `--port`.
"""

from __future__ import annotations

import os
import struct
import sys
import uuid
from collections.abc import Iterator

import grpc

from baton.api.common.v1 import common_pb2
from baton.api.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc

GATEWAY = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"
TIMEOUT_S = 60.0


def credentials() -> tuple[tuple[str, str], ...]:
    """The bearer key as call metadata; loopback without a tenants file needs none."""
    key = os.environ.get("BATON_API_KEY")
    return (("authorization", f"Bearer {key}"),) if key else ()


def generate(gateway: gateway_pb2_grpc.GatewayServiceStub) -> gateway_pb2.Completed:
    """Stream one answer to the terminal; returns what closed it."""
    request = gateway_pb2.GenerateRequest(
        chat=gateway_pb2.ChatMessages(
            messages=[
                gateway_pb2.ChatMessage(role="user", content="What is the capital of France?")
            ]
        )
    )
    request.sampling.temperature = 0
    request.sampling.max_tokens = 32
    for response in gateway.Generate(request, timeout=TIMEOUT_S, metadata=credentials()):
        kind = response.WhichOneof("event")
        if kind == "admitted":
            admitted = response.admitted
            print(f"prefill at {admitted.prefill_worker_id}, decode at {admitted.decode_worker_id}")
        elif kind == "token":
            print(response.token.text, end="", flush=True)
        else:
            usage = response.completed.usage
            print(f"\n{usage.prompt_tokens} tokens in, {usage.completion_tokens} out")
            return response.completed
    raise SystemExit("the stream ended without `completed`: the answer failed")


def capability(
    gateway: gateway_pb2_grpc.GatewayServiceStub, log_id: bytes, *rights: str
) -> gateway_pb2.GetCapabilityResponse:
    """A capability for one of our own logs, or for a new one when `log_id` is empty."""
    request = gateway_pb2.GetCapabilityRequest(log_id=log_id, rights=rights)
    return gateway.GetCapability(request, timeout=TIMEOUT_S, metadata=credentials())


def fetch(
    store: kvstore_pb2_grpc.KVStoreServiceStub, log_id: bytes, token: str
) -> tuple[common_pb2.KvBlobDescriptor, list[bytes]]:
    """The blob of a log: its descriptor, then its bytes in chunks."""
    request = kvstore_pb2.GetBlobRequest(log_id=log_id, capability=token)
    descriptor, chunks = common_pb2.KvBlobDescriptor(), []
    for response in store.GetBlob(request, timeout=TIMEOUT_S):
        if response.WhichOneof("content") == "descriptor":
            descriptor = response.descriptor
        else:
            chunks.append(response.chunk)
    return descriptor, chunks


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), bit by bit: 124 bytes need no table."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def renamed(descriptor: common_pb2.KvBlobDescriptor, log_id: bytes) -> common_pb2.KvBlobDescriptor:
    """The descriptor under another log id: the log id is part of the header, so its CRC changes.

    The 128-byte header of docs/formats.md, little-endian; the CRC covers bytes 0 to 123, masked.
    """
    new = common_pb2.KvBlobDescriptor()
    new.CopyFrom(descriptor)
    new.log_id = log_id
    header = struct.pack(
        "<4s8s6H3I2H2Q16s16s16s2I2HI2H",
        b"BKV1",
        new.tokenizer_hash,
        *(new.version, new.dtype, new.layers, new.kv_heads, new.head_dim, new.block_tokens),
        *(new.total_tokens, new.flags, new.first_position),
        *(new.layout, new.head_dim_v),
        *(new.generation, new.payload_bytes),
        *(new.model_digest, new.kv_digest, new.log_id),
        *(new.payload_offset, new.payload_crc32c),
        *(new.first_layer, new.first_kv_head, new.numeric_class_id),
        *(new.layers_total, new.kv_heads_total),
    )
    crc = crc32c(header)
    new.header_crc32c = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    return new


def put(
    store: kvstore_pb2_grpc.KVStoreServiceStub,
    header: kvstore_pb2.PutBlobHeader,
    chunks: list[bytes],
) -> kvstore_pb2.PutBlobResponse:
    """Store a blob: a header first, then the same bytes."""

    def messages() -> Iterator[kvstore_pb2.PutBlobRequest]:
        yield kvstore_pb2.PutBlobRequest(header=header)
        for chunk in chunks:
            yield kvstore_pb2.PutBlobRequest(chunk=chunk)

    return store.PutBlob(messages(), timeout=TIMEOUT_S)


def show(descriptor: common_pb2.KvBlobDescriptor) -> None:
    """What a descriptor says of its blob."""
    print(
        f"  {descriptor.total_tokens} tokens in {len(descriptor.pages)} pages, "
        f"{descriptor.payload_bytes} bytes, {common_pb2.KvDtype.Name(descriptor.dtype)}, "
        f"{descriptor.layers} layers x {descriptor.kv_heads} heads x {descriptor.head_dim}"
    )
    print(f"  tokenizer {descriptor.tokenizer_hash.hex()}, KV digest {descriptor.kv_digest.hex()}")


def main() -> None:
    """The tour."""
    with grpc.insecure_channel(GATEWAY) as channel:
        gateway = gateway_pb2_grpc.GatewayServiceStub(channel)
        completed = generate(gateway)
        log_id = completed.log.log_id
        mine = capability(gateway, log_id, "blob_get", "read")
        with grpc.insecure_channel(completed.kvstore_address) as store_channel:
            store = kvstore_pb2_grpc.KVStoreServiceStub(store_channel)
            described = store.DescribeBlob(
                kvstore_pb2.DescribeBlobRequest(log_id=log_id, capability=mine.capability),
                timeout=TIMEOUT_S,
            )
            print(f"the log {log_id.hex()} would be sent as:")
            show(described.descriptor)
            descriptor, chunks = fetch(store, log_id, mine.capability)
            print(f"fetched {sum(map(len, chunks))} bytes in {len(chunks)} chunks:")
            show(descriptor)
            fresh = capability(gateway, b"", "blob_put", "blob_get", "read")
            header = kvstore_pb2.PutBlobHeader(
                request_id=uuid.uuid4().hex,
                capability=fresh.capability,
                descriptor=renamed(descriptor, fresh.log_id),
            )
            stored = put(store, header, chunks)
            print(f"stored it again as log {stored.log.log_id.hex()}, {stored.log.position} tokens")
            again, bytes_again = fetch(store, stored.log.log_id, fresh.capability)
            is_same = b"".join(bytes_again) == b"".join(chunks)
            print(f"fetched that: {again.total_tokens} tokens, bytes equal: {is_same}")


if __name__ == "__main__":
    main()
