"""pd-decode: offers memory to prefill, checks what arrives in it, and writes answers from the second token on.

Without a prefill it does all of it alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from pd_common import config
from pd_common.control import metrics, process, room_log, server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.inspection_servicer import InspectionServicer
from pd_common.control.security import Security
from pd_common.control.status_servicer import TransferStatusServicer
from pd_common.control.supervisor import Supervisor
from pd_common.control.waiting import WaitingLimits
from pd_common.engine.engine import Engine
from pd_common.kv.prefix import PrefixCache
from pd_common.runtime import Runtime
from pd_common.scheduling import DecodeConfig, SchedulingConfig, decode_options, scheduling_options
from pd_common.telemetry import logs
from pd_common.transport.fake import FAKE
from pd_common.types import Role
from services.decode.answering import Answering
from services.decode.drain import Drain
from services.decode.handoff import Handoff
from services.decode.host_copies import HostCopies
from services.decode.lookout import Lookout
from services.decode.memory import DecodeMemory
from services.decode.pairing import OwnMemory
from services.decode.prefills import Prefills
from services.decode.queues import PreallocQueue
from services.decode.refetch import Refetch
from services.decode.scheduler import DecodeScheduler
from services.decode.service import DecodeService


@click.command(context_settings=config.CONTEXT)
@config.model_options
@scheduling_options
@decode_options
@config.listen_options(port=8999)
@config.transport_options
@config.security_options
@config.room_options
@config.log_options
@config.metrics_options
@config.probe_options
def main(**options: Any) -> None:
    """Serve the decode role: TransferStatus, Abort and Generation on one gRPC port.

    Which prefill a request comes from is said by the request itself; one that names none is served here alone, prompt
    and all. Every option is also an environment variable: --page-size is PD_PAGE_SIZE.
    """
    process.run(Role.DECODE, lambda: serve(options), config.pick(config.LogConfig, options))


async def serve(options: dict[str, Any]) -> None:
    """The wiring of one decode process; returns when it has drained after SIGTERM."""
    listen = config.pick(config.ListenConfig, options)
    steps, growth = config.pick(SchedulingConfig, options), config.pick(DecodeConfig, options)
    security = Security.open(config.pick(config.SecurityConfig, options), listen.host)
    own = Runtime.start(Role.DECODE, options, metadata_slots=growth.rows)
    logs.identify(own.instance.instance_id)
    room_log.follow_rooms(own.tracing, own.transfers)
    engine = own.engine
    memory = DecodeMemory(_prefixes_of(engine, steps), own.metadata, engine.pool.page_size)
    queue = PreallocQueue(memory, growth.rows, growth.num_reserved_decode_tokens)
    copies = HostCopies(engine, growth.host_pages)
    scheduler = _scheduler_of(own, memory, copies, steps, growth)
    lookout = Lookout(own.metadata)
    handoff = _handoff_of(own, queue, lookout, config.pick(config.TransportConfig, options))
    answering = Answering(engine, scheduler, memory, queue, copies, own.hub)
    drain = Drain(queue.take_back, security.dial)
    limits = WaitingLimits(steps.max_queued_requests, steps.queue_timeout_s)
    service = DecodeService(
        own.instance,
        engine,
        memory,
        queue,
        handoff,
        answering,
        drain,
        copies,
        own.transfers,
        own.hub,
        limits,
        own.tracing,
    )
    describe = partial(own.describe, Role.DECODE)
    control = server.ControlServer(
        [
            server.transfer_status(TransferStatusServicer(service)),
            server.abort(AbortServicer(service)),
            server.inspection(InspectionServicer(describe, own.tracing)),
            server.generation(EngineGenerationServicer(service, own.hub, engine)),
        ],
        security.tls,
        security.keys,
    )
    async with control.listening(listen.host, listen.port, options["health_port"]) as port:
        address = listen.advertised(port)
        own_memory = OwnMemory(own.instance, address, engine.layout, own.pool, own.regions, own.metadata, own.canaries)
        prefills = Prefills(own_memory, own.transport, service.prefill_lost, service.proven, security.dial)
        refetch = Refetch(service, handoff, prefills, security.keys)
        service.use(prefills)
        answering.use(refetch.again)
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
                lookout=lookout.run(),
                pairings=prefills.watch(),
                proofs=drain.watch(),
                legs=refetch.watch(),
                metrics=metrics_server(),
            ),
        ):
            await control.set_serving(True)
            process.announce(f"pd-decode serves {engine.model_info.name} on {address}", own.transport.info)
            await supervisor.until_end()
            await service.close(supervisor.patience_s(options["drain_timeout_s"]))
        await supervisor.close(refetch.close(), prefills.close(), drain.close(), control.stop(grace_s=1.0), own.close())


def _prefixes_of(engine: Engine, steps: SchedulingConfig) -> PrefixCache:
    return PrefixCache(engine.pages, engine.pool.page_size, keeps=steps.enable_prefix_cache)


def _scheduler_of(
    own: Runtime, memory: DecodeMemory, copies: HostCopies, steps: SchedulingConfig, growth: DecodeConfig
) -> DecodeScheduler:
    return DecodeScheduler(
        own.engine,
        memory,
        own.hub,
        copies,
        max_running=steps.max_running_requests,
        chunk_tokens=steps.chunked_prefill_size,
        retract_every=growth.test_retract_every,
        audit=memory.check_integrity if steps.check_integrity else None,
    )


def _handoff_of(own: Runtime, queue: PreallocQueue, lookout: Lookout, data: config.TransportConfig) -> Handoff:
    return Handoff(
        own.instance,
        own.engine,
        queue,
        own.pool,
        own.metadata,
        lookout,
        own.transfers,
        new_digest=own.new_digest if data.digest else None,
        handshake_only=data.transfer_backend == FAKE,
    )


if __name__ == "__main__":
    main()
