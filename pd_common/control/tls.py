"""TLS from mounted files: credentials of servers, channels and HTTP, each new connection with the files of the day.

A certificate speaks for a role when one of its DNS names is `pd-prefill`, `pd-decode` or `pd-router`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from pd_common.config import SecurityConfig
from pd_common.control.files import Mounted
from pd_common.errors import InvalidRequest
from pd_common.types import Role


def name_of(role: Role) -> str:
    """The DNS name that a certificate for this role has."""
    return f"pd-{role.value}"


@dataclass(frozen=True, slots=True)
class _Pems:
    """What the files held at one time, checked to fit together."""

    cert: bytes
    key: bytes
    ca: bytes
    http: ssl.SSLContext


class Tls:
    """This process's certificate, and whom it believes. `verifies_clients`: callers need a certificate as well."""

    def __init__(self, cert: Path, key: Path, ca: Path, *, verifies_clients: bool) -> None:
        """Reads the files.

        Raises:
            InvalidRequest: one cannot be read, or they do not fit together.

        """
        self.verifies_clients = verifies_clients
        self._files = Mounted([cert, key, ca], lambda: _read(cert, key, ca, verifies_clients=verifies_clients))

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a port that looks at the files before each handshake."""
        return grpc.dynamic_ssl_server_credentials(self._server_files(), self._server_files, self.verifies_clients)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """From the files as they are now; a channel keeps them for all of its life."""
        now = self._files.current()
        return grpc.ssl_channel_credentials(now.ca, now.key, now.cert)

    def http_context(self) -> ssl.SSLContext:
        """For an HTTP server; each handshake gets the files of its time."""

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._files.current().http

        context = self._files.current().http
        context.sni_callback = choose
        return context

    def _server_files(self) -> grpc.ServerCertificateConfiguration:
        now = self._files.current()
        return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], now.ca)


def open_tls(settings: SecurityConfig) -> Tls | None:
    """None when TLS is off.

    Raises:
        InvalidRequest: some of the files are named and others are not, or as `Tls`.

    """
    cert, key, ca = settings.tls_cert, settings.tls_key, settings.tls_ca
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        missing = next(name for name in ("tls_cert", "tls_key", "tls_ca") if getattr(settings, name) is None)
        raise InvalidRequest(f"TLS needs --{missing.replace('_', '-')} as well", field=missing)
    return Tls(cert, key, ca, verifies_clients=settings.tls_verify_clients)


def _read(cert: Path, key: Path, ca: Path, *, verifies_clients: bool) -> _Pems:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3  # Python cannot keep earlier ones from resuming
        context.num_tickets = 0  # no resuming: that shows no certificate, and would outlive an authority
        context.load_cert_chain(cert, key, password="")  # without a password OpenSSL would ask at the terminal
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED if verifies_clients else ssl.CERT_NONE
        return _Pems(cert.read_bytes(), key.read_bytes(), ca.read_bytes(), context)
    except OSError as error:  # an SSLError is one too
        raise InvalidRequest(
            f"{cert}, {key} and {ca} are not a certificate, its key and its authorities: {error}", field="tls_cert"
        ) from error
