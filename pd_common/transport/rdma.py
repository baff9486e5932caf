"""Which RDMA devices this machine has, told from /sys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pd_common.errors import InvalidRequest

DEVICES = Path("/sys/class/infiniband")


def require_present(devices: Iterable[str], otherwise: str) -> None:
    """For libraries that say nothing of a device that is missing. `otherwise` is what a person can do instead.

    Raises:
        InvalidRequest: this machine lacks one of them.
    """
    for device in devices:
        if not device or not (DEVICES / device).is_dir():
            present = ", ".join(sorted(each.name for each in DEVICES.glob("*"))) or "none"
            raise InvalidRequest(f"no RDMA device {device!r} here ({present}); {otherwise}", field="ib_device")
