"""pd-decode: offers memory to prefill, checks what arrives in it, and writes answers from the second token on."""

from __future__ import annotations

from typing import Any

import click

from pd_common import config
from pd_common.control import process, server
from pd_common.control.outputs import OutputHub
from pd_common.control.servicers import AbortServicer, EngineGenerationServicer, TransferStatusServicer
from pd_common.engine.engine import Engine
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.metadata import METADATA_SCHEMA, MetadataBuffers
from pd_common.handoff.table import TransferTable
from pd_common.telemetry import spans
from pd_common.transport.base import MemoryRegion
from pd_common.transport.ucx.transport import UcxTransport
from pd_common.types import Role
from services.decode.drain import Drain
from services.decode.prefills import OwnMemory, Prefills
from services.decode.queues import PreallocQueue
from services.decode.scheduler import DecodeScheduler
from services.decode.service import DecodeService


@click.command(context_settings=config.CONTEXT)
@config.model_options
@config.listen_options(port=8999)
@config.transport_options
@config.room_options
@config.log_options
def main(**options: Any) -> None:
    """Serve the decode role: TransferStatus, Abort and Generation on one gRPC port.

    Which prefill a request comes from is said by the request itself. Every option is also an environment variable:
    --page-size is PD_PAGE_SIZE.
    """
    process.run(lambda: serve(options), options["log_level"])


async def serve(options: dict[str, Any]) -> None:
    """The wiring of one decode process; returns when it has drained after SIGTERM."""
    model = config.pick(config.ModelConfig, options)
    listen = config.pick(config.ListenConfig, options)
    data = config.pick(config.TransportConfig, options)
    rooms = config.pick(config.RoomConfig, options)

    process.share_interpreter()
    instance = process.new_instance(Role.DECODE)
    tracing = spans.configure("pd-decode", instance.instance_id)
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
    regions = (MemoryRegion(*engine.pool.region), metadata.region)
    for region in regions:
        transport.register(region)
    bases, _, item_lens = engine.pool.get_contiguous_buf_infos()
    pool = PoolBuffers(tuple(bases), tuple(item_lens), engine.pool.num_pages, engine.pool.page_size)

    hub = OutputHub()
    transfers = TransferTable(Role.DECODE, rooms.room_retention_s, max_finished=100_000)
    prealloc = PreallocQueue(engine.pages, metadata)
    scheduler = DecodeScheduler(engine, hub, model.max_running_requests)
    drain = Drain(prealloc.release)
    service = DecodeService(
        instance, engine, scheduler, prealloc, drain, pool, metadata, transfers, hub, with_digest=data.digest
    )
    control = server.ControlServer(
        [
            server.transfer_status(TransferStatusServicer(service)),
            server.abort(AbortServicer(service)),
            server.generation(EngineGenerationServicer(service, hub, engine)),
        ]
    )
    address = listen.advertised(await control.start(listen.host, listen.port))
    own = OwnMemory(instance, address, engine.layout, pool, regions, metadata)
    prefills = Prefills(own, transport, service.prefill_lost)
    service.use(prefills)
    async with process.background(scheduler.run(), service.reap(), transport.watch()):
        await control.set_serving(True)
        process.announce(f"pd-decode serves {engine.model_info.name} on {address}", transport.info)
        await server.until_signal()
        await control.set_serving(False)
        await service.close(rooms.drain_timeout_s)
    await prefills.close()
    await drain.close()
    await control.stop(grace_s=1.0)
    await transport.close()
    await engine.close()
    if tracing is not None:
        tracing.shutdown()


if __name__ == "__main__":
    main()
