"""Child processes of the bench, seen from the bench: started, asked, stopped and continued, and ended in every case."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import Any

from pd_common.cli.bench.paths import Place
from pd_common.cli.bench.spec import LINE_BYTES, Reply, Spec
from pd_common.errors import ERROR_OF_REASON, PeerLost, Reason

WORKER = (sys.executable, "-m", "pd_common.cli.bench.worker")
_ANSWER_S = 120.0


class Child:
    """One process. What it prints is kept only to say why it ended."""

    def __init__(self, spec: Spec, place: Place) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_ANSWER_S)
        arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(asdict(spec))]
        with theirs:
            self._process = subprocess.Popen(
                [*place.prefix, *WORKER, *arguments],
                env=os.environ | place.environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._lines = self._control.makefile("rb")

    def opened(self) -> None:
        """Waits until the end is open.

        Raises:
            PdError: it cannot be opened, of the class that says why.
            PeerLost: the process ended.

        """
        self.answer()

    def ask(self, what: str, **arguments: Any) -> Reply:
        """A request and its answer; errors as for `answer`."""
        self.begin(what, **arguments)
        return self.answer()

    def begin(self, what: str, **arguments: Any) -> None:
        """A request whose answer is fetched later."""
        try:
            self._control.sendall(json.dumps({"what": what} | arguments).encode() + b"\n")
        except OSError as error:
            raise self._lost() from error

    def answer(self) -> Reply:
        """The answer to the oldest request.

        Raises:
            PdError: the child could not do it, of the class that says why.
            PeerLost: the process ended, or did not answer in two minutes.

        """
        try:
            line = self._lines.readline(LINE_BYTES)
        except OSError as error:
            raise PeerLost(f"a process of the bench does not answer: {error}") from error
        if not line:
            raise self._lost()
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise ERROR_OF_REASON[Reason(reply["reason"])](reply["error"])
        return reply

    def stop(self) -> None:
        """Takes the processor away from it, whatever its threads do."""
        self._signal(signal.SIGSTOP)

    def go(self) -> None:
        """Gives the processor back."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Ends the process, also one that is stopped."""
        self._process.kill()
        self._process.wait()
        self._lines.close()
        self._control.close()
        self._output.close()

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)  # does nothing when the process has been waited for

    def _lost(self) -> PeerLost:
        code = self._process.wait()
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace").strip().splitlines()
        return PeerLost(f"a process of the bench ended with {code}: {printed[-1] if printed else 'no output'}")
