"""A process as it is, of which SIGUSR1 kills one task from within: `python -m tests.e2e.mortal ROLE TASK FLAGS...`."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from typing import Any


def kill(name: str) -> None:
    """The task whose name begins like this."""
    (task,) = (task for task in asyncio.all_tasks() if task.get_name().startswith(name))
    task.cancel()


def main(role: str, task: str, flags: list[str]) -> None:
    module: Any = importlib.import_module(f"services.{role}.__main__")
    serve = module.serve

    async def mortal(*args: Any, **options: Any) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, kill, task)
        await serve(*args, **options)

    module.serve = mortal
    module.main(flags)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
