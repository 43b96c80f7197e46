"""Reduced schemas of the kinds in deploy that Kubernetes itself does not have.

They are written after the published definitions, and have their names, types, limits and required fields.
Many fields that the manifests do not use are left out. The manifests and these schemas were compared with:

- vllm-project/aibrix, commit e3e10f9e4aebe9aac5e7d992fb87d2648e01628b of 2026-08-22, after 0.7.0:
  config/crd/model/model.aibrix.ai_modeladapters.yaml,
  config/crd/autoscaling/autoscaling.aibrix.ai_podautoscalers.yaml
- kedacore/keda, commit 8b4f083ca8c8c2baf8477e322bd4d16ac4dfa09a of 2026-08-20, after 2.20.1:
  config/crd/bases/keda.sh_scaledobjects.yaml
- prometheus-operator/prometheus-operator, commit 6adcebc5076c34f4f55f8f5f7b1e528929373ac7 of 2026-08-08,
  which is 0.93.0:
  example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml,
  example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml
"""

from __future__ import annotations

from typing import Any

__all__ = ["SPECIFICATIONS"]

TEXT: dict[str, Any] = {"type": "string"}
NAME = {"type": "string", "minLength": 1}
INTEGER = {"type": "integer"}
COUNT = {"type": "integer", "minimum": 0}
POSITIVE = {"type": "integer", "minimum": 1}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object without other fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(items: dict[str, Any]) -> dict[str, Any]:
    """The schema of a list that is not empty."""
    return {"type": "array", "minItems": 1, "items": items}


MODEL_ADAPTER = closed(
    "artifactURL podSelector",
    additionalConfig=TEXTS,
    artifactURL=TEXT,
    baseModel=TEXT,
    credentialsSecretRef=closed("", name=TEXT),
    podSelector=closed("", matchLabels=TEXTS),
    replicas={"type": "integer", "enum": [1]},
    schedulerName=TEXT,
)
POD_AUTOSCALER = closed(
    "maxReplicas scaleTargetRef scalingStrategy",
    maxReplicas=INTEGER,
    metricsSources=listed(
        closed(
            "metricSourceType targetMetric targetValue",
            endpoint=TEXT,
            metricSourceType={"type": "string", "enum": ["pod", "resource", "custom", "external", "domain"]},
            path=TEXT,
            port=TEXT,
            protocolType={"type": "string", "enum": ["http", "https"]},
            targetMetric=TEXT,
            targetValue=TEXT,
        )
    ),
    minReplicas=INTEGER,
    scaleTargetRef=closed("", apiVersion=TEXT, kind=TEXT, name=TEXT),
    scalingStrategy={"type": "string", "enum": ["HPA", "KPA", "APA"]},
)
SCALED_OBJECT = closed(
    "scaleTargetRef triggers",
    advanced=closed(
        "",
        horizontalPodAutoscalerConfig=closed(
            "",
            behavior=closed("", scaleDown=closed("", selectPolicy=TEXT, stabilizationWindowSeconds=INTEGER)),
        ),
    ),
    cooldownPeriod=COUNT,
    fallback=closed("failureThreshold replicas", failureThreshold=COUNT, replicas=COUNT),
    maxReplicaCount=POSITIVE,
    minReplicaCount=COUNT,
    pollingInterval=POSITIVE,
    scaleTargetRef=closed("name", apiVersion=TEXT, kind=TEXT, name=NAME),
    triggers=listed(closed("metadata type", metadata=TEXTS, metricType=TEXT, name=TEXT, type=NAME)),
)
METRICS_ENDPOINTS = {
    "type": "array",
    "items": closed(
        "",
        authorization=closed("", type=TEXT, credentials=closed("key", name=TEXT, key=TEXT)),
        interval={"type": "string", "pattern": "^(0|([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$"},
        path=TEXT,
        port=TEXT,
    ),
}
SELECTOR = closed("", matchLabels=TEXTS)
SERVICE_MONITOR = closed("endpoints selector", endpoints=METRICS_ENDPOINTS, selector=SELECTOR)
POD_MONITOR = closed("selector", podMetricsEndpoints=METRICS_ENDPOINTS, selector=SELECTOR)
#: The schema of `spec`, by version and kind.
SPECIFICATIONS = {
    ("model.aibrix.ai/v1alpha1", "ModelAdapter"): MODEL_ADAPTER,
    ("autoscaling.aibrix.ai/v1alpha1", "PodAutoscaler"): POD_AUTOSCALER,
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): SERVICE_MONITOR,
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
}
