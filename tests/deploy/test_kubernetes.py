"""The manifests for `kubectl apply -k`: schemas, the restricted standard, flags and probes that fit."""

from __future__ import annotations

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
