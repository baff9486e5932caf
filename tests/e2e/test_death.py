"""A process in which something dies ends, and says of what. That each part counts is tested in tests/services."""

from __future__ import annotations

import asyncio
import signal
import sys

from demo.cluster import LOOPBACK, Ports


async def test_a_process_in_which_a_task_dies_ends_with_code_1_and_its_last_line_names_it() -> None:
    ports = Ports.free()
    flags = ["--prefill", f"{LOOPBACK}:{ports.prefill}", "--decode", f"{LOOPBACK}:{ports.decode}"]
    flags += ["--http-port", str(ports.http), "--grpc-port", str(ports.grpc)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.e2e.mortal", "router", "prober", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            while b"pd-router listens" not in (line := await process.stdout.readline()):
                assert line, "it ended before it listened"
        process.send_signal(signal.SIGUSR1)
        log, _ = await asyncio.wait_for(process.communicate(), 10)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    last = log.decode().rstrip().splitlines()[-1]
    assert (process.returncode, last) == (1, "Error: this process cannot go on: prober died: it was cancelled")
