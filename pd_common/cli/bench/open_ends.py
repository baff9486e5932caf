"""Opens the end that is asked for, and loads only its library: two makers' UCX in one process are one too many."""

from __future__ import annotations

from pd_common.cli.bench.ends import BACKENDS, SOCKET, EndSettings, ReceivingEnd, Regions, SendingEnd


def sending_end(settings: EndSettings, regions: Regions) -> SendingEnd:
    if settings.contender in BACKENDS:
        from pd_common.cli.bench.own import OwnSender  # noqa: PLC0415

        return OwnSender(settings, regions)
    if settings.contender == SOCKET:
        from pd_common.cli.bench.socket_rival import SocketSender  # noqa: PLC0415

        return SocketSender(settings, regions)
    from pd_common.cli.bench.nixl_rival import NixlSender  # noqa: PLC0415

    return NixlSender(settings, regions)


def receiving_end(settings: EndSettings, regions: Regions) -> ReceivingEnd:
    if settings.contender in BACKENDS:
        from pd_common.cli.bench.own import OwnReceiver  # noqa: PLC0415

        return OwnReceiver(settings, regions)
    if settings.contender == SOCKET:
        from pd_common.cli.bench.socket_rival import SocketReceiver  # noqa: PLC0415

        return SocketReceiver(settings, regions)
    from pd_common.cli.bench.nixl_rival import NixlReceiver  # noqa: PLC0415

    return NixlReceiver(settings, regions)
