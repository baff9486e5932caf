"""Calls to other processes: one channel per address, typed errors out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import grpc

from pd_common.control.server import KEEPALIVE, MAX_MESSAGE_BYTES
from pd_common.control.status import from_rpc_error
from pd_common.control.tls import Tls, name_of
from pd_common.errors import PeerLost
from pd_common.types import Role

_T = TypeVar("_T")

CALL_TIMEOUT_S = 5.0
"""For calls that only look something up or note something down."""
ATTEMPT_S = 1.0
"""For calls on a room that are repeated until they are answered: a message that is lost costs this much."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # dialled anew is tried anew, whatever others met at that address
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # also the time that one attempt gets
    ("grpc.max_reconnect_backoff_ms", 1000),
    *KEEPALIVE,
)


class Connection:
    """A channel to one address, shared by the clients below. Connects on the first call and again after each break."""

    def __init__(self, address: str, channel: grpc.aio.Channel | None = None) -> None:
        self.address = address
        self.channel = channel or grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Cancels running calls."""
        await self.channel.close(grace=None)

    async def call(self, method: Callable[..., Awaitable[_T]], request: object, **options: Any) -> _T:
        """One unary call; a failure becomes the PdError that the other side raised, or what its status means."""
        with self.typed_errors():
            return await method(request, **{"timeout": CALL_TIMEOUT_S, **options})

    async def stream(self, method: Callable[..., Any], request: object, **options: Any) -> AsyncGenerator[Any, None]:
        """The responses of a server stream; closing the generator ends the call."""
        with self.typed_errors():
            call = method(request, **options)
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

    @contextmanager
    def typed_errors(self) -> Iterator[None]:
        """The border: no gRPC exception leaves this block."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self.address) from error
        except grpc.aio.UsageError as error:
            raise PeerLost(f"{self.address}: the connection is closed", peer=self.address) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled the caller: the connection was closed under the call.
            raise PeerLost(f"{self.address}: the connection was closed", peer=self.address) from error


class Dial(Protocol):
    """Makes connections as this process is configured to; `role` is what the process at the address must be."""

    def __call__(self, address: str, role: Role) -> Connection: ...


def dial_plain(address: str, role: Role) -> Connection:  # noqa: ARG001  without TLS nobody can prove a role
    """Without TLS."""
    return Connection(address)


def dial_with(tls: Tls) -> Dial:
    """With this certificate, to processes whose certificate speaks for the role, whatever address they have.

    A connection keeps the files of its making: whoever lives longer than a connection dials again.
    """

    def dial(address: str, role: Role) -> Connection:
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name_of(role)))
        return Connection(address, grpc.aio.secure_channel(address, tls.channel_credentials(), options=options))

    return dial
