"""A light load on a router: `python -m tests.cluster.load HOST PORT` until its standard input ends.

A new connection for each request, as clients behind a Service have. Says then, as JSON, how many whole answers came,
and what became of the others, each with how often that was.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field

CLIENTS = 2
BODY = json.dumps(
    {
        "text": "ROMEO.\nBut soft, what light through yonder window breaks?\n",
        "sampling_params": {"max_new_tokens": 48, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
)
END = b"data: [DONE]"
PATIENCE_S = 60.0


@dataclass(slots=True)
class Tally:
    """What has become of the requests so far."""

    whole: int = 0
    lost: Counter[str] = field(default_factory=Counter)


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    tally, enough = Tally(), threading.Event()
    clients = [threading.Thread(target=_client, args=(host, port, tally, enough)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    sys.stdin.read()
    enough.set()
    for client in clients:
        client.join()
    print(json.dumps({"whole": tally.whole, "lost": tally.lost}))


def _client(host: str, port: int, tally: Tally, enough: threading.Event) -> None:
    while not enough.is_set():
        if why := _lost(host, port):
            tally.lost[why] += 1
            enough.wait(0.2)
        else:
            tally.whole += 1


def _lost(host: str, port: int) -> str:
    """Why there was no whole answer to one request; nothing if there was."""
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/generate", BODY)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as broken:
        return repr(broken)
    finally:
        connection.close()
    whole = answer.status == http.HTTPStatus.OK and content.rstrip().endswith(END) and b'"error"' not in content
    return "" if whole else f"{answer.status} {content[-500:].decode(errors='replace')}"


if __name__ == "__main__":
    main()
