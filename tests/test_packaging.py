"""What is shipped: the wheel as an installed thing, and the rules that setup.py keeps."""

from __future__ import annotations

import email
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fastipc

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "setup.py").exists():
    pytest.skip("needs the source tree", allow_module_level=True)

# Names that only a build with test hooks contains.
HOOKS = (b"fipc_test_", b"FIPC_TEST_")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command, cwd, **kwargs):
    result = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        **kwargs,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the tree, with the build tools that are installed here."""
    source = tmp_path_factory.mktemp("source") / "fastipc"
    ignored = shutil.ignore_patterns(
        ".*", "build", "dist", "wheelhouse", "*.egg-info", "*.so", "__pycache__"
    )
    shutil.copytree(ROOT, source, ignore=ignored)
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check")
    run(*pip, "--no-build-isolation", "--no-deps", "--wheel-dir", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A directory that the wheel, and nothing else, is installed into."""
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"fastipc", "fastipc_core-0.1.0.dist-info"}

    for name in ("py.typed", "_core.pyi", "__init__.py", "__main__.py", "demo/__init__.py"):
        assert f"fastipc/{name}" in names
    assert any(name.endswith(".pxd") for name in names)
    assert any(re.fullmatch(r"fastipc/_core\..*\.so", name) for name in names)
    allowed = (".py", ".pyi", ".pxd", ".so", "py.typed")
    strange = [n for n in names if n.startswith("fastipc/") and not n.endswith(allowed)]
    assert strange == []
    # Every Python file of the tree is there: a subpackage without __init__.py would not be.
    in_tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fastipc").rglob("*.py")}
    assert in_tree <= set(names)


@pytest.mark.slow
def test_wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    text = archive.read("fastipc_core-0.1.0.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    assert metadata["Name"] == "fastipc-core"
    assert metadata["Version"] == "0.1.0"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    needed = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in needed}
    assert names == {"cloudpickle", "msgspec", "numpy", "pyzmq"}
    assert metadata.get_payload().strip(), "the README is the long description"

    scripts = archive.read("fastipc_core-0.1.0.dist-info/entry_points.txt").decode()
    assert "fastipc = fastipc.__main__:main" in scripts


@pytest.mark.slow
def test_wheel_has_no_test_hooks_and_exports_only_its_init(installed, hooked_core):
    (core,) = (installed / "fastipc").glob("_core*.so")
    (hooked,) = (hooked_core / "fastipc").glob("_core*.so")
    for hook in HOOKS:
        assert hook in hooked.read_bytes(), "this test no longer knows the names of the hooks"
        assert hook not in core.read_bytes()
    for built in (installed / "fastipc").glob("*.so"):
        for check in (b"__asan_", b"__ubsan_"):  # FASTIPC_SANITIZE
            assert check not in built.read_bytes()

    if sys.platform == "linux":
        symbols = run("nm", "-D", "--defined-only", core, cwd=installed).split("\n")
        assert [line.split()[-1] for line in symbols if line] == ["PyInit__core"]


@pytest.mark.slow
def test_installed_wheel_runs_outside_the_tree(installed, run_child):
    printed = run_child(
        "import fastipc, fastipc._core; print(fastipc.__file__); print(fastipc._core.__file__)",
        pythonpath=installed,
    )
    assert all(line.startswith(str(installed)) for line in printed.splitlines())
    printed = run_child(
        command=["-m", "fastipc", "demo", "--seconds", "0.3", "--json"], pythonpath=installed
    )
    assert json.loads(printed)["verified"] is True


def test_version_is_said_once_more_in_the_package():
    assert fastipc.__version__ == PYPROJECT["project"]["version"]


def test_windows_is_refused_in_one_sentence(tmp_path):
    refused = subprocess.run(
        [
            sys.executable,
            "-c",
            "import runpy, sys; sys.platform = 'win32'; runpy.run_path(sys.argv[1])",
            str(ROOT / "setup.py"),
        ],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "cannot be built on Windows" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_the_build_needs_no_more_than_it_says():
    tools = {re.match(r"[\w-]+", need)[0] for need in PYPROJECT["build-system"]["requires"]}
    expected = {"setuptools", "Cython"}
    if (ROOT / "fastipc" / "_codec.pyx").exists():
        expected.add("numpy")
    assert tools == expected
    # The suite builds without isolation, so the test extra brings the same tools.
    test_extra = PYPROJECT["project"]["optional-dependencies"]["test"]
    assert set(PYPROJECT["build-system"]["requires"]) <= set(test_extra)


def test_top_level_holds_only_what_belongs_there():
    listed = run("git", "ls-files", cwd=ROOT).splitlines()
    top = {name.split("/")[0] for name in listed}
    assert top <= {
        ".ci",
        ".clang-format",
        ".github",
        ".gitignore",
        "LICENSE",
        "MANIFEST.in",
        "README.md",
        "bench",
        "csrc",
        "fastipc",
        "pyproject.toml",
        "setup.py",
        "tests",
    }
