"""Scatter-gather PUT: the probe that finds where it is not to be had, and the choice of what goes in one call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import pytest

from pd_common.errors import TransferFailed
from pd_common.transport.base import Puts
from pd_common.transport.ucx import transport as ucx
from pd_common.transport.ucx.interface import OK, Endpoint, Rkey, UCXError
from pd_common.transport.ucx.library import ffi
from pd_common.transport.ucx.sgl import GatheredPuts, known_to, worth_a_probe
from pd_common.transport.ucx.transport import UcxTransport
from pd_common.transport.ucx.write import Posting, Write
from tests.transport.pairs import BUFFER_BYTES, CARRIERS, LocalReceiver, Pair, ProcessReceiver

NO_PROTOCOL = -16
"""UCS_ERR_CANCELED"""


@pytest.fixture(params=["cma", "tcp"])
async def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    for variable, value in CARRIERS[str(request.param)].items():
        monkeypatch.setenv(variable, value)
    sender, receiver = UcxTransport(), UcxTransport()
    yield Pair(sender, LocalReceiver(receiver))
    await sender.close()
    await receiver.close()


async def test_a_probe_where_there_is_none_says_no_and_harms_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx, "worth_a_probe", lambda _: True)
    for number in range(5):
        channel = await pair.sender.connect(await pair.receiver.listen())
        assert isinstance(channel, ucx.UcxChannel)
        assert not channel.gathers
        pair.source.bytes[0] = number
        await channel.write(pair.puts((0, 0, BUFFER_BYTES)))
        assert await pair.receiver.read(0, BUFFER_BYTES) == pair.source.bytes.tobytes()


async def test_a_gathered_write_that_was_not_probed_breaks_its_connection_and_not_the_process(pair: Pair) -> None:
    address = await pair.receiver.listen()
    broken, whole = await pair.sender.connect(address), await pair.sender.connect(address)
    assert isinstance(broken, ucx.UcxChannel)
    broken.gathers = True
    with pytest.raises(TransferFailed) as failed:
        await broken.write(pair.puts((0, 0, 64), (64, 64, 64)))
    assert failed.value.metadata["ucx_status"] == str(NO_PROTOCOL)
    await whole.write(pair.puts((0, 1000, 64)))
    assert await pair.receiver.read(1000, 64) == pair.source.bytes[:64].tobytes()


async def test_carriers_that_are_known_to_have_none_are_not_probed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> bool:
        raise AssertionError("a probe")

    monkeypatch.setattr(UcxTransport, "_gathers", refuse)
    await pair.sender.connect(await pair.receiver.listen())


async def test_a_receiver_that_dies_during_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "worth_a_probe", lambda _: True)
    sender, receiver = UcxTransport(), ProcessReceiver(CARRIERS["tcp"])
    address = await receiver.listen()
    probe = UcxTransport._gathers

    async def kill_and_probe(self: UcxTransport, *arguments: Any) -> bool:
        receiver.kill()
        return await probe(self, *arguments)

    monkeypatch.setattr(UcxTransport, "_gathers", kill_and_probe)
    channel = await asyncio.wait_for(sender.connect(address), 20)
    assert isinstance(channel, ucx.UcxChannel)
    assert not channel.gathers
    await sender.close()


@pytest.mark.parametrize(
    ("version", "known"), [("1.21.0", False), ("1.22.0", True), ("1.22", True), ("2.0.1", True), ("unknown", False)]
)
def test_versions_that_have_the_call(version: str, known: bool) -> None:
    assert known_to(version) == known


@pytest.mark.parametrize(
    ("carrier", "worth"),
    [
        ("cma", False),
        ("tcp/eth0", False),
        ("unknown", False),
        ("rc_mlx5/mlx5_0:1", True),
        ("rc_mlx5/mlx5_0:1+rc_mlx5/mlx5_1:1", True),
        ("rc_mlx5/mlx5_0:1+tcp/eth0", False),
    ],
)
def test_carriers_that_are_worth_a_probe(carrier: str, worth: bool) -> None:
    assert worth_a_probe(carrier) == worth


class _Key:
    def __init__(self, handle: int) -> None:
        self.handle = ffi.cast("ucp_rkey_h", handle)

    def destroy(self) -> None: ...


class _Endpoint:
    """Finishes nothing before `finish`; notes what is posted."""

    failure: UCXError | None = None

    def __init__(self) -> None:
        self.each: list[tuple[int, int, int]] = []
        self.gathered: list[GatheredPuts] = []
        self._done = False

    def finish(self) -> None:
        self._done = True

    def put_nbx(self, puts: Iterable[tuple[int, int, int, Any, Any]], requests: deque[Any]) -> None:
        for local, length, remote, _, _ in puts:
            self.each.append((local, length, remote))
            requests.append(1)

    def put_gathered(self, puts: GatheredPuts, requests: deque[Any]) -> None:
        assert len(requests) < 2
        self._done = False
        self.gathered.append(puts)
        requests.append(1)

    def reap(self, requests: deque[Any]) -> UCXError | None:
        if self._done:
            requests.clear()
        return None

    def flush_nbx(self) -> int:
        return 0

    def take(self, _request: int) -> int | None:
        return OK

    def unpack_rkey(self, packed: bytes) -> Rkey:
        raise NotImplementedError

    def close_nbx(self) -> int:
        raise NotImplementedError

    def error(self, status: int, doing: str) -> UCXError:
        return UCXError(doing, status)


async def _advanced(count: int, sources: list[int], *, gathered: bool) -> tuple[_Endpoint, Posting]:
    params = [ffi.new("ucp_request_param_t *", {"memh": ffi.cast("ucp_mem_h", 7000 + each)}) for each in range(2)]
    numbers = np.arange(count, dtype=np.int64)
    puts = Puts(numbers * 10 + 5, numbers * 100 + 50, np.full(count, 8))
    posting = Posting.of(puts, numbers % 3, np.resize(np.array(sources, dtype=np.int64), count), tuple(params))
    write = Write((posting,), 0.0, asyncio.get_running_loop().create_future(), gathered)
    fake = _Endpoint()
    endpoint: Endpoint = fake
    keys: list[Rkey] = [_Key(9000 + each) for each in range(3)]
    for _ in range(100):
        if write.finished:
            return fake, posting
        if not write.advance(endpoint, keys):
            fake.finish()
    raise AssertionError("the write does not end")


async def test_gathered_puts_are_all_puts_in_order_with_their_keys() -> None:
    endpoint, posting = await _advanced(5000, [1], gathered=True)
    assert not endpoint.each
    assert 1 < len(endpoint.gathered) < 10
    for name in ("local", "remote", "lengths"):
        sent = np.concatenate([getattr(each, name) for each in endpoint.gathered])
        assert (sent == getattr(posting.puts, name)).all()
    assert (np.concatenate([each.rkeys for each in endpoint.gathered]) == posting.targets + 9000).all()
    assert {int(memory) for each in endpoint.gathered for memory in each.memories} == {7001}


@pytest.mark.parametrize(("count", "sources", "gathered"), [(5000, [1], False), (1, [1], True), (600, [0, 1], True)])
async def test_what_is_not_gathered(count: int, sources: list[int], gathered: bool) -> None:
    """Without a probe that said yes; a single put; puts out of two registered ranges."""
    endpoint, posting = await _advanced(count, sources, gathered=gathered)
    assert not endpoint.gathered
    assert [local for local, _, _ in endpoint.each] == posting.puts.local.tolist()
