"""The manifests for `kubectl apply -k`: schemas, the restricted standard, flags and probes that fit."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from octavo.metrics.prometheus import EngineMetrics
from tests.deploy.kubernetes import Manifest, built, check, containers, pods

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"
COMPONENTS = {path.name for path in (ROOT / "components").iterdir()}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_overlays(device: str, scaler: str, tmp_path: Path) -> None:
    """With every component; of the two scalers one."""
    overlay = yaml.safe_load((ROOT / device / "kustomization.yaml").read_text())
    assert overlay["components"] == ["../components/hpa"]
    overlay["resources"] = [str(ROOT / "base")]
    overlay["components"] = [str(ROOT / "components" / name) for name in COMPONENTS - {"hpa", "keda"} | {scaler}]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    manifests = built(tmp_path)
    check(manifests)
    kinds = {manifest["kind"] for manifest in manifests}
    assert {"PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor", "Ingress", "PriorityClass"} <= kinds
    (server,) = (c for m in manifests for pod in pods(m) for c in containers(pod))
    assert server["image"] == {"cpu": "octavo:cpu", "gpu": "octavo:cuda"}[device]
    assert ("nvidia.com/gpu" in server["resources"]["limits"]) == (device == "gpu")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_is_applied_as_it_stands(device: str) -> None:
    manifests = built(ROOT / device)
    check(manifests)
    (scaler,) = [m for m in manifests if m["kind"] == "HorizontalPodAutoscaler"]
    assert scaler["spec"]["minReplicas"] == 2


@pytest.mark.parametrize(("overlay", "image"), [("leaderworkerset", "octavo:cpu"), ("kuberay", "octavo:ray")])
def test_pods_that_share_a_model(overlay: str, image: str) -> None:
    manifests = built(ROOT / overlay)
    check(manifests)
    assert [c["image"] for m in manifests for pod in pods(m) for c in containers(pod)] == [image] * 2


def test_a_server_ends_when_its_hosts_do_not_come(tmp_path: Path) -> None:
    (cluster,) = [m for m in built(ROOT / "kuberay") if m["kind"] == "RayCluster"]
    wait = containers(pods(cluster)[0])[0]["args"][0].split("&\n", 1)[1]
    for program in ("python3", "sleep", "octavo"):  # none of which a wait that is over asks for again
        (tmp_path / program).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f"SECONDS=541\n{wait}"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, b"fewer than 2 hosts have joined Ray after 540 s\n")


def test_what_is_kept_is_asked_of_the_server_that_keeps_it() -> None:
    manifests = yaml.safe_load_all((ROOT / "components" / "ingress" / "ingress.yaml").read_text())
    hashed = {
        path["path"]
        for ingress in manifests
        for path in ingress["spec"]["rules"][0]["http"]["paths"]
        if ingress["metadata"]["annotations"].get("nginx.ingress.kubernetes.io/upstream-hash-by") == "$remote_addr"
    }
    assert hashed == {"/v1/responses", "/v1/conversations", "/v1/files", "/v1/batches"}


def _worker(manifests: list[Manifest]) -> dict[str, Any]:
    (group,) = [m for m in manifests if len(pods(m)) > 1]
    spec: dict[str, Any] = pods(group)[1]["spec"]
    return spec


@pytest.mark.parametrize(
    ("overlay", "spoil"),
    [
        ("leaderworkerset", lambda worker: worker["containers"][0]["args"].remove("--headless")),
        ("leaderworkerset", lambda worker: worker["containers"][0]["args"].append("--max-model-len=8192")),
        ("leaderworkerset", lambda worker: worker["containers"][0]["env"].pop(0)),
        ("leaderworkerset", lambda worker: worker["securityContext"].update(runAsNonRoot=False)),
        ("leaderworkerset", lambda worker: worker.update(terminationGracePeriodSeconds=25)),
        (
            "kuberay",
            lambda worker: worker["containers"][0]["lifecycle"]["preStop"]["exec"].update(command=["sleep", "5"]),
        ),
        ("kuberay", lambda worker: worker["containers"][0]["ports"][0].update(containerPort=6381)),
    ],
)
def test_pods_that_do_not_fit_together_are_noticed(overlay: str, spoil: Callable[[dict[str, Any]], object]) -> None:
    manifests = built(ROOT / overlay)
    spoil(_worker(manifests))
    with pytest.raises(AssertionError):
        check(manifests)


def test_what_scalers_ask_for_is_exported() -> None:
    """By the server, and for the HPA by the adapter under the name without a colon."""
    exported = {metric.name for metric in EngineMetrics("m", 128).collect()}
    hpa = yaml.safe_load((ROOT / "components/hpa/hpa.yaml").read_text())
    names = {metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]}
    assert {name.replace("vllm_", "vllm:", 1) for name in names} <= exported
    rules = yaml.safe_load((ROOT / "components/hpa/adapter-values.yaml").read_text())["rules"]["custom"]
    assert {rule["name"]["as"]: rule["seriesQuery"].split("{")[0] for rule in rules} == {
        name: name.replace("vllm_", "vllm:", 1) for name in names
    }
    assert all("by (<<.GroupBy>>)" in rule["metricsQuery"] for rule in rules), "an engine each has its series"
    scaled = yaml.safe_load((ROOT / "components/keda/scaledobject.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["metadata"]["query"].split("{")[0].split("(")[-1] in exported


def test_scalers_count_every_engine_of_a_pod(tmp_path: Path) -> None:
    """Prometheus itself answers what KEDA and the adapter ask, of two pods with two engines each (-dp 2)."""
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool here (Debian: apt-get install --no-install-recommends prometheus)")
    scaled = yaml.safe_load((ROOT / "components/keda/scaledobject.yaml").read_text())
    adapter = yaml.safe_load((ROOT / "components/hpa/adapter-values.yaml").read_text())
    waiting, cache = (trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])
    asked: dict[str, list[tuple[str, float]]] = {waiting: [("{}", 10)], cache: [("{}", 1.4)]}
    for rule in adapter["rules"]["custom"]:
        name, query = rule["seriesQuery"].split("{")[0], rule["metricsQuery"]
        for pattern, value in {"Series": name, "LabelMatchers": 'namespace="n",pod=~"a|b"', "GroupBy": "pod"}.items():
            query = query.replace(f"<<.{pattern}>>", value)
        of_pods = (3, 7) if "waiting" in name else (0.9, 0.5)
        asked[query] = [(f'{{pod="{pod}"}}', value) for pod, value in zip("ab", of_pods, strict=True)]
    series = {
        "vllm:num_requests_waiting": {("a", 0): 1, ("a", 1): 2, ("b", 0): 3, ("b", 1): 4},
        "vllm:kv_cache_usage_perc": {("a", 0): 0.9, ("a", 1): 0.1, ("b", 0): 0.5, ("b", 1): 0.5},
    }
    labels = 'namespace="n",service="octavo",pod="{}",engine="{}"'
    tests = {
        "interval": "15s",
        "input_series": [
            {"series": f"{name}{{{labels.format(*engine)}}}", "values": f"{value}x20"}
            for name, values in series.items() for engine, value in values.items()
        ],
        "promql_expr_test": [
            {"expr": query, "eval_time": "2m", "exp_samples": [{"labels": of, "value": value} for of, value in values]}
            for query, values in asked.items()
        ],
    }  # fmt: skip
    (tmp_path / "tests.yml").write_text(json.dumps({"evaluation_interval": "15s", "tests": [tests]}))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        ("securityContext.runAsNonRoot", False, AssertionError),
        ("containers", [{"name": "server", "imagee": "octavo"}], kubernetes_validate.ValidationError),
        ("terminationGracePeriodSeconds", 20, AssertionError),
    ],
)
def test_a_manifest_that_is_wrong_is_noticed(path: str, value: object, error: type[Exception]) -> None:
    manifests = built(ROOT / "cpu")
    (at,) = [m["spec"]["template"]["spec"] for m in manifests if m["kind"] == "Deployment"]
    *parents, last = path.split(".")
    for part in parents:
        at = at[part]
    assert last in at
    at[last] = value
    with pytest.raises(error):
        check(manifests)
