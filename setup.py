"""Builds the native step kernel while Baton is installed; everything else is in pyproject.toml.

Without a compiler or CMake the installation succeeds, says once what is lost, and decoding runs on
torch.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


def _builder():
    """baton.engine.step_kernel_build, loaded by path: Baton is not installed yet."""
    path = ROOT / "baton" / "engine" / "step_kernel_build.py"
    spec = importlib.util.spec_from_file_location("step_kernel_build", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildStepKernel(build_ext):
    """One library with a plain C interface: no Python module, so CMake builds it, not distutils."""

    def get_ext_filename(self, fullname: str) -> str:
        """No ABI tag: the library does not know Python."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Where the sources were not shipped, or nothing can compile them, there is no library."""
        builder = _builder()
        builder.build_or_warn(Path(self.get_ext_fullpath(ext.name)), ROOT / "native")


setup(
    cmdclass={"build_ext": BuildStepKernel},
    # Optional: setuptools goes on when the file does not appear.
    ext_modules=[Extension("baton.engine.libbaton_step", sources=[], optional=True)],
)
