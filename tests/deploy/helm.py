"""Installs a chart by Helm itself (the package helm-sdkpy) into an API server that only writes down what it is sent."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.kubernetes import Manifest

# What the server knows, as `kubectl api-resources` would list it: plural and kind by group and version.
_RESOURCES = {
    "v1": {
        "serviceaccounts": "ServiceAccount", "secrets": "Secret", "services": "Service", "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim", "pods": "Pod",
    },
    "apps/v1": {"deployments": "Deployment"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "leaderworkerset.x-k8s.io/v1": {"leaderworkersets": "LeaderWorkerSet"},
    "gateway.networking.k8s.io/v1": {"httproutes": "HTTPRoute"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
    "monitoring.coreos.com/v1": {"servicemonitors": "ServiceMonitor", "prometheusrules": "PrometheusRule"},
}  # fmt: skip
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


class Recorder(ThreadingHTTPServer):
    """The API server. `created` are the manifests that came, in order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: list[Manifest] = []

    def describe(self, path: str) -> dict[str, Any] | None:
        """What discovery asks for; None for objects."""
        if path == "/version":
            return {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = []
            for version in _RESOURCES.keys() - {"v1"}:
                name, number = version.split("/")
                entry = {"groupVersion": version, "version": number}
                groups.append({"name": name, "versions": [entry], "preferredVersion": entry})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version not in _RESOURCES:
            return None
        resources = [
            {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": _VERBS}
            for plural, kind in _RESOURCES[version].items()
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


class _Handler(BaseHTTPRequestHandler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        found = self.server.describe(self.path.split("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self._send(200 if found else 404, json.dumps(found or missing).encode())

    def do_POST(self) -> None:
        """What is sent in JSON is the chart's. Helm keeps its own account of the release in a Secret that it sends in
        another form; that comes back as it is."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Type"] == "application/json":
            self.server.created.append(json.loads(body))
        self._send(201, body, self.headers["Content-Type"])

    do_PUT = do_POST

    def _send(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def kubeconfig(url: str) -> str:
    return yaml.safe_dump({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    })  # fmt: skip


@dataclass(frozen=True)
class Release:
    """What Helm made of a chart: the manifests that it created, in order, those of its tests, and its notes."""

    created: list[Manifest]
    tests: list[Manifest]
    notes: str


def installed(chart: Path, values: dict[str, Any], release: str = "llm") -> Release:
    """Install into the namespace `serving`. Raises helm_sdkpy.HelmError for values that the chart refuses."""
    import helm_sdkpy

    server = Recorder()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        at = kubeconfig(f"http://127.0.0.1:{server.server_address[1]}")
        install = helm_sdkpy.Install(helm_sdkpy.Configuration(namespace="serving", kubeconfig=at))
        done = asyncio.run(install.run(release, str(chart), values=values, wait=False))
    finally:
        server.shutdown()
        server.server_close()
    hooks = [yaml.safe_load(hook["manifest"]) for hook in done["hooks"]]
    return Release(server.created, hooks, done["info"]["notes"])
