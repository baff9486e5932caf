"""Where a router is told that its workers are: an address is one of them, a name any number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from pd_common.config import ADDRESS
from pd_common.types import BootstrapAddress

_DNS = "dns+"


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name, every address of which is one worker. They come and go as what the name stands for changes."""

    host: str
    port: int

    @property
    def target(self) -> str:
        """As it is given."""
        return f"{_DNS}{BootstrapAddress(self.host, self.port).target}"


Source = BootstrapAddress | DnsName


class _WorkerSource(click.ParamType[Source]):
    """HOST:PORT is one worker, dns+NAME:PORT as many as the name has addresses."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Source:
        if isinstance(value, DnsName):
            return value
        is_name = isinstance(value, str) and value.startswith(_DNS)
        address = ADDRESS.convert(value.removeprefix(_DNS) if is_name else value, param, ctx)
        return DnsName(address.host, address.port) if is_name else address


WORKER_SOURCE = _WorkerSource()
