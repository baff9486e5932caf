"""pdctl in a process of its own, into pipes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ended:
    """What one run has printed, and its exit code."""

    out: str
    err: str
    code: int


async def start_pdctl(environment: Mapping[str, str], *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pd_common.cli.main", *words),
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run_pdctl(environment: Mapping[str, str], *words: str) -> Ended:
    process = await start_pdctl(environment, *words)
    out, err = await process.communicate()
    return Ended(out.decode(), err.decode(), process.returncode or 0)
