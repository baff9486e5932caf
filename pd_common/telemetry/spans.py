"""Spans in OpenTelemetry's terms: names, one tracer, and the trace context that is carried in gRPC metadata.

Without an OTLP endpoint nothing is exported and every span is a no-op.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache

from opentelemetry import propagate, trace
from opentelemetry.context import Context, create_key, get_value, set_value
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Tracer, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags

from pd_common.types import BootstrapRoom

ROOM = "pd.bootstrap_room"
"""On every span and log line of a room: the room as a decimal string (it may exceed a signed 64-bit integer)."""

_tracer = trace.get_tracer("pd")
"""Made once: asking for it costs as much as a span. `configure` puts one here that exports."""

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

_ARRIVAL = create_key("pd-arrival-ns")


class SpanName(StrEnum):
    """Every span that the system writes."""

    ROUTE = "pd.route"
    RECEIVE = "pd.receive"
    DISPATCH = "pd.dispatch"
    FIRST_TOKEN_WAIT = "pd.first_token_wait"  # noqa: S105  a span name
    STREAM = "pd.stream"
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
    ABORT = "pd.abort"
    QUARANTINE = "pd.quarantine"


def configure(service: str, instance_id: str) -> TracerProvider | None:
    """Exports this process's spans by OTLP/gRPC when OTEL_EXPORTER_OTLP_(TRACES_)ENDPOINT is set; else does nothing.

    The caller shuts the returned provider down, which sends what is still queued, or gives it up after a moment.
    """
    if not any(os.environ.get(variable) for variable in _ENDPOINT_VARIABLES):
        return None
    # Loaded only when it is used: it brings a second of import time.
    from pd_common.telemetry.export import exporting_processor  # noqa: PLC0415

    provider = TracerProvider(resource=Resource.create({"service.name": service, "service.instance.id": instance_id}))
    provider.add_span_processor(exporting_processor())
    trace.set_tracer_provider(provider)
    global _tracer  # noqa: PLW0603  a process has one provider, by OpenTelemetry's own rule
    _tracer = provider.get_tracer("pd")
    return provider


def start(
    name: SpanName, room: BootstrapRoom, parent: Context, *, start_ns: int | None = None, **attributes: str | float
) -> Span:
    """A span of a room, open until its `end()`. `start_ns` is nanoseconds since 1970 (default: now)."""
    return _tracer.start_span(name, parent, attributes={ROOM: str(room), **attributes}, start_time=start_ns)


def export_child(
    parent: Span,
    name: SpanName,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, str | float],
    error: str | None,
) -> None:
    """Exports a span that is over, if `parent` is exported; `error` is why it has failed.

    Made by hand: a tracer takes 35 microseconds for one, ten times as long, and a room has more than twenty of them.
    """
    if not isinstance(_tracer, Tracer) or not isinstance(parent, ReadableSpan):
        return
    above = parent.get_span_context()
    own = SpanContext(above.trace_id, _tracer.id_generator.generate_span_id(), False, above.trace_flags)
    span = ReadableSpan(
        name,
        own,
        above,
        _tracer.resource,
        attributes,
        status=Status() if error is None else Status(StatusCode.ERROR, error),
        start_time=start_ns,
        end_time=end_ns,
        instrumentation_scope=parent.instrumentation_scope,
    )
    _tracer.span_processor.on_end(span)


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
    """A context whose trace id is derived from the room alone, and so is whether it is sampled: alike everywhere."""
    digest = hashlib.blake2b(room.to_bytes(8, "big"), digest_size=24, person=b"pd.room").digest()
    trace_id = int.from_bytes(digest[:16], "big")
    span_context = SpanContext(
        trace_id=trace_id,
        span_id=int.from_bytes(digest[16:], "big"),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if _is_sampled(trace_id) else TraceFlags.DEFAULT),
    )
    return trace.set_span_in_context(NonRecordingSpan(span_context))


def arrived(caller: Context) -> Context:
    """The caller's context, in which a request has arrived now: its room, once it has one, begins with this moment."""
    return set_value(_ARRIVAL, now_ns(), caller)


def arrival_ns(context: Context) -> int | None:
    """When the request has arrived; None if nobody has noted it."""
    noted = get_value(_ARRIVAL, context)
    return noted if isinstance(noted, int) else None


def now_ns() -> int:
    """Nanoseconds since 1970, as spans count."""
    return time.time_ns()


def _is_sampled(trace_id: int) -> bool:
    """As a trace that begins here: what derives from a room is nobody's decision yet, whatever its flag said."""
    return _sampler().should_sample(Context(), trace_id, SpanName.ROUTE).decision is Decision.RECORD_AND_SAMPLE


@cache
def _sampler() -> Sampler:
    """What OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG ask for, also in a process that exports nothing."""
    return TracerProvider(shutdown_on_exit=False).sampler
