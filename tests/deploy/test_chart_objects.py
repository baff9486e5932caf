"""What the chart makes: Kubernetes takes it, its parts fit, processes understand it, and no right is given away."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import yaml  # type: ignore[import-untyped]

from deploy.helm.options import Option, options_of, variables_of
from deploy.helm.values import all_values
from pd_common.types import Role
from tests.deploy.programs import PROGRAMS, from_environment, parsed
from tests.deploy.rendered import RELEASE, Object, of_kind
from tests.deploy.rules import DOCS, ROOT, named
from tests.deploy.schemas import VERSIONS, complaints
from tests.deploy.value_sets import KUBERNETES, NAMES, objects, objects_of, values_file

each_set = pytest.mark.parametrize("name", NAMES)

ADAPTER = ROOT / "deploy/helm/prometheus-adapter.yaml"
FIELDS = {
    "status.podIP": "10.0.0.7",
    "spec.nodeName": "node-1",
    "metadata.labels['apps.kubernetes.io/pod-index']": "2",
    "limits.cpu": "2",
}
"""What Kubernetes fills in."""

RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}


@dataclass(frozen=True, slots=True)
class Pod:
    """One of a workload's pods, or a pod by itself, as it is described."""

    owner: Object
    labels: Mapping[str, str]
    spec: Object

    @property
    def name(self) -> str:
        return f"{self.owner['kind']} {self.owner['metadata']['name']}"

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def main(self) -> Object:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.main.get("ports", ())}

    @property
    def plain(self) -> dict[str, str]:
        """Its environment, filled in."""
        return {variable["name"]: _filled_in(variable) for variable in self.main.get("env", ())}

    def is_selected(self, labels: Mapping[str, str]) -> bool:
        return bool(labels) and labels.items() <= self.labels.items()


def _filled_in(variable: Object) -> str:
    if "value" in variable:
        return str(variable["value"])
    (source,) = variable["valueFrom"].values()
    return FIELDS[source.get("fieldPath") or source["resource"]]


def pods(name: str) -> list[Pod]:
    """All of a release; those of the roles and that of `helm test`."""
    made = [
        Pod(owner, owner["spec"]["template"]["metadata"]["labels"], owner["spec"]["template"]["spec"])
        for owner in of_kind(objects(name), "Deployment", "StatefulSet")
    ]
    return made + [Pod(pod, pod["metadata"]["labels"], pod["spec"]) for pod in of_kind(objects(name), "Pod")]


def processes(name: str) -> list[Pod]:
    """Those of the roles."""
    return [pod for pod in pods(name) if pod.owner["kind"] != "Pod"]


def by_name(name: str, kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in of_kind(objects(name), kind)}


# --- Kubernetes takes it ---


@each_set
def test_kubernetes_knows_every_field(name: str) -> None:
    newest = KUBERNETES[name].removesuffix(".0")
    version = newest if newest in VERSIONS else VERSIONS[0]  # no older schemas are published
    assert {each["metadata"]["name"]: found for each in objects(name) if (found := complaints(each, version))} == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_knows_every_field(version: str) -> None:
    made = objects("default", version)
    assert {each["metadata"]["name"]: found for each in made if (found := complaints(each, version))} == {}


def test_old_kubernetes_gets_what_it_has() -> None:
    made = objects("old-kubernetes")
    apis = {(each["kind"], each["apiVersion"]) for each in made}
    assert ("PodDisruptionBudget", "policy/v1beta1") in apis
    assert ("HorizontalPodAutoscaler", "autoscaling/v2beta2") in apis
    text = yaml.safe_dump(made)
    assert "endPort" not in text
    assert "grpc: " not in text.replace("name: grpc", "")


@pytest.mark.parametrize("name", ["default", "ranks"])
def test_names_are_short_enough_whatever_the_release_is_called(name: str) -> None:
    """Services' names and labels end at 63 bytes, and one label of its pods is a StatefulSet's name and 11 more."""
    longest = "x" * 53  # helm takes no longer one
    for each in objects_of(longest, name):
        assert len(each["metadata"]["name"]) <= 52, each["metadata"]["name"]
        assert all(len(str(value)) <= 63 for value in each["metadata"]["labels"].values())


# --- it gives away no right ---


