"""The chart in deploy/helm: its values, what Helm makes of them, and facts that the manifests have, too."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml

import penstock.server
from penstock.cli.serve import serve
from penstock.runtime.rules import rules_of
from penstock.server.application import _ROUTES
from support.manifests import CHART, KUBERNETES, Rendered, check_schema, parsed, render
from support.paths import ROOT
from support.server.serving import serving

#: Files of values that the chart has for tests.
NAMES = sorted(file.name.removesuffix("-values.yaml") for file in (CHART / "ci").glob("*.yaml"))
MODEL = {"model": "path/to/model"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"modell": "x"}, "modell"),
    ({"threads": 0}, "threads"),
    ({"threads": "two"}, "threads"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"gpu": {"count": 2}}, "count"),
    ({"persistence": {"accessModes": []}}, "accessModes"),
    ({"persistence": {"size": "20 GB"}}, "size"),
    ({"apiKeys": {"value": "secret"}}, "value"),
    ({"drainSeconds": -1}, "drainSeconds"),
    ({"metrics": {"podMonitor": {"interval": "fast"}}}, "interval"),
    ({"resources": {"limits": {"memory": "much"}}}, "memory"),
]


def values_of(name: str) -> dict[str, Any]:
    """The values of a file in ci."""
    return dict(yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text()))


def defaults() -> dict[str, Any]:
    """The values of the chart."""
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def schema() -> dict[str, Any]:
    """The schema of the values."""
    return dict(json.loads((CHART / "values.schema.json").read_text()))


@cache
def rendered() -> dict[str, Rendered]:
    """The chart with each of the files in ci."""
    return dict(zip(NAMES, render([values_of(name) for name in NAMES]), strict=True))


def manifest() -> dict[str, Any]:
    """The pods of the manifests."""
    text = (ROOT / "deploy" / "kubernetes" / "deployment.yaml").read_text()
    [found] = [item for item in yaml.safe_load_all(text) if item["kind"] == "Deployment"]
    return dict(found["spec"]["template"]["spec"])


def test_values_have_their_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    for values in (defaults(), *(values_of(name) for name in NAMES)):
        jsonschema.validate(values, schema())


@pytest.mark.parametrize(("values", "name"), WRONG, ids=lambda item: item if isinstance(item, str) else "")
def test_schema_refuses_wrong_values(values: dict[str, Any], name: str) -> None:
    with pytest.raises(jsonschema.ValidationError) as caught:
        jsonschema.validate(values, schema())
    assert name in f"{caught.value.message} {caught.value.json_path}"


def test_every_value_is_described_and_used() -> None:
    templates = "".join(file.read_text() for file in (CHART / "templates").rglob("*.*"))
    assert schema()["properties"].keys() == {*defaults(), "global"}
    for name in defaults():
        assert re.search(rf"\.Values\.{name}\b|Values \$field|\"{name}\"", templates), name


@pytest.mark.parametrize("name", NAMES)
def test_chart_has_no_lint(name: str) -> None:
    assert (rendered()[name].error, rendered()[name].problems) == (None, [])


def test_oldest_version_of_kubernetes_is_validated() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={KUBERNETES[0]}.0-0"
    text = " ".join((ROOT / "docs" / "containers.md").read_text().split())
    assert f"for Kubernetes {KUBERNETES[0]} and newer" in text


@pytest.mark.parametrize("name", NAMES)
def test_rendered_objects_have_their_schemas(name: str) -> None:
    objects = rendered()[name].objects
    assert {"Deployment", "Service", "Pod"} <= objects.keys()
    for item in objects.values():
        check_schema(item)


def test_everything_renders_all_kinds() -> None:
    minimal, everything = (set(rendered()[name].objects) for name in ("model", "everything"))
    assert minimal == {"Deployment", "Service", "Pod"}
    assert everything - minimal == {
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "PodMonitor",
        "ServiceMonitor",
    }


@pytest.mark.parametrize("name", NAMES)
def test_server_has_options_that_exist(name: str) -> None:
    found, values = rendered()[name], {**defaults(), **values_of(name)}
    assert found.engine["command"] == ["penstock", "serve"]
    options = parsed(serve, found.engine["args"])
    [port] = found.engine["ports"]
    assert (options["model"], options["port"]) == (values["model"], str(port["containerPort"]))
    assert options["host"] == "0.0.0.0"  # noqa: S104 - in the pod
    assert options["threads"] == str(values["threads"])
    assert options["drain_timeout"] == str(values["drainSeconds"])
    files = [options[key] for key in ("api_key_file", "admin_api_key_file") if options.get(key)]
    folders = [item["mountPath"] for item in found.engine["volumeMounts"]]
    assert all(file.rpartition("/")[0] in folders for file in files)
    assert len(files) == (2 if name == "everything" else 0)


@pytest.mark.parametrize("name", NAMES)
def test_pod_outlives_the_hook_and_the_drain(name: str) -> None:
    values = {**defaults(), **values_of(name)}
    seconds = values["preStopSeconds"] + values["drainSeconds"]
    # The server takes up to 7 s after its drain: 5 for last events, and 2 for requests of new connections.
    assert rendered()[name].pod["terminationGracePeriodSeconds"] >= seconds + 7
    hook = rendered()[name].engine.get("lifecycle")
    command = ["sleep", str(values["preStopSeconds"])]
    assert hook == ({"preStop": {"exec": {"command": command}}} if values["preStopSeconds"] else None)


def test_chart_and_manifests_agree() -> None:
    chart, engine = rendered()["model"], manifest()["containers"][0]
    for field in (
        "startupProbe",
        "readinessProbe",
        "livenessProbe",
        "lifecycle",
        "ports",
        "resources",
        "securityContext",
    ):
        assert chart.engine[field] == engine[field], field
    for field in ("terminationGracePeriodSeconds", "automountServiceAccountToken"):
        assert chart.pod[field] == manifest()[field], field
    assert manifest()["securityContext"].items() <= chart.pod["securityContext"].items()
    ours, theirs = (parsed(serve, item["args"]) for item in (chart.engine, engine))
    for option in ("host", "port", "threads", "drain_timeout"):
        assert ours[option] == theirs[option], option


def test_probes_ask_open_routes() -> None:
    is_open = {path for method, path, _, access in _ROUTES if method == "GET" and access == "open"}
    engine = rendered()["model"].engine
    assert {engine[key]["httpGet"]["path"] for key in engine if key.endswith("Probe")} <= is_open
    [_, address] = rendered()["model"].objects["Pod"]["spec"]["containers"][0]["args"]
    assert address == "http://my-penstock:8000/health"
    probe = rendered()["everything"].engine["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == values_of("everything")["startupSeconds"]


@pytest.mark.parametrize("name", NAMES)
def test_containers_of_the_chart_are_restricted(name: str) -> None:
    pods = [rendered()[name].pod, rendered()[name].objects["Pod"]["spec"]]
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert user is not None
    for pod in pods:
        context, [container] = pod["securityContext"], pod["containers"]
        assert context["runAsNonRoot"] is True
        assert (context["runAsUser"], context["runAsGroup"]) == (int(user[1]), int(user[2]))
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", NAMES)
def test_mounts_have_volumes_and_cover_the_home(name: str) -> None:
    mounts = {item["name"]: item["mountPath"] for item in rendered()[name].engine["volumeMounts"]}
    assert mounts.keys() == {item["name"] for item in rendered()[name].pod["volumes"]}
    [home] = re.findall(r"^WORKDIR (.*)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert mounts["home"] == home


def test_volume_of_one_node_is_not_shared_by_two_revisions() -> None:
    strategies = {name: rendered()[name].objects["Deployment"]["spec"].get("strategy") for name in NAMES}
    assert strategies == {"model": None, "everything": None, "claim": {"type": "Recreate"}}
    claims = [item.get("persistentVolumeClaim") for item in rendered()["claim"].pod["volumes"]]
    assert claims == [{"claimName": "models"}, None]


def test_cpu_is_requested_for_the_threads() -> None:
    resources = {name: rendered()[name].engine["resources"] for name in NAMES}
    assert resources["model"]["requests"]["cpu"] == str(defaults()["threads"])
    assert resources["everything"] == {
        "requests": {"cpu": "6", "memory": "2Gi"},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": 1},
    }
    assert parsed(serve, rendered()["everything"].engine["args"])["device"] == "cuda"
    assert resources["claim"] == values_of("claim")["resources"]


def test_server_without_keys_takes_the_names_of_the_service() -> None:
    options = parsed(serve, rendered()["model"].engine["args"])
    settings = penstock.server.ServerSettings(allowed_hosts=tuple(options["allowed_hosts"]))
    service = rendered()["model"].objects["Service"]["metadata"]["name"]
    with serving(penstock.server.app(penstock.Engine("path/to/model"), settings)) as server:
        names = [
            service,
            f"{service}.llm",
            f"{service}.llm.svc",
            f"{service}.llm.svc.cluster.local",
            "10.0.0.7",
        ]
        for host in names:
            assert server.ask("/v1/models", headers={"Host": f"{host}:8000"})[0] == 200
        assert server.ask("/v1/models", headers={"Host": "example.org"})[0] == 403


def test_metrics_with_keys_need_a_token() -> None:
    minimal, everything = rendered()["model"], rendered()["everything"]
    annotations = minimal.objects["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    [port] = minimal.engine["ports"]
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port["containerPort"]),
        "prometheus.io/path": "/metrics",
    }
    assert everything.objects["Deployment"]["spec"]["template"]["metadata"]["annotations"].keys() == {
        "example.org/note"
    }
    [endpoint] = everything.objects["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "metrics", "key": "token"}
    notes = {name: rendered()[name].files["penstock/templates/NOTES.txt"] for name in NAMES}
    assert "set metrics.podMonitor.bearerToken" in notes["everything"]
    assert "There are no API keys" in notes["model"]
    assert "There are no API keys" not in notes["everything"]


def test_selectors_match_the_pods_of_the_server_only() -> None:
    objects = rendered()["everything"].objects
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        objects["PodMonitor"]["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= objects["Pod"]["metadata"]["labels"].items()
    services = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert services.items() <= objects["Service"]["metadata"]["labels"].items()


def test_autoscaler_reads_a_metric_that_exists() -> None:
    scaler = rendered()["everything"].objects["HorizontalPodAutoscaler"]["spec"]
    [metric] = scaler["metrics"]
    name = metric["pods"]["metric"]["name"].replace("_", ":", 1)
    assert name in rules_of("penstock")["aibrix:queue_size"]
    assert (
        scaler["scaleTargetRef"]["name"] == rendered()["everything"].objects["Deployment"]["metadata"]["name"]
    )
    assert "replicas" not in rendered()["everything"].objects["Deployment"]["spec"]


def test_model_is_required() -> None:
    [found] = render([{}])
    assert found.error is not None
    assert "model is a hub id or a path" in found.error


def test_helm_refuses_wrong_values() -> None:
    for (_, name), found in zip(WRONG, render([{**MODEL, **values} for values, _ in WRONG]), strict=True):
        assert found.error is not None
        assert name in found.error


def test_long_names_are_cut_to_labels() -> None:
    [found] = render([{**MODEL, "fullnameOverride": "a" * 70}])
    names = {item["metadata"]["name"] for item in found.objects.values()}
    assert names == {"a" * 63, "a" * 56 + "-health"}
