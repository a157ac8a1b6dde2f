"""A certificate of our own for localhost, 127.0.0.1 and pictures.example, and servers with it."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.http_server import Handler, LocalServer


class Certificate(NamedTuple):
    file: Path
    key: Path

    @property
    def trusting(self) -> ssl.SSLContext:
        """A client's context that trusts it, and nothing else."""
        return ssl.create_default_context(cafile=self.file)


def make_certificate(folder: Path) -> Certificate:
    """Skips the test where there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate")
    certificate = Certificate(folder / "certificate.pem", folder / "key.pem")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=pictures.example", "-addext",
         "subjectAltName=DNS:pictures.example,DNS:localhost,IP:127.0.0.1", "-keyout", str(certificate.key),
         "-out", str(certificate.file)],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate


class SecureServer(LocalServer):
    """Speaks TLS with this certificate."""

    def __init__(self, handler: type[Handler], certificate: Certificate) -> None:
        super().__init__(handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.file, certificate.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self.url = self.url.replace("http://", "https://")
