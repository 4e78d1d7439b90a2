"""Fault points: named places where a test may make the code pause, fail, die or see bad data.

Off unless BATON_FAULTS_ENABLED=1; then FAULT="point:action[:arg][:once][,...]" arms some at start,
and `faults.arm` more while running. A call site is one line and does nothing while off:

    await faults.reach("prefill.after_accept")

Each process has one `faults`; services call `faults.start_from(os.environ)` first thing. Points
stand in `points`, the grammar in `spec`, what happens in `switchboard`, HTTP control in `admin`.
"""

from __future__ import annotations

from typing import Final

from baton.faults.switchboard import Faults

faults: Final = Faults()
"""The process's own; off until `start_from` turns it on."""

__all__ = ["Faults", "faults"]
