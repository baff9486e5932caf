"""Inspection: who this process is, and what it has noted of the times of its rooms."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf import timestamp_pb2
from pd.v1 import inspection_pb2, inspection_pb2_grpc

from pd_common.control import convert, process
from pd_common.control.rooms import Call
from pd_common.telemetry.tracing import RoomTrace, Stage, Tracing
from pd_common.types import Instance, Role


class InspectionServicer(inspection_pb2_grpc.InspectionServicer):
    """`describe` says what the process is at this moment."""

    def __init__(self, describe: Callable[[], inspection_pb2.GetProcessResponse], tracing: Tracing) -> None:
        self._describe = describe
        self._tracing = tracing

    async def GetProcess(
        self, request: inspection_pb2.GetProcessRequest, context: Call
    ) -> inspection_pb2.GetProcessResponse:
        answer = self._describe()
        answer.now.GetCurrentTime()
        return answer

    async def GetSpans(self, request: inspection_pb2.GetSpansRequest, context: Call) -> inspection_pb2.GetSpansResponse:
        legs = self._tracing.of_room(convert.room_from(request.bootstrap_room))
        return inspection_pb2.GetSpansResponse(legs=[_leg_to(leg) for leg in legs])


def describe(instance: Instance, role: Role, model: str) -> inspection_pb2.GetProcessResponse:
    """What every process says of itself."""
    return inspection_pb2.GetProcessResponse(
        instance=convert.instance_to(instance),
        role=convert.role_to(role),
        software_version=process.SOFTWARE_VERSION,
        model=model,
    )


def _leg_to(leg: RoomTrace) -> inspection_pb2.RoomSpans:
    stages = sorted(leg.stages, key=lambda stage: stage.start_ns)
    return inspection_pb2.RoomSpans(
        trace_id=leg.trace_id, root=_span_to(leg.root), stages=[_span_to(stage) for stage in stages]
    )


def _span_to(stage: Stage) -> inspection_pb2.Span:
    return inspection_pb2.Span(
        name=stage.name.value,
        start=_time_to(stage.start_ns),
        end=None if stage.end_ns is None else _time_to(stage.end_ns),
        attributes={name: str(value) for name, value in stage.attributes.items()},
        failure=stage.failure.reason.value if stage.failure else "",
    )


def _time_to(nanoseconds: int) -> timestamp_pb2.Timestamp:
    seconds, nanos = divmod(nanoseconds, 10**9)
    return timestamp_pb2.Timestamp(seconds=seconds, nanos=nanos)
