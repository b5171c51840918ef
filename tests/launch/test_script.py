"""What is launched: a Python script, or another program."""

from __future__ import annotations

import os
import py_compile
import re
import zipfile
from pathlib import Path

import pytest

from tests.launch.conftest import Start, Write
from zrpc.launch.script import check_script, find_program

SHELL = '#!/bin/sh\necho "rank $RANK of $WORLD_SIZE: $*"\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(path: Path, text: str | bytes, *, executable: bool = False) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o755 if executable else 0o644)
    return path.name


def test_another_program_in_the_place_of_the_script_is_refused(here: Path) -> None:
    for name, text, kind in (
        ("a", SHELL, "a script for /bin/sh"),
        ("a.py", SHELL, "a script for /bin/sh"),
        ("a.sh", "if true; then\n", "none"),
        ("executable", "export A=1; exec train\n", "none"),
        ("a", b"\x7fELF\x02\x01\x01\0\0\0", "a binary file"),
        ("a.pl", "#!/usr/bin/env perl\nuse strict;\n", "a script for /usr/bin/env perl"),
    ):
        make(here / name, text, executable=name == "executable")
        with pytest.raises(ValueError, match=f"'{name}' is {kind}: to run it .*-no-python") as e:
            check_script(name)
        assert "\n" not in str(e.value)


def test_python_script_is_accepted_and_its_errors_are_left_to_python(here: Path) -> None:
    """So are compiled and zipped programs, and directories."""
    for name, text in (
        ("a.py", "print('a syntax error'\n"),
        ("a", "#!/usr/bin/env python3\nprint('a syntax error'\n"),
        ("a", "print()\n"),
        ("a.txt", "print()\n"),
        ("a", "#!/bin/sh\n''':'\nexec python3 \"$0\"\n'''\nprint()\n"),
        ("a", "#!/usr/bin/env -S uv run --script\nprint()\n"),
        ("a", ""),
    ):
        check_script(make(here / name, text))
    make(here / "a.py", "print()")
    py_compile.compile("a.py", "compiled")
    with zipfile.ZipFile("app", "w") as bundle:
        bundle.write("a.py", "__main__.py")
    zipped = (here / "app").read_bytes()
    make(here / "app", b"#!/opt/an/interpreter\n" + zipped, executable=True)
    (here / "directory").mkdir()
    for name in ("compiled", "app", "directory"):
        check_script(name)


def test_command_in_the_place_of_the_script_is_explained() -> None:
    with pytest.raises(FileNotFoundError, match=r"no script 'sh' in .*; to run .*/sh, add --no-p"):
        check_script("sh")
    with pytest.raises(FileNotFoundError, match=r"there is no script 'no-such-command' in /[^;]*$"):
        check_script("no-such-command")


def test_program_is_found_as_by_a_shell_or_in_the_working_directory(here: Path) -> None:
    assert find_program("sh") in (["/bin/sh"], ["/usr/bin/sh"])
    make(here / "tool", SHELL, executable=True)
    assert find_program("tool") == find_program("./tool") == ["./tool"]
    with pytest.raises(
        FileNotFoundError, match=r"no program 'no-such-command' on the PATH or in /"
    ):
        find_program("no-such-command")
    with pytest.raises(FileNotFoundError, match=r"no program './no-such-file' in /"):
        find_program("./no-such-file")


def test_script_that_is_not_executable_is_run_by_what_its_first_line_names(here: Path) -> None:
    make(here / "a", "#!/usr/bin/env -S bash -e\n")
    make(here / "b", "echo\n")
    make(here / "c", "echo\n", executable=True)
    make(here / "d", b"\x7fELF\0")
    assert find_program("a") == ["/usr/bin/env", "-S bash -e", "a"]
    assert find_program("b") == ["/bin/sh", "b"]
    assert find_program("c") == ["/bin/sh", "./c"]
    with pytest.raises(ValueError, match="'d' is not executable: `chmod"):
        find_program("d")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_program_has_the_environment_of_a_worker(start: Start, write: Write, method: str) -> None:
    shown = "$RANK/$WORLD_SIZE $ZRPC_WORKER_NAME $* $(grep SigIgn /proc/self/status)"
    program = write(f'#!/bin/sh\necho "{shown}"; exit $RANK\n', "p")
    job = {"target": program, "argv": ["a b", "c"], "no_python": True}
    code, out, err = start(nprocs=2, start_method=method, **job).finish()
    assert code == 1
    found = re.search(r"\[1\] 1/2 worker1 a b c SigIgn:\s(\w+)\n", out)
    assert found
    assert not int(found[1], 16) & (1 << 12)  # SIGPIPE, which Python ignores
    assert "failed first, with exit code 1; it wrote nothing to standard error" in err


def test_program_that_cannot_be_run_exits_as_under_a_shell(start: Start, write: Write) -> None:
    program = write("#!/no/such/interpreter\n", "p")
    os.chmod(program, 0o755)
    code, _, err = start(target=program, no_python=True).finish()
    assert code == 127
    assert f"zrpc launch: {program!r} can't be run: " in err


def test_output_of_a_python_program_is_not_held_back(start: Start) -> None:
    program = "print('at once'); import time; time.sleep(1000)"
    launched = start(target="python3", argv=["-c", program], no_python=True)
    launched.read_until("[0] at once\n")
    launched.stop()
