"""pdctl health as a probe runs it, in a process of its own: its exit code, its one line, and how little it loads."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pd_common.control import server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.outputs import OutputHub
from pd_common.control.server import ControlServer
from tests.cli.pdctl_runs import Ended, run_pdctl
from tests.control.certificates import Authority
from tests.control.fake_rooms import FakeRooms
from tests.control.serving import LOOPBACK


@dataclass(frozen=True, slots=True)
class Probed:
    """A decode with certificates, which is ready, and the papers of a person."""

    control: ControlServer
    address: str
    health_port: str
    papers: dict[str, str]

    async def health(self, *words: str) -> Ended:
        return await run_pdctl(self.papers, "health", *words)


@pytest.fixture
async def probed(tmp_path: Path) -> AsyncIterator[Probed]:
    authority = Authority(tmp_path)
    control = ControlServer(
        [server.abort(AbortServicer(FakeRooms(OutputHub())))], authority.issue("pd-decode", to="decode").tls()
    )
    person = authority.issue("alice.example", to="alice")
    papers = {"PD_TLS_CERT": str(person.cert), "PD_TLS_KEY": str(person.key), "PD_TLS_CA": str(person.ca)}
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        health_port: int = free.getsockname()[1]
    async with control.listening(LOOPBACK, 0, health_port) as port:
        await control.set_serving(True)
        yield Probed(control, f"{LOOPBACK}:{port}", f"{LOOPBACK}:{health_port}", papers)


async def test_a_ready_process_is_serving(probed: Probed) -> None:
    assert await probed.health(probed.health_port, "--plaintext") == Ended("SERVING\n", "", 0)


async def test_with_a_certificate_the_role_is_found(probed: Probed) -> None:
    assert await probed.health(probed.address) == Ended("SERVING\n", "", 0)


async def test_a_process_that_is_not_ready_is_not_serving_and_lives(probed: Probed) -> None:
    await probed.control.withdraw()
    ready, live = await asyncio.gather(
        probed.health(probed.health_port, "--plaintext"),
        probed.health(probed.health_port, "--plaintext", "--service", "liveness"),
    )
    assert ready == Ended("NOT_SERVING\n", "", 1)
    assert live == Ended("SERVING\n", "", 0)


async def test_why_there_is_no_answer_is_one_line(probed: Probed) -> None:
    unknown, nobody, no_tls, half = await asyncio.gather(
        probed.health(probed.address, "--service", "x"),
        probed.health(f"{LOOPBACK}:1"),
        probed.health(probed.address, "--plaintext"),
        run_pdctl({"PD_TLS_CERT": probed.papers["PD_TLS_CERT"]}, "health", probed.address),
    )
    assert unknown == Ended("", f"Error: no such service at {probed.address}: x\n", 1)
    refused = "Failed to connect to remote host: Connection refused"
    assert nobody == Ended("", f"Error: nobody answers at {LOOPBACK}:1: {refused}\n", 1)
    assert (no_tls.code, no_tls.out) == (1, "")
    assert no_tls.err.startswith(f"Error: nobody answers at {probed.address}: ")
    assert half == Ended("", "Error: TLS needs --tls-key as well\n", 1)


async def test_one_that_says_nothing_is_given_up() -> None:
    with socket.create_server((LOOPBACK, 0)) as frozen:  # the kernel takes connections in, and nobody reads them
        address = f"{LOOPBACK}:{frozen.getsockname()[1]}"
        ended = await asyncio.wait_for(run_pdctl({}, "health", address, "--timeout", "0.2"), 15)
    assert ended == Ended("", f"Error: nobody answers at {address} in time\n", 1)


def test_it_loads_nothing_heavy() -> None:
    code = "import sys; from pd_common.cli.main import COMMANDS; COMMANDS['health'].load('health'); print(*sys.modules)"
    ran = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "numpy", "rich", "opentelemetry", "prometheus_client", "pd.v1"}
    assert not heavy & set(ran.stdout.split())
