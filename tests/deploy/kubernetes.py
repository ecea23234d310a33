"""Builds what `kubectl apply -k` would send, and says what must be true of any manifests of ours.

`kustomize` cannot be had from a package index: `built` does what our files ask of it (resources, components, labels,
images, and patches as RFC 6902 has them) and refuses anything else.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
CUSTOM = {
    "ServiceMonitor",
    "PrometheusRule",
    "ScaledObject",
    "HTTPRoute",
}  # which kubernetes-validate has no schemas of
KUBERNETES = "1.30"
_KNOWN = {"apiVersion", "kind", "resources", "components", "labels", "images", "patches"}


def built(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization."""
    return _with(folder, [])


def _with(folder: Path, manifests: list[Manifest]) -> list[Manifest]:
    """`manifests`, with what the kustomization or component in `folder` adds and changes."""
    own = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert own.keys() <= _KNOWN, own.keys() - _KNOWN
    assert own["kind"] == "Component" or not manifests
    for name in own.get("resources", ()):
        path = folder / name
        manifests += built(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for name in own.get("components", ()):
        manifests = _with(folder / name, manifests)
    for patch in own.get("patches", ()):
        target = patch["target"]
        found = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (target["kind"], target["name"])]
        assert found, f"{folder}: nothing is {target}"
        for manifest in found:
            for operation in yaml.safe_load(patch["patch"]):
                _apply(operation, manifest)
    for labels in own.get("labels", ()):
        for manifest in manifests:
            manifest["metadata"].setdefault("labels", {}).update(labels["pairs"])
    for image in own.get("images", ()):
        for container in (c for m in manifests if m["kind"] == "Deployment" for c in containers(m)):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return manifests


def _apply(operation: dict[str, Any], manifest: Manifest) -> None:
    """One operation of RFC 6902."""
    assert operation.keys() <= {"op", "path", "value"}
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    at: Any = manifest
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    if isinstance(at, list):
        assert (operation["op"], last) == ("add", "-"), operation
        at.append(operation["value"])
    else:
        assert (operation["op"] == "add") != (last in at), f"{operation}: replace what is there, add what is not"
        if operation["op"] == "remove":
            del at[last]
        else:
            at[last] = operation["value"]


def containers(workload: Manifest) -> list[dict[str, Any]]:
    """Of a Deployment, or of a Pod."""
    pod = workload["spec"]["template"]["spec"] if "template" in workload["spec"] else workload["spec"]
    return [*pod.get("initContainers", ()), *pod["containers"]]


def check(manifests: list[Manifest], others: Set[str] = frozenset()) -> None:
    """Kubernetes's own schemas, the restricted standard for pods, and that what belongs together fits. `others` are
    services of the namespace that come from elsewhere."""
    import kubernetes_validate

    keys = [(m["apiVersion"], m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(keys)) == len(keys), "a name twice"
    by_kind: dict[str, list[Manifest]] = {}
    for manifest in json.loads(json.dumps(manifests)):
        by_kind.setdefault(manifest["kind"], []).append(manifest)
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for workload in by_kind.get("Deployment", []) + by_kind.get("Pod", []):
        _check_restricted(workload)
    deployments = by_kind["Deployment"]
    for deployment in deployments:
        _check_server(deployment, by_kind)
    names = {deployment["metadata"]["name"] for deployment in deployments}
    for scaler in by_kind.get("HorizontalPodAutoscaler", []) + by_kind.get("ScaledObject", []):
        target = scaler["spec"]["scaleTargetRef"]["name"]
        assert target in names
        (scaled,) = [d for d in deployments if d["metadata"]["name"] == target]
        assert "replicas" not in scaled["spec"], "each apply would undo the autoscaler's number"
    known = {service["metadata"]["name"] for service in by_kind["Service"]} | others
    for ingress in by_kind.get("Ingress", []):
        for path in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
            assert path["backend"]["service"]["name"] in known
    for route in by_kind.get("HTTPRoute", []):
        for rule in route["spec"]["rules"]:
            assert {ref["name"] for ref in rule["backendRefs"]} <= known
            assert sum(ref["weight"] for ref in rule["backendRefs"]) == 100
    for monitor in by_kind.get("ServiceMonitor", []):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = [s for s in by_kind["Service"] if wanted.items() <= s["metadata"]["labels"].items()]
        assert services, "the monitor finds no service"
        for service in services:
            assert {e["port"] for e in monitor["spec"]["endpoints"]} <= {p["name"] for p in service["spec"]["ports"]}


def _check_restricted(workload: Manifest) -> None:
    """The Pod Security Standard `restricted`, and a root file system that cannot be written."""
    pod = workload["spec"].get("template", workload)["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001, "the image's"
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for volume in pod.get("volumes", ()):
        kinds = volume.keys() - {"name"}
        assert kinds <= {"configMap", "csi", "emptyDir", "image", "persistentVolumeClaim", "projected", "secret"}
    for container in containers(workload):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]} and "privileged" not in context
        assert not any("hostPort" in port for port in container.get("ports", ()))
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]


def _check_server(deployment: Manifest, by_kind: dict[str, list[Manifest]]) -> None:
    """Its flags are the server's, it drains in its grace time, and service, budget and policy mean its pods."""
    from octavo.entrypoints.cli.serve import parse_args

    template = deployment["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    (server,) = pod["containers"]
    args = parse_args(server["args"], "octavo serve")[1]
    assert server["startupProbe"]["httpGet"]["path"] == server["readinessProbe"]["httpGet"]["path"] == "/health"
    assert server["livenessProbe"]["httpGet"]["path"] == "/version"
    assert {port["name"]: port["containerPort"] for port in server["ports"]}["http"] == args.port
    command, seconds = server["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep" and pod["terminationGracePeriodSeconds"] > int(seconds) + args.shutdown_timeout
    assert pod["enableServiceLinks"] is False
    mounted = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {"/data", "/tmp"} <= set(mounted.values())
    claims = {claim["metadata"]["name"] for claim in by_kind.get("PersistentVolumeClaim", [])}
    for volume in pod["volumes"]:
        if claim := volume.get("persistentVolumeClaim"):
            assert claim["claimName"] in claims or claim["claimName"].startswith("existing")
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()

    def mean_it(kind: str, *path: str) -> list[Manifest]:
        found = []
        for manifest in by_kind.get(kind, []):
            selector = manifest["spec"]
            for key in path:
                selector = selector[key]
            if selector.items() <= labels.items():
                found.append(manifest)
        return found

    (service,) = mean_it("Service", "selector")
    assert {port["targetPort"] for port in service["spec"]["ports"]} == {"http"}
    assert len(mean_it("PodDisruptionBudget", "selector", "matchLabels")) == len(
        by_kind.get("PodDisruptionBudget", [])
    ) / len(by_kind["Deployment"])
    for policy in mean_it("NetworkPolicy", "podSelector", "matchLabels"):
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == {args.port}
