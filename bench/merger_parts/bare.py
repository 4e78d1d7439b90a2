"""The limit: a server of the same library that does nothing with what comes, until its input ends.

    python -m bench.merger_parts.bare PORT_FILE

SpliceStream returns each message as it came; Raw sends as many bytes as it is asked for, in
messages as large as a blob's. No interceptor, no parsing, no metrics.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc

from baton.process_files import write_port_file
from baton.rpc.server import MESSAGE_BYTES_MAX
from baton.wire.blob_chunks import encoded_chunk

SERVICE_NAME: Final = "baton.api.merger.v1.MergerService"
CHUNK_BYTES: Final = (1 << 20) - 4096

_Context = grpc.aio.ServicerContext[Any, Any]


async def echo(requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
    """What came."""
    async for request in requests:
        yield request


async def raw(request: bytes, context: _Context) -> AsyncIterator[bytes]:
    """So many bytes."""
    left = int(request)
    while left > 0:
        yield encoded_chunk([bytes(min(left, CHUNK_BYTES))])
        left -= CHUNK_BYTES


async def serve(port_file: Path) -> None:
    """Until the input ends."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ]
    )
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "SpliceStream": grpc.stream_stream_rpc_method_handler(echo),
        "Raw": grpc.unary_stream_rpc_method_handler(raw),
    }
    generic = grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write_port_file(port_file, f"127.0.0.1:{port}")
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(1.0)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
