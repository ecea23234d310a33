"""The chart: linted and installed by Helm itself over several files of values; what it creates is held against the same
rules as the manifests of deploy/kubernetes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.version import __version__
from tests.deploy.helm import installed, kubeconfig
from tests.deploy.kubernetes import Manifest, check, containers, pods

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "octavo"
VALUES = sorted((CHART.parent / "examples").glob("*.yaml"))


@pytest.fixture(autouse=True)
def helm() -> Any:
    return pytest.importorskip("helm_sdkpy", reason="Helm's package, of the extra `test`, wants Linux and Python 3.12")


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def other_services(values: dict[str, Any]) -> set[str]:
    """Of the release that a canary's values name, as it is installed: with the same models, and without a route."""
    other = values.get("canary", {}).get("release")
    if not other:
        return set()
    services = of_kind(installed(CHART, {"models": values["models"]}, other).created, "Service")
    return {service["metadata"]["name"] for service in services}


def test_lint(helm: Any) -> None:
    found = asyncio.run(helm.Lint(helm.Configuration(kubeconfig=kubeconfig("http://127.0.0.1:1"))).run(str(CHART)))
    assert not found["Errors"]
    assert [m["Path"] for m in found["Messages"] if m["Severity"] > 0] == ["Chart.yaml"], (
        "which says that there is no icon"
    )


def test_the_chart_has_octavos_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


