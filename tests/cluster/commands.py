"""Commands without which there is no cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.deploy.tools import Unavailable


def checked(command: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        Unavailable: it fails.
    """
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout
