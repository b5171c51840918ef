"""The workflow that uploads a release, and the README that it uploads."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import yaml

from tests.docs.pages import links

ROOT = Path(__file__).parents[1]
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
    assert [
        name for name in re.findall(r"python (docs/\S+)", TEXT) if not (ROOT / name).exists()
    ] == []
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
