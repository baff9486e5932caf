"""Protobuf's times, states and failures as plain JSON values.

Times are milliseconds since 1970 by this router's clock.
"""

from __future__ import annotations

from google.protobuf import timestamp_pb2
from pd.v1 import types_pb2

from pd_common.errors import PdError
from pd_common.inspection.views import ProcessView
from services.router.exchange import Json


def time_ms(view: ProcessView, time: timestamp_pb2.Timestamp) -> float:
    """By this router's clock what that process has noted by its own; exact to a microsecond."""
    return view.ours_ns(time) / 1e6


def state_name(state: types_pb2.TransferState) -> str:
    """As the enum names it, without its prefix."""
    return types_pb2.TransferState.Name(state).removeprefix("TRANSFER_STATE_")


def failure_to(error: PdError) -> Json:
    """Why, for a program and for a person."""
    return {"reason": error.reason.value, "message": error.message}
