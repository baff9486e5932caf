"""Wrong values are refused before anything is made, with words that name what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.deploy.value_sets import refusal

TYPOS = [
    ("imagee: {}", "at '': additional properties 'imagee' not allowed"),
    ("image: {repo: x}", "at '/image': additional properties 'repo' not allowed"),
    ("prefill: {replica: 2}", "at '/prefill': additional properties 'replica' not allowed"),
    ("decode: {ranks: 2}", "at '/decode': additional properties 'ranks' not allowed"),
    ("tls: {certManager: {issuer: x}}", "at '/tls/certManager': additional properties 'issuer' not allowed"),
    ("tls: {existingSecrets: {client: x}}", "at '/tls/existingSecrets': additional properties 'client' not allowed"),
    ("decode: {autoscaling: {max: 3}}", "at '/decode/autoscaling': additional properties 'max' not allowed"),
    ("decode: {env: [{key: A}]}", "at '/decode/env/0': missing property 'name'"),
    ("router: {resources: {request: {}}}", "at '/router/resources': additional properties 'request' not allowed"),
    (
        "networkPolicy: {clients: [{pods: {}}]}",
        "at '/networkPolicy/clients/0': additional properties 'pods' not allowed",
    ),
    ("ucx: {NET_DEVICES: x}", "at '/ucx': additional properties 'NET_DEVICES' not allowed"),
]
OPTIONS = [
    ("engine: {options: {page_size: 16}}", "at '/engine/options': additional properties 'page_size' not allowed"),
    (
        "engine: {options: {host-kv-tokens: 1}}",
        "at '/engine/options': additional properties 'host-kv-tokens' not allowed",
    ),
    (
        "prefill: {options: {host-kv-tokens: 1}}",
        "at '/prefill/options': additional properties 'host-kv-tokens' not allowed",
    ),
    (
        "decode: {options: {last-chunk-tokens: 1}}",
        "at '/decode/options': additional properties 'last-chunk-tokens' not",
    ),
    ("router: {options: {page-size: 16}}", "at '/router/options': additional properties 'page-size' not allowed"),
    ("prefill: {options: {port: 1}}", "at '/prefill/options': additional properties 'port' not allowed"),
    ("engine: {options: {page-size: 0}}", "at '/engine/options/page-size': minimum: got 0, want 1"),
    ("engine: {options: {page-size: sixteen}}", "at '/engine/options/page-size': got string, want integer"),
    ("engine: {options: {digest: maybe}}", "at '/engine/options/digest': got string, want boolean"),
    ("engine: {options: {transfer-backend: tcp}}", "at '/engine/options/transfer-backend': value must be one of 'ucx'"),
]
KINDS = [
    ("prefill: {replicas: -1}", "at '/prefill/replicas': minimum: got -1, want 0"),
    ("prefill: {ranks: 0}", "at '/prefill/ranks': minimum: got 0, want 1"),
    ("decode: {replicas: two}", "at '/decode/replicas': got string, want integer"),
    ("image: {tag: 1.5}", "at '/image/tag': got number, want string"),
    ("image: {digest: latest}", "at '/image/digest': 'latest' does not match pattern"),
    ("image: {pullPolicy: Sometimes}", "at '/image/pullPolicy': value must be one of 'Always'"),
    ("model: {source: hub}", "at '/model/source': value must be one of 'demo'"),
    ("model: {subPath: /x}", "at '/model/subPath': '/x' does not match pattern"),
    ("tickets: {enabled: 'no'}", "at '/tickets/enabled': got string, want boolean"),
    ("router: {service: {type: Public}}", "at '/router/service/type': value must be one of 'ClusterIP'"),
    (
        "router: {resources: {limits: {memory: 1 GB}}}",
        "at '/router/resources/limits/memory': '1 GB' does not match pattern",
    ),
    (
        "decode: {autoscaling: {pagesUsedPercent: 101}}",
        "at '/decode/autoscaling/pagesUsedPercent': maximum: got 101, want 100",
    ),
    ("logs: {level: verbose}", "at '/logs/level': value must be one of 'debug'"),
    ("logs: {format: xml}", "at '/logs/format': value must be one of 'text'"),
    ("probes: {type: http}", "at '/probes/type': value must be one of 'auto'"),
    ("autoscaling: {provider: vpa}", "at '/autoscaling/provider': value must be one of 'hpa'"),
    (
        "podDisruptionBudget: {maxUnavailable: half}",
        "at '/podDisruptionBudget/maxUnavailable': 'half' does not match pattern",
    ),
    (
        "networkPolicy: {dataPorts: {last: 70000}}",
        "at '/networkPolicy/dataPorts/last': maximum: got 70,000, want 65,535",
    ),
    ("metrics: {serviceMonitor: {interval: 15}}", "at '/metrics/serviceMonitor/interval': got number, want string"),
    ("fullnameOverride: LLM", "at '/fullnameOverride': 'LLM' does not match pattern"),
    ("commonLabels: {app.kubernetes.io/name: x}", "at '/commonLabels/app.kubernetes.io~1name'"),
    ("preStopSeconds: -1", "at '/preStopSeconds': minimum: got -1, want 0"),
    ("drainTimeoutSeconds: -1", "at '/drainTimeoutSeconds': minimum: got -1, want 0"),
]
TOGETHER = [
    ("tls: {enabled: true}", "tls.enabled needs tls.certManager.enabled, or tls.existingSecrets.decode"),
    (
        "tls: {enabled: true, existingSecrets: {router: a, decode: b}}",
        "tls.enabled needs tls.certManager.enabled, or tls.existingSecrets.prefill",
    ),
    ("tls: {enabled: true, certManager: {enabled: true}}", "tls.certManager.issuerRef.name is missing"),
    (
        "prefill: {ranks: 2, autoscaling: {enabled: true}}",
        "prefill.autoscaling.enabled cannot be with prefill.ranks above 1",
    ),
    ("model: {source: pvc}", "model.source pvc needs model.pvc.claimName"),
    ("model: {source: image}", "model.source image needs model.image.reference"),
    ("model: {source: init}", "model.source init needs model.init.image"),
    (
        "{autoscaling: {provider: keda}, decode: {autoscaling: {enabled: true}}}",
        "decode.autoscaling.enabled with autoscaling.provider keda needs autoscaling.prometheusAddress",
    ),
    (
        "{metrics: {enabled: false}, prefill: {autoscaling: {enabled: true}}}",
        "prefill.autoscaling.enabled needs metrics.enabled",
    ),
    (
        "metrics: {enabled: false, serviceMonitor: {enabled: true}}",
        "metrics.serviceMonitor.enabled needs metrics.enabled",
    ),
    (
        "router: {autoscaling: {minReplicas: 5}}",
        "router.autoscaling.minReplicas is above router.autoscaling.maxReplicas",
    ),
    (
        "networkPolicy: {dataPorts: {first: 30000}}",
        "networkPolicy.dataPorts.first is above networkPolicy.dataPorts.last",
    ),
    ("router: {ingress: {enabled: true, tlsSecret: x}}", "router.ingress.tlsSecret needs router.ingress.host"),
    ("decode: {env: [{name: PD_PAGE_SIZE, value: '8'}]}", "decode.env: PD_PAGE_SIZE is an option of the process"),
]
TOO_OLD = [
    ("prefill: {ranks: 2}", "1.27.3", "prefill.ranks above 1 needs Kubernetes 1.28"),
    ("model: {source: image, image: {reference: x}}", "1.30.0", "model.source image needs Kubernetes 1.31"),
    ("{}", "1.19.0", "chart requires kubeVersion: >=1.20.0-0"),
]


def read(text: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(text)
    return values


@pytest.mark.parametrize(("values", "words"), [*TYPOS, *OPTIONS, *KINDS, *TOGETHER])
def test_wrong_values_are_refused_by_name(values: str, words: str) -> None:
    assert words in refusal(read(values), "1.37.0")


@pytest.mark.parametrize(("values", "kubernetes", "words"), TOO_OLD)
def test_what_a_kubernetes_cannot_do_is_refused(values: str, kubernetes: str, words: str) -> None:
    assert words in refusal(read(values), kubernetes)


def test_all_that_is_wrong_is_told_at_once() -> None:
    said = refusal(read("{logs: {level: loud}, prefill: {replica: 2}, ucx: {NET: 1}}"), "1.37.0")
    assert all(key in said for key in ("/logs/level", "'replica'", "'NET'"))
