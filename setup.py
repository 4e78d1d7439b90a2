"""Builds the native libraries while Baton is installed; everything else is in pyproject.toml.

Without a compiler or CMake the installation succeeds, says once what is lost, and decoding runs on
torch, the kvstore's log on Python.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
STEP = "baton.engine.libbaton_step"
LOG = "services.kvstore.log.libbaton_log"
COPY = "baton.arena.libbaton_copy"


def _builder():
    """baton.engine.step_kernel_build, loaded by path: Baton is not installed yet."""
    path = ROOT / "baton" / "engine" / "step_kernel_build.py"
    spec = importlib.util.spec_from_file_location("step_kernel_build", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Libraries with a plain C interface, no Python modules: CMake builds them, not distutils."""

    def get_ext_filename(self, fullname: str) -> str:
        """No ABI tag: the library does not know Python."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Where the sources were not shipped, or nothing can compile them, there is no library."""
        builder = _builder()
        target = {LOG: builder.LOG, COPY: builder.COPY}.get(ext.name, builder.STEP)
        builder.build_or_warn(Path(self.get_ext_fullpath(ext.name)), target.sources, target)


setup(
    cmdclass={"build_ext": BuildNative},
    # Optional: setuptools goes on when the file does not appear.
    ext_modules=[Extension(name, sources=[], optional=True) for name in (STEP, LOG, COPY)],
)
