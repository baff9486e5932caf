from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pd_common.handoff.process import own_process_proof, process_is_gone
from pd_common.types import ProcessProof

CHILD = """
from pd_common.handoff.process import own_process_proof as own
proof = own()
print(proof.host_id, proof.pid, proof.start_ticks, flush=True)
input()
"""


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], ProcessProof]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        host_id, pid, start_ticks = process.stdout.readline().rsplit(maxsplit=2)
        yield process, ProcessProof(host_id, int(pid), int(start_ticks))
        process.kill()


def test_a_living_process_is_not_gone(child: tuple[subprocess.Popen[str], ProcessProof]) -> None:
    assert not process_is_gone(child[1])
    assert not process_is_gone(own_process_proof())


def test_a_killed_process_is_gone_even_before_it_is_reaped(child: tuple[subprocess.Popen[str], ProcessProof]) -> None:
    process, proof = child
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_is_gone(proof)
    process.wait()
    assert process_is_gone(proof)


def test_a_reused_pid_is_another_process() -> None:
    own = own_process_proof()
    assert process_is_gone(replace(own, start_ticks=own.start_ticks - 1))


def test_nothing_is_known_of_another_host_or_of_nonsense() -> None:
    own = own_process_proof()
    assert not process_is_gone(replace(own, host_id="elsewhere", start_ticks=1))
    assert not process_is_gone(replace(own, pid=0))
    assert not process_is_gone(replace(own, pid=-1))
