"""The manifests of examples/kubernetes fit the schemas of Kubernetes, and their workers meet."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.pods import IMAGE, Pods
from zrpc.membership.secret import new_secret

pytestmark = pytest.mark.engine
yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install kubernetes-validate")
EXAMPLE = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFESTS: dict[str, Any] = {
    each["kind"]: each for each in yaml.safe_load_all((EXAMPLE / "mesh.yaml").read_text())
}
ELASTIC: list[Any] = list(yaml.safe_load_all((EXAMPLE / "elastic.yaml").read_text()))
JOB = MANIFESTS["Job"]
POD = JOB["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", ["1.29", "latest"])
def test_the_manifests_fit_the_schemas(version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    if version == "latest":
        version = schemas.latest_version()
    for manifest in (*MANIFESTS.values(), *ELASTIC):
        schemas.validate(manifest, version, strict=True)
        broken = {**manifest, "spec": {**manifest["spec"], "nosuchfield": 1}}
        with pytest.raises(schemas.ValidationError, match="nosuchfield"):
            schemas.validate(broken, version, strict=True)


def test_the_manifests_of_an_elastic_mesh_fit_each_other() -> None:
    service, head, rollout, policy = ELASTIC
    for deployment in (head, rollout):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"] == head["spec"]["selector"]["matchLabels"]
    [worker] = rollout["spec"]["template"]["spec"]["containers"]
    joins = worker["command"][worker["command"].index("--join") + 1]
    assert joins == f"{service['metadata']['name']}:29500"


def test_the_manifests_fit_together() -> None:
    labels = JOB["spec"]["template"]["metadata"]["labels"]
    policy = MANIFESTS["NetworkPolicy"]["spec"]
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert POD["subdomain"] == MANIFESTS["Service"]["metadata"]["name"]
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"]
    [container] = POD["containers"]
    variables = {each["name"]: each for each in container["env"]}
    assert variables["WORLD_SIZE"]["value"] == str(JOB["spec"]["completions"])
    assert container["resources"]["limits"]["cpu"] == variables["OMP_NUM_THREADS"]["value"]
    dockerfile = (EXAMPLE / "Dockerfile").read_text()
    assert f"USER {POD['securityContext']['runAsUser']}\n" in dockerfile
    for copied in re.findall(r"^COPY (.*) \S+$", dockerfile, re.M):
        for path in copied.split():
            assert (EXAMPLE.parents[1] / path).exists(), path


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """The pods of the example's Job."""
    if hidden := [str(path) for path in IMAGE if path.stat().st_mode & 0o5 != 0o5]:
        pytest.skip(f"needs {' and '.join(hidden)} to be readable by other users: chmod o+rx")
    # Not pytest's own directory, which other users can't read.
    with tempfile.TemporaryDirectory(prefix="zrpc-pods-") as path:
        directory = Path(path)
        directory.chmod(0o755)
        pods = Pods(JOB, {("mesh", "secret"): new_secret()}, directory)
        with pods.network():
            yield pods


def test_the_workers_of_the_job_meet(pods: Pods) -> None:
    pods.start(EXAMPLE)
    outcomes = pods.outcomes()
    assert [code for code, _ in outcomes] == [0] * 4, outcomes
    for index, (_, output) in enumerate(outcomes):
        assert f"worker{index} of 4 {index**2}\n" in output
        # Not by Unix sockets: each pod has a /tmp and a /dev/shm of its own.
        assert f"name=worker{index}) listens on tcp://10.78.0.{index + 1}:" in output
        assert "(CURVE)" in output


def test_a_pod_that_is_deleted_exits_at_once(pods: Pods) -> None:
    """Its first process would ignore SIGTERM, and wait for rank 0 until it is killed."""
    pods.start(EXAMPLE, first=3)
    pods.terminate()
    [(code, output)] = pods.outcomes()
    assert code == 1
    assert output.splitlines()[-1] == "stopped by SIGTERM"


def test_the_doctor_finds_all_well_in_a_pod(pods: Pods) -> None:
    pods.start(EXAMPLE, ["zrpc", "doctor"], first=3)
    [(code, output)] = pods.outcomes()
    assert code == 0, output
    lines = {line.split()[1]: line for line in output.splitlines() if line[0] in "okwf"}
    assert lines["interface"].split() == ["ok", "interface", "10.78.0.4"]
    assert lines["secret"].split() == ["ok", "secret", "in", "ZRPC_SECRET"]
    assert lines["directory"].split()[:3] == ["warning", "directory", "/dev/shm,"]
    assert "0 failure(s), 1 warning(s)" in output
