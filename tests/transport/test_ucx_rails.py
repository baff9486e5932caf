"""One write over two network devices at once: what a group promises must hold across rails too."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from pd_common.transport.ucx.transport import UcxTransport
from tests.transport.namespaces import Namespace, namespace
from tests.transport.pairs import BUFFER_BYTES, Pair, ProcessReceiver

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and the ip command"
)


@pytest.fixture(scope="module")
def there() -> Iterator[Namespace]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(namespace(pairs=2))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
        yield made


@pytest.fixture
async def pair(there: Namespace, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    sender = UcxTransport(ib_device=",".join(there.near))
    receiver = ProcessReceiver({"UCX_NET_DEVICES": ",".join(there.far)}, run_by=there.run_by)
    yield Pair(sender, receiver)
    receiver.kill()
    await sender.close()


async def test_two_devices_are_two_rails_and_the_carrier_says_so(there: Namespace, pair: Pair) -> None:
    assert pair.sender.info.devices == tuple(sorted(there.near))
    assert "MAX_RMA_RAILS=2" in pair.sender.info.settings
    channel = await pair.sender.connect(await pair.receiver.listen())
    assert sorted(channel.carrier.split("+")) == sorted(f"tcp/{device}" for device in there.near)
    before = there.sent_bytes()
    await channel.write(pair.puts((0, 0, BUFFER_BYTES)))
    sent = [after - earlier for after, earlier in zip(there.sent_bytes(), before, strict=True)]
    assert min(sent) > BUFFER_BYTES // 4
    assert await pair.receiver.read(0, BUFFER_BYTES) == pair.source.bytes.tobytes()


async def test_a_group_is_visible_only_after_the_one_before_over_two_rails(pair: Pair) -> None:
    channel = await pair.sender.connect(await pair.receiver.listen())
    data_bytes = 800_000
    for value in range(1, 30):
        pair.source.bytes[: data_bytes + 1] = value
        data = pair.puts(*((start, start, 40_000) for start in range(0, data_bytes, 40_000)))
        flag = pair.puts((data_bytes, BUFFER_BYTES - 1, 1))
        writing = asyncio.create_task(channel.write(data, flag))
        assert await pair.receiver.holds_when_flagged(BUFFER_BYTES - 1, value, 0, data_bytes)
        await writing
