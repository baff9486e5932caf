"""A real cluster for tests: three processes, real gRPC and UCX, and a look into both pools."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc
from pd.v1 import (
    abort_pb2,
    abort_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    transfer_status_pb2,
    transfer_status_pb2_grpc,
)

from demo.cluster import LOOPBACK, Cluster, Ports, Process, cluster
from tests.tiny_models import tiny_model

CONTEXT_LENGTH = 8192
KV_TOKENS = 12288
PATIENCE_S = 20.0


@cache
def long_model(family: str) -> Path:
    """The tiny model with room for prompts of several thousand tokens; its weights do not depend on that."""
    directory = Path(tempfile.mkdtemp(prefix="e2e-")) / f"tiny-{family}"
    shutil.copytree(tiny_model(family), directory)
    config_file = directory / "config.json"
    settings = json.loads(config_file.read_text())
    settings["max_position_embeddings"] = CONTEXT_LENGTH
    config_file.write_text(json.dumps(settings))
    return directory


@contextmanager
def started_cluster(
    family: str = "llama",
    *,
    page_size: int = 16,
    chunk: int = 100,
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Three processes with one engine thread each, not necessarily ready."""
    with cluster(
        long_model(family),
        Ports.free(),
        engine_flags=["--threads", "1", "--dtype", "float32", "--kv-cache-tokens", str(KV_TOKENS)],
        prefill_flags=["--page-size", str(page_size), "--chunked-prefill-size", str(chunk), *prefill_flags],
        decode_flags=["--page-size", str(page_size), *decode_flags],
        environment=environment,
    ) as running:
        yield running


@contextmanager
def running_cluster(family: str = "llama", **settings: Any) -> Iterator[Cluster]:
    """As `started_cluster`, ready to serve."""
    with started_cluster(family, **settings) as running:
        running.wait_ready()
        yield running


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer."""

    room: int
    token_ids: list[int]
    text: str
    logprobs: list[generation_pb2.TokenLogprob]
    last: generation_pb2.Output

    @property
    def finish(self) -> str:
        return generation_pb2.FinishReason.Name(self.last.finish_reason)


class Client:
    """gRPC calls to the three processes of a cluster."""

    def __init__(self, running: Cluster) -> None:
        self.cluster = running
        self._channels = {
            name: grpc.aio.insecure_channel(f"{LOOPBACK}:{port}")
            for name, port in (
                ("router", running.ports.grpc),
                ("prefill", running.ports.prefill),
                ("decode", running.ports.decode),
            )
        }

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(grace=None)

    def generation(self, name: str = "router") -> Any:
        return generation_pb2_grpc.GenerationStub(self._channels[name])

    def transfers(self, name: str) -> Any:
        return transfer_status_pb2_grpc.TransferStatusStub(self._channels[name])

    async def generate(self, prompt: Sequence[int] | str, *, to: str = "router", **fields: Any) -> Answer:
        """Raises grpc.aio.AioRpcError as the call does."""
        outputs = [r.output async for r in self.generation(to).Generate(make_request(prompt, **fields), timeout=120)]
        return Answer(
            room=outputs[-1].bootstrap_room,
            token_ids=[token for output in outputs for token in output.token_ids],
            text="".join(output.text for output in outputs),
            logprobs=[logprob for output in outputs for logprob in output.logprobs],
            last=outputs[-1],
        )

    async def direct(self, prompt: Sequence[int] | str, room: int, **fields: Any) -> tuple[Answer, Answer]:
        """Both legs without a router, as (prefill's answer, decode's answer)."""
        meeting = {"bootstrap_room": room, "bootstrap_host": LOOPBACK, "bootstrap_port": self.cluster.ports.prefill}
        legs = (self.generate(prompt, to=name, **meeting, **fields) for name in ("prefill", "decode"))
        prefill, decode = await asyncio.gather(*legs)
        return prefill, decode

    async def abort(self, name: str, room: int) -> abort_pb2.AbortRoomResponse:
        stub: Any = abort_pb2_grpc.AbortStub(self._channels[name])
        response: abort_pb2.AbortRoomResponse = await stub.AbortRoom(
            abort_pb2.AbortRoomRequest(bootstrap_room=room, message="the test says so"), timeout=10
        )
        return response

    async def pool(self, name: str) -> transfer_status_pb2.GetPoolResponse:
        response: transfer_status_pb2.GetPoolResponse = await self.transfers(name).GetPool(
            transfer_status_pb2.GetPoolRequest(), timeout=10
        )
        return response

    async def reached(self, name: str, state: int, room: int) -> None:
        """Returns when the room has come to this state, or further, on this side."""
        watch = self.transfers(name).WatchTransfers(transfer_status_pb2.WatchTransfersRequest(), timeout=PATIENCE_S)
        async for change in watch:
            if change.transfer.bootstrap_room == room and change.transfer.state >= state:
                watch.cancel()
                return

    async def wait_clean(self) -> None:
        """Asserts that both pools come back to where they started: every page and slot free, nothing in quarantine."""
        for name in ("prefill", "decode"):
            await eventually(partial(self._unclean, name))

    async def _unclean(self, name: str) -> str:
        pool = await self.pool(name)
        pages_used = pool.pages_total - pool.pages_free - pool.pages_cached
        used = (pages_used, pool.slots_total - pool.slots_free, pool.live_rooms)
        return f"{name} still holds {used} pages, slots, rooms: {pool}" if any(used) else ""


async def eventually(complaint: Callable[[], Awaitable[str]], patience_s: float = PATIENCE_S) -> None:
    """Asks again and again until there is nothing to complain of; fails with the last complaint."""
    give_up = time.monotonic() + patience_s
    while text := await complaint():
        assert time.monotonic() < give_up, text
        await asyncio.sleep(0.02)


def make_request(
    prompt: Sequence[int] | str,
    *,
    max_new_tokens: int = 16,
    temperature: float = 0.0,
    ignore_eos: bool = True,
    sampling: Mapping[str, Any] | None = None,
    **fields: Any,
) -> generation_pb2.GenerateRequest:
    """Greedy by default, and as long as asked for."""
    if isinstance(prompt, str):
        fields["text"] = prompt
    else:
        fields["input_ids"] = generation_pb2.TokenIds(ids=prompt)
    parameters = generation_pb2.SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, ignore_eos=ignore_eos, **(sampling or {})
    )
    return generation_pb2.GenerateRequest(sampling_params=parameters, **fields)


@asynccontextmanager
async def client_of(running: Cluster) -> AsyncIterator[Client]:
    """A client whose cluster must be clean afterwards: no test may leave a page behind."""
    client = Client(running)
    try:
        yield client
        await client.wait_clean()
    finally:
        await client.close()


def engine_processes(running: Cluster) -> dict[str, Process]:
    return {"prefill": running.prefill, "decode": running.decode}
