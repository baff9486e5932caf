"""A small authority for tests, and the three files that each process has."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pd_common.control.tls import Tls

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Files:
    """Where one process finds its certificate."""

    cert: Path
    key: Path
    ca: Path

    def tls(self, *, verifies_clients: bool = True) -> Tls:
        return Tls(self.cert, self.key, self.ca, verifies_clients=verifies_clients)


class Authority:
    """Signs certificates and puts them into files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._signed(self._key.public_key(), [], is_ca=True)

    def issue(self, *dns_names: str, to: str, uri: str | None = None) -> Files:
        """Puts a fresh certificate into the files of `to`, in place of an earlier one."""
        key = ec.generate_private_key(ec.SECP256R1())
        files = Files(*(self._directory / f"{to}.{kind}" for kind in ("crt", "key", "ca")))
        names: list[x509.GeneralName] = [x509.DNSName(name) for name in dns_names]
        if uri is not None:
            names.append(x509.UniformResourceIdentifier(uri))
        put(files.cert, _pem(self._signed(key.public_key(), names)))
        put(files.key, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, _CLEAR))
        put(files.ca, _pem(self.certificate))
        return files

    def _signed(
        self, key: ec.EllipticCurvePublicKey, names: list[x509.GeneralName], *, is_ca: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority" if is_ca else "process")])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


_CLEAR = serialization.NoEncryption()


def put(path: Path, content: bytes) -> None:
    """As a mounted secret changes: another file appears under the name."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(path)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
