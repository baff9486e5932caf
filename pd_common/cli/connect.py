"""How a command finds the processes of a running system, and what becomes of its failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import click

from pd_common import config
from pd_common.cli.certificate import certificate_options, open_certificate
from pd_common.control.connection import Dial, dial_plain, dial_with
from pd_common.errors import PdError, PeerLost
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.process_client import ProcessClient
from pd_common.inspection.views import ProcessView
from pd_common.types import BootstrapAddress, Role

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

USUAL_ROUTER = BootstrapAddress("127.0.0.1", 8001)
_STOPPED_BY_HAND = 130

ROOM = click.IntRange(1, 2**64 - 1)
"""A room number on the command line."""


def connect_options(command: _F) -> _F:
    """Where to begin, and the caller's certificate; they go to `inspect` together."""
    return config.apply_options(
        command,
        click.option(
            "--router", type=config.ADDRESS,
            help="gRPC address of the router, which names all others.  [default: 127.0.0.1:8001, unless --process is "
            "given]",
        ),
        click.option(
            "--process", "processes", type=config.ADDRESS, multiple=True, envvar="PD_PROCESS",
            help="A prefill or decode to begin with; it names its peers. May be repeated.",
        ),
        certificate_options,
    )  # fmt: skip


def inspect(options: Mapping[str, Any], work: Callable[[Inspector], Awaitable[_T]]) -> _T:
    """What the work gives, as `run`."""

    async def inspected() -> _T:
        async with inspector_of(options) as inspector:
            return await work(inspector)

    return run(inspected())


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """What the work gives; its failure, or a stop by hand, ends the command with one line and no traceback."""
    try:
        return asyncio.run(work)
    except PdError as error:
        raise click.ClickException(error.message) from error
    except KeyboardInterrupt as stop:
        raise click.exceptions.Exit(_STOPPED_BY_HAND) from stop


@asynccontextmanager
async def inspector_of(options: Mapping[str, Any]) -> AsyncIterator[Inspector]:
    """Begins where the options of `connect_options` say; who does not answer there is named on stderr.

    Raises:
        InvalidRequest: the files of the certificate are not all there, or do not fit together.
        PeerLost: there is no router to ask, and no --process answers.
    """
    dial = dial_of(options)
    router: BootstrapAddress | None = options["router"]
    processes: tuple[BootstrapAddress, ...] = options["processes"]
    if router is None and not processes:
        router = USUAL_ROUTER
    entries = [(router.target, Role.ROUTER)] if router else []
    for address in processes:
        try:
            entries.append((address.target, await _role_of(address.target, dial)))
        except PeerLost as error:
            click.echo(error.message, err=True)
    if not entries:
        raise PeerLost("there is nobody to begin with: give --router or another --process")
    inspector = Inspector(entries, dial)
    try:
        yield inspector
    finally:
        await inspector.close()


def dial_of(options: Mapping[str, Any]) -> Dial:
    """With the certificate, if there is one."""
    tls = open_certificate(options)
    return dial_plain if tls is None else dial_with(tls)


async def _role_of(address: str, dial: Dial) -> Role:
    """Under TLS a process answers only who knows its role: so all are tried, at the same time."""
    views = await asyncio.gather(*(_taken_for(role, address, dial) for role in Role))
    for view in views:
        if view.trouble is None:
            return view.role
    raise PeerLost(f"--process {address} does not answer: {views[0].why_silent}", peer=address)


async def _taken_for(role: Role, address: str, dial: Dial) -> ProcessView:
    client = ProcessClient(dial(address, role))
    try:
        return await client.look(role)
    finally:
        await client.close()
