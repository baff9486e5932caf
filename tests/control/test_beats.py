from __future__ import annotations

import asyncio
import time

import pytest

from pd_common.control import beats


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.01)


async def test_silence_of_five_beats_ends_the_block() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with beats.Patience():
            await asyncio.wait_for(asyncio.Event().wait(), 5)
    assert 0.04 < time.monotonic() - began < 2


async def test_whoever_is_heard_now_and_then_is_never_given_up() -> None:
    async with beats.Patience() as patience:
        for _ in range(12):
            await asyncio.sleep(0.02)  # two beats of ours
            patience.heard()


async def test_a_process_that_was_stopped_itself_hears_what_came_meanwhile_before_it_gives_up() -> None:
    """What arrives takes some turns of the loop to be heard, as it does with grpc."""

    async with beats.Patience() as patience:
        await asyncio.sleep(0)
        time.sleep(20 * beats.BEAT_S)  # noqa: ASYNC251  the whole process stands still
        for _ in range(10):
            await asyncio.sleep(0)
        patience.heard()
        await asyncio.sleep(2 * beats.BEAT_S)


async def test_an_error_in_the_block_is_that_error() -> None:
    with pytest.raises(ValueError, match="mine"):
        async with beats.Patience():
            raise ValueError("mine")
