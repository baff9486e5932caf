from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from pd_common import threads
from pd_common.errors import InternalError
from pd_common.threads import CallThread


def end_thread() -> None:
    raise SystemExit


async def test_calls_run_in_order_on_one_thread_and_give_results_or_errors() -> None:
    thread = CallThread("test")
    ran: list[str] = []

    def call(name: str) -> str:
        ran.append(f"{name} on {threading.current_thread().name}")
        return name

    def fail() -> None:
        raise ZeroDivisionError

    assert await asyncio.gather(*(thread.run(partial(call, name)) for name in "abc")) == ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError):
        await thread.run(fail)
    assert await thread.run(lambda: call("d")) == "d"
    assert ran == [f"{name} on test" for name in "abcd"]
    thread.stop()


async def test_all_that_wait_for_a_thread_that_dies_are_told_and_so_is_its_watch() -> None:
    thread = CallThread("test")
    go = threading.Event()
    watch = asyncio.create_task(thread.watch())
    calls: tuple[Callable[[], object], ...] = (go.wait, end_thread, list, list)
    waiting = [asyncio.create_task(thread.run(call)) for call in calls]
    await asyncio.sleep(0)
    go.set()
    first, *others = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    assert first is True
    assert [type(other) for other in others] == [InternalError] * 3
    with pytest.raises(InternalError, match="the test thread died: SystemExit"):
        await asyncio.wait_for(watch, 10)
    with pytest.raises(InternalError, match="the test thread died"):
        await thread.run(list)
    thread.stop()


async def test_a_call_that_nobody_wants_any_more_does_not_run() -> None:
    thread = CallThread("test")
    go, ran = threading.Event(), threading.Event()
    first = asyncio.create_task(thread.run(go.wait))
    second = asyncio.create_task(thread.run(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait((second,))
    go.set()
    await first
    thread.stop()
    assert not ran.is_set()


async def test_a_thread_that_was_stopped_has_not_died_and_takes_no_call() -> None:
    thread = CallThread("test")
    watch = asyncio.create_task(thread.watch())
    thread.stop()
    with pytest.raises(InternalError, match="closed"):
        await thread.run(list)
    await asyncio.sleep(0)
    assert not watch.done()
    watch.cancel()


async def test_a_call_that_takes_too_long_is_a_thread_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "HANGS_AFTER_S", 0.0)
    monkeypatch.setattr(threads, "_LOOK_S", 0.01)
    thread = CallThread("test")
    go = threading.Event()
    hanging = thread.submit(go.wait)
    with pytest.raises(InternalError, match="the test thread hangs"):
        await asyncio.wait_for(thread.watch(), 10)
    go.set()
    assert hanging.result(10)
    thread.stop()


async def test_an_idle_thread_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "HANGS_AFTER_S", 0.0)
    monkeypatch.setattr(threads, "_LOOK_S", 0.01)
    thread = CallThread("test")
    await thread.run(list)
    looked_often = asyncio.wait_for(thread.watch(), 0.1)
    with pytest.raises(TimeoutError):
        await looked_often
    thread.stop()
