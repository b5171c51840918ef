"""zrpc doctor reports what init_rpc would decide here, and what to do about it."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zrpc.membership.endpoints
from zrpc.cli import main
from zrpc.membership.secret import new_secret, write_secret

LOCAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "0"}
OUTSIDE: dict[str, str | None] = dict.fromkeys(LOCAL)  # of a launch: none of them is set
CHECKS = [
    *("zrpc", "python", "torch", "pyzmq", "cloudpickle", "click", "typing_extensions"),
    *("variables", "libzmq", "CURVE", "memfd"),
    *("directory", "interface", "secret", "descriptors"),
]
Findings = dict[str, dict[str, str]]


@pytest.fixture(autouse=True)
def directory(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A master on this host, and nothing else; gives the directory for sockets."""
    # In this order: what no_leaks sets is there until monkeypatch has restored the rest.
    directory = Path(os.environ["ZRPC_RUNTIME_DIR"])  # of no_leaks
    for name in list(os.environ):
        if name.startswith(("ZRPC_", "SLURM_", "OMPI_", "PMI", "MPI_", "JOB_")):
            monkeypatch.delenv(name)
    for name, value in LOCAL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(directory))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield directory
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def examine(*options: str, code: int = 0, **variables: str | None) -> Findings:
    done = CliRunner(env=variables).invoke(main, ["doctor", "--json", *options])
    assert done.exit_code == code, done.output
    return {each["check"]: each for each in json.loads(done.stdout)["findings"]}


def expect(finding: dict[str, str], verdict: str, found: str, next_step: str) -> None:
    assert finding["verdict"] == verdict, finding
    assert found in finding["found"]
    assert next_step in finding["next_step"]
    # Whoever reads a warning is told what to do, and nobody else is.
    assert bool(finding["next_step"]) == (verdict != "ok")


def test_all_is_well_on_one_host(directory: Path) -> None:
    findings = examine()
    assert list(findings) == CHECKS
    for finding in findings.values():
        expect(finding, "ok", "", "")
    assert findings["torch"]["found"] == metadata.version("torch")
    assert findings["variables"]["found"] == "worker0, 60 s to meet"
    assert findings["interface"]["found"] == "127.0.0.1, for workers of this host"
    assert "enough for 2 worker(s)" in findings["descriptors"]["found"]
    assert list(directory.iterdir()) == []  # it leaves nothing


def test_text_has_a_line_for_each_check_and_what_to_do_below() -> None:
    done = CliRunner().invoke(main, ["doctor"], env={"ZRPC_SECRET": "short"})
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert [line.split()[1] for line in lines if line[0] in "okwf"] == CHECKS
    [number] = [i for i, line in enumerate(lines) if line.startswith("failure  secret")]
    assert "expected a cluster secret of 32 to 4096 characters, found one of 5" in lines[number]
    assert lines[number + 1].strip() == "→ make one with `zrpc secret`"
    assert lines[-1] == "1 failure(s), 0 warning(s)"