@each_set
def test_containers_have_no_right_that_they_do_not_need(name: str) -> None:
    rdma = yaml.safe_load(values_file(name).read_text()).get("rdma", {})
    for pod in pods(name):
        is_root = rdma.get("asRoot", False) and pod.labels["app.kubernetes.io/component"] in {"prefill", "decode"}
        whole = pod.spec["securityContext"]
        assert (whole["runAsNonRoot"], whole["runAsUser"]) == ((False, 0) if is_root else (True, 10001)), pod.name
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}, pod.name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys(), pod.name
        for container in pod.containers:
            added = {"add": ["IPC_LOCK"]} if is_root else {}
            capabilities = {"capabilities": {"drop": ["ALL"], **added}}
            assert container["securityContext"] == RESTRICTED | capabilities, pod.name
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}, pod.name
            assert "memory" in container["resources"]["limits"], pod.name


@each_set
def test_no_pod_can_call_the_kubernetes_api_or_is_told_of_other_services(name: str) -> None:
    accounts = by_name(name, "ServiceAccount")
    for pod in pods(name):
        assert pod.spec["automountServiceAccountToken"] is False, pod.name
        assert pod.spec["enableServiceLinks"] is False, pod.name
    assert {pod.spec["serviceAccountName"] for pod in processes(name)} == accounts.keys()
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    assert not of_kind(objects(name), "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")


@each_set
def test_policies_open_what_is_served_and_nothing_else(name: str) -> None:
    policies = of_kind(objects(name), "NetworkPolicy")
    for pod in processes(name) if policies else []:
        (policy,) = [each for each in policies if pod.is_selected(each["spec"]["podSelector"]["matchLabels"])]
        rules = policy["spec"]["ingress"]
        opened = [port for rule in rules for port in rule.get("ports", ())]
        served = {port for what, port in pod.ports.items() if what != "health"}
        assert {port["port"] for port in opened if "endPort" not in port} == served, pod.name
        ranges = {f"{port['port']}-{port['endPort']}" for port in opened if "endPort" in port}
        assert ranges <= {pod.plain.get("UCX_TCP_PORT_RANGE"), "20000-20999"}, pod.name


