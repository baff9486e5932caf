"""The page itself: a few files beside this one, read once, sent with headers that let it use nothing else."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

HEADERS = {
    # Nothing from elsewhere, nothing inline, and no way for a text to become markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""On everything under /ui/, what its API answers too."""

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def file_routes() -> list[Route]:
    """The page at `/ui/`, where `/ui` leads: its addresses are relative, and hold behind a proxy's prefix."""
    files = sorted(Path(__file__).with_name("static").iterdir())
    routes = [Route(f"/ui/{file.name}", _answer(file), methods=["GET"]) for file in files]
    index = next(file for file in files if file.name == "index.html")
    return [Route("/ui", _to_page), Route("/ui/", _answer(index), methods=["GET"]), *routes]


async def _to_page(_: Request) -> Response:
    return RedirectResponse("ui/", 307)


def _answer(file: Path) -> Response:
    return Response(file.read_bytes(), 200, HEADERS, _MEDIA_TYPES[file.suffix])
