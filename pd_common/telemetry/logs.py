"""Log lines: one format for every process, on standard error."""

from __future__ import annotations

import logging
import sys


def configure(level: str) -> None:
    """Installs the format; `level` is a name such as "info"."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    for noisy in ("httpx", "httpcore", "asyncio", "transformers", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
