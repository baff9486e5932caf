"""One load sent to one server."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from pd_common.cli.bench.serve.client import Completions, Server
from pd_common.cli.bench.serve.exchange import Log
from pd_common.cli.bench.serve.load import send
from pd_common.cli.bench.serve.plan import Plan


def fields_of(model: str, *, ignore_eos: bool) -> dict[str, Any]:
    """What every request says beside its prompt and length."""
    eos = {"ignore_eos": True} if ignore_eos else {}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "temperature": 0.0, **stream, **eos}


async def send_to(server: Server, fields: Mapping[str, Any], plan: Plan, log: Log) -> None:
    """Returns when every prompt has been answered; `log` is whole enough at any moment."""
    gc.freeze()  # the collector does not go through all that is loaded while times are taken
    try:
        async with server.session() as session:
            await send(plan, Completions(server, session, fields).complete, log)
    finally:
        gc.unfreeze()
