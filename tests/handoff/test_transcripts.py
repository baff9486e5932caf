"""Runs testdata/*.txt: each command must answer with exactly the lines beneath it.

REWRITE=1 puts the actual answers into the files; read the difference before you keep it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.handoff.world import World

TRANSCRIPTS = sorted((Path(__file__).parent / "testdata").glob("*.txt"))
SEPARATOR = "----"


async def replay(text: str) -> str:
    """The transcript with the answers that its commands get now."""
    world = World()
    blocks = []
    try:
        for block in text.strip().split("\n\n"):
            asked = block.split(f"\n{SEPARATOR}")[0]
            command = asked.splitlines()[-1]
            answered = [] if command.startswith("#") else [SEPARATOR, *await world.run(command)]
            blocks.append("\n".join([asked, *answered]))
    finally:
        await world.close()
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    written = path.read_text(encoding="utf-8")
    actual = asyncio.run(replay(written))
    if os.environ.get("REWRITE"):
        path.write_text(actual, encoding="utf-8")
    else:
        assert actual == written


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 40
