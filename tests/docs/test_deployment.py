"""The manifests in deploy: their schemas, and options, ports and metrics that exist."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

import penstock.server
from penstock.cli.runtime import runtime
from penstock.cli.serve import serve
from penstock.runtime.rules import rules_of
from support.manifests import FAULTS, check_schema, parsed
from support.paths import ROOT
from support.server.serving import serving

FOLDER = ROOT / "deploy" / "kubernetes"


def objects() -> list[Any]:
    """All objects, each with the name of its file as the id of a test."""
    return [
        pytest.param(item, id=f"{file.stem}-{item['kind']}")
        for file in sorted(FOLDER.glob("*.yaml"))
        for item in yaml.safe_load_all(file.read_text())
    ]


def object_of(kind: str) -> dict[str, Any]:
    """The object of this kind."""
    [found] = [param.values[0] for param in objects() if param.values[0]["kind"] == kind]
    return dict(found)


def pod() -> dict[str, Any]:
    """The specification of the pods."""
    return dict(object_of("Deployment")["spec"]["template"]["spec"])


def container(name: str) -> dict[str, Any]:
    [found] = [item for item in pod()["containers"] if item["name"] == name]
    return dict(found)


@pytest.mark.parametrize("item", objects())
def test_object_has_its_schema(item: dict[str, Any]) -> None:
    """Of Kubernetes as it is published; of other kinds a reduced one, see `support/kinds.py`."""
    check_schema(item)


@pytest.mark.parametrize("item", objects())
def test_schema_finds_an_unknown_field(item: dict[str, Any]) -> None:
    with pytest.raises(FAULTS):
        check_schema({**item, "spec": {**item["spec"], "replicaz": 1}})
    with pytest.raises(FAULTS):
        check_schema({**item, "apiVersion": f"{item['apiVersion']}x"})


def test_containers_have_options_that_exist() -> None:
    engine, sidecar = container("engine"), container("aibrix-runtime")
    assert (engine["command"], sidecar["command"]) == (["penstock", "serve"], ["penstock", "runtime"])
    served, managed = parsed(serve, engine["args"]), parsed(runtime, sidecar["args"])
    for options, item in ((served, engine), (managed, sidecar)):
        [port] = item["ports"]
        assert options["port"] == str(port["containerPort"])
        assert options["host"] == "0.0.0.0"  # noqa: S104 - in the pod
    assert managed["adapter_dir"].startswith("/models/")
    assert served["lora_roots"] == [managed["adapter_dir"]]
    address = {item["name"]: item["value"] for item in sidecar["env"]}["INFERENCE_ENGINE_ENDPOINT"]
    assert address.endswith(f":{served['port']}")
    [_, seconds] = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert pod()["terminationGracePeriodSeconds"] >= float(served["drain_timeout"]) + float(seconds) + 10
    assert served["threads"] == engine["resources"]["requests"]["cpu"]


def test_token_and_key_of_the_engine_are_different_and_not_given() -> None:
    engine, sidecar = container("engine")["args"], container("aibrix-runtime")["args"]
    served, managed = parsed(serve, engine), parsed(runtime, sidecar)
    assert served["admin_api_key_file"] == managed["engine_key_file"] != managed["token_file"]
    assert "Secret" not in {param.values[0]["kind"] for param in objects()}
    assert object_of("ModelAdapter")["spec"]["additionalConfig"]["api-key"] == "${TOKEN}"


def test_gateway_reaches_the_engine_only() -> None:
    ports: dict[str, set[int]] = {}
    for rule in object_of("NetworkPolicy")["spec"]["ingress"]:
        for source in rule["from"]:
            labels = source.get("namespaceSelector", {}).get("matchLabels", {})
            name = labels.get("kubernetes.io/metadata.name", "")
            ports.setdefault(name, set()).update(port["port"] for port in rule["ports"])
    both = {8000, 8080}
    assert ports == {
        "": {8000},
        "envoy-gateway-system": {8000},
        "aibrix-system": both,
        "monitoring": both,
    }


def test_both_containers_see_the_models_at_the_same_path() -> None:
    volumes = {item["name"] for item in pod()["volumes"]}
    mounts = [
        {item["name"]: item["mountPath"] for item in found["volumeMounts"]} for found in pod()["containers"]
    ]
    assert [mount["models"] for mount in mounts] == ["/models", "/models"]
    assert all(mount.keys() <= volumes for mount in mounts)


def test_containers_are_restricted() -> None:
    assert pod()["securityContext"]["runAsNonRoot"] is True
    for item in pod()["containers"]:
        context = item["securityContext"]
        assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert item["resources"]["limits"]["memory"]


def test_probes_ask_routes_that_exist() -> None:
    from penstock.runtime.application import _ROUTES as OF_RUNTIME
    from penstock.server.application import _ROUTES as OF_SERVER

    for name, routes in (("engine", OF_SERVER), ("aibrix-runtime", OF_RUNTIME)):
        item = container(name)
        is_open = {path for method, path, _, access in routes if method == "GET" and access == "open"}
        probes = [item[key]["httpGet"] for key in item if key.endswith("Probe")]
        assert len(probes) >= 2
        assert {probe["path"] for probe in probes} <= is_open
        assert {probe["port"] for probe in probes} == {item["ports"][0]["name"]}


def test_autoscalers_read_metrics_that_exist() -> None:
    common = rules_of("penstock")
    [source] = object_of("PodAutoscaler")["spec"]["metricsSources"]
    assert f"vllm:{source['targetMetric']}" in common[f"aibrix:{source['targetMetric']}"]
    [trigger] = object_of("ScaledObject")["spec"]["triggers"]
    names = re.findall(r"aibrix:\w+", trigger["metadata"]["query"])
    assert set(names) <= {*common, "aibrix:engine_up"}
    [metric] = object_of("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"].replace("_", ":", 1) in common
    for kind in ("PodAutoscaler", "ScaledObject", "HorizontalPodAutoscaler"):
        target = object_of(kind)["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("Deployment", object_of("Deployment")["metadata"]["name"])


def compose_services() -> dict[str, Any]:
    """Those of the compose file."""
    return dict(yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"])


def compose_additions() -> list[dict[str, Any]]:
    """The files of the guide that are merged with the compose file."""
    text = (ROOT / "docs" / "guide" / "connect-programs.md").read_text()
    found = re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [yaml.safe_load(each) for each in found]


def test_compose_file_connects_open_webui_to_the_server() -> None:
    services = compose_services()
    [*_, entrypoint] = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    program, command, *arguments = json.loads(entrypoint)
    assert (program, command) == ("penstock", "serve")
    served = parsed(serve, [*arguments, *services["penstock"]["command"]])
    address = urlsplit(services["open-webui"]["environment"]["OPENAI_API_BASE_URL"])
    assert (address.hostname, str(address.port), address.path) == ("penstock", served["port"], "/v1")
    settings = penstock.server.ServerSettings(allowed_hosts=tuple(served["allowed_hosts"]))
    application = penstock.server.app(penstock.Engine("path/to/model"), settings)
    with serving(application) as server:
        for host, status in ((address.netloc, 200), ("example.org", 403)):
            assert server.ask("/v1/models", headers={"Host": host})[0] == status


def test_compose_server_has_a_read_only_root() -> None:
    server = compose_services()["penstock"]
    assert (server["read_only"], server["cap_drop"]) == (True, ["ALL"])
    [home] = re.findall(r"^WORKDIR (.*)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert {volume.split(":")[1] for volume in server["volumes"]} | set(server["tmpfs"]) == {home, "/tmp"}  # noqa: S108


def test_additions_of_the_guide_give_both_services_a_key() -> None:
    with_variable, with_file, _ = compose_additions()
    server, client = with_variable["services"]["penstock"], with_variable["services"]["open-webui"]
    assert server["environment"] == {"PENSTOCK_API_KEY": "${KEY:?an API key}"}
    assert client["environment"] == {"OPENAI_API_KEY": "${KEY}"}
    served = parsed(serve, with_file["services"]["penstock"]["command"])
    assert served["api_key_file"] == "/run/secrets/key"
    assert with_file["services"]["penstock"]["secrets"] == ["key"] == list(with_file["secrets"])
    for addition in (with_variable, with_file):
        assert "allowed_hosts" not in parsed(serve, addition["services"]["penstock"]["command"])
        assert addition["services"].keys() == compose_services().keys()
    settings = penstock.server.ServerSettings(api_keys=("k",))
    with serving(penstock.server.app(penstock.Engine("path/to/model"), settings)) as server:
        for key, status in (("k", 200), ("other", 401)):
            headers = {"Host": "penstock:8000", "Authorization": f"Bearer {key}"}
            assert server.ask("/v1/models", headers=headers)[0] == status


def test_addition_of_the_guide_mounts_a_model() -> None:
    service = compose_additions()[2]["services"]["penstock"]
    assert [volume.split(":")[1:] for volume in service["volumes"]] == [["/model", "ro"]]
    assert compose_services()["penstock"]["command"][0].endswith("or /model}")
