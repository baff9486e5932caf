"""Who may call what: roles by the caller's certificate, rooms by their tickets. Both tables of the control plane."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pd.v1 import types_pb2

from pd_common.control.rooms import Call
from pd_common.control.tickets import TicketKeys
from pd_common.control.tls import name_of
from pd_common.errors import PermissionDenied
from pd_common.types import Role

_PREFILL, _DECODE, _ROUTER = name_of(Role.PREFILL), name_of(Role.DECODE), name_of(Role.ROUTER)

CALLERS: dict[str, tuple[str, ...]] = {
    "/pd.v1.Bootstrap/RegisterRank": (_PREFILL,),
    "/pd.v1.Bootstrap/RenewLease": (_PREFILL,),
    "/pd.v1.Bootstrap/UnregisterRank": (_PREFILL,),
    "/pd.v1.Bootstrap/RegisterDpRank": (_PREFILL,),
    "/pd.v1.Bootstrap/GetTopology": (_DECODE, _ROUTER),
    "/pd.v1.Bootstrap/WatchTopology": (_DECODE, _ROUTER),
    "/pd.v1.Bootstrap/QueryDpRanks": (_DECODE, _ROUTER),
    "/pd.v1.PageAllocation/RegisterReceiver": (_DECODE,),
    "/pd.v1.PageAllocation/HoldReceiver": (_DECODE,),
    "/pd.v1.PageAllocation/SendCanary": (_DECODE,),
    "/pd.v1.PageAllocation/AllocatePages": (_DECODE,),
    "/pd.v1.TransferStatus/ReportTransfer": (_PREFILL, _DECODE),
    "/pd.v1.Generation/Submit": (_ROUTER,),
    "/pd.v1.Generation/StreamOutputs": (_ROUTER,),
}
"""Names of which a caller's certificate must have one. What is not here is open to every certificate."""


def _never(_: Any) -> bool:
    return False


def _always(_: Any) -> bool:
    return True


def _of_a_failure(report: Any) -> bool:
    return bool(report.state == types_pb2.TRANSFER_STATE_FAILED)


_ACCEPTS_OVER: dict[str, Callable[[Any], bool]] = {
    "/pd.v1.Generation/Submit": _never,
    "/pd.v1.Generation/Generate": _never,
    "/pd.v1.PageAllocation/AllocatePages": _never,
    "/pd.v1.TransferStatus/ReportTransfer": _of_a_failure,
    "/pd.v1.Abort/AbortRoom": _always,
}
"""Methods that need the room's ticket, and the requests for which one that is over will do: stopping always works."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a server asks of its callers. Without TLS nobody has a name, without keys nobody needs a ticket."""

    by_role: bool = False
    keys: TicketKeys | None = None

    def check_caller(self, method: str, context: Call) -> None:
        """Raises PermissionDenied when the caller's certificate does not speak for a role that may call this."""
        allowed = CALLERS.get(method)
        if not self.by_role or allowed is None:
            return
        names = [name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())]
        if not set(names) & set(allowed):
            raise PermissionDenied(
                f"{method} is for {' or '.join(allowed)}; the caller says {', '.join(names) or 'nothing'}",
                method=method,
                allowed=",".join(allowed),
            )

    def check_room(self, method: str, request: Any) -> None:
        """Raises PermissionDenied when the request needs its room's ticket and has not got it."""
        accepts_over = _ACCEPTS_OVER.get(method)
        if self.keys is None or accepts_over is None:
            return
        of_room = request.request if method == "/pd.v1.Generation/Submit" else request
        room = of_room.bootstrap_room
        self.keys.check(of_room.ticket, room, time.time(), may_be_over=accepts_over(request))
