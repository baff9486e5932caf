"""pd-prefill: reads prompts, and writes their KV pages into the memory that decode offers."""

from __future__ import annotations

import logging
from typing import Any

import click

from pd_common import config
from pd_common.control import process, server
from pd_common.control.clients import BootstrapClient, Connection
from pd_common.control.outputs import OutputHub
from pd_common.control.registry import Registry
from pd_common.control.servicers import (
    AbortServicer,
    BootstrapServicer,
    EngineGenerationServicer,
    TransferStatusServicer,
)
from pd_common.engine.engine import Engine
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.metadata import METADATA_SCHEMA, MetadataBuffers
from pd_common.handoff.table import TransferTable
from pd_common.telemetry import spans
from pd_common.transport.base import MemoryRegion
from pd_common.transport.ucx.transport import UcxTransport
from pd_common.types import RankInfo, RankPosition, Role
from services.prefill.membership import Membership
from services.prefill.receivers import Receivers
from services.prefill.scheduler import PrefillScheduler
from services.prefill.service import PrefillService
from services.prefill.servicers import PageAllocationServicer

_log = logging.getLogger("pd.prefill")


@click.command(context_settings=config.CONTEXT)
@config.model_options
@click.option(
    "--chunked-prefill-size", default=2048, type=click.IntRange(min=1), help="Prompt tokens in one engine step."
)
@config.listen_options(port=8998)
@config.transport_options
@config.room_options
@config.log_options
def main(**options: Any) -> None:
    """Serve the prefill role: Bootstrap, PageAllocation, TransferStatus, Abort and Generation on one gRPC port.

    Every option is also an environment variable: --page-size is PD_PAGE_SIZE.
    """
    process.run(lambda: serve(options), options["log_level"])


async def serve(options: dict[str, Any]) -> None:
    """The wiring of one prefill process; returns when it has drained after SIGTERM."""
    model = config.pick(config.ModelConfig, options)
    listen = config.pick(config.ListenConfig, options)
    data = config.pick(config.TransportConfig, options)
    rooms = config.pick(config.RoomConfig, options)

    process.share_interpreter()
    instance = process.new_instance(Role.PREFILL)
    tracing = spans.configure("pd-prefill", instance.instance_id)
    engine = Engine.load(
        model.model,
        page_size=model.page_size,
        num_pages=model.num_pages,
        metadata_schema=METADATA_SCHEMA,
        software_version=process.SOFTWARE_VERSION,
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
    )
    metadata = MetadataBuffers(2 * model.max_running_requests)
    transport = UcxTransport(data.ucx_library)
    transport.register(MemoryRegion(*engine.pool.region))
    transport.register(metadata.region)

    bases, _, item_lens = engine.pool.get_contiguous_buf_infos()
    pool = PoolBuffers(tuple(bases), tuple(item_lens), engine.pool.num_pages, engine.pool.page_size)

    hub = OutputHub()
    transfers = TransferTable(Role.PREFILL, rooms.room_retention_s, max_finished=100_000)
    scheduler = PrefillScheduler(engine, options["chunked_prefill_size"], model.max_running_requests)
    service = PrefillService(instance, engine, scheduler, pool, metadata, transfers, hub, with_digest=data.digest)
    receivers = Receivers(engine.layout, transport, service.receiver_lost)
    service.use(receivers)
    control = server.ControlServer(
        [
            server.bootstrap(BootstrapServicer(Registry())),
            server.page_allocation(PageAllocationServicer(service, receivers)),
            server.transfer_status(TransferStatusServicer(service)),
            server.abort(AbortServicer(service)),
            server.generation(EngineGenerationServicer(service, hub, engine)),
        ]
    )
    port = await control.start(listen.host, listen.port)
    address = listen.advertised(port)
    directory = Connection(address)
    membership = Membership(
        RankInfo(instance, Role.PREFILL, RankPosition(), address, engine.layout), BootstrapClient(directory)
    )
    lease_s = await membership.join()
    async with process.background(scheduler.run(), service.reap(), membership.stay(lease_s), transport.watch()):
        await control.set_serving(True)
        process.announce(f"pd-prefill serves {engine.model_info.name} on {address}", transport.info)
        await server.until_signal()
        await control.set_serving(False)
        await service.close(rooms.drain_timeout_s)
        await membership.leave()
    await receivers.close()
    await directory.close()
    await control.stop(grace_s=1.0)
    await transport.close()
    await engine.close()
    if tracing is not None:
        tracing.shutdown()


if __name__ == "__main__":
    main()
