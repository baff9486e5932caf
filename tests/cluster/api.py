"""The API server as the node's own programs ask it."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

from tests.cluster.settings import API_PORT, NODE_ADDRESS, TOKEN, Layout

PATIENCE_S = 5.0


class Api:
    """Answers as JSON, over one connection that is made again when it breaks. For one thread."""

    def __init__(self, layout: Layout) -> None:
        self._certificate = layout.api_certificate
        self._connection: http.client.HTTPSConnection | None = None

    def ready(self) -> bool:
        try:
            return self._ask("/readyz")[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def get(self, path: str) -> dict[str, Any] | None:
        """None if there is no such thing."""
        status, body = self._ask(path)
        if status == http.HTTPStatus.NOT_FOUND:
            return None
        if status != http.HTTPStatus.OK:
            raise OSError(f"{path}: {status} {body.decode(errors='replace')}")
        found: dict[str, Any] = json.loads(body)
        return found

    def _ask(self, path: str) -> tuple[int, bytes]:
        """OSError if nobody answers."""
        if self._connection is None:
            trust = ssl.create_default_context(cafile=self._certificate)
            self._connection = http.client.HTTPSConnection(NODE_ADDRESS, API_PORT, context=trust, timeout=PATIENCE_S)
        try:
            self._connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as broken:
            self._connection.close()
            self._connection = None
            raise OSError(f"{path}: {broken}") from broken
