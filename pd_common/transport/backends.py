"""Which library moves the pages: the one place that turns `--transfer-backend` into a transport."""

from __future__ import annotations

from pd_common.config import TransportConfig
from pd_common.transport.base import Transport
from pd_common.transport.fake import FakeTransport
from pd_common.transport.mooncake.transport import MooncakeTransport
from pd_common.transport.nixl.transport import NixlTransport
from pd_common.transport.ucx.binding import UCXContext
from pd_common.transport.ucx.interface import Binding
from pd_common.transport.ucx.transport import UcxTransport
from pd_common.transport.ucx.ucx_py import UcxPyContext

_UCX_BINDINGS: dict[str, Binding] = {"own": UCXContext, "ucx-py": UcxPyContext}


def open_transport(config: TransportConfig) -> Transport:
    """Opens the data plane of this process.

    Raises:
        TransportUnavailable: its library is not installed or does not start.
        InvalidRequest: an option that this backend does not have.
    """
    if config.transfer_backend == "fake":
        return FakeTransport()
    if config.transfer_backend == "mooncake":
        return MooncakeTransport(config.ib_device)
    if config.transfer_backend == "nixl":
        return NixlTransport(config.ib_device)
    return UcxTransport(config.ucx_library, config.ib_device, _UCX_BINDINGS[config.ucx_binding])
