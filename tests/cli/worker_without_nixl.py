"""A child of the bench on a machine where NIXL is not installed."""

from __future__ import annotations

import sys

from pd_common.cli.bench import worker

if __name__ == "__main__":
    sys.modules["nixl_cu12"] = None  # type: ignore[assignment]
    worker.main(sys.argv[1:])
