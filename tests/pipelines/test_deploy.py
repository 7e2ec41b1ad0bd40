"""What lies in deploy/ parses, belongs together, and asks for metrics that exist."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from strop.pipelines.settings import load_settings
from strop.serving.capture import Counts
from strop.serving.capture_metrics import CaptureCollector
from strop.serving.gateway import Gateway
from strop.serving.journal import WriterCounts
from strop.serving.monitoring import TARGETS
from strop.serving.process import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"


def manifests() -> list[dict[str, Any]]:
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def kind(name: str) -> list[dict[str, Any]]:
    return [m for m in manifests() if m["kind"] == name]


def test_the_configuration_in_the_manifests_is_one_strop_takes(tmp_path: Path) -> None:
    [config] = kind("ConfigMap")
    file = tmp_path / "strop.yaml"
    file.write_text(config["data"]["strop.yaml"])
    serving = load_settings(file).serving
    [cluster] = kind("RayCluster")
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert serving.port in [p["containerPort"] for c in head["containers"] for p in c["ports"]]
    mounts = {m["mountPath"]: m["name"] for m in head["containers"][0]["volumeMounts"]}
    # Keys are mounted where they are looked for, and readable by nobody else.
    assert serving.gateway.keys_file and mounts[str(Path(serving.gateway.keys_file).parent)] == "keys"
    [keys] = [v for v in head["volumes"] if v["name"] == "keys"]
    assert keys["secret"]["defaultMode"] == 0o400
    [job] = kind("RayJob")
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    workers = cluster["spec"]["workerGroupSpecs"]
    assert sum(group["replicas"] for group in workers) >= serving.replicas * serving.gpus_per_replica


def test_every_volume_that_is_mounted_exists_and_no_container_may_gain_rights() -> None:
    [cluster], [loop] = kind("RayCluster"), kind("CronJob")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pods = [g["template"]["spec"] for g in groups]
    pods.append(loop["spec"]["jobTemplate"]["spec"]["template"]["spec"])
    for pod in pods:
        volumes = {v["name"] for v in pod["volumes"]}
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert {m["name"] for m in container["volumeMounts"]} <= volumes
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_prometheus_looks_where_the_fleet_writes() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    [found] = job["file_sd_configs"][0]["files"]
    home = re.search(r"STROP_HOME=(\S+)", (DEPLOY / "Dockerfile").read_text())
    assert home and found == f"{home[1]}/run/{TARGETS}"


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the metrics that HAProxy, vLLM and capture show."""
    gateway = Gateway.start("127.0.0.1", free_port(), tmp_path_factory.mktemp("gateway"))
    gateway.attach(0, [("127.0.0.1", 1)], 1)
    names = set(re.findall(r"^(haproxy_\w+)", httpx.get(gateway.metrics_url).text, re.M))
    gateway.child.stop()
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.origin
    for source in (Path(spec.origin).parent / "v1").rglob("*.py"):
        for name in re.findall(r"\"(vllm:\w+)\"", source.read_text()):
            names |= {name, f"{name}_total", f"{name}_bucket"}
    names |= {f"{f.name}_total" for f in CaptureCollector(Counts(), WriterCounts()).collect()}
    return names | {"up"}


def test_the_dashboard_asks_for_metrics_that_exist(exposed: set[str]) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "strop.json").read_text())
    panels = dashboard["panels"]
    assert len({p["id"] for p in panels}) == len(panels) >= 9
    for panel in panels:
        for target in panel["targets"]:
            expression = re.sub(r'"[^"]*"', "", target["expr"])
            metrics = re.findall(r"\b(?:haproxy_|vllm:|strop_|up\b)[\w:]*", expression)
            assert metrics and set(metrics) <= exposed, panel["title"]
            for opening, closing in ("()", "{}", "[]"):
                assert expression.count(opening) == expression.count(closing), panel["title"]


def test_top_reads_metrics_that_exist(exposed: set[str]) -> None:
    source = (DEPLOY.parent / "pipelines" / "top.py").read_text()
    names = set(re.findall(r"\"((?:haproxy_|vllm:)\w+)\"", source))
    assert len(names) > 8
    assert {n for n in names if n not in exposed and f"{n}_bucket" not in exposed} == set()
