"""A test authority and certificates of it, made on the spot with the `openssl` command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from syncguard.rpc.credentials import TlsFiles


def run(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self.certificate = folder / f"{name}.crt"
        self.key = folder / f"{name}.key"
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        run(
            "req",
            "-x509",
            *curve,
            "-keyout",
            str(self.key),
            "-out",
            str(self.certificate),
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
        )

    def issue(self, name: str) -> TlsFiles:
        """Return a certificate for localhost with this common name."""
        key, request, certificate = (self.folder / f"{name}.{end}" for end in ("key", "csr", "crt"))
        extensions = self.folder / f"{name}.ext"
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        run("req", *curve, "-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}")
        run(
            *("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self.key)),
            *("-CAcreateserial", "-days", "2", "-out", str(certificate), "-extfile", str(extensions)),
        )
        return TlsFiles(certificate, key, self.certificate)
