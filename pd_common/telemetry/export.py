"""The way of spans to a collector that may be dead: requests do not wait for it, nor does the end of the process."""

from __future__ import annotations

import logging
import threading
import time

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

_LAST_EXPORT_S = 2.0
"""What is still queued when the process ends has so long to be sent."""
_SAID_EVERY_S = 60.0

_NOISY = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")
"""They speak of every attempt to send, and of every span that finds the queue full."""


def exporting_processor() -> BatchSpanProcessor:
    """Sends spans in batches, from a thread, to where the OTEL_EXPORTER_OTLP_* variables say."""
    for name in _NOISY:
        logging.getLogger(name).addFilter(_NowAndThen())
    return _Hasty(OTLPSpanExporter())


class _Hasty(BatchSpanProcessor):
    """Ends soon: the SDK's own would wait up to half a minute for a collector that does not answer."""

    def __init__(self, exporter: SpanExporter) -> None:
        super().__init__(exporter)
        self._exporter = exporter

    def shutdown(self) -> None:
        enough = threading.Timer(_LAST_EXPORT_S, self._exporter.shutdown)  # a call that is under way ends with it
        enough.daemon = True
        enough.start()
        super().shutdown()  # type: ignore[no-untyped-call]
        enough.cancel()


class _NowAndThen(logging.Filter):
    """Lets a line through once a minute, and none of those that only say that it will be tried again."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if record.levelno < logging.WARNING or record.msg.startswith("Transient error") or now < self._next_s:
            return False
        self._next_s = now + _SAID_EVERY_S
        return True
