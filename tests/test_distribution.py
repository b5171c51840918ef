"""The wheel and the source distribution hold what a user needs, and work when installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 300
_NOT_COPIED = shutil.ignore_patterns(".*", "_build", "build", "*.egg-info", "__pycache__", "shared")
_HELLO = """
import zrpc as rpc
with rpc.session() as worker:
    if worker.id == 0:
        print(rpc.rpc_sync("worker1", max, args=(1, 2)), rpc.__version__, rpc.__file__)
"""

_TYPED = """
from typing import assert_type
import zrpc
def square(number: int) -> int:
    return number * number
assert_type(zrpc.rpc_sync("worker1", square, args=(2,)), int)
zrpc.rpc_sync("worker1", 3)  # type: ignore[call-overload]  # pyright: ignore
"""

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source distribution, and the wheel that was built out of it."""
    directory = tmp_path_factory.mktemp("distribution")
    source = _copy_of_checkout(directory)
    built = directory / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def test_the_wheel_has_the_package_and_nothing_else(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.endswith("-py3-none-any.whl")
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"zrpc"}
    packed = {name for name in names if name.startswith("zrpc/") and "/cli/" not in name}
    present = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zrpc").rglob("*.py")}
    assert packed == {*present, "zrpc/py.typed"}


def test_the_source_distribution_has_readme_and_licence(distributions: Path) -> None:
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert names >= {"README.md", "LICENSE", "pyproject.toml", "zrpc/py.typed"}
    assert "zrpc/cli/launch.py" in names


def test_the_wheel_works_in_a_new_environment(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    bin, packages = _environment_with(tmp_path, str(wheel))
    (tmp_path / "hello.py").write_text(_HELLO)
    output = run(str(bin / "zrpc"), "launch", "--nprocs", "2", "hello.py", cwd=tmp_path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert output.split() == ["[0]", "2", version, str(packages / "zrpc" / "__init__.py")]


def test_type_checkers_find_the_types_of_an_editable_install(tmp_path: Path) -> None:
    bin, _ = _environment_with(tmp_path, "-e", str(_copy_of_checkout(tmp_path)))
    (tmp_path / "program.py").write_text(_TYPED)
    for checker in ("mypy", "--strict", "--python-executable"), ("pyright", "--pythonpath"):
        run(sys.executable, "-m", *checker, str(bin / "python"), "program.py", cwd=tmp_path)
    assert run(str(bin / "zrpc"), "--version").startswith("zrpc, version ")


def _copy_of_checkout(directory: Path) -> Path:
    return shutil.copytree(ROOT, directory / "source", symlinks=True, ignore=_NOT_COPIED)


def _environment_with(directory: Path, *package: str) -> tuple[Path, Path]:
    """Installs the package in a new environment; returns where its commands and packages are."""
    venv = directory / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    (packages,) = venv.glob("lib/python*/site-packages")
    # The dependencies; the .pth files there, such as that of this checkout, are not read.
    (packages / "dependencies.pth").write_text(_installed_packages())
    install = ["install", "--no-deps", "--no-build-isolation", *package]
    run(sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), *install)
    return venv / "bin", packages


def _installed_packages() -> str:
    """The directories in which this interpreter finds packages, a line each."""
    directories = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return "\n".join([*directories, *(path for path in sys.path if path.endswith("-packages"))])


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
