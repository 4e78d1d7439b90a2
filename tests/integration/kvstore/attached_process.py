"""A worker in a process of its own: attaches, opens one log, says so, then waits to be ended.

Run as a module with the store's address, the model's path and the log's id in hex; prints one line
with the log's generation and its granted pages. It can be stopped and killed as a real worker can.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from baton.engine.config import read_config
from baton.engine.label import build_label, torch_numeric_class
from baton.kv.layout import KvDtype
from baton.text.bundle import TextBundle
from tests.integration.kvstore.harness import BLOCK, Model, StoreProcess, capability, connected

TOKENS = [7] * (BLOCK + 4)
PAGES_AHEAD = 6


async def main(address: str, path: Path, log_id: bytes) -> None:
    """See the module."""
    config = read_config(path)
    geometry = config.kv_geometry(BLOCK, KvDtype.F32)
    label = build_label(
        path,
        config,
        TextBundle.load(path).tokenizer_hash,
        geometry,
        torch_numeric_class(config, KvDtype.F32),
    )
    model = Model(path=path, label=label, geometry=geometry)
    store = StoreProcess(model=model, directory=path, address=address)
    async with connected(store) as site:
        worker = await site.attach("stopped")
        log = await site.open(
            worker,
            TOKENS,
            log_id=log_id,
            capability=capability(log_id),
            output_pages=PAGES_AHEAD,
        )
        worker.write(log, 0, len(TOKENS))
        sys.stdout.write(f"ready {log.generation}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), bytes.fromhex(sys.argv[3])))
