"""pd-router: one address in front of many prefills and decodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from pd_common import config
from pd_common.addresses import is_wildcard
from pd_common.control import metrics, process, room_log, server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.http_server import HttpServer
from pd_common.control.inspection_servicer import InspectionServicer
from pd_common.control.security import Security
from pd_common.control.supervisor import Supervisor
from pd_common.errors import InvalidRequest
from pd_common.inspection.inspector import Inspector
from pd_common.telemetry import logs, spans
from pd_common.telemetry.metrics import RoomMetrics
from pd_common.telemetry.tracing import Tracing
from pd_common.types import BootstrapAddress, Role
from services.router.collector import RouterCollector
from services.router.counted import CountedErrors, CountedRequests
from services.router.describe import describe
from services.router.dispatch import Dispatcher
from services.router.draining import drain
from services.router.http import create_app
from services.router.open_requests import HttpDoor, OpenRequests
from services.router.policy import LeastLoaded
from services.router.probe import Prober
from services.router.servicer import RouterGenerationServicer
from services.router.sources import WORKER_SOURCE, Source
from services.router.ui.api import ui_routes
from services.router.workers import Workers


@click.command(context_settings=config.CONTEXT)
@click.option(
    "--prefill",
    "prefills",
    multiple=True,
    type=WORKER_SOURCE,
    help="HOST:PORT of a prefill, or dns+NAME:PORT for one at each address that the name stands for at the time; may "
    "be repeated (PD_PREFILL: separated by blanks). Without one decode computes prompts too.",
    envvar="PD_PREFILL",
)
@click.option(
    "--decode",
    "decodes",
    required=True,
    multiple=True,
    type=WORKER_SOURCE,
    help="HOST:PORT of a decode, or dns+NAME:PORT as with --prefill; may be repeated (PD_DECODE: separated by blanks).",
    envvar="PD_DECODE",
)
@click.option(
    "--disaggregation-min-prompt-tokens",
    default=0,
    type=click.IntRange(min=0),
    help="Prompts with fewer tokens go to a decode alone, which computes them itself; 0: none.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 or :: for every interface.")
@click.option(
    "--http-port", default=8000, type=click.IntRange(0, 65535), help="HTTP port; 0 takes a free one and prints it."
)
@click.option(
    "--grpc-port", default=8001, type=click.IntRange(0, 65535), help="gRPC port; 0 takes a free one and prints it."
)
@click.option(
    "--ui/--no-ui",
    default=True,
    help="Status page at /ui on the HTTP port: rooms, memory, peers, no prompts. Whoever reaches the API can see it.",
)
@config.drain_options
@config.security_options
@config.log_options
@config.metrics_options
@config.probe_options
def main(**options: Any) -> None:
    """Serve requests: OpenAI's API and /generate on HTTP, pd.v1.Generation on gRPC.

    Makes a room for each request, sends it to one prefill and one decode or to a decode alone, and relays decode's
    answer. Every option is also an environment variable: --http-port is PD_HTTP_PORT.
    """
    process.run(Role.ROUTER, lambda: serve(**options), config.pick(config.LogConfig, options))


async def serve(
    *,
    prefills: tuple[Source, ...],
    decodes: tuple[Source, ...],
    disaggregation_min_prompt_tokens: int,
    host: str,
    http_port: int,
    grpc_port: int,
    ui: bool,
    metrics_port: int | None,
    health_port: int | None,
    **settings: Any,
) -> None:
    """The wiring of one router process; returns when it has drained after SIGTERM."""
    _refuse_repeated("--prefill", prefills)
    _refuse_repeated("--decode", decodes)
    security = Security.open(config.pick(config.SecurityConfig, settings), host)
    drain_timeout_s = config.pick(config.DrainConfig, settings).drain_timeout_s
    changed = asyncio.Event()
    policy = LeastLoaded(min_prompt_tokens=disaggregation_min_prompt_tokens, disaggregated=bool(prefills))
    workers = Workers({Role.PREFILL: prefills, Role.DECODE: decodes}, policy, changed, security.dial)
    tracing = Tracing()
    dispatcher = Dispatcher(policy, tracing, security.keys)
    exporting = spans.configure("pd-router", dispatcher.instance.instance_id)
    logs.identify(dispatcher.instance.instance_id)
    room_log.follow_requests(tracing)
    requests, legs, still_open = CountedRequests(dispatcher), RoomMetrics(), OpenRequests()
    tracing.listeners.append(legs.note_leg)
    described = partial(describe, dispatcher, policy)
    control = server.ControlServer(
        [
            server.abort(AbortServicer(dispatcher)),
            server.inspection(InspectionServicer(described, tracing)),
            server.generation(RouterGenerationServicer(requests, still_open)),
        ],
        security.tls,
    )
    prober = Prober(dispatcher, policy, changed, control)
    async with control.listening(host, grpc_port, health_port, option="grpc_port") as bound_grpc_port:
        inspector = Inspector([(_own_address(host, bound_grpc_port), Role.ROUTER)], security.dial)
        app = CountedErrors(create_app(requests, lambda: control.is_live, ui_routes(inspector) if ui else ()))
        http = HttpServer(HttpDoor(app, still_open), host, http_port, tls=security.tls)
        bound_http_port = await http.start()
        now = RouterCollector(dispatcher, policy), metrics.IdentityCollector(described)
        exposed = metrics.served((*now, requests, legs, app, control.errors), host, metrics_port, security.tls)
        supervisor = Supervisor(control)
        async with (
            exposed as metrics_server,
            supervisor.running(
                **workers.works(),
                prober=prober.run(),
                probes=prober.watch(),
                rooms=dispatcher.watch(),
                http=http.watch(),
                metrics=metrics_server(),
            ),
        ):
            process.announce(
                f"pd-router listens for HTTP on {host}:{bound_http_port} and for gRPC on {host}:{bound_grpc_port}"
            )
            await supervisor.until_end()
            await drain(still_open, dispatcher, http, control, supervisor.out_of_patience(drain_timeout_s))
            await inspector.close()
    if exporting is not None:
        await asyncio.to_thread(exporting.shutdown)
    await supervisor.close(dispatcher.close(), workers.close())


def _own_address(host: str, port: int) -> str:
    """Where this process finds itself, as others do."""
    return BootstrapAddress("localhost" if is_wildcard(host) else host, port).target


def _refuse_repeated(option: str, sources: Sequence[Source]) -> None:
    for source in sources:
        if sources.count(source) > 1:
            raise InvalidRequest(f"{option} {source.target} is given more than once", field=option)


if __name__ == "__main__":
    main()
