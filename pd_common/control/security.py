"""How a process proves who it is and what it asks of others: TLS and tickets, opened once from its settings."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass

from pd_common.config import SecurityConfig
from pd_common.control.connection import Dial, dial_plain, dial_with
from pd_common.control.tickets import TicketKeys
from pd_common.control.tls import Tls, open_tls

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Security:
    """None stands for what is off."""

    tls: Tls | None
    keys: TicketKeys | None

    @classmethod
    def open(cls, settings: SecurityConfig, host: str) -> Security:
        """Reads the files, and warns when more than this machine can reach `host` and something is off.

        Raises:
            InvalidRequest: the settings contradict each other, or a file cannot be used.

        """
        path = settings.ticket_key_file
        security = cls(open_tls(settings), None if path is None else TicketKeys.read(path))
        if not _is_loopback(host):
            security.warn_of_what_is_open(host)
        return security

    def warn_of_what_is_open(self, host: str) -> None:
        """Says it once, so that nobody overlooks it."""
        open_doors = []
        if self.tls is None:
            open_doors += [
                "  anybody on the way may read prompts and answers, and anybody may call what only prefill, decode and",
                "  router should; close it with --tls-cert, --tls-key and --tls-ca",
            ]
        elif not self.tls.verifies_clients:
            open_doors += [
                "  anybody may call it, with no certificate and so with no role: right for a router that faces people;",
                "  close it with --tls-verify-clients",
            ]
        if self.keys is None:
            open_doors += [
                "  anybody whom it serves may offer memory for, report on and abort rooms of others;",
                "  close it with --ticket-key-file on prefill, decode and router",
            ]
        if open_doors:
            _log.warning(
                "THIS PROCESS IS OPEN: it listens on %s, not only for this machine\n%s", host, "\n".join(open_doors)
            )

    @property
    def dial(self) -> Dial:
        """Makes connections of this process."""
        return dial_plain if self.tls is None else dial_with(self.tls)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
