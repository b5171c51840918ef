"""What is released: the wheel, the source distribution, the workflow, and the README."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import links

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


@pytest.mark.system
def test_the_wheel_has_the_package_and_nothing_else(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.endswith("-py3-none-any.whl")
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"zrpc"}
    packed = {name for name in names if name.startswith("zrpc/") and "/cli/" not in name}
    present = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zrpc").rglob("*.py")}
    assert packed == {*present, "zrpc/py.typed"}


@pytest.mark.system
def test_the_source_distribution_has_readme_and_licence(distributions: Path) -> None:
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert names >= {"README.md", "LICENSE", "pyproject.toml", "zrpc/py.typed"}
    assert "zrpc/cli/launch.py" in names


@pytest.mark.system
def test_the_wheel_works_in_a_new_environment(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    bin, packages = _environment_with(tmp_path, str(wheel))
    (tmp_path / "hello.py").write_text(_HELLO)
    output = run(str(bin / "zrpc"), "launch", "--nprocs", "2", "hello.py", cwd=tmp_path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert output.split() == ["[0]", "2", version, str(packages / "zrpc" / "__init__.py")]


@pytest.mark.system
def test_type_checkers_find_the_types_of_an_editable_install(tmp_path: Path) -> None:
    bin, _ = _environment_with(tmp_path, "-e", str(_copy_of_checkout(tmp_path)))
    assert run(str(bin / "zrpc"), "--version").startswith("zrpc, version ")
    (tmp_path / "program.py").write_text(_TYPED)
    for checker in ("mypy", "--strict", "--python-executable"), ("pyright", "--pythonpath"):
        run(sys.executable, "-m", *checker, str(bin / "python"), "program.py", cwd=tmp_path)


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


TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text()
JOBS = yaml.safe_load(TEXT)["jobs"]


def test_only_the_job_that_uploads_may_prove_to_pypi_who_it_is() -> None:
    assert JOBS["publish"]["permissions"] == {"id-token": "write"}
    assert JOBS["publish"]["environment"] == "pypi"
    assert "permissions" not in JOBS["build"]
    assert yaml.safe_load(TEXT)["permissions"] == {"contents": "read"}


def test_the_workflow_has_no_secret_and_pins_what_it_uses() -> None:
    assert "secrets." not in TEXT
    assert "password" not in TEXT
    used = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    assert len(used) == 5
    # By commit: a tag can be moved. The comment is for people, and for bots that raise versions.
    assert len(re.findall(r"uses: \S+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", TEXT, re.M)) == len(used)


def test_the_workflow_runs_files_that_exist_on_a_supported_python() -> None:
    named = re.findall(r"python (docs/\S+)", TEXT)
    assert [name for name in named if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f'python-version: "{project["requires-python"].removeprefix(">=")}"' in TEXT


def test_the_readme_on_pypi_has_absolute_links(tmp_path: Path) -> None:
    absolute = runpy.run_path(str(ROOT / "docs" / "pypi_readme.py"))["absolute"]
    readme = tmp_path / "README.md"
    readme.write_text(absolute((ROOT / "README.md").read_text(), "https://example.org/z", "v1"))
    found = links(readme)
    assert "https://example.org/z/blob/v1/docs/tutorial.md" in found
    assert "https://example.org/z/raw/v1/docs/_static/mark.svg" in found
    assert [link for link in found if not re.match(r"https?://|#", link)] == []
