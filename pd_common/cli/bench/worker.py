"""A child process of the bench: one end of a transfer, or an engine alone. Answers requests, one JSON line each.

It ends when the bench does: with its connection, and by the kernel's hand when it is stopped at that time.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys

from pd_common.cli.bench.end_memory import EndMemory
from pd_common.cli.bench.engine import EngineRequests
from pd_common.cli.bench.open_ends import receiving_end, sending_end
from pd_common.cli.bench.receiver import Receiver
from pd_common.cli.bench.sender import Sender
from pd_common.cli.bench.spec import LINE_BYTES, Handler, Reply, Side, Spec
from pd_common.errors import PdError

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Arguments: the connection's file descriptor, the parent's process id, and the spec."""
    control, parent, spec = int(arguments[0]), int(arguments[1]), Spec.parse(arguments[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the bench ended before it could be watched
    asyncio.run(serve(socket.socket(fileno=control), spec))
    os._exit(0)  # libraries that keep threads of their own are not waited for


async def serve(control: socket.socket, spec: Spec) -> None:
    """Opens the end, says so, and answers until the connection ends."""
    reader, writer = await asyncio.open_unix_connection(sock=control, limit=LINE_BYTES)
    handlers: dict[str, Handler] = {}
    reply = await _answer(lambda: _open(spec, handlers))
    while True:
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()
        line = await reader.readline()
        if not line:
            return
        request = json.loads(line)
        handler = handlers[request.pop("what")]
        reply = await _answer(lambda handler=handler, request=request: handler(**request))


async def _answer(handler: Handler) -> Reply:
    try:
        return await handler()
    except PdError as error:
        return {"error": error.message, "reason": error.reason.value}


async def _open(spec: Spec, handlers: dict[str, Handler]) -> Reply:
    handlers.update(EngineRequests().handlers)
    if spec.side is Side.ENGINE:
        return {}
    memory = EndMemory(spec)
    if spec.side is Side.SENDER:
        handlers.update(Sender(spec.work, memory, sending_end(spec.end, memory.regions)).handlers)
    else:
        handlers.update(Receiver(spec.work, memory, receiving_end(spec.end, memory.regions)).handlers)
    return {}


if __name__ == "__main__":
    main(sys.argv[1:])
