"""pd-prefill: reads prompts, and writes their KV pages into the memory that decode offers."""

from __future__ import annotations

from typing import Any

import click

from pd_common import config
from pd_common.control import metrics, process, server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.bootstrap_servicer import BootstrapServicer
from pd_common.control.clients import BootstrapClient, dial_plain
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.registry import Registry
from pd_common.control.status_servicer import TransferStatusServicer
from pd_common.runtime import Runtime
from pd_common.types import RankInfo, RankPosition, Role
from services.prefill.membership import Membership
from services.prefill.receivers import Receivers
from services.prefill.scheduler import PrefillScheduler
from services.prefill.service import PrefillService
from services.prefill.servicers import PageAllocationServicer


@click.command(context_settings=config.CONTEXT)
@config.model_options
@click.option(
    "--chunked-prefill-size", default=2048, type=click.IntRange(min=1), help="Prompt tokens in one engine step."
)
@config.listen_options(port=8998)
@config.transport_options
@config.room_options
@config.log_options
@config.metrics_options
def main(**options: Any) -> None:
    """Serve the prefill role: Bootstrap, PageAllocation, TransferStatus, Abort and Generation on one gRPC port.

    Every option is also an environment variable: --page-size is PD_PAGE_SIZE.
    """
    process.run(lambda: serve(options), options["log_level"])


async def serve(options: dict[str, Any]) -> None:
    """The wiring of one prefill process; returns when it has drained after SIGTERM."""
    listen = config.pick(config.ListenConfig, options)
    data = config.pick(config.TransportConfig, options)
    own = Runtime.start(Role.PREFILL, options)
    engine = own.engine
    scheduler = PrefillScheduler(engine, options["chunked_prefill_size"], options["max_running_requests"])
    service = PrefillService(
        own.instance,
        engine,
        scheduler,
        own.pool,
        own.metadata,
        own.transfers,
        own.hub,
        new_digest=own.new_digest if data.digest else None,
        only_fake=data.transfer_backend == "fake",
    )
    receivers = Receivers(engine.layout, own.transport, service.receiver_lost, dial_plain)
    service.use(receivers)
    control = server.ControlServer(
        [
            server.bootstrap(BootstrapServicer(Registry())),
            server.page_allocation(PageAllocationServicer(service, receivers)),
            server.transfer_status(TransferStatusServicer(service)),
            server.abort(AbortServicer(service)),
            server.generation(EngineGenerationServicer(service, own.hub, engine)),
        ]
    )
    address = listen.advertised(await control.start(listen.host, listen.port))
    data_plane = own.data_plane(listen.advertised_host)
    directory = dial_plain(address, Role.PREFILL)
    rank = RankInfo(own.instance, Role.PREFILL, RankPosition(), address, engine.layout, data_plane)
    membership = Membership(rank, BootstrapClient(directory))
    lease_s = await membership.join()
    exposed = metrics.served(service.pool_status, listen.host, options["metrics_port"])
    async with (
        exposed,
        process.background(scheduler.run(), service.reap(), membership.stay(lease_s), own.transport.watch()),
    ):
        await control.set_serving(True)
        process.announce(f"pd-prefill serves {engine.model_info.name} on {address}", own.transport.info)
        await server.until_signal()
        await control.set_serving(False)
        await service.close(options["drain_timeout_s"])
        await membership.leave()
    await receivers.close()
    await directory.close()
    await control.stop(grace_s=1.0)
    await own.close()


if __name__ == "__main__":
    main()
