"""Write the golden log directories beside this script, by the real writer.

    python -m tests.data.log.make_golden

Segment and store ids are random, so that each run writes other bytes: run it for a new format
version only, into a new folder. A reader that reads a committed folder otherwise than its
`expected.json` says
has lost what users have on disk.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.durability.engine import Found, start
from tests.durability.pristine import Files, write_log
from tests.durability.simulation import scratch
from tests.durability.workload import Script

HERE = Path(__file__).parent
VERSION = "v1"
SEED = 4


def told(found: Found) -> dict[str, Any]:
    """What a start says, as JSON."""
    return {
        "logs": {
            log_id.hex(): {
                "generation": seen.generation,
                "is_sealed": seen.is_sealed,
                "tokens": list(seen.tokens),
            }
            for log_id, seen in sorted(found.state.items())
        },
        "damaged": sorted(log_id.hex() for log_id in found.damaged),
        "is_damage_reported": found.is_damage_reported,
        "durable_lsn": found.durable_lsn,
        "newest_lsn": found.newest_lsn,
    }


def golden() -> dict[str, Files]:
    """Logs by folder: left by a clean stop, by a kill, by a power cut, and with damage."""
    script = Script()
    script.extend(random.Random(SEED), 40)
    folders: dict[str, Files] = {}
    for name, is_clean in (("clean", True), ("killed", False)):
        with scratch() as path:
            folders[name] = write_log(path, script, SEED, 4096, is_clean=is_clean)
    clean = folders["clean"]
    newest = max(name for name in clean if name.endswith(".blog"))
    folders["torn"] = {**clean, newest: clean[newest][:-200] + bytes(100) + b"\xff" * 60}
    oldest = min(clean)
    flipped = bytearray(clean[oldest])
    flipped[len(flipped) // 2] ^= 0x10
    folders["damaged"] = {**clean, oldest: bytes(flipped)}
    return folders


def main() -> None:
    """Writes the folders and what a start says of each."""
    expected = {}
    shutil.rmtree(HERE / VERSION, ignore_errors=True)
    for folder, files in golden().items():
        target = HERE / VERSION / folder
        target.mkdir(parents=True)
        for name, data in files.items():
            if name.endswith(".blog"):
                (target / name).write_bytes(data)
        with scratch() as path:
            shutil.copytree(target, path, dirs_exist_ok=True)
            expected[folder] = told(start(path))
        sys.stdout.write(f"{folder}: {len(expected[folder]['logs'])} logs\n")
    text = json.dumps(expected, indent=1, sort_keys=True) + "\n"
    (HERE / VERSION / "expected.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
