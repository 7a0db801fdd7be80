"""The extension modules; everything else about the distribution is in pyproject.toml.

FASTIPC_TEST_HOOKS=1 in the environment compiles in the crash points and wake-up filters that the
tests use, FASTIPC_SANITIZE=address,undefined the compiler's checks (.ci/sanitized runs the suite on
such a build). Neither is ever shipped: a test of the wheel proves that it has none of them.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    sys.exit("fastipc needs POSIX shared memory and file locks: it cannot be built on Windows.")

import os
from glob import glob
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# setuptools wants paths relative to setup.py, which may be started from elsewhere.
os.chdir(Path(__file__).resolve().parent)

MACROS: list[tuple[str, str | None]] = []
if sys.platform.startswith("linux"):
    MACROS.append(("_GNU_SOURCE", "1"))  # -std=c11 alone hides memfd_create and F_OFD_SETLK
if os.environ.get("FASTIPC_TEST_HOOKS") == "1":
    MACROS.append(("FIPC_TEST_HOOKS", "1"))

# Hidden visibility: an extension exports PyInit_* only, so that two copies of csrc/ in one process
# never bind to each other's symbols.
CFLAGS = ["-std=c11", "-O3", "-fvisibility=hidden"]
LDFLAGS: list[str] = []
if sanitize := os.environ.get("FASTIPC_SANITIZE"):
    # The last -O counts. What was found ends the process: a message alone would be overlooked.
    CFLAGS += ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
    CFLAGS.append(f"-fsanitize={sanitize}")
    LDFLAGS.append(f"-fsanitize={sanitize}")


class BuildExt(build_ext):
    """Rebuilds when the flags changed, which setuptools alone does not notice.

    Without it a tree that was once built with test hooks keeps them in the next ordinary build.
    """

    def build_extensions(self) -> None:
        flags = repr((MACROS, CFLAGS, os.environ.get("CFLAGS"), os.environ.get("CC")))
        # What is built in place and what goes to build/lib are separate files, stamped separately.
        stamp = Path(self.build_temp, "flags-inplace" if self.inplace else "flags")
        if not stamp.exists() or stamp.read_text() != flags:
            self.force = True
            stamp.unlink(missing_ok=True)  # a build that fails half-way is not up to date
        super().build_extensions()
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(flags)


def extension(
    name: str, sources: list[str], include_dirs: list[str], macros: list[tuple[str, str | None]]
) -> Extension:
    headers = [*glob("csrc/*.h"), *glob("fastipc/*.h"), *glob("fastipc/*.pxd")]
    return Extension(
        name,
        sources,
        include_dirs=include_dirs,
        define_macros=macros,
        extra_compile_args=CFLAGS,
        extra_link_args=LDFLAGS,
        depends=["setup.py", *sorted(headers)],
    )


# Every C file is always compiled; those for another platform are empty there by #ifdef. The codec
# is Cython alone: it knows Python objects, and nothing of the ring.
extensions = [
    extension("fastipc._core", ["fastipc/_core.pyx", *sorted(glob("csrc/*.c"))], ["csrc"], MACROS),
    extension(
        "fastipc._codec",
        ["fastipc/_codec.pyx"],
        ["fastipc", numpy.get_include()],
        [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    ),
]

setup(
    # The generated C goes to build/, so that neither the package nor an sdist picks it up.
    ext_modules=cythonize(extensions, build_dir="build/cython", language_level=3),
    cmdclass={"build_ext": BuildExt},
)
