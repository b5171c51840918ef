"""The docs build, their links lead somewhere, and what they list is what there is."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import subprocess
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest

import zrpc
import zrpc.testing
from tests.docs.pages import ROOT, blocks, links, pages
from tests.support.warm import warm_commands
from tests.test_imports import ROOMS
from zrpc.agent.service import Service
from zrpc.calls.message_hooks import MessageHooks
from zrpc.testing import Mesh
from zrpc.wire.kind import Rules

# The garbage collector would take a sixth of the build's time: almost all objects are kept.
_BUILD = """
import gc, sys
gc.disable()
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.system
def test_the_docs_build_without_a_warning(tmp_path: Path) -> None:
    build = tmp_path / "build.py"
    build.write_text(_BUILD)
    command = [warm_commands().python, str(build), "-W", "--keep-going", "-n", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "html")],
        env=warm_commands().environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "index.html").exists()
    names = {page.stem for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts}
    listed = (tmp_path / "html" / "llms.txt").read_text()
    assert [name for name in names - {"index"} if f"{name}.html): " not in listed] == []
    assert "`zrpc.rpc_sync` `(to, func" in (tmp_path / "html" / "llms-full.txt").read_text()
    assert _words_without_their_page(tmp_path / "html") == []


def _words_without_their_page(html: Path) -> list[str]:
    """The words of docs/search_words.py that the search of the site doesn't lead to their pages."""
    script = (html / "searchindex.js").read_text()
    index = json.loads(script.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
    words = runpy.run_path(str(ROOT / "docs" / "search_words.py"))["WORDS"]
    return [
        word
        for page, listed in words.items()
        for word in listed.lower().split(", ")
        if not any(
            index["docnames"][found] == page for found, *_ in index["indexentries"].get(word, [])
        )
    ]


@pytest.mark.parametrize(
    "figure", sorted((ROOT / "docs" / "figures").glob("*.svg")), ids=lambda figure: figure.stem
)
def test_a_figure_can_be_read_on_a_phone(figure: Path) -> None:
    if figure.stem in ("launch", "stacks", "top", "top-worker", "slow-worker"):
        pytest.skip("what a screen showed, which scrolls on a phone")
    size = re.search(r'viewBox="0 0 ([\d.]+)', figure.read_text())
    assert size
    assert float(size[1]) <= 560  # so 13 px are at least 8 px on a screen of 390 px


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_to_files(page: Path) -> None:
    local = [link.partition("#")[0] for link in links(page) if "://" not in link]
    missing = [link for link in local if link and not (page.parent / link).exists()]
    assert not missing


def test_the_version_equals_the_one_in_pyproject() -> None:
    declared = _PROJECT["version"]
    assert version("torch-zrpc") == declared == zrpc.__version__
    assert f"## [{declared}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_what_readme_requires_is_what_pyproject_requires() -> None:
    python = _PROJECT["requires-python"].removeprefix(">=")
    [torch] = [each[7:] for each in _PROJECT["dependencies"] if each.startswith("torch>=")]
    required = f"Python {python} or newer, torch {torch} or newer"
    assert required in (ROOT / "README.md").read_text()


@pytest.mark.system
def test_the_page_of_all_names_says_what_the_code_says() -> None:
    index = runpy.run_path(str(ROOT / "docs" / "api_index.py"))
    assert index["PAGE"].read_text() == index["page"](), "run: python docs/api_index.py"


def test_the_errors_of_the_faq_are_those_of_the_code() -> None:
    section = (ROOT / "docs" / "faq.md").read_text().partition("## By symptom")[0]
    texts = re.findall(r"^`(.+)`$", section, re.MULTILINE)
    code = "".join(path.read_text() for path in (ROOT / "zrpc").rglob("*.py"))
    # Strings that a formatter has broken into two lines, and what stands for a value.
    joined = re.sub(r'"\n\s+f?"', "", code)
    from_python = ("AttributeError: ", "KeyError: ")
    ours = [re.split(r"['(]", text)[0] for text in texts if not text.startswith(from_python)]
    assert len(ours) > 5
    assert [text for text in ours if text.strip() not in joined] == []


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("launch", "reference/command-line.md"),
        ("launch", "how-to/launch.md"),
        ("stacks", "reference/command-line.md"),
    ],
)
def test_every_option_of_a_command_is_described(module: str, page: str) -> None:
    command = importlib.import_module(f"zrpc.cli.{module}").command
    text = (ROOT / "docs" / page).read_text()
    options = [option for param in command.params for option in param.opts if option[0] == "-"]
    assert options
    assert [option for option in options if f"`{option}" not in text] == []


def test_every_public_name_is_in_the_reference() -> None:
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    names = [f"zrpc.{name}" for name in zrpc.__all__]
    names += [f"zrpc.testing.{name}" for name in zrpc.testing.__all__]
    unlisted = [name for name in names if not re.search(rf":: {re.escape(name)}\b", reference)]
    assert unlisted == []


def test_every_line_of_the_tables_of_coming_from_ray_is_in_its_program() -> None:
    page = ROOT / "docs" / "coming-from-ray.md"
    rows = re.findall(r"^\| .* \| (.*) \|$", page.read_text(), re.MULTILINE)
    found = [code for cell in rows for code in re.findall(r"(?<!})`([^`]+)`", cell)]
    lines = [line for line in found if re.search(r"zrpc\.|\.rpc_|\)$", line)]
    [program] = [block.text for block in blocks(page) if block.language == "python"]
    assert len(lines) > 40
    assert [line for line in lines if line not in program and line[:6] != "close("] == []


@pytest.mark.zrpc(workers=1)
def test_what_contributing_names_of_agents_services_and_hooks_exists(mesh: Mesh) -> None:
    found = re.findall(r"`(agent|Service|MessageHooks)\.([a-z_.]+)", _CONTRIBUTING)
    kinds = {"agent": mesh.agent(0), "Service": Service, "MessageHooks": MessageHooks}
    assert {kind for kind, _ in found} == set(kinds)
    for kind, name in found:
        assert attrgetter(name)(kinds[kind])


def test_contributing_explains_each_rule_of_a_kind_of_message() -> None:
    assert [rule for rule in Rules._fields if f"`{rule}`" not in _CONTRIBUTING] == []


def test_contributing_has_one_row_for_each_room() -> None:
    for room in {room for row in ROOMS for room in row}:
        name = f"{room}:" if room in ("face", "leaves", "values") else f"`{room}` "
        rows = [line for line in _CONTRIBUTING.splitlines() if line.startswith(f"| {name}")]
        assert len(rows) == 1, room
        assert rows[0].endswith(". |")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_files_and_modules_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    files = re.findall(r"`((?:zrpc|tests|cli|docs)/[\w/.-]+)`", text)
    modules = re.findall(r"(?<!\})`(zrpc\.[a-z_.]+)`|automodule:: (zrpc\.[a-z_.]+)", text)
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert [name for pair in modules for name in pair if name and not find_spec(name)] == []
