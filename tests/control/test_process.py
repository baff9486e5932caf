"""What every process does around its wiring."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

_LOADS_A_MODEL = """
import sys, time
from pd_common.config import LogConfig
from pd_common.control import process
from pd_common.types import Role

async def serve():
    print("loading", flush=True)
    time.sleep(60)

process.run(Role.PREFILL, serve, LogConfig("info", "text", False))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes process namespaces")
def test_sigterm_ends_the_first_process_of_a_container_while_it_loads_its_model() -> None:
    """The kernel drops signals to process 1 that it has no handler for."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", _LOADS_A_MODEL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "loading\n"
        (first,) = _children_of(container.pid)
        os.kill(first, signal.SIGTERM)
        assert container.wait(timeout=30) == 128 + signal.SIGTERM


def _children_of(pid: int) -> list[int]:
    listed = subprocess.run(["pgrep", "--parent", str(pid)], capture_output=True, text=True, check=True)
    return [int(each) for each in listed.stdout.split()]
