"""Which library moves the pages: the one place that turns `--transfer-backend` into a transport."""

from __future__ import annotations

from pd_common.config import TransportConfig
from pd_common.transport.base import Transport
from pd_common.transport.ucx.transport import UcxTransport


def open_transport(config: TransportConfig) -> Transport:
    """Opens the data plane of this process.

    Raises:
        TransportUnavailable: its library is not installed or does not start.
        InvalidRequest: an option that this backend does not have.
    """
    return UcxTransport(config.ucx_library)
