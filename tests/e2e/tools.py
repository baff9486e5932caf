"""Tools that know nothing of this project: grpcurl and buf, as a person runs them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_TOOLS = Path(sys.executable).parent
GRPCURL, BUF = _TOOLS / "grpcurl", _TOOLS / "buf"
needs_grpcurl = pytest.mark.skipif(not GRPCURL.exists(), reason="grpcurl is not installed beside this interpreter")
needs_buf = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed beside this interpreter")


@dataclass(frozen=True, slots=True)
class Printed:
    """What a tool has printed, and its exit code."""

    out: str
    err: str
    code: int

    @property
    def messages(self) -> list[Any]:
        """The JSON documents of `out`."""
        decoder, found, at = json.JSONDecoder(), [], 0
        while rest := self.out[at:].lstrip():
            at = len(self.out) - len(rest)
            message, length = decoder.raw_decode(rest)
            found.append(message)
            at += length
        return found

    @property
    def message(self) -> Any:
        """The only one, of a call that went well."""
        assert self.code == 0, self.err
        (message,) = self.messages
        return message


async def grpcurl(
    address: str, *words: str, data: Any = None, max_time_s: float = 20.0, papers: Sequence[str] = ("-plaintext",)
) -> Printed:
    """`data` is sent as JSON; `papers` are the options that say how it proves who it is."""
    sent = [] if data is None else ["-d", json.dumps(data)]
    return await _run(GRPCURL, *papers, "-max-time", str(max_time_s), *sent, address, *words)


async def buf_curl(home: Path, address: str, method: str, data: Any) -> Printed:
    url = f"http://{address}/{method}"
    words = ("--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(data), url)
    return await _run(BUF, "curl", *words, HOME=str(home), XDG_CACHE_HOME=str(home))


async def _run(tool: Path, *words: str, **environment: str) -> Printed:
    process = await asyncio.create_subprocess_exec(
        tool,
        *words,
        env={"PATH": os.defpath, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return Printed(out.decode(), err.decode(), process.returncode or 0)
