"""The TLS and token options that commands share when they speak to an agent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from syncguard.errors import UsageError

if TYPE_CHECKING:
    from syncguard.rpc.credentials import ChannelCredentials


def client_credentials(
    ca: Path | None, cert: Path | None, key: Path | None, token_file: Path | None
) -> ChannelCredentials:
    """Return what a command's TLS and token options say.

    Raises:
        UsageError: Half of the TLS files, or a token that cannot be read.
    """
    from syncguard.rpc.credentials import ChannelCredentials, TlsFiles, read_secret

    tls = None
    if ca is not None and cert is not None and key is not None:
        tls = TlsFiles(certificate=cert, key=key, authority=ca)
    elif ca is not None or cert is not None or key is not None:
        raise UsageError(
            "TLS files of the client",
            expected="--tls-ca, --tls-cert and --tls-key together, or none of them",
            found=" ".join(str(path) for path in (ca, cert, key) if path is not None),
        )
    return ChannelCredentials(tls=tls, token=read_secret(token_file) if token_file is not None else "")