@each_set
def test_only_this_release_reaches_engines(name: str) -> None:
    for policy in of_kind(objects(name), "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            if {port["port"] for port in rule.get("ports", ())} & {8998, 8999, 20000} or "ports" not in rule:
                selectors = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
                assert all(selector["app.kubernetes.io/instance"] == RELEASE for selector in selectors)
                callers = {selector["app.kubernetes.io/component"] for selector in selectors}
                assert callers <= {"router", "prefill", "decode", "pdctl"}


@each_set
def test_all_of_this_release_reach_engines(name: str) -> None:
    policies = {each["metadata"]["name"]: each["spec"]["ingress"] for each in of_kind(objects(name), "NetworkPolicy")}
    for rules in [rules for policy, rules in policies.items() if policy != f"{RELEASE}-router"]:
        control = [peer["podSelector"]["matchLabels"] for peer in rules[0]["from"]]
        assert all(any(pod.is_selected(labels) for labels in control) for pod in pods(name))
    if f"{RELEASE}-prefill" in policies:
        for one, other in (("prefill", "decode"), ("decode", "prefill")):
            (peer,) = policies[f"{RELEASE}-{one}"][1]["from"]
            writers = [pod for pod in processes(name) if pod.is_selected(peer["podSelector"]["matchLabels"])]
            assert {pod.labels["app.kubernetes.io/component"] for pod in writers} == {other}


@each_set
def test_helm_test_may_reach_the_router(name: str) -> None:
    (pod,) = of_kind(objects(name), "Pod")
    for policy in of_kind(objects(name), "NetworkPolicy"):
        if policy["metadata"]["name"] == f"{RELEASE}-router":
            rule = policy["spec"]["ingress"][0]
            assert {8000, 8001} == {port["port"] for port in rule["ports"]}
            labels = pod["metadata"]["labels"].items()
            allowed = [
                peer["podSelector"]["matchLabels"].items() for peer in rule.get("from", ()) if "podSelector" in peer
            ]
            assert "from" not in rule or any(selector <= labels for selector in allowed)


# --- its parts fit together ---


@each_set
def test_services_lead_to_ports_of_pods(name: str) -> None:
    for service in of_kind(objects(name), "Service"):
        behind = [pod for pod in processes(name) if pod.is_selected(service["spec"]["selector"])]
        assert behind, service["metadata"]["name"]
        for pod in behind:
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= pod.ports.keys()
            assert {port["port"] for port in service["spec"]["ports"]} <= set(pod.ports.values())


@each_set
def test_workloads_select_their_own_pods_and_nobody_elses(name: str) -> None:
    everything = pods(name)
    for pod in processes(name):
        selector = pod.owner["spec"]["selector"]["matchLabels"]
        assert [other.name for other in everything if other.is_selected(selector)] == [pod.name]


@each_set
def test_budgets_are_of_one_role_each(name: str) -> None:
    for budget in of_kind(objects(name), "PodDisruptionBudget"):
        behind = [pod for pod in pods(name) if pod.is_selected(budget["spec"]["selector"]["matchLabels"])]
        roles = {pod.labels["app.kubernetes.io/component"] for pod in behind}
        assert [f"{RELEASE}-{role}" for role in roles] == [budget["metadata"]["name"]]


@each_set
def test_autoscalers_scale_deployments_that_say_no_number(name: str) -> None:
    deployments = by_name(name, "Deployment")
    targets = [
        each["spec"]["scaleTargetRef"]["name"]
        for each in of_kind(objects(name), "HorizontalPodAutoscaler", "ScaledObject")
    ]
    assert sorted(targets) == sorted(key for key, each in deployments.items() if "replicas" not in each["spec"])


@each_set
def test_what_scales_by_a_metric_names_one_that_there_is(name: str) -> None:
    documented = set(re.findall(r"(?m)^\| `(pd_[a-z_]+)", DOCS.read_text()))
    for scaler in of_kind(objects(name), "ScaledObject"):
        assert named([trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]) <= documented
    for scaler in of_kind(objects(name), "HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            assert metric["type"] == "Resource" or metric["pods"]["metric"]["name"] in adapted()


def test_the_adapter_makes_its_metrics_of_such_that_there_are() -> None:
    documented = set(re.findall(r"(?m)^\| `(pd_[a-z_]+)", DOCS.read_text()))
    assert set(adapted().values()) <= documented


def adapted() -> dict[str, str]:
    """The metrics that prometheus-adapter serves, and what each is made of."""
    rules = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    series = [rule["seriesQuery"].partition("{")[0] for rule in rules]
    return {rule.get("name", {}).get("as", made_of): made_of for rule, made_of in zip(rules, series, strict=True)}


@each_set
def test_monitors_find_the_metrics_port_of_every_process(name: str) -> None:
    monitors = of_kind(objects(name), "ServiceMonitor")
    found = set()
    for monitor in monitors:
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [
            each for each in of_kind(objects(name), "Service") if wanted <= each["metadata"]["labels"].items()
        ]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        found |= {pod.name for pod in processes(name) if pod.is_selected(service["spec"]["selector"])}
    assert not monitors or found == {pod.name for pod in processes(name)}


@each_set
def test_volumes_are_mounted_and_secrets_are_there(name: str) -> None:
    made = {*by_name(name, "Secret"), *(each["spec"]["secretName"] for each in of_kind(objects(name), "Certificate"))}
    given = values_file(name).read_text()
    for pod in pods(name):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounted = {mount["name"] for container in pod.containers for mount in container["volumeMounts"]}
        assert mounted == volumes.keys(), pod.name
        secrets = {volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume}
        assert all(secret in made or f" {secret}" in given for secret in secrets), pod.name


@each_set
def test_files_that_a_process_is_told_of_are_in_the_image_or_in_a_volume(name: str) -> None:
    for pod in pods(name):
        roots = ["/opt/pd/", *(f"{mount['mountPath']}/" for mount in pod.main["volumeMounts"])]
        told = [value for variable, value in pod.plain.items() if variable.startswith("PD_") and value.startswith("/")]
        assert all(any(f"{path}/".startswith(root) for root in roots) for path in told), pod.name


def test_ranks_register_with_the_first_of_their_group() -> None:
    services = by_name("ranks", "Service")
    for pod in processes("ranks"):
        if pod.owner["kind"] == "StatefulSet":
            spec = pod.owner["spec"]
            assert services[spec["serviceName"]]["spec"]["publishNotReadyAddresses"] is True
            assert pod.plain["PD_BOOTSTRAP"] == f"{pod.owner['metadata']['name']}-0.{spec['serviceName']}:8998"
            assert int(pod.plain["PD_DP_SIZE"]) == spec["replicas"] == 3


@each_set
def test_the_router_is_told_the_services_of_engines(name: str) -> None:
    (router,) = [pod for pod in processes(name) if pod.labels["app.kubernetes.io/component"] == "router"]
    services = by_name(name, "Service")
    roles = {pod.labels["app.kubernetes.io/component"] for pod in processes(name)}
    told = {role: router.plain.get(f"PD_{role.upper()}") for role in ("prefill", "decode")}
    assert {role for role, source in told.items() if source} == roles - {"router"}
    for source in filter(None, told.values()):
        service, _, port = source.removeprefix("dns+").partition(":")
        assert services[service]["spec"]["clusterIP"] == "None"
        assert int(port) in {each["port"] for each in services[service]["spec"]["ports"]}


# --- the processes understand it ---


@each_set
def test_processes_understand_what_they_are_told(name: str) -> None:
    for pod in processes(name):
        role = Role(pod.labels["app.kubernetes.io/component"])
        assert pod.main["command"] == [f"pd-{role}"]
        told = {variable for variable in pod.plain if variable.startswith("PD_")}
        assert told <= variables_of(role)
        understood = parsed([*pod.main["command"], *pod.main.get("args", ())], pod.plain)
        assert len(from_environment(understood)) == len(told), pod.name


@each_set
def test_no_variable_stands_twice_and_the_others_are_those_of_libraries(name: str) -> None:
    given = values_file(name).read_text()
    for pod in pods(name):
        for container in pod.containers:
            variables = [variable["name"] for variable in container.get("env", ())]
            assert len(variables) == len(set(variables)), pod.name
            foreign = {each for each in variables if not each.startswith(("PD_", "UCX_", "OTEL_"))}
            assert all(f"name: {each}" in given for each in foreign), pod.name


@each_set
def test_programs_in_pods_exist_and_take_their_arguments(name: str) -> None:
    for pod in pods(name):
        for command in _commands(pod.main):
            assert command[0] in {"sleep", "pdctl", *PROGRAMS}, pod.name
            if command[0] == "pdctl":
                parsed(command, pod.plain)


@each_set
def test_probes_ask_where_health_is_answered(name: str) -> None:
    asks_by_grpc = name not in {"alone", "old-kubernetes"}
    for pod in processes(name):
        asked = {kind: pod.main[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
        for kind, probe in asked.items():
            service = "" if kind == "readiness" else "liveness"
            if asks_by_grpc:
                assert probe["grpc"] == {"port": 8090, "service": service}, pod.name
            else:
                program = ["pdctl", "health", "--plaintext", "--service", service, "localhost:8090"]
                assert probe["exec"]["command"] == program, pod.name
        assert pod.plain["PD_HEALTH_PORT"] == str(pod.ports["health"]) == "8090"
        patience_s = asked["startup"]["periodSeconds"] * asked["startup"]["failureThreshold"]
        assert patience_s == all_values().default["engine"]["startupSeconds"]


@each_set
def test_a_pod_is_given_the_time_to_drain(name: str) -> None:
    for pod in processes(name):
        program, seconds = pod.main["lifecycle"]["preStop"]["exec"]["command"]
        assert program == "sleep"
        least = int(seconds) + float(pod.plain["PD_DRAIN_TIMEOUT"])
        assert pod.spec["terminationGracePeriodSeconds"] > least, pod.name


@pytest.mark.parametrize("role", Role)
def test_every_option_in_the_schema_is_a_variable_of_its_process(role: Role) -> None:
    options: dict[str, Option] = options_of(role)
    assert {f"PD_{name.upper().replace('-', '_')}" for name in options} <= variables_of(role)


def _commands(container: Object) -> Iterator[list[str]]:
    yield container["command"]
    probes = [container.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")]
    hooks = [*probes, container.get("lifecycle", {}).get("preStop", {})]
    yield from (hook["exec"]["command"] for hook in hooks if "exec" in hook)
