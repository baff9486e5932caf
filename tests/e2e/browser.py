"""A headless Chromium, driven over its DevTools protocol: what a person would see and do, for tests."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

_FOUND = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 20.0

needs_chromium = pytest.mark.skipif(_FOUND is None, reason="there is no chromium here (Debian: apt install chromium)")


class Page:
    """One tab. `complaints` are its uncaught errors and everything that its security policy has refused."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()

    async def read(self) -> None:
        """Hands answers to those who wait; ends with the connection."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["source"] == "security":
                self.complaints.append(said["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, PATIENCE_S)
        assert "error" not in said, said["error"]
        result: dict[str, Any] = said["result"]
        return result

    async def open(self, url: str) -> None:
        """Returns when it has been loaded."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), PATIENCE_S)

    async def show_as(self, width: int, height: int, scheme: str) -> None:
        """The size in CSS pixels, and whether the person likes it `dark` or `light`."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def value(self, expression: str) -> Any:
        """What JavaScript makes of it; a promise is awaited."""
        said = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Its value, once it is true; looked at whenever the page has changed."""
        watch = f"""new Promise((resolve, reject) => {{
            const look = () => {{ const value = {condition}; if (value) {{ watcher.disconnect(); resolve(value); }} }};
            const watcher = new MutationObserver(look);
            watcher.observe(document, {{subtree: true, childList: true, characterData: true, attributes: true}});
            setTimeout(() => reject(new Error("never true")), {PATIENCE_S * 900});
            look();
        }})"""
        return await self.value(watch)

    async def text(self, selector: str) -> str:
        """As it is drawn."""
        return str(await self.value(f"document.querySelector({selector!r}).innerText"))

    async def press(self, key: str) -> None:
        """One key, as from a keyboard."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        key_event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        typed = {"Enter": "\r", " ": " "}.get(key)
        down = {**key_event, "type": "keyDown", **({"text": typed} if typed else {})}
        await self.call("Input.dispatchKeyEvent", **down)
        await self.call("Input.dispatchKeyEvent", **key_event, type="keyUp")

    async def screenshot(self) -> bytes:
        """What is seen now, as PNG."""
        picture = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(picture["data"])


@asynccontextmanager
async def browser_page(profile: Path) -> AsyncIterator[Page]:
    """A tab of a browser of its own, with `profile` as its folder; both are gone afterwards."""
    assert _FOUND is not None
    flags = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
        *(f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
    ]
    process = await asyncio.create_subprocess_exec(
        _FOUND, *flags, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        origin = await asyncio.wait_for(_devtools(process), PATIENCE_S)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{origin}/json/list") as answer:
                target = next(each for each in await answer.json() if each["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                reading = asyncio.create_task(page.read())
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                yield page
                reading.cancel()
    finally:
        process.terminate()
        await process.communicate()


async def _devtools(process: asyncio.subprocess.Process) -> str:
    """Where it listens for us, as it says itself."""
    assert process.stderr is not None
    async for line in process.stderr:
        if b"DevTools listening on ws://" in line:
            return "http://" + line.decode().split("ws://")[1].split("/")[0]
    raise AssertionError(f"chromium has ended with {await process.wait()}")
