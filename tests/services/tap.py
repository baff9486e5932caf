"""A tap on the control plane: what becomes of single messages between real clients and real servicers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from pd_common.errors import PdError, PeerLost
from tests.services.byte_engine import Gate

PassOn = Callable[[], Awaitable[Any]]
Rule = Callable[[Any, PassOn], Awaitable[Any]]
"""Takes a request and the way to the servicer; gives the answer, or raises what the caller is to see."""


class Tap:
    """Rules by method name. A servicer behind a tap can be replaced: a new process behind the same address."""

    def __init__(self) -> None:
        self.rules: dict[str, Rule] = {}
        self.passed: list[str] = []

    def on(self, servicer: Any) -> Tapped:
        return Tapped(self, servicer)

    async def unary(self, method: Callable[..., Awaitable[Any]], request: Any, context: Any) -> Any:
        name = method.__name__

        async def pass_on() -> Any:
            self.passed.append(name)
            return await method(request, context)

        rule = self.rules.get(name)
        return await (pass_on() if rule is None else rule(request, pass_on))


class Tapped:
    """Stands for a servicer; `servicer` is looked up at every call."""

    def __init__(self, tap: Tap, servicer: Any) -> None:
        self.servicer = servicer
        self._tap = tap

    def __getattr__(self, name: str) -> Any:
        if inspect.isasyncgenfunction(getattr(self.servicer, name)):
            return self._stream(name)

        async def unary(request: Any, context: Any) -> Any:
            return await self._tap.unary(getattr(self.servicer, name), request, context)

        return unary

    def _stream(self, name: str) -> Any:
        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with aclosing(getattr(self.servicer, name)(request, context)) as responses:
                async for response in responses:
                    yield response

        return stream


def lost(times: int = 1, *, applies: Callable[[Any], bool] = lambda _: True) -> Rule:
    """The message never arrives."""
    return _broken(times, applies, arrives=False)


def answer_lost(times: int = 1, *, applies: Callable[[Any], bool] = lambda _: True) -> Rule:
    """The message arrives and is acted on; nobody hears of it."""
    return _broken(times, applies, arrives=True)


def silence(times: int = 1, *, applies: Callable[[Any], bool] = lambda _: True) -> Rule:
    """The message never arrives, and its sender is told nothing: it waits until it gives up."""
    left = times

    async def rule(request: Any, pass_on: PassOn) -> Any:
        nonlocal left
        if left == 0 or not applies(request):
            return await pass_on()
        left -= 1
        return await asyncio.Event().wait()

    return rule


def overtaken(*, applies: Callable[[Any], bool] = lambda _: True) -> Rule:
    """The first such message arrives after the next message of its method; its sender has given up meanwhile."""
    late: list[PassOn] = []
    struck = False

    async def rule(request: Any, pass_on: PassOn) -> Any:
        nonlocal struck
        if not struck and applies(request):
            struck = True
            late.append(pass_on)
            return await asyncio.Event().wait()
        outcome = await _outcome(pass_on())
        while late:
            await _outcome(late.pop()())
        return _raised(outcome)

    return rule


def held(gate: Gate, *, applies: Callable[[Any], bool] = lambda _: True) -> Rule:
    """The message is late, and arrives even if its sender has gone away meanwhile."""
    late: set[asyncio.Task[Any]] = set()

    async def arrive(pass_on: PassOn) -> Any:
        await gate.wait()
        return await _outcome(pass_on())

    async def rule(request: Any, pass_on: PassOn) -> Any:
        if not applies(request):
            return await pass_on()
        arriving = asyncio.create_task(arrive(pass_on))
        late.add(arriving)
        arriving.add_done_callback(late.discard)
        return _raised(await asyncio.shield(arriving))

    return rule


def answer_held(gate: Gate, *, applies: Callable[[Any], bool] = lambda _: True) -> Rule:
    """The answer is late."""

    async def rule(request: Any, pass_on: PassOn) -> Any:
        answer = await pass_on()
        if applies(request):
            await gate.wait()
        return answer

    return rule


def twice(*, applies: Callable[[Any], bool] = lambda _: True) -> Rule:
    """The message is delivered twice, and both copies are answered the same."""

    async def rule(request: Any, pass_on: PassOn) -> Any:
        if not applies(request):
            return await pass_on()
        first, second = await asyncio.gather(_outcome(pass_on()), _outcome(pass_on()))
        assert str(first) == str(second), request
        return _raised(first)

    return rule


async def _outcome(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except PdError as error:
        return error


def _raised(outcome: Any) -> Any:
    if isinstance(outcome, PdError):
        raise outcome
    return outcome


def _broken(times: int, applies: Callable[[Any], bool], *, arrives: bool) -> Rule:
    left = times

    async def rule(request: Any, pass_on: PassOn) -> Any:
        nonlocal left
        if left == 0 or not applies(request):
            return await pass_on()
        left -= 1
        if arrives:
            await pass_on()
        raise PeerLost("the connection broke")

    return rule
