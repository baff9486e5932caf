"""`pdctl bench control`: what a room costs the control plane."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from pd_common.cli.bench.control import peers
from pd_common.cli.bench.control.handshakes import handshakes
from pd_common.cli.bench.control.load import Load
from pd_common.cli.bench.control.model import write_model
from pd_common.cli.bench.control.result import Latency, Result, Throughput
from pd_common.cli.bench.machine import Machine
from pd_common.cli.bench.processes import LOOPBACK, Service, running
from pd_common.cli.bench.signals import sigterm_ends
from pd_common.errors import PdError
from pd_common.types import BootstrapAddress

_WARM_UP_ROOMS = 200
_FLAGS = (
    *("--transfer-backend", "fake", "--threads", "1", "--kv-cache-tokens", "65536", "--max-running-requests", "512"),
    *("--room-retention", "60", "--log-level", "info"),
)


@click.command()
@click.option("--rooms", default=5000, type=click.IntRange(min=100), help="Rooms sent back to back.")
@click.option("--at-once", default=32, type=click.IntRange(min=1), help="Of these, rooms under way at any time.")
@click.option("--rate", default=100.0, type=click.FloatRange(min=1), help="Rooms a second where latency is measured.")
@click.option("--seconds", default=10.0, type=click.FloatRange(min=1), help="How long that goes on.")
@click.option("--peers", "count", default=256, type=click.IntRange(1, 1000), help="Simulated decodes on one prefill.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the result to this file.",
)
def control(rooms: int, at_once: int, rate: float, seconds: float, count: int, json_path: Path | None) -> None:
    """Send rooms through one prefill and one decode of this machine that move no pages, and count.

    Both are started for this, with the fake transfer backend: a room takes its whole way through the control plane
    (both legs submitted, topology, registration, pages offered, success reported and agreed, outputs told), and
    nothing is computed or written. Then the prefill gets many simulated decodes, each with a connection of its own.
    """
    load = os.getloadavg()[0]
    with sigterm_ends(), Status("starting", console=Console(stderr=True)) as status:
        try:
            result = asyncio.run(_measure(status, load, rooms, at_once, rate, seconds, count))
        except PdError as error:
            raise click.ClickException(error.message) from error
    if json_path is not None:
        result.write_json(json_path)
    for line in result.lines():
        click.echo(line)


async def _measure(
    status: Status, load: float, rooms: int, at_once: int, rate: float, seconds: float, count: int
) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        with running(("--model", directory, *_FLAGS)) as (prefill, decode):
            at_prefill, at_decode = await _address(prefill), await _address(decode)
            client = Load(at_prefill, at_decode)
            await client.start()
            status.update("the first room of a new pair")
            first_s = (await client.room()).seconds
            usual_s = statistics.median(times.seconds for times in await client.back_to_back(_WARM_UP_ROOMS, 1))
            status.update(f"{rooms} rooms back to back")
            throughput = await _throughput(client, (prefill, decode), rooms, at_once)
            status.update(f"{rate:g} rooms/s for {seconds:g} s")
            paced = await client.at_rate(round(rate * seconds), rate)
            handshake = Latency.of(await handshakes(at_prefill, paced))
            await client.stop()
            status.update(f"{count} simulated decodes")
            held = await peers.measure(prefill, at_prefill, count)
    first_contact_ms = 1e3 * (first_s - usual_s)
    whole = Latency.of([times.seconds for times in paced])
    return Result(Machine.here(load, ()), first_contact_ms, throughput, rate, handshake, whole, held)


async def _address(service: Service) -> BootstrapAddress:
    return BootstrapAddress(LOOPBACK, await asyncio.to_thread(service.wait_until_it_serves))


async def _throughput(client: Load, pair: tuple[Service, Service], rooms: int, at_once: int) -> Throughput:
    cpu_s = [service.cpu_s for service in pair]
    own_s, began_s = time.process_time(), time.perf_counter()
    latency = Latency.of([times.seconds for times in await client.back_to_back(rooms, at_once)])
    took_s = time.perf_counter() - began_s
    prefill_ms, decode_ms = (
        1e3 * (service.cpu_s - before) / rooms for service, before in zip(pair, cpu_s, strict=True)
    )
    own_ms = 1e3 * (time.process_time() - own_s) / rooms
    return Throughput(rooms, at_once, rooms / took_s, prefill_ms, decode_ms, own_ms, latency)
