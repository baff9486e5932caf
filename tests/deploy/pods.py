"""The chart's pods as processes on this machine: command, arguments, environment and probes as they were rendered.

What stands for a node and its cluster is here, and nothing else is changed:

* every pod has a loopback address of its own, so that ports stay as they are; PD_HOST is that address, not all of them
* paths of volumes, and of the model in the image, become directories of this machine
* names of services are in a hosts file that only the pod sees, in a mount namespace of its own
* programs are those of this virtual environment
* probes come more often than rendered, so that a single failure of liveness is not borne
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_common.addresses import is_wildcard
from tests.deploy.rendered import Object, Template

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo" / "shakespeare"
PATIENCE_S = 120.0
"""For a pod to become ready on a machine that has much else to do."""

_PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
_AUDITED = {"PD_CHECK_INTEGRITY": "1"}
"""As for every engine that tests start."""
_READS_HOSTS = {"GRPC_DNS_RESOLVER": "native"}
"""gRPC's own resolver takes names in a hosts file for one that share an address, as a rank's and its service's do."""
_PACE_S = 0.2
_HOSTS_BYTES = 4096


class Seen(NamedTuple):
    """What both probes have said at one time."""

    alive: bool
    ready: bool
    draining: bool


@dataclass(slots=True)
class Node:
    """Where pods run: a directory for their files, and what the chart expects to find in its namespace."""

    directory: Path
    volumes: Mapping[str, Path] = field(default_factory=dict)
    """Directories for claims, by name, and for images that are volumes, by reference."""
    secrets: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    _subnet: str = field(default_factory=lambda: f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}")
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def place(self) -> tuple[str, Path]:
        """An address and a directory that no other pod has."""
        number = next(self._numbers)
        home = self.directory / str(number)
        home.mkdir()
        return f"{self._subnet}.{number}", home

    def keep(self, secrets: Sequence[Object]) -> None:
        """Those that are there already stay as they are."""
        for secret in secrets:
            data = {name: base64.b64decode(text) for name, text in secret["data"].items()}
            self.secrets.setdefault(secret["metadata"]["name"], data)


