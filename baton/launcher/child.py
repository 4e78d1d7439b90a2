"""Entry point of a child process: dies with its parent, then runs a service module.

Owns the tie to the parent. A supervisor that is killed cannot stop its children, so each asks the
kernel for SIGTERM at its parent's death before it does anything else.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """`python -m baton.launcher.child PARENT_PID MODULE [ARGUMENT...]`."""
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # The parent may have died before the request reached the kernel.
    if os.getppid() != parent_pid:
        sys.exit(f"error: the supervisor {parent_pid} is gone; {module} was not started")
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
