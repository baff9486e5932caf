"""pd-prefill: reads prompts, and writes their KV pages into the memory that decode offers."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from pd_common import config
from pd_common.control import metrics, process, room_log, server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.bootstrap_servicer import BootstrapServicer
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.inspection_servicer import InspectionServicer
from pd_common.control.registry import Registry
from pd_common.control.security import Security
from pd_common.control.status_servicer import TransferStatusServicer
from pd_common.control.supervisor import Supervisor
from pd_common.control.waiting import WaitingLimits
from pd_common.kv.prefix import PrefixCache
from pd_common.runtime import Runtime
from pd_common.scheduling import SchedulingConfig, scheduling_options
from pd_common.telemetry import logs
from pd_common.transport.fake import FAKE
from pd_common.types import RankInfo, Role
from services.prefill.membership import Membership
from services.prefill.receivers import Receivers
from services.prefill.scheduler import PrefillScheduler
from services.prefill.service import PrefillService
from services.prefill.servicers import PageAllocationServicer


@click.command(context_settings=config.CONTEXT)
@config.model_options
@scheduling_options
@click.option(
    "--last-chunk-tokens",
    default=512,
    type=click.IntRange(min=1),
    help="Most tokens in a prompt's last step: nothing of it is left to compute while their pages are sent.",
)
@click.option(
    "--optimistic-prefill-attempts",
    default=0,
    type=click.IntRange(min=0),
    help="How often a prompt may be begun before decode has set memory aside for it; 0: never.",
)
@config.listen_options(port=8998)
@config.rank_options
@config.transport_options
@config.security_options
@config.room_options
@config.log_options
@config.metrics_options
@config.probe_options
def main(**options: Any) -> None:
    """Serve the prefill role: Bootstrap, PageAllocation, TransferStatus, Abort and Generation on one gRPC port.

    Every option is also an environment variable: --page-size is PD_PAGE_SIZE.
    """
    process.run(Role.PREFILL, lambda: serve(options), config.pick(config.LogConfig, options))


async def serve(options: dict[str, Any]) -> None:
    """The wiring of one prefill process; returns when it has drained after SIGTERM."""
    listen = config.pick(config.ListenConfig, options)
    place = config.pick(config.RankConfig, options)
    steps = config.pick(SchedulingConfig, options)
    security = Security.open(config.pick(config.SecurityConfig, options), listen.host)
    own = Runtime.start(Role.PREFILL, options, metadata_slots=2 * steps.max_running_requests)
    logs.identify(own.instance.instance_id)
    room_log.follow_rooms(own.tracing, own.transfers)
    service, scheduler = _rooms_of(own, options, steps)
    engine = own.engine
    receivers = Receivers(engine.layout, own.transport, own.canaries, service.receiver_lost, security.dial)
    service.use(receivers)
    describe = partial(own.describe, Role.PREFILL)
    control = server.ControlServer(
        [
            server.bootstrap(BootstrapServicer(Registry(Role.PREFILL, own.instance.epoch))),
            server.page_allocation(PageAllocationServicer(service, receivers)),
            server.transfer_status(TransferStatusServicer(service)),
            server.abort(AbortServicer(service)),
            server.inspection(InspectionServicer(describe, own.tracing)),
            server.generation(EngineGenerationServicer(service, own.hub, engine, place.bootstrap)),
        ],
        security.tls,
        security.keys,
    )
    async with control.listening(listen.host, listen.port, options["health_port"]) as port:
        address = listen.advertised(port)
        data_plane = own.data_plane(listen.advertised_host)
        directory = address if place.bootstrap is None else place.bootstrap.target
        rank = RankInfo(own.instance, Role.PREFILL, place.position, address, engine.layout, data_plane)
        membership = Membership(rank, lambda: security.dial(directory, Role.PREFILL))
        service.announce_with(membership.announced)
        lease_s = await membership.join()
        now = metrics.EngineCollector(service), metrics.IdentityCollector(describe)
        collectors = (*now, *own.collectors, control.errors)
        exposed = metrics.served(collectors, listen.host, options["metrics_port"], security.tls)
        supervisor = Supervisor(control)
        async with (
            exposed as metrics_server,
            supervisor.running(
                scheduler=scheduler.run(),
                reaper=service.reap(),
                engine=engine.watch(),
                data_plane=own.transport.watch(),
                rooms=service.watch(),
                lease=membership.stay(lease_s),
                metrics=metrics_server(),
            ),
        ):
            await control.set_serving(True)
            process.announce(f"pd-prefill serves {engine.model_info.name} on {address}", own.transport.info)
            await supervisor.until_end()
            await service.close(supervisor.patience_s(options["drain_timeout_s"]))
        await supervisor.close(membership.leave(), receivers.close(), control.stop(grace_s=1.0), own.close())


def _rooms_of(
    own: Runtime, options: dict[str, Any], steps: SchedulingConfig
) -> tuple[PrefillService, PrefillScheduler]:
    """All rooms of the process, and what computes them."""
    engine, data = own.engine, config.pick(config.TransportConfig, options)
    prefixes = PrefixCache(engine.pages, engine.pool.page_size, keeps=steps.enable_prefix_cache)
    scheduler = PrefillScheduler(
        engine,
        prefixes,
        steps.chunked_prefill_size,
        steps.max_running_requests,
        last_chunk_tokens=options["last_chunk_tokens"],
        audited=steps.check_integrity,
    )
    service = PrefillService(
        own.instance,
        engine,
        scheduler,
        own.pool,
        own.metadata,
        own.transfers,
        own.hub,
        WaitingLimits(steps.max_queued_requests, steps.queue_timeout_s),
        own.tracing,
        new_digest=own.new_digest if data.digest else None,
        optimistic_attempts=options["optimistic_prefill_attempts"],
        handshake_only=data.transfer_backend == FAKE,
    )
    return service, scheduler


if __name__ == "__main__":
    main()
