"""The status page in a real browser, over a real system: what a person sees, reaches by keyboard and is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from demo.cluster import LOOPBACK, Cluster
from tests.e2e.browser import Page, browser_page, needs_chromium
from tests.e2e.harness import Client, running_cluster

pytestmark = [pytest.mark.slow, needs_chromium]

HOSTILE = "<img src=x onerror=\"document.title='broken in'\">\u202egnp.exe</script>"
SIZES = ((1400, 1000), (390, 844))


@pytest.fixture(scope="module")
def system() -> Iterator[Cluster]:
    """A test may leave its decode and router dead."""
    with running_cluster() as running:
        yield running


@pytest.fixture
async def client(system: Cluster) -> AsyncIterator[Client]:
    client = Client(system)
    yield client
    await client.close()


@pytest.fixture
async def page(system: Cluster, tmp_path: Path) -> AsyncIterator[Page]:
    """The page, open; whatever a test does, it must have nothing to complain of."""
    async with browser_page(tmp_path) as page:
        await page.show_as(*SIZES[0], "light")
        await page.open(f"http://{LOOPBACK}:{system.ports.http}/ui")
        yield page
        assert page.complaints == []


async def test_rooms_come_as_they_are_and_a_hostile_name_stays_a_name(client: Client, page: Page) -> None:
    answer = await client.generate(list(range(1, 300)), rid=HOSTILE)
    row = f"[...document.querySelectorAll('#ended tbody tr')].find(row => row.innerText.includes('{answer.room}'))"
    await page.until(row)
    assert await page.value(f"{row}.querySelector('.rid').textContent") == HOSTILE
    assert await page.value("document.querySelectorAll('main img, main script').length") == 0
    assert await page.value("document.title") == "pd-handoff"
    assert "success" in await page.value(f"{row}.querySelector('.prefill').innerText")
    assert await page.value(f"{row}.querySelector('.pages').innerText") == "19"
    assert (await page.text("#processes")).count("\tup\t") == 3
    assert "proven" in await page.text("#routes")
    assert "cma" in await page.text("#routes")


async def test_a_room_opens_and_closes_by_keyboard_and_draws_all_three_processes(client: Client, page: Page) -> None:
    answer = await client.generate(list(range(1, 300)))
    await page.until(f"document.querySelector('#ended')?.innerText.includes('{answer.room}')")
    link = f"[...document.querySelectorAll('#ended a')].find(link => link.textContent === '{answer.room}')"
    await page.value(f"{link}.focus()")
    await page.press("Enter")
    await page.until("document.querySelectorAll('#spans .lane').length === 3")
    drawn = await page.text("#spans")
    for stage in (
        "router",
        "prefill",
        "decode",
        "dispatch",
        "chunk compute",
        "chunk transfer",
        "transfer wait",
        "gate",
    ):
        assert stage in drawn
    assert "of prompt" in drawn
    assert "chunk compute" in await page.text("#account")
    assert "transferring" in await page.text("#states")
    await page.press("Escape")
    await page.until("!document.querySelector('#room').open && location.hash === ''")
    assert await page.value("document.activeElement.textContent") == str(answer.room), "where it was before"


async def test_nothing_runs_out_of_a_narrow_or_a_wide_window(client: Client, page: Page) -> None:
    answer = await client.generate(list(range(1, 300)), rid="x" * 256)
    await page.until(f"document.querySelector('#ended').innerText.includes('{answer.room}')")
    overflow = "document.documentElement.scrollWidth - innerWidth"
    for width, height in SIZES:
        for scheme in ("light", "dark"):
            await page.show_as(width, height, scheme)
            assert await page.value(overflow) <= 0, (width, scheme)
            await page.value(f"location.hash = '#room={answer.room}'")
            await page.until("document.querySelectorAll('#spans .lane').length === 3")
            dialog = "document.querySelector('#room')"
            assert await page.value(f"{dialog}.scrollWidth - {dialog}.clientWidth") <= 0, (width, scheme)
            await page.press("Escape")
            await page.until("location.hash === ''")


async def test_an_unknown_room_is_said_to_be_unknown(page: Page) -> None:
    await page.value("location.hash = '#room=4242'")
    said = await page.until("document.querySelector('#room-trouble').textContent")
    assert "4242 is not on record" in said


async def test_a_page_that_pauses_stands_still(client: Client, page: Page) -> None:
    await page.until("document.querySelectorAll('#processes tbody .process').length === 3")
    await page.value("document.querySelector('#pause').focus()")
    await page.press(" ")
    assert await page.value("document.querySelector('#pause').ariaPressed") == "true"
    answer = await client.generate([1, 2, 3])
    shown = "document.querySelector('#ended').innerText"
    assert str(answer.room) not in await page.value(shown)
    await page.press(" ")
    await page.until(f"{shown}.includes('{answer.room}')")


async def test_a_dead_worker_and_a_dead_router_are_shown_so(system: Cluster, page: Page) -> None:
    await page.until("document.querySelector('#routes').innerText.includes('proven')")
    system.decode.kill()
    await page.until("!!document.querySelector('#routes .bad')")
    processes = await page.until(
        "(text => text.includes('does not answer') && text)(document.querySelector('#processes').innerText)"
    )
    assert processes.count("\tup\t") == 2
    assert await page.value("document.querySelector('#lost').hidden")
    await asyncio.to_thread(system.router.kill)
    await page.until("!document.querySelector('#lost').hidden")
    assert "The router does not answer since" in await page.text("#lost")
