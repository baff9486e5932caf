"""Ports of this process: each is taken, or refused with the option that has named it."""

from __future__ import annotations

import socket

import grpc

from pd_common.control.tls import Tls
from pd_common.errors import InvalidRequest
from pd_common.types import BootstrapAddress


def bind(host: str, port: int, option: str) -> socket.socket:
    """A TCP socket that does not listen yet; port 0 takes a free one.

    Raises:
        InvalidRequest: the address cannot be bound.

    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off delays (TCP_NODELAY) where the protocol is named, and not where it is 0: then every first
    # token on a connection that is used again comes 40 ms late.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _refused(host, port, option, error.strerror or str(error)) from error
    return bound


def bind_grpc(server: grpc.aio.Server, host: str, port: int, option: str, tls: Tls | None = None) -> int:
    """As `bind`, for a gRPC server that has not started; gives the port."""
    target = BootstrapAddress(host, port).target
    try:
        if tls is None:
            return server.add_insecure_port(target)
        return server.add_secure_port(target, tls.server_credentials())
    except RuntimeError as error:
        why = "is the port in use, and does the host belong to this machine?"
        raise _refused(host, port, option, why) from error


def require_free(host: str, **ports: int | None) -> None:
    """By the names of their options; None is not wanted. For before a model is loaded: that takes minutes.

    Raises:
        InvalidRequest: one of them is taken.

    """
    for option, port in ports.items():
        if port:
            bind(host, port, option).close()


def _refused(host: str, port: int, option: str, why: str) -> InvalidRequest:
    target, flag = BootstrapAddress(host, port).target, option.replace("_", "-")
    return InvalidRequest(f"cannot listen on {target} (--{flag}): {why}", field=option)
