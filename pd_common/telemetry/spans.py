"""Spans in OpenTelemetry's terms: names, one tracer, and the trace context that is carried in gRPC metadata.

Without an OTLP endpoint no SDK is installed and every span is a no-op.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from enum import StrEnum

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags

from pd_common.types import BootstrapRoom

ROOM = "pd.bootstrap_room"
"""On every span and log line of a room: the room as a decimal string (it may exceed a signed 64-bit integer)."""

_tracer = trace.get_tracer("pd")
"""Made once: asking for it costs as much as a span. It turns to the provider that `configure` sets."""

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class SpanName(StrEnum):
    """Every span that the system writes."""

    ROUTE = "pd.route"
    DISPATCH = "pd.dispatch"
    PREFILL = "pd.prefill"
    BOOTSTRAP_WAIT = "pd.bootstrap_wait"
    COMPUTE_WAIT = "pd.compute_wait"
    CHUNK_COMPUTE = "pd.chunk_compute"
    CHUNK_TRANSFER = "pd.chunk_transfer"
    COMMIT = "pd.commit"
    DECODE = "pd.decode"
    PEERING = "pd.peering"
    PREALLOC_WAIT = "pd.prealloc_wait"
    ALLOCATE = "pd.allocate"
    TRANSFER_WAIT = "pd.transfer_wait"
    GATE = "pd.gate"
    PROMPT_COMPUTE = "pd.prompt_compute"
    RESTORE = "pd.restore"
    REFETCH = "pd.refetch"
    FIRST_TOKEN = "pd.first_token"  # noqa: S105  a span name
    DECODE_STEPS = "pd.decode_steps"


def configure(service: str, instance_id: str) -> TracerProvider | None:
    """Exports this process's spans by OTLP/gRPC when OTEL_EXPORTER_OTLP_(TRACES_)ENDPOINT is set; else does nothing.

    The caller shuts the returned provider down, which sends what is still queued.
    """
    if not any(os.environ.get(variable) for variable in _ENDPOINT_VARIABLES):
        return None
    # Loaded only when it is used: it brings a second of import time.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    provider = TracerProvider(resource=Resource.create({"service.name": service, "service.instance.id": instance_id}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider


def start(
    name: SpanName, room: BootstrapRoom, parent: Context, *, start_ns: int | None = None, **attributes: str | float
) -> Span:
    """A span of a room, open until its `end()`. `start_ns` is nanoseconds since 1970 (default: now)."""
    return _tracer.start_span(name, parent, attributes={ROOM: str(room), **attributes}, start_time=start_ns)


def inside(span: Span) -> Context:
    """The context in which children of `span` are started."""
    return trace.set_span_in_context(span)


def carried(context: Context) -> tuple[tuple[str, str], ...]:
    """GRPC metadata that carries the context to the next process (W3C trace context)."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return tuple(carrier.items())


def received(metadata: Iterable[tuple[str, str | bytes]] | None, room: BootstrapRoom) -> Context:
    """The caller's context; without one, a trace id that follows from the room, so that two legs meet in one trace."""
    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    context = propagate.extract(carrier)
    if trace.get_current_span(context).get_span_context().is_valid:
        return context
    return of_room(room)


def of_room(room: BootstrapRoom) -> Context:
    """A context whose trace id is derived from the room alone."""
    digest = hashlib.blake2b(room.to_bytes(8, "big"), digest_size=24, person=b"pd.room").digest()
    span_context = SpanContext(
        trace_id=int.from_bytes(digest[:16], "big"),
        span_id=int.from_bytes(digest[16:], "big"),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(NonRecordingSpan(span_context))


def now_ns() -> int:
    """Nanoseconds since 1970, as spans count."""
    return time.time_ns()