@pytest.mark.parametrize(
    ("version", "found"), [(None, "not installed"), ("2.5.1", "expected 2.6 or newer, found 2.5.1")]
)
def test_a_package_that_is_missing_or_too_old_and_the_checks_that_need_it(
    monkeypatch: pytest.MonkeyPatch, version: str | None, found: str
) -> None:
    versions = metadata.version

    def version_of(name: str) -> str:
        if name != "torch":
            return versions(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", version_of)
    findings = examine(code=1)
    expect(findings["torch"], "failure", found, "pip install 'torch>=2.6'")
    assert list(findings) == CHECKS[:7]  # the others need torch


def test_a_package_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    finding = examine(code=1)["pyzmq"]
    expect(finding, "failure", "ModuleNotFoundError: import of", "pip install --force-reinstall")


def test_libraries_that_cannot_encrypt_or_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(zrpc.membership.endpoints, "supports_curve", lambda: False)
    found = examine(code=1)
    expect(found["CURVE"], "failure", "found one without", "install pyzmq from its wheels")
    expect(found["memfd"], "warning", "(Operation not permitted)", "allow memfd_create in the")


def test_directories_that_cannot_be_used(directory: Path) -> None:
    long = directory / ("x" * 100)
    long.mkdir()
    finding = examine(ZRPC_RUNTIME_DIR=str(long))["directory"]
    expect(finding, "warning", f"/tmp, since {long} is too long", "with a short path")
    long.rmdir()
    findings = examine(code=1, ZRPC_RUNTIME_DIR="/nonexistent")
    expect(findings["directory"], "failure", "/nonexistent (No such file", "make it one, or name")
    expect(findings["interface"], "warning", "127.0.0.1, not tried", "mend the directory")
    directory.chmod(0o777)
    expect(examine(code=1)["directory"], "failure", "as its mode is 0777", "chmod go-w")


def test_interfaces_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for interface in ("*", "nosuchthing0"):
        finding = examine(code=1, ZRPC_IFACE=interface)["interface"]
        expect(finding, "failure", interface, "name")

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    for find in (socket.getaddrinfo, unknown):
        monkeypatch.setattr(socket, "getaddrinfo", find)
        # No name that could be asked for.
        finding = examine(code=1, MASTER_ADDR="train-0..mesh")["interface"]
        expect(finding, "failure", "'train-0..mesh' has no address", "check MASTER_ADDR")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ZRPC_INIT_TIMEOUT", "-4"),
        ("ZRPC_INIT_TIMEOUT", "nan"),
        ("ZRPC_RPC_TIMEOUT", "abc"),
        ("ZRPC_PORT_RANGE", "9-1"),
        ("ZRPC_METRICS_PORT", "abc"),
        ("RANK", "x"),
        ("RANK", "5"),
        ("WORLD_SIZE", "x"),
        ("MASTER_PORT", "70000"),
        ("ZRPC_WORKER_NAME", "a b"),
    ],
)
def test_a_variable_with_which_init_rpc_would_fail(variable: str, value: str) -> None:
    named = {"RANK": "rank", "ZRPC_WORKER_NAME": "Worker name"}.get(variable, variable)
    for others in ({},) if variable in LOCAL else ({}, OUTSIDE):
        finding = examine(code=1, **others, **{variable: value})["variables"]
        expect(finding, "failure", named, "correct that variable")


def test_outside_of_a_launch_there_is_no_master() -> None:
    findings = examine(**OUTSIDE)
    expect(findings["interface"], "warning", "without a master", "such as srun zrpc doctor")
    assert "the world size isn't known" in findings["descriptors"]["found"]


def test_a_master_whose_name_means_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where /etc/hosts gives the host's own name 127.0.1.1."""
    find = socket.getaddrinfo

    def debian(host: Any, *more: Any, **options: Any) -> Any:
        return find("127.0.1.1" if host == "node0" else host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    finding = examine(MASTER_ADDR="node0")["interface"]
    expect(finding, "warning", "to which node0 leads: other hosts can't", "set ZRPC_IFACE")


@pytest.fixture
def network_address() -> str:
    """An address of this host that others may reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            pytest.skip(f"this host has no route to others: {error}")
        return str(probe.getsockname()[0])


def test_other_hosts_need_a_secret_which_is_found_and_not_shown(
    network_address: str, tmp_path: Path
) -> None:
    findings = examine(MASTER_ADDR=network_address)
    expect(findings["interface"], "ok", network_address, "")
    refused = "workers of other hosts are refused"
    expect(findings["secret"], "warning", refused, "`zrpc secret FILE`")
    secret, file = new_secret(), tmp_path / "secret"
    write_secret(file, secret)
    variables = {"MASTER_ADDR": network_address, "ZRPC_SECRET_FILE": str(file)}
    findings = examine(**variables)
    expect(findings["secret"], "ok", f"the file {file}", "")
    assert secret not in json.dumps(findings)
    file.chmod(0o604)
    expect(examine(code=1, **variables)["secret"], "failure", "found mode 0604", "chmod 600")


def test_more_workers_than_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("descriptors are not limited here")
    finding = examine("--world-size", str(hard), code=1)["descriptors"]
    expect(finding, "failure", f"to talk to {hard - 1} other worker(s)", "`ulimit -n`")
    expect(examine("--world-size", "3")["descriptors"], "ok", "enough for 3 worker(s)", "")
