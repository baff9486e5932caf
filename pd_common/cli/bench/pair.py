"""A sender and a receiver on one path with one library; only the pair that is measured has the processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from pd_common.cli.bench.children import Child
from pd_common.cli.bench.ends import EndSettings
from pd_common.cli.bench.paths import Path, Place
from pd_common.cli.bench.spec import Side, Spec
from pd_common.cli.bench.work import Case, Work
from pd_common.errors import DigestMismatch


@dataclass(frozen=True, slots=True)
class Options:
    """Options of this project's transport, as the services have them."""

    ucx_library: str
    ucx_binding: str
    ib_device: str | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer: seconds until posted and until visible."""

    bytes: int
    descriptors: int
    posting_s: float
    total_s: float


class Pair:
    """Connected from its creation to `end`, and stopped except within `running`.

    Stopping matters: some libraries poll without pause, which would slow down whatever is measured beside them.
    """

    def __init__(self, path: Path, contender: str, work: Work, options: Options, staging_bytes: int = 0) -> None:
        """Starts both processes and connects them.

        Raises:
            PdError: the library is not there, or does not work on this path.

        """
        self.path = path
        self.contender = contender
        self._children: list[Child] = []
        try:
            self.receiver = self._child(Side.RECEIVER, path.receiver, work, options, staging_bytes)
            self.sender = self._child(Side.SENDER, path.sender, work, options, staging_bytes)
            for child in self._children:
                child.opened()
            connected = self.sender.ask("connect", **self.receiver.ask("listen"))
        except BaseException:
            self.end()
            raise
        self.carrier: str = connected["carrier"]
        self.library: str = connected["library"]
        for child in self._children:
            child.stop()

    def _child(self, side: Side, place: Place, work: Work, options: Options, staging_bytes: int) -> Child:
        end = EndSettings(self.contender, place.host, **asdict(options))
        child = Child(Spec(side, end, work, staging_bytes), place)
        self._children.append(child)
        return child

    @contextmanager
    def running(self) -> Iterator[None]:
        """The pair has the processor within this block."""
        for child in self._children:
            child.go()
        try:
            yield
        finally:
            for child in self._children:
                child.stop()

    def transfer(self, case: Case) -> Sample:
        """Moves the pool once."""
        named = asdict(case)
        self.receiver.ask("expect", **named)
        return Sample(**self.sender.ask("write", **named))

    def checked_transfer(self, case: Case, digest: int) -> Sample:
        """Moves the pool once, into memory that held something else before.

        Raises:
            DigestMismatch: what arrived is not what was sent.

        """
        self.receiver.ask("clear")
        sample = self.transfer(case)
        if self.receiver.ask("digest", **asdict(case))["digest"] != digest:
            raise DigestMismatch("the bytes that arrived are not those that were sent")
        return sample

    def end(self) -> None:
        """Ends both processes."""
        for child in self._children:
            child.end()
