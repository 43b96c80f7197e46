"""Checks of the objects of Kubernetes in deploy, and the chart rendered by Helm."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml

from support.paths import ROOT
from support.runtime.kinds import SPECIFICATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CHART", "FAULTS", "KUBERNETES", "Rendered", "check_schema", "parsed", "render"]

CHART = ROOT / "deploy" / "helm" / "penstock"
#: The oldest and the newest version whose schemas the objects have.
KUBERNETES = ("1.25", "1.37")
FAULTS = (
    jsonschema.ValidationError,
    kubernetes_validate.SchemaNotFoundError,
    kubernetes_validate.ValidationError,
)
#: Reads a list of values, and prints what Helm says and makes of each. A process of its own has the threads
#: that the library starts.
HELM = """
import json, sys
from helm_python import Chart, HelmError, lint
path, results = sys.argv[1], []
for values in json.load(sys.stdin):
    report = lint(path, values, strict=True)
    problems = [item for item in report["messages"] if item["severity"] > 1] + report["errors"]
    try:
        with Chart.load(path) as chart:
            chart.validate_schema(values)
            rendered = chart.render(values, name="my", namespace="llm")
        results.append({"error": None, "problems": problems, "files": rendered})
    except HelmError as error:
        results.append({"error": str(error), "problems": problems, "files": {}})
print(json.dumps(results))
"""


def parsed(command: click.Command, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of the options and arguments of a command; fails for an unknown option."""
    with click.Context(command) as context:
        values, rest, _ = command.make_parser(context).parse_args(list(arguments))
    assert rest == []
    return values


def check_schema(item: Mapping[str, Any]) -> None:
    """Raise the error of a schema, of which unknown fields are errors."""
    specification = SPECIFICATIONS.get((item["apiVersion"], item["kind"]))
    if specification is not None:
        assert item.keys() == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(item["spec"], specification)
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(item, version, strict=True)


class Rendered:
    """The manifests that Helm makes of the chart with some values."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.error: str | None = result["error"]
        self.problems: list[Any] = result["problems"]
        self.files: dict[str, str] = result["files"]
        texts = [text for name, text in self.files.items() if name.endswith(".yaml")]
        found = [item for text in texts for item in yaml.safe_load_all(text) if item is not None]
        self.objects: dict[str, dict[str, Any]] = {item["kind"]: item for item in found}
        assert len(found) == len(self.objects), "one object of each kind"

    @property
    def pod(self) -> dict[str, Any]:
        """The specification of the server's pods."""
        return dict(self.objects["Deployment"]["spec"]["template"]["spec"])

    @property
    def engine(self) -> dict[str, Any]:
        """The server's container."""
        [found] = self.pod["containers"]
        return dict(found)


def render(values: Sequence[Mapping[str, Any]]) -> list[Rendered]:
    """Lint and render the chart with each of the values."""
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("Helm is not installed: pip install helm-python-sdk")
    command = [sys.executable, "-c", HELM, str(CHART)]
    done = subprocess.run(command, input=json.dumps(values), stdout=subprocess.PIPE, text=True, check=True)
    return [Rendered(result) for result in json.loads(done.stdout)]
