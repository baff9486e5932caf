"""Requests to a router's POST /generate, one at a time or as a steady light load, with every answer kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE_S = 60.0

_AGAIN_S = 0.2
"""After a service has led nowhere."""

_SERVER = {"sni_hostname": "pd-router"}  # whose name is in its certificate, and its address is not


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and how its greedy answer is wanted."""

    prompt: tuple[int, ...]
    new_tokens: int
    streamed: bool

    @property
    def body(self) -> dict[str, Any]:
        sampling = {"max_new_tokens": self.new_tokens, "temperature": 0, "ignore_eos": True}
        return {"input_ids": list(self.prompt), "sampling_params": sampling, "stream": self.streamed}


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of a question; `trouble` is the error's body, or what broke."""

    question: Question
    token_ids: list[int]
    trouble: str = ""
    took_s: float = 0.0


async def ask(
    url: str, question: Question, tls: ssl.SSLContext | bool = True, begun: asyncio.Event | None = None
) -> Answered:
    """On a connection of its own; `begun` is set when the first token is there."""
    began = time.monotonic()
    token_ids: list[int] = []
    trouble = ""
    async with httpx.AsyncClient(verify=tls, timeout=PATIENCE_S, trust_env=False) as client:
        try:
            async with client.stream("POST", f"{url}/generate", json=question.body, extensions=_SERVER) as response:
                async for part in _parts(response, question.streamed):
                    token_ids = part.get("output_ids", token_ids)
                    trouble = json.dumps(part["error"]) if "error" in part else trouble
                    if begun is not None:
                        begun.set()
        except httpx.HTTPError as error:
            trouble = repr(error)
    return Answered(question, token_ids, trouble, time.monotonic() - began)


async def _parts(response: httpx.Response, streamed: bool) -> AsyncIterator[dict[str, Any]]:
    """Each says the whole answer so far."""
    if not streamed or response.is_error:
        yield json.loads(await response.aread())
        return
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data not in {"", "[DONE]"}:
            yield json.loads(data)


@dataclass(slots=True)
class Load:
    """Some clients, each with one question at a time."""

    answered: list[Answered] = field(default_factory=list)
    """In the order in which they ended."""
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def answers(self, more: int) -> None:
        """Returns when so many more have ended."""
        wanted = len(self.answered) + more
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answered) < wanted:
                self._more.clear()
                await self._more.wait()

    async def ask_on(
        self, questions: Sequence[Question], urls: Callable[[], Sequence[str]], ended: asyncio.Event
    ) -> None:
        """One after the other, over and over, at the services' addresses in turn; the last one to its end."""
        for turn, question in enumerate(itertools.cycle(questions)):
            if ended.is_set():
                return
            at = urls()
            if at:
                self.answered.append(await ask(at[turn % len(at)], question))
            else:
                self.answered.append(Answered(question, [], "nobody is ready"))
                await asyncio.sleep(_AGAIN_S)
            self._more.set()


@asynccontextmanager
async def load(clients: int, questions: Sequence[Question], urls: Callable[[], Sequence[str]]) -> AsyncIterator[Load]:
    """Runs beside the block; all that was asked has been answered after it."""
    under_way, ended = Load(), asyncio.Event()
    async with asyncio.TaskGroup() as asking:
        for client in range(clients):
            turned = [*questions[client:], *questions[:client]]
            asking.create_task(under_way.ask_on(turned, urls, ended))
        try:
            yield under_way
        finally:
            ended.set()
