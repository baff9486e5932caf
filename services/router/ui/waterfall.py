"""One room in full, as the page draws it: states, failures and spans of each side on one time axis."""

from __future__ import annotations

from pd.v1 import inspection_pb2

from pd_common.inspection.ttft import account
from pd_common.inspection.views import ProcessView, RoomSide, RoomView
from services.router.exchange import Json
from services.router.ui.rooms import Side
from services.router.ui.values import failure_to, state_name, time_ms


def room_to(view: RoomView, now_ms: float) -> Json:
    """Times are as in the list of rooms: milliseconds since 1970 by this router's clock."""
    return {
        "room": str(view.number),
        "now_ms": now_ms,
        "rid": next((side.transfer.rid for side in view.sides if side.transfer and side.transfer.rid), ""),
        "trace_id": next((leg.trace_id for side in view.sides for leg in side.legs), None),
        "sides": [
            _side_to(view.cluster.at(side.address) or ProcessView(side.address, side.role), side, now_ms)
            for side in view.sides
        ],
        "account": [
            {"span": share.name, "role": share.role and share.role.value, "took_ms": share.took_ms}
            for share in account(view)
        ],
    }


def _process_of(view: RoomView, side: RoomSide) -> ProcessView:
    """Where the side is; with its clock, if that is known."""
    return view.cluster.at(side.address) or ProcessView(side.address, side.role)


def _side_to(process: ProcessView, side: RoomSide, now_ms: float) -> Json:
    return {
        "role": side.role.value,
        "address": side.address,
        "transfer": None if side.transfer is None else _transfer_to(Side(process, side.transfer, now_ms)),
        "legs": [
            {"root": _span_to(process, leg.root), "stages": [_span_to(process, stage) for stage in leg.stages]}
            for leg in side.legs
        ],
    }


def _transfer_to(side: Side) -> Json:
    failure = side.failure
    return {
        **side.shown(),
        "failure": None if failure is None else failure_to(failure),
        "timeline": [
            {"state": state_name(step.state), "at_ms": time_ms(side.view, step.time)} for step in side.transfer.timeline
        ],
    }


def _span_to(process: ProcessView, span: inspection_pb2.Span) -> Json:
    return {
        "name": span.name,
        "start_ms": time_ms(process, span.start),
        "end_ms": time_ms(process, span.end) if span.HasField("end") else None,
        "attributes": dict(span.attributes),
        "failure": span.failure or None,
    }