@pytest.mark.parametrize("path", [CHART / "values.yaml", *VALUES], ids=lambda path: path.stem)
def test_values(path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    release = installed(CHART, values)
    extra = values.get("extraObjects", [])
    assert all(any(m["metadata"]["name"] == e["metadata"]["name"] for m in release.created) for e in extra)
    own = [m for m in release.created if m["metadata"]["name"] not in {e["metadata"]["name"] for e in extra}]
    (pod,) = release.tests
    check([*own, pod], other_services(values))
    names = {f"llm-octavo-{model['name']}" for model in values["models"]}
    routers = {"llm-octavo-router"} if values.get("router", {}).get("enabled") else set()
    assert {m["metadata"]["name"] for m in of_kind(own, "Service")} == names | routers
    servers = of_kind(own, "Deployment") + of_kind(own, "LeaderWorkerSet")
    assert {m["metadata"]["name"].removesuffix("-group") for m in servers} == names | routers
    (test,) = containers(pod)
    assert set(test["args"][1:]) == {f"http://{name}:80/health" for name in names | routers}
    assert all(f"service/{name} " in release.notes for name in names | routers)


def test_several_models_behind_one_ingress() -> None:
    created = installed(CHART, yaml.safe_load((CHART.parent / "examples" / "several-models.yaml").read_text())).created
    servers = {m["metadata"]["name"]: containers(pods(m)[0])[0] for m in of_kind(created, "Deployment")}
    (ingress,) = of_kind(created, "Ingress")
    for path in ingress["spec"]["rules"][0]["http"]["paths"]:
        assert path["path"].endswith("/v1")
        assert f"--root-path={path['path'].removesuffix('/v1')}" in servers[path["backend"]["service"]["name"]]["args"]
    images = {name: server["image"] for name, server in servers.items()}
    assert images == {"llm-octavo-chat": "registry.example.com/octavo:cuda", "llm-octavo-small": "octavo:cpu"}
    assert servers["llm-octavo-chat"]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert [m["kind"] for m in created if m["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")] == [
        "HorizontalPodAutoscaler", "ScaledObject",
    ]  # fmt: skip
    (scaled,) = of_kind(created, "ScaledObject")
    plain = yaml.safe_load((ROOT / "deploy/kubernetes/components/keda/scaledobject.yaml").read_text())
    ours, manifest = ([t["metadata"]["query"] for t in m["spec"]["triggers"]] for m in (scaled, plain))
    own = 'namespace="serving", service="llm-octavo-chat"'
    assert ours == [query.replace('service="octavo"', own) for query in manifest]
    (rules,) = of_kind(created, "PrometheusRule")
    (boards,) = (m for m in of_kind(created, "ConfigMap") if m["metadata"]["name"] == "llm-octavo-dashboards")
    files = [ROOT / "deploy" / "prometheus" / name for name in ("recording.yml", "alerts.yml")]
    assert rules["spec"]["groups"] == [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    assert {name: json.loads(text)["uid"] for name, text in boards["data"].items()} == {
        f"{name}.json": f"octavo-{name}" for name in ("service", "engine", "models")
    }


@pytest.mark.parametrize("route", ["ingress", "gateway"])
def test_the_gateway_alone_is_offered_where_there_is_one(route: str) -> None:
    values = yaml.safe_load((CHART.parent / "examples" / "router.yaml").read_text())
    values |= {"ingress": {"enabled": False}, "networkPolicy": {"enabled": False}}
    values[route] = {"enabled": True}
    values["models"].append({"name": "large", "servedModelName": "org/large"})
    created = installed(CHART, values).created
    check(created)
    assert shares(created) == {"/v1": [("llm-octavo-router", 100)]}
    assert not any(arg.startswith("--root-path") for arg in str(created).split("'"))
    (settings,) = (m for m in of_kind(created, "ConfigMap") if m["metadata"]["name"] == "llm-octavo-router")
    models = yaml.safe_load(settings["data"]["models.yaml"])["models"]
    assert models["chat"]["aliases"] == ["gpt-4o-mini"] and models["large"]["served_model_name"] == "org/large"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"router": {"enabled": True, "catalogue": {"x": {}}}}, "none of the models"),
        (
            {"router": {"enabled": True}, "canary": {"release": "b"}, "gateway": {"enabled": True}},
            "router.catalogue instead",
        ),
        ({"router": {"enabled": True}, "models": [{"name": "router"}]}, "router is the name"),
    ],
)
def test_a_gateway_that_cannot_be_is_refused(helm: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(helm.HelmError, match=says):
        installed(CHART, {"models": [{"name": "a"}], **more})


def test_a_replica_of_several_nodes_is_a_group() -> None:
    """With the same objects about it as a Deployment, and beside one."""
    models = [{"name": "large", "nodes": 3, "replicas": 2}, {"name": "small"}]
    created = installed(CHART, {"models": models, "nodesToken": {"value": "t"}, "apiKey": {"value": "k"}}).created
    (group,), (server,) = of_kind(created, "LeaderWorkerSet"), of_kind(created, "Deployment")
    assert group["spec"]["replicas"] == 2 and group["spec"]["leaderWorkerTemplate"]["size"] == 3
    variables = [{e["name"] for e in containers(pod)[0]["env"]} for pod in (*pods(group), *pods(server))]
    assert [found & {"OCTAVO_NODES_TOKEN", "OCTAVO_API_KEY"} for found in variables] == [
        {"OCTAVO_NODES_TOKEN", "OCTAVO_API_KEY"}, {"OCTAVO_NODES_TOKEN"}, {"OCTAVO_API_KEY"},
    ]  # fmt: skip
    assert all("--root-path=/large" in containers(pod)[0]["args"] for pod in pods(group))
    (secret,) = of_kind(created, "Secret")
    assert secret["stringData"] == {"api-key": "k", "nodes-token": "t"}
    services = {m["metadata"]["name"]: m["spec"]["selector"] for m in of_kind(created, "Service")}
    leader, worker = (pod["metadata"]["labels"] for pod in pods(group))
    assert services["llm-octavo-large"].items() <= leader.items()
    assert not any(selector.items() <= worker.items() for selector in services.values())


def test_a_model_s_settings_reach_all_that_they_concern() -> None:
    """The example of GPUs, held against the chart's defaults."""
    values = yaml.safe_load((CHART.parent / "examples" / "gpu.yaml").read_text())
    created = installed(CHART, values).created
    (server,), (service,) = of_kind(created, "Deployment"), of_kind(created, "Service")
    (pod,) = pods(server)
    (container,) = containers(pod)
    assert server["spec"]["strategy"] == {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert server["spec"]["progressDeadlineSeconds"] == 2100 and pod["spec"]["runtimeClassName"] == "nvidia"
    assert {"--device=cuda", "--engine-ready-timeout=1800", "--enable-lora"} <= set(container["args"])
    assert service["metadata"]["annotations"]["networking.gke.io/load-balancer-type"] == "Internal"
    (policy,) = of_kind(created, "NetworkPolicy")
    assert policy["spec"]["ingress"][-1] == values["networkPolicy"]["ingress"][0]
    # Resources are a model's own or the chart's: half of each, a limit might be below its request.
    own = {"requests": {"cpu": "16", "memory": "64Gi"}}
    created = installed(CHART, {"models": [{"name": "m", "resources": own}], "paths": ["/v1", "/tokenize"]}).created
    (container,) = containers(pods(of_kind(created, "Deployment")[0])[0])
    assert container["resources"] == own and "--model=" in container["args"], "the default model"


@pytest.mark.parametrize(
    ("model", "mode", "rollout"),
    [
        ({}, "ReadWriteOnce", {"maxSurge": 0, "maxUnavailable": 1}),
        ({"replicas": 2}, "ReadWriteMany", {"maxSurge": 1, "maxUnavailable": 0}),
        ({"autoscaling": {"enabled": True}}, "ReadWriteMany", {"maxSurge": 1, "maxUnavailable": 0}),
        ({"rollout": {"maxSurge": 2, "maxUnavailable": 0}}, "ReadWriteOnce", {"maxSurge": 2, "maxUnavailable": 0}),
    ],
)
def test_one_pod_s_claim_is_one_node_s_and_its_upgrade_waits_for_no_volume(
    model: dict[str, Any], mode: str, rollout: dict[str, int]
) -> None:
    values = {"models": [{"name": "m", **model}], "service": {"sessionAffinity": "ClientIP"}}
    created = installed(CHART, values).created
    (claim,), (server,) = of_kind(created, "PersistentVolumeClaim"), of_kind(created, "Deployment")
    assert claim["spec"]["accessModes"] == [mode] and server["spec"]["strategy"]["rollingUpdate"] == rollout
    assert [service["spec"]["sessionAffinity"] for service in of_kind(created, "Service")] == ["ClientIP"]


def test_pods_start_anew_when_a_secret_of_the_chart_changes() -> None:
    def annotations(**values: Any) -> dict[str, str]:
        created = installed(CHART, {"models": [{"name": "m", "podAnnotations": {"a": "b"}}], **values}).created
        (pod,) = pods(of_kind(created, "Deployment")[0])
        found: dict[str, str] = pod["metadata"]["annotations"]
        return found

    assert annotations() == annotations(apiKey={"existingSecret": "mine"}) == {"a": "b"}
    old, new = annotations(apiKey={"value": "old"}), annotations(apiKey={"value": "new"})
    assert old.keys() == new.keys() == {"a", "checksum/secret"} and old != new
    assert old == annotations(apiKey={"value": "old"})


def shares(manifests: list[Manifest]) -> dict[str, list[tuple[str, int]]]:
    """By path, the services that requests go to, with their weights in a hundred, this release's first."""
    found: dict[str, list[tuple[str, int]]] = {}
    for route in of_kind(manifests, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            assert [ref["port"] for ref in rule["backendRefs"]] == [80] * len(rule["backendRefs"])
            for match in rule["matches"]:
                found[match["path"]["value"]] = [(ref["name"], ref["weight"]) for ref in rule["backendRefs"]]
    canary = "nginx.ingress.kubernetes.io/canary"
    for ingress in of_kind(manifests, "Ingress"):
        weight = 100
        if canary in (annotations := ingress["metadata"]["annotations"]):
            ours = {name for name in annotations if not name.startswith("meta.helm.sh/")}
            assert ours == {canary, f"{canary}-weight"}, "nginx overlooks others there"
            assert annotations[canary] == "true"
            weight = int(annotations[f"{canary}-weight"])
        for path in ingress["spec"]["rules"][0]["http"]["paths"]:
            found.setdefault(path["path"], []).append((path["backend"]["service"]["name"], weight))
    return {path: sorted(services) for path, services in found.items()}


@pytest.mark.parametrize("by", ["gateway", "ingress"])
def test_a_canary_gets_its_share_of_each_model(by: str) -> None:
    models = [{"name": "chat"}, {"name": "small"}]
    values = {"models": models, by: {"enabled": True}, "canary": {"release": "next", "weight": 10}}
    created = installed(CHART, values).created
    check(created, other_services(values))
    rest = 90 if by == "gateway" else 100  # a canary of nginx takes from the first
    assert shares(created) == {
        f"/{name}": [(f"llm-octavo-{name}", rest), (f"next-octavo-{name}", 10)] for name in ("chat", "small")
    }
    # Both answer at the same path, and without a canary all requests are the first one's.
    other = installed(CHART, {"models": models, "image": {"tag": "new"}}, "next").created
    paths = [
        [containers(pods(m)[0])[0]["args"] for m in of_kind(manifests, "Deployment")] for manifests in (created, other)
    ]
    assert paths[0] == paths[1] and all("--root-path=/" in " ".join(args) for args in paths[0])
    assert not shares(other)
    alone = installed(CHART, {"models": models[:1], by: {"enabled": True}}).created
    assert shares(alone) == {"/": [("llm-octavo-chat", 100)]}
    created = installed(CHART, values | {"paths": ["/v1", "/tokenize"]}).created
    assert shares(created) == {
        f"/{name}{path}": [(f"llm-octavo-{name}", rest), (f"next-octavo-{name}", 10)]
        for name in ("chat", "small") for path in ("/v1", "/tokenize")
    }  # fmt: skip


def test_the_steps_of_a_canary_change_every_image_and_end_where_they_began() -> None:
    steps = []
    commands = re.compile(r"^helm (?:install|upgrade) (\w+) .*-f (\S+) --set (\S+)", re.MULTILINE)
    for release, path, sets in commands.findall((CHART / "README.md").read_text()):
        values = yaml.safe_load((ROOT / path).read_text())
        for assignment in sets.split(","):
            (*keys, last), value = assignment.split("=")[0].split("."), assignment.split("=")[1]
            at = values
            for key in keys:
                at = at.setdefault(key, {})
            at[last] = yaml.safe_load(value) if value else ""
        created = installed(CHART, values, release).created
        images = {containers(pods(m)[0])[0]["image"] for m in of_kind(created, "Deployment")}
        found = (service for services in shares(created).values() for service in services)
        to_next = {weight for name, weight in found if name.startswith("next-")}
        steps.append((release, images, to_next))
    old, new = {"octavo:cpu"}, {"octavo:next"}
    assert steps == [
        ("next", new, set()), ("llm", old, {10}), ("llm", old, {100}), ("llm", new, {100}), ("llm", new, set()),
    ]  # fmt: skip


def test_secrets_are_made_or_named() -> None:
    def variables(**values: Any) -> tuple[dict[str, str], list[Manifest]]:
        created = installed(CHART, {"models": [{"name": "m"}], **values}).created
        (server,) = (containers(pods(m)[0])[0] for m in of_kind(created, "Deployment"))
        refs = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in server["env"] if "valueFrom" in e}
        return {name: f"{ref['name']}/{ref['key']}" for name, ref in refs.items()}, of_kind(created, "Secret")

    assert variables() == ({}, [])
    made, (secret,) = variables(apiKey={"value": "k"}, hfToken={"value": "t"})
    assert made == {"OCTAVO_API_KEY": "llm-octavo/api-key", "HF_TOKEN": "llm-octavo/hf-token"}
    assert secret["stringData"] == {"api-key": "k", "hf-token": "t"}
    named = variables(apiKey={"existingSecret": "mine", "key": "token"})
    assert named == ({"OCTAVO_API_KEY": "mine/token"}, [])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": []}, "models"),
        ({"models": [{"model": "a"}]}, "name"),
        ({"models": [{"name": "Upper"}]}, "Upper|pattern"),
        ({"models": [{"name": "m", "replica": 2}]}, "replica"),
        ({"models": [{"name": "m", "gpus": 2}]}, "gpus"),
        ({"modelDefaults": {"autoscaling": {"by": "magic"}}}, "by"),
        ({"models": [{"name": "m", "nodes": 0}]}, "nodes"),
        ({"models": [{"name": "m", "nodes": 2}]}, "nodes needs nodesToken"),
        ({"models": [{"name": "m", "nodes": 2, "gpus": 1}]}, "nodes with gpus"),
        ({"models": [{"name": "m", "nodes": 2, "autoscaling": {"enabled": True}}]}, "nodes with autoscaling"),
        ({"ingres": {"enabled": True}}, "ingres"),
        ({"drain": {"shutdownTimeout": -1}}, "shutdownTimeout"),
        ({"models": [{"name": "m", "rollout": {"maxSurge": "half"}}]}, "maxSurge"),
        ({"paths": ["v1"]}, "paths"),
        ({"gateway": {"enabled": True}, "canary": {"release": "next", "weight": 101}}, "weight"),
        ({"canary": {"release": "next", "weight": 10}}, "ingress.enabled or gateway.enabled"),
        ({"gateway": {"enabled": True}, "canary": {"release": "llm", "weight": 10}}, "another release"),
    ],
)
def test_wrong_values_are_refused(helm: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        installed(CHART, values)
