"""A minimal OTLP/gRPC collector in this process: keeps the spans that processes of this machine export to it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from pd_common.telemetry.spans import ROOM

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """One finished span; times are nanoseconds since 1970."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Attribute]
    failed: bool

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on loopback while it is entered; `endpoint` is for OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self, port: int = 0) -> None:
        """Port 0 is a free one."""
        self._spans: list[RecordedSpan] = []
        self._arrived = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait()

    @property
    def environment(self) -> dict[str, str]:
        """For the processes whose spans are to come here, quickly."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def Export(  # noqa: N802  generated name
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        spans = [
            _recorded(_attributes(resource.resource.attributes), span)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._arrived:
            self._spans += spans
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_room(self, room: int) -> list[RecordedSpan]:
        """The room's spans so far, by start time."""
        with self._arrived:
            mine = [span for span in self._spans if span.attributes.get(ROOM) == str(room)]
        return sorted(mine, key=lambda span: span.start_ns)

    def wait_for(self, room: int, names: frozenset[str], timeout_s: float) -> list[RecordedSpan]:
        """The room's spans once all these names are among them, or after the time is over."""
        with self._arrived:
            self._arrived.wait_for(lambda: names <= {span.name for span in self.of_room(room)}, timeout_s)
        return self.of_room(room)


def _recorded(resource: dict[str, Attribute], span: trace_pb2.Span) -> RecordedSpan:
    return RecordedSpan(
        service=str(resource.get("service.name", "")),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, Attribute]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