class Pod:
    """One process, and what a kubelet does with it. `changed` is called when it becomes ready or unready, or ends."""

    def __init__(self, template: Template, node: Node, changed: Callable[[], None]) -> None:
        self.template = template
        self.address, self._home = node.place()
        self.seen: list[Seen] = []
        self.is_serving = False
        """A service sends requests here: it is ready, and not about to end."""
        self.ready = asyncio.Event()
        """It has been ready once."""
        self.signalled = asyncio.Event()
        """It has got SIGTERM."""
        self.ended = asyncio.Event()
        self._changed = changed
        self._terminating = False
        self._files = _files(template, node, self._home)
        self._hosts = self._home / "hosts"
        self._hosts.write_bytes(b"")

    def __str__(self) -> str:
        return f"{self.template.workload} at {self.address}"

    @property
    def log(self) -> str:
        return (self._home / "log").read_text()

    @property
    def environment(self) -> dict[str, str]:
        """As rendered."""
        return {entry["name"]: self._value(entry) for entry in self.template.container.get("env", ())}

    @property
    def command(self) -> list[str]:
        """As rendered, with its arguments."""
        container = self.template.container
        return [*container["command"], *container.get("args", ())]

    @property
    def seen_in_drain(self) -> set[Seen]:
        return {seen for seen in self.seen if seen.draining}

    def know(self, names: Sequence[tuple[str, str]]) -> None:
        """(address, name) of every service: what DNS says from now on. Written at once, so nobody reads a half."""
        lines = "".join(f"{address} {name}\n" for address, name in ((self.address, "localhost"), *names))
        assert len(lines) <= _HOSTS_BYTES
        with self._hosts.open("r+b") as file:
            file.write(lines.ljust(_HOSTS_BYTES, "\n").encode())

    # --- its life ---

    async def run(self) -> None:
        """From start to end. Fails for whatever a kubelet would have to mend."""
        process = await self._begin()
        try:
            async with asyncio.TaskGroup() as kubelet:
                probes = kubelet.create_task(self._probe(process))
                terminator = kubelet.create_task(self._end_when_told(process))
                code = await process.wait()
                probes.cancel()
                terminator.cancel()
            assert self.signalled.is_set(), f"{self} ended by itself with {code}:\n{self.log}"
            assert code == 0, f"{self} ended with {code}:\n{self.log}"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self.is_serving = False
            self.ended.set()
            self._changed()

    async def run_once(self) -> str:
        """A pod that does one thing; its output."""
        code = await (await self._begin()).wait()
        assert code == 0, f"{self} ended with {code}:\n{self.log}"
        return self.log

    async def until_ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.ready.wait()

    async def terminate(self) -> float:
        """As a deleted pod ends; gives the seconds from SIGTERM on.

        Services forget it at the very end of preStop, as late as the chart allows for.
        """
        async with asyncio.timeout(self.template.spec["terminationGracePeriodSeconds"]):  # then SIGKILL would come
            self._terminating = True
            assert await self.call(self.template.container["lifecycle"]["preStop"]["exec"]["command"]) == 0
            self.is_serving = False
            self._changed()
            began = time.monotonic()
            self.signalled.set()
            await self.ended.wait()
        return time.monotonic() - began

    async def call(self, command: Sequence[str]) -> int:
        """Another program in the pod; its exit code."""
        process = await self._start(command, subprocess.DEVNULL)
        return await process.wait()

    async def _end_when_told(self, process: asyncio.subprocess.Process) -> None:
        await self.signalled.wait()
        process.terminate()

    async def _begin(self) -> asyncio.subprocess.Process:
        with (self._home / "log").open("wb") as log:
            return await self._start(self.command, log)

    async def _start(self, command: Sequence[str], output: Any) -> asyncio.subprocess.Process:
        mounted = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(self._hosts))
        given = {"PATH": _PROGRAMS, "HOME": str(self._home), **_AUDITED, **_READS_HOSTS}
        return await asyncio.create_subprocess_exec(
            *_own_mounts(),
            *mounted,
            *map(self._located, command),
            env={**given, **self.environment},
            cwd=self._home,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    # --- probes ---

    async def _probe(self, process: asyncio.subprocess.Process) -> None:
        container = self.template.container
        while not await self._succeeds(container["startupProbe"]):  # noqa: ASYNC110  this is what probes are
            await asyncio.sleep(_PACE_S)
        while True:
            draining = self.signalled.is_set()
            alive = await self._succeeds(container["livenessProbe"])
            ready = await self._succeeds(container["readinessProbe"])
            if process.returncode is None:
                self._note(Seen(alive, ready, draining))
            await asyncio.sleep(_pace_s(container["readinessProbe"]))

    def _note(self, seen: Seen) -> None:
        assert seen.alive or self._terminating, f"{self} would be started anew:\n{self.log}"
        self.seen.append(seen)
        serving = seen.ready and not self.signalled.is_set()
        if serving:
            self.ready.set()
        if serving is not self.is_serving:
            self.is_serving = serving
            self._changed()

    async def _succeeds(self, probe: Object) -> bool:
        try:
            async with asyncio.timeout(probe["timeoutSeconds"]):
                if "grpc" in probe:
                    return await self._is_healthy(**probe["grpc"])
                return await self.call(probe["exec"]["command"]) == 0
        except TimeoutError:
            return False

    async def _is_healthy(self, port: int, service: str) -> bool:
        async with grpc.aio.insecure_channel(f"{self.address}:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    # --- what a kubelet fills in ---

    def _value(self, entry: Object) -> str:
        if entry["name"] == "PD_HOST" and is_wildcard(entry["value"]):
            return self.address
        if "value" in entry:
            return self._located(entry["value"])
        ((kind, reference),) = entry["valueFrom"].items()
        if kind == "resourceFieldRef":
            name = reference["resource"].removeprefix("limits.")
            return str(_whole(self.template.container["resources"]["limits"].get(name, str(os.cpu_count()))))
        assert kind == "fieldRef"
        known = {"status.podIP": self.address, "spec.nodeName": socket.gethostname(), **_label_fields(self.template)}
        return known[reference["fieldPath"]]

    def _located(self, text: str) -> str:
        """A path in the pod as one on this machine; anything else as it is."""
        for mount, here in self._files.items():
            if text == mount or text.startswith(f"{mount}/"):
                return f"{here}{text.removeprefix(mount)}"
        return text


def _files(template: Template, node: Node, home: Path) -> dict[str, Path]:
    """Where paths of the pod are on this machine."""
    volumes = {volume["name"]: volume for volume in template.spec["volumes"]}
    mounts = template.container["volumeMounts"]
    return {
        "/opt/pd/demo-model": DEMO_MODEL,
        **{mount["mountPath"]: _volume(volumes[mount["name"]], node, home) for mount in mounts},
    }


def _volume(volume: Object, node: Node, home: Path) -> Path:
    if "persistentVolumeClaim" in volume:
        return node.volumes[volume["persistentVolumeClaim"]["claimName"]]
    if "image" in volume:
        return node.volumes[volume["image"]["reference"]]
    directory = home / str(volume["name"])
    directory.mkdir()
    if "secret" in volume:
        for name, content in node.secrets[volume["secret"]["secretName"]].items():
            (directory / name).write_bytes(content)
    else:
        assert "emptyDir" in volume
    return directory


def _label_fields(template: Template) -> dict[str, str]:
    return {f"metadata.labels['{name}']": text for name, text in template.labels.items()}


def _whole(cpus: str) -> int:
    """As the downward API gives it: rounded up."""
    return math.ceil(int(cpus[:-1]) / 1000 if cpus.endswith("m") else float(cpus))


def _pace_s(probe: Object) -> float:
    """A program costs more than a call: it comes as often as rendered."""
    return _PACE_S if "grpc" in probe else probe["periodSeconds"]


@cache
def _own_mounts() -> tuple[str, ...]:
    """What gives a program mounts of its own; skips the test where nothing does."""
    for command in (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount")):
        done = subprocess.run(
            [*command, "mount", "--bind", "/etc/hosts", "/etc/hosts"], capture_output=True, check=False
        )
        if done.returncode == 0:
            return command
    pytest.skip(f"this machine lets nobody make a mount namespace: {done.stderr.decode().strip()}")
