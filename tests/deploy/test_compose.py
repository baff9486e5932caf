"""compose.yaml against the processes and the Dockerfile: every variable, every command, every probe is understood."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.cluster.image import DOCKERFILE, ROOT
from tests.deploy.programs import from_environment, parsed

FOLDER = DOCKERFILE.parent
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NAMES = sorted(SERVICES)
SECONDS = {"s": 1, "m": 60}


def default(text: str) -> str:
    """With compose's ${NAME:-default} as if no NAME were set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def port(name: str) -> str:
    """Where the service's gRPC port is: as its own options say, told or not."""
    context = parsed(SERVICES[name]["command"], SERVICES[name]["environment"])
    return str(context.params.get("port") or context.params["grpc_port"])


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_variables_are_understood(name: str) -> None:
    service = SERVICES[name]
    own = service["environment"]
    assert len(from_environment(parsed(service["command"], own))) == len(own)


@pytest.mark.parametrize("name", NAMES)
def test_probes_ask_the_port_that_the_process_listens_on(name: str) -> None:
    kind, *command = SERVICES[name]["healthcheck"]["test"]
    assert kind == "CMD"
    assert parsed(command, {}).params["process"].target == f"127.0.0.1:{port(name)}"


def test_the_router_looks_where_the_others_are() -> None:
    told = SERVICES["router"]["environment"]
    assert told["PD_PREFILL"] == f"dns+prefill:{port('prefill')}"
    assert told["PD_DECODE"] == f"dns+decode:{port('decode')}"


@pytest.mark.parametrize("name", NAMES)
def test_the_image_is_that_of_the_dockerfile(name: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert default(SERVICES[name]["image"]) == f"pd-handoff:{version}"
    build = SERVICES[name]["build"]
    context = FOLDER / build["context"]
    assert (context / build["dockerfile"]).resolve() == DOCKERFILE
    assert re.search(rf"^FROM \w+ AS {build['target']}$", DOCKERFILE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_model_is_the_demo_unless_told(name: str) -> None:
    [volume] = SERVICES[name]["volumes"]
    source, target, mode = default(volume).split(":")
    assert (FOLDER / source / "config.json").exists()
    assert (target, mode) == (SERVICES[name]["environment"]["PD_MODEL"], "ro")


def only_writable() -> str:
    """The home that the image gives its user."""
    [home] = re.findall(r"--home-dir (\S+)", DOCKERFILE.read_text())
    return str(home)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_allowed_that_is_not_needed(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [*service["tmpfs"]] == [only_writable()]
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc"}


def test_only_the_router_is_reached_and_from_this_machine_alone() -> None:
    assert {name for name in NAMES if "ports" in SERVICES[name]} == {"router"}
    published = [default(each) for each in SERVICES["router"]["ports"]]
    context = parsed(SERVICES["router"]["command"], SERVICES["router"]["environment"])
    inside = [context.params["http_port"], context.params["grpc_port"]]
    assert published == [f"127.0.0.1:{number}:{number}" for number in inside]


@pytest.mark.parametrize("name", NAMES)
def test_a_process_may_drain_before_it_is_killed(name: str) -> None:
    number, unit = re.fullmatch(r"(\d+)([sm])", SERVICES[name]["stop_grace_period"]).groups()  # type: ignore[union-attr]
    drain = parsed(SERVICES[name]["command"], SERVICES[name]["environment"]).params["drain_timeout_s"]
    assert int(number) * SECONDS[unit] >= drain + 10


def test_for_cma_both_are_in_the_namespaces_of_one_and_only_one_is_their_init() -> None:
    changed = yaml.safe_load((FOLDER / "compose.cma.yaml").read_text())["services"]
    assert changed.keys() < SERVICES.keys()
    assert changed["decode"] == {"pid": "service:prefill", "ipc": "service:prefill", "init": False}
    assert changed["prefill"] == {"ipc": "shareable"}
    assert SERVICES["prefill"]["init"]
    assert {SERVICES[name]["environment"]["PD_UCX_LIBRARY"] for name in ("prefill", "decode")} == {"wheel"}
