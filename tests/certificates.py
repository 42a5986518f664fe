"""Certificates for servers of tests, made by the openssl of this machine."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

__all__ = ["own_certificate"]


def own_certificate(place: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for 127.0.0.1 that vouches for itself, and what a server needs to show it."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    certificate, key = place / "certificate.pem", place / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=prorld test", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context
