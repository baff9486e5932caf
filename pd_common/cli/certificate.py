"""The certificate of whoever types a command: the options that name it, and TLS with it. Loads little."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from pd_common import config
from pd_common.config import SecurityConfig
from pd_common.control.tls import Tls, open_tls

_F = TypeVar("_F", bound=Callable[..., Any])


def certificate_options(command: _F) -> _F:
    """They go to `open_certificate` together."""
    path = click.Path(path_type=Path)
    return config.apply_options(
        command,
        click.option("--tls-cert", type=path, help="Your certificate, PEM: turns TLS on.  [default: none]"),
        click.option("--tls-key", type=path, help="The certificate's private key, PEM.  [default: none]"),
        click.option("--tls-ca", type=path, help="Certificates of who may sign for others, PEM.  [default: none]"),
    )


def open_certificate(options: Mapping[str, Any]) -> Tls | None:
    """None without one. Raises as `open_tls`."""
    files = {name: options[name] for name in ("tls_cert", "tls_key", "tls_ca")}
    return open_tls(SecurityConfig(**files, tls_verify_clients=True, ticket_key_file=None))
