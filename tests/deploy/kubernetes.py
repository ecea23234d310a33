"""Builds what `kubectl apply -k` would send, and says what must be true of any manifests of ours.

`kustomize` cannot be had from a package index: `built` does what our files ask of it (resources, components, labels,
images, and patches as RFC 6902 has them) and refuses anything else.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tempfile
from collections.abc import Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.gateway.catalogue import read_catalogue
from octavo.gateway.discovery import SERVICE_ACCOUNT, KubernetesService, read_source

Manifest = dict[str, Any]
# Which kubernetes-validate has no schemas of.
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "LeaderWorkerSet", "RayCluster"}
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
        for container in (c for m in manifests for pod in pods(m) for c in containers(pod)):
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


def pods(workload: Manifest) -> list[Manifest]:
    """Pods, or templates of such: of a group the one of the server, then those of workers."""
    if workload["kind"] == "LeaderWorkerSet":
        group = workload["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    if workload["kind"] == "RayCluster":
        groups = workload["spec"]["headGroupSpec"], *workload["spec"]["workerGroupSpecs"]
        return [group["template"] for group in groups]
    if workload["kind"] == "Deployment":
        return [workload["spec"]["template"]]
    return [workload] if workload["kind"] == "Pod" else []


def containers(pod: Manifest) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def check(manifests: list[Manifest], others: Set[str] = frozenset()) -> None:
    """Kubernetes's own schemas, the restricted standard for pods, and that what belongs together fits. `others` are
    services of the namespace that come from elsewhere."""
    import kubernetes_validate

    assert "%!" not in (text := json.dumps(manifests)), f"Go could not format {text[text.index('%!') - 40 :][:80]}"
    keys = [(m["apiVersion"], m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(keys)) == len(keys), "a name twice"
    by_kind: dict[str, list[Manifest]] = {}
    for manifest in json.loads(json.dumps(manifests)):
        by_kind.setdefault(manifest["kind"], []).append(manifest)
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for pod in (pod for workload in manifests for pod in pods(workload)):
        whole = {"apiVersion": "v1", "kind": "Pod", **pod}
        kubernetes_validate.validate(json.loads(json.dumps(whole)), KUBERNETES, strict=True)
        _check_restricted(pod)
    deployments = by_kind.get("Deployment", [])
    for router in (d for d in deployments if d["metadata"]["labels"].get("app.kubernetes.io/component") == "router"):
        _check_router(router, by_kind)
    deployments = [d for d in deployments if d["metadata"]["labels"].get("app.kubernetes.io/component") != "router"]
    for deployment in deployments:
        template = deployment["spec"]["template"]
        assert deployment["spec"]["progressDeadlineSeconds"] > _start_s(template), "it would fail before the probe"
        _check_server(template, by_kind, len(deployments))
        assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    for group in by_kind.get("LeaderWorkerSet", []):
        _check_group(group, by_kind)
        _check_nodes(group)
    for cluster in by_kind.get("RayCluster", []):
        _check_group(cluster, by_kind)
        _check_ray(cluster, by_kind)
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
    pod = workload["spec"]
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


def _check_server(template: Manifest, by_kind: dict[str, list[Manifest]], num_budgets: int) -> None:
    """Its flags are the server's, it drains in its grace time, and service, one in `num_budgets` budgets and the policy
    mean its pods."""
    pod, labels = template["spec"], template["metadata"]["labels"]
    (server,) = pod["containers"]
    args = _parsed(server)
    assert server["startupProbe"]["httpGet"]["path"] == server["readinessProbe"]["httpGet"]["path"] == "/health"
    assert server["livenessProbe"]["httpGet"]["path"] == "/version"
    assert all(server[name]["timeoutSeconds"] == 5 for name in ("startupProbe", "readinessProbe", "livenessProbe"))
    assert server["readinessProbe"]["failureThreshold"] == 3, "one late answer of a busy server is no reason"
    assert _start_s(template) >= args.engine_ready_timeout, "one of both would end a start that the other waits for"
    assert args.device == ("cuda" if "nvidia.com/gpu" in server["resources"].get("limits", {}) else "auto")
    assert {port["name"]: port["containerPort"] for port in server["ports"]}["http"] == args.port
    assert pod["terminationGracePeriodSeconds"] > _drain_s(server, args)
    _check_volumes(pod, by_kind)

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
    assert (
        len(mean_it("PodDisruptionBudget", "selector", "matchLabels"))
        == len(_of_servers(by_kind.get("PodDisruptionBudget", []))) / num_budgets
    )
    for policy in mean_it("NetworkPolicy", "podSelector", "matchLabels"):
        ports = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
        assert ports == {args.port}


def _of_servers(manifests: list[Manifest]) -> list[Manifest]:
    return [one for one in manifests if not one["metadata"]["name"].endswith("-router")]


def _check_router(router: Manifest, by_kind: dict[str, list[Manifest]]) -> None:
    """The gateway's flags and catalogue are what it takes. It may find each entry's service, whose pods serve the name,
    and it may reach them and the API server."""
    from octavo.entrypoints.cli.gateway import make_parser

    name, pod = router["metadata"]["name"], router["spec"]["template"]["spec"]
    labels = router["spec"]["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    assert container["command"] == ["octavo", "gateway"]
    args = make_parser("octavo gateway").parse_args(container["args"])
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": args.port}
    assert pod["terminationGracePeriodSeconds"] > _drain_s(container, args)
    assert not args.several_gateways  # all read the servers' notes
    # 1. The catalogue.
    (settings,) = (one for one in by_kind["ConfigMap"] if one["metadata"]["name"] == name)
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    folder, _, file = args.catalogue.rpartition("/")
    assert volumes[mounts[folder]]["configMap"]["name"] == name
    environment = {one["name"]: one for one in container["env"]}
    with tempfile.TemporaryDirectory() as here, pytest.MonkeyPatch.context() as patch:
        for variable in environment:
            patch.setenv(variable, "x")
        path = Path(here) / file
        path.write_text(settings["data"][file])
        models = read_catalogue(str(path)).models
    servers = [one for one in by_kind["Deployment"] if one is not router]
    assert len(models) == len(_of_servers(by_kind["Service"]))
    for entry in models.values():
        source = read_source(entry.discover or "")
        assert isinstance(source, KubernetesService) and not source.namespace, "its own"
        (service,) = (one for one in by_kind["Service"] if one["metadata"]["name"] == source.name)
        assert source.port in {port["name"] for port in service["spec"]["ports"]}
        for server in (one for one in servers if one["metadata"]["name"] == source.name):
            own = containers(pods(server)[0])[0]
            assert f"--served-model-name={entry.served_model_name}" in own["args"]
            key = next((one for one in own["env"] if one["name"] == "OCTAVO_API_KEY"), None)
            assert (None if entry.api_key_env is None else environment[entry.api_key_env]) == key
    # 2. Its rights.
    (role,), (binding,) = by_kind["Role"], by_kind["RoleBinding"]
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [one["name"] for one in binding["subjects"]] == [pod["serviceAccountName"]]
    token = volumes[mounts[str(SERVICE_ACCOUNT)]]["projected"]["sources"]
    found = [*(one["serviceAccountToken"]["path"] for one in token if "serviceAccountToken" in one)]
    found += [
        item["path"]
        for one in token
        for kind in ("configMap", "downwardAPI")
        for item in one.get(kind, {}).get("items", ())
    ]
    assert sorted(found) == ["ca.crt", "namespace", "token"]
    # 3. Where its requests come from and go to.
    (service,) = (one for one in by_kind["Service"] if one["spec"]["selector"].items() <= labels.items())
    assert service["metadata"]["name"] == name
    for policy in (one for one in by_kind.get("NetworkPolicy", []) if one["metadata"]["name"] == name):
        to_servers, elsewhere = policy["spec"]["egress"]
        assert [port["port"] for port in to_servers["ports"]] == [8000]
        for server in servers:
            selected = to_servers["to"][0]["podSelector"]["matchLabels"]
            assert selected.items() <= server["spec"]["template"]["metadata"]["labels"].items()
        assert {port["port"] for port in elsewhere["ports"]} == {443, 6443}


def _check_group(group: Manifest, by_kind: dict[str, list[Manifest]]) -> None:
    """Workers outlive the server's drain; policy and budget mean all, the Service the server alone."""
    leader, *workers = pods(group)
    _check_server(leader, by_kind, 1)
    (service,), (budget,), (policy,) = (by_kind[kind] for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"))
    selected = policy["spec"]["podSelector"]
    assert {"from": [{"podSelector": selected}]} in policy["spec"]["ingress"]
    assert {"to": [{"podSelector": selected}]} in policy["spec"]["egress"]
    (server,) = containers(leader)
    drain_s = _drain_s(server, _parsed(server))
    for worker in workers:
        _check_volumes(worker["spec"], by_kind)
        (node,), labels = containers(worker), worker["metadata"]["labels"]
        stays_s = int(node["lifecycle"]["preStop"]["exec"]["command"][1])
        assert drain_s < stays_s < worker["spec"]["terminationGracePeriodSeconds"]
        assert not service["spec"]["selector"].items() <= labels.items()
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert selected["matchLabels"].items() <= labels.items()
        assert server["resources"] == node["resources"], "stages have equally many layers"


def _check_nodes(group: Manifest) -> None:
    """Of a LeaderWorkerSet: all nodes have the same flags, but for those that say who they are."""
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    (server,), (node,) = (containers(pod) for pod in pods(group))
    own, other = _parsed(server, LWS_GROUP_SIZE=str(size)), _parsed(node, LWS_GROUP_SIZE=str(size))
    assert own.node_rank == 0 and other.node_rank == 1 and other.headless and not own.headless
    assert own.nnodes == size and own.pipeline_parallel_size % size == 0
    differing = {name for name, value in vars(own).items() if vars(other)[name] != value}
    assert differing == {"node_rank", "master_addr", "headless"}, differing
    (port,) = [port["containerPort"] for port in server["ports"] if port["name"] == "nodes"]
    assert port == own.master_port
    for container in (server, node):
        tokens = [e["valueFrom"]["secretKeyRef"] for e in container["env"] if e["name"] == "OCTAVO_NODES_TOKEN"]
        assert len(tokens) == 1 and not tokens[0].get("optional"), "nodes of other hosts need one to join"
    assert group["spec"]["startupPolicy"] == "LeaderCreated", "the leader is not ready before its workers"
    assert group["metadata"]["name"] != "octavo", "the controller makes a Service of its name"


def _check_ray(cluster: Manifest, by_kind: dict[str, list[Manifest]]) -> None:
    """Of a RayCluster: a pod for each stage, which are waited for, and no port of Ray's without its token."""
    (server,) = containers(pods(cluster)[0])
    args, spec = _parsed(server), cluster["spec"]
    num_pods = 1 + sum(group["replicas"] for group in spec["workerGroupSpecs"])
    assert args.distributed_executor_backend == "ray" and args.pipeline_parallel_size == num_pods
    assert f"< {num_pods})" in server["args"][0]
    assert spec["authOptions"] == {"mode": "token"}
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    assert all("$KUBERAY_GEN_RAY_START_CMD" in containers(pod)[0]["args"][0] for pod in pods(cluster))
    for group in spec["workerGroupSpecs"]:
        (port,) = containers(group["template"])[0]["ports"]
        assert str(port["containerPort"]) == group["rayStartParams"]["node-manager-port"]
    (budget,) = by_kind["PodDisruptionBudget"]
    assert "maxUnavailable" not in budget["spec"], "RayClusters have no scale, from which it would be counted"


# As the controller of LeaderWorkerSets, or the manifest, sets them.
_VARIABLES = {
    "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "octavo-group-0.octavo-group.default",
    "POD_IP": "10.0.0.1",
}  # fmt: skip


def _parsed(container: dict[str, Any], **variables: str) -> argparse.Namespace:
    """The server's arguments, with variables in them as the kubelet writes them out."""
    from octavo.entrypoints.cli.serve import parse_args

    words = container["args"]
    if "command" in container:  # a script that ends in it
        words = shlex.split(words[0].split("exec octavo serve ")[1])
    values = _VARIABLES | variables
    words = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in words]
    engine_args, server_args = parse_args(words, "octavo serve")
    return argparse.Namespace(**(asdict(server_args) | asdict(engine_args)))


def _start_s(template: Manifest) -> float:
    """How long the startup probe waits."""
    probe = template["spec"]["containers"][0]["startupProbe"]
    wait_s: float = probe["periodSeconds"] * probe["failureThreshold"]
    return wait_s


def _drain_s(server: dict[str, Any], args: argparse.Namespace) -> float:
    """From the end's beginning to that of the server: preStop, then the requests under way."""
    command, seconds = server["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    drain_s: float = int(seconds) + args.shutdown_timeout
    return drain_s


def _check_volumes(pod: dict[str, Any], by_kind: dict[str, list[Manifest]]) -> None:
    (container,) = pod["containers"]
    assert pod["enableServiceLinks"] is False
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {"/data", "/tmp"} <= set(mounted.values())
    claims = {claim["metadata"]["name"] for claim in by_kind.get("PersistentVolumeClaim", [])}
    for volume in pod["volumes"]:
        if claim := volume.get("persistentVolumeClaim"):
            assert claim["claimName"] in claims or claim["claimName"].startswith("existing")
