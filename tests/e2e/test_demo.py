"""The first thing a newcomer runs: it ends well, shows an answer and where its time went, and leaves nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_demo(*flags: str) -> tuple[int, str, str]:
    """Exit code, what it printed, and what it left running."""
    command = [sys.executable, "-m", "demo.run", *flags]
    demo = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    printed, _ = demo.communicate(timeout=120)
    left = subprocess.run(["pgrep", "-a", "-s", str(demo.pid)], capture_output=True, text=True, check=False)
    return demo.returncode, printed, left.stdout


def test_the_demo_shows_one_answer_and_its_timeline() -> None:
    code, printed, left = run_demo()
    assert code == 0, printed
    for stage in ("wait for decode's pages", "compute chunk", "write chunk", "check slot and digest", "write the rest"):
        assert stage in printed
    assert printed.count("write chunk") >= 3, "the prompt goes in several chunks"
    assert "carried by cma" in printed
    assert not left


def test_the_demo_says_what_is_missing(tmp_path: Path) -> None:
    code, printed, left = run_demo("--model", str(tmp_path))
    assert code != 0
    assert "config.json is missing" in printed
    assert not left
