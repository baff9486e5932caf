"""The ends of this project's own transport, whichever backend is behind it."""

from __future__ import annotations

from pd_common.cli.bench.ends import EndSettings, Moved, Regions
from pd_common.config import TransportConfig
from pd_common.errors import InternalError
from pd_common.transport.backends import open_transport
from pd_common.transport.base import Channel, Puts, Transport


def _open(settings: EndSettings, regions: Regions) -> Transport:
    transport = open_transport(
        TransportConfig(
            transfer_backend=settings.contender,
            ucx_library=settings.ucx_library,
            ucx_binding=settings.ucx_binding,
            ib_device=settings.ib_device,
            digest=False,
        )
    )
    for region in regions:
        transport.register(region)
    return transport


class OwnSender:
    """One transport with one channel."""

    def __init__(self, settings: EndSettings, regions: Regions) -> None:
        self._transport = _open(settings, regions)
        self._channel: Channel | None = None
        info = self._transport.info
        self.library = f"{info.backend} {info.version}"

    @property
    def carrier(self) -> str:
        return self._connected.carrier

    async def connect(self, address: bytes) -> None:
        self._channel = await self._transport.connect(address)

    async def write(self, puts: Puts) -> Moved:
        receipt = await self._connected.write(puts)
        return Moved(receipt.posting_seconds, receipt.seconds)

    @property
    def _connected(self) -> Channel:
        if self._channel is None:
            raise InternalError("the sending end is not connected")
        return self._channel


class OwnReceiver:
    """One transport with one port."""

    def __init__(self, settings: EndSettings, regions: Regions) -> None:
        self._transport = _open(settings, regions)
        self.address = self._transport.listen(regions).address

    async def expect(self, puts: Puts) -> None:
        """Nothing: writes are one-sided."""
