"""What is compared: a prefill and a decode behind a router, or one engine alone behind one, each on its cores."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pd_common.cli.bench.processes import LOOPBACK, Service, end_all
from pd_common.errors import CapacityExceeded

_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Cores:
    """Prefill has the first, and decode the second. Routers and the client share the first with prefill."""

    first: int
    second: int

    @classmethod
    def here(cls) -> Self:
        """The first two that this process may use.

        Raises:
            CapacityExceeded: there is only one.

        """
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2:
            raise CapacityExceeded("this needs two cores, one for prefill and one for decode; here is only one")
        return cls(usable[0], usable[1])

    @property
    def both(self) -> frozenset[int]:
        return frozenset((self.first, self.second))


@dataclass(frozen=True, slots=True)
class Engine:
    """One process with a model, and the cores that it is kept to; it computes with as many threads."""

    role: str
    cores: frozenset[int]
    flags: tuple[str, ...]

    def start(self, environment: Mapping[str, str]) -> Service:
        return Service(self.role, (*self.flags, "--threads", str(len(self.cores))), self.cores, environment)


@dataclass(frozen=True, slots=True)
class SetupSpec:
    """How a set-up is made."""

    name: str
    engines: tuple[Engine, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """One that runs: `addresses` are those of its engines, host:port, by role."""

    name: str
    model: str
    url: str
    addresses: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Starter:
    """Makes set-ups with one model on one pair of cores."""

    model: Path
    cores: Cores
    kv_cache_tokens: int

    def pair(
        self,
        name: str = "pair",
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> SetupSpec:
        """A prefill and a decode, each with one core."""
        return SetupSpec(
            name,
            (
                Engine("prefill", frozenset((self.cores.first,)), (*self._flags, *prefill)),
                Engine("decode", frozenset((self.cores.second,)), (*self._flags, *decode)),
            ),
            environment or {},
        )

    def alone(self, name: str, cores: frozenset[int]) -> SetupSpec:
        """A decode that has no prefill: it reads its prompts itself."""
        return SetupSpec(name, (Engine("decode", cores, self._flags),))

    @contextmanager
    def running(self, *specs: SetupSpec) -> Iterator[tuple[Setup, ...]]:
        """All of them at once, ready for requests.

        Raises:
            PeerLost: a process ended, or one does not come up.

        """
        services: list[Service] = []
        try:
            services.extend(engine.start(spec.environment) for spec in specs for engine in spec.engines)
            addresses = _addresses(specs, services)
            services.extend(self._router(spec, known) for spec, known in zip(specs, addresses, strict=True))
            urls = [_ready(router) for router in services[-len(specs) :]]
            yield tuple(
                Setup(spec.name, self.model.name, url, known)
                for spec, url, known in zip(specs, urls, addresses, strict=True)
            )
        finally:
            end_all(services)

    @property
    def _flags(self) -> tuple[str, ...]:
        tokens = str(self.kv_cache_tokens)
        return ("--model", str(self.model), "--dtype", "float32", "--device", "cpu", "--kv-cache-tokens", tokens)

    def _router(self, spec: SetupSpec, addresses: Mapping[str, str]) -> Service:
        flags = [flag for role, address in addresses.items() for flag in (f"--{role}", address)]
        return Service("router", flags, frozenset((self.cores.first,)), spec.environment)


def _addresses(specs: Sequence[SetupSpec], services: Sequence[Service]) -> list[dict[str, str]]:
    """Of each set-up's engines, by role, once they serve; `services` are all of them in order."""
    left = iter(services)
    return [
        {engine.role: f"{LOOPBACK}:{next(left).wait_until_it_serves()}" for engine in spec.engines} for spec in specs
    ]


def _ready(router: Service) -> str:
    """The router's URL, once a real request has gone through all that is behind it."""
    url = f"http://{LOOPBACK}:{router.wait_until_it_serves()}"
    give_up = time.monotonic() + _READY_S
    while (trouble := _trouble(url)) is not None:
        if not router.is_alive or time.monotonic() > give_up:
            raise router.trouble(f"is not ready ({trouble})")
        time.sleep(0.05)
    return url


def _trouble(url: str) -> str | None:
    """Why it is not ready; None when it is."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 - our own address
            return None
    except urllib.error.HTTPError as error:
        return error.read().decode(errors="replace")
    except OSError as error:
        return str(error)
