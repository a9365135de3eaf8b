"""Who may speak: TLS credentials, loopback rules and roles.

Closed by default: an address off loopback is refused without TLS. Roles are ordered (observe < verify < admin) and come
from the common name of a verified client certificate or from a bearer token. Tokens and keys are read from files or the
environment and are never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from syncguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TOKEN_BYTES_MIN: Final = 16


class Role(IntEnum):
    """What a caller may do; a higher role may do all that a lower one may."""

    NONE = 0
    OBSERVE = 1
    VERIFY = 2
    ADMIN = 3

    @classmethod
    def named(cls, text: str) -> Role:
        """Return the role of a name.

        Raises:
            UsageError: There is none of this name.
        """
        try:
            return cls[text.strip().upper()]
        except KeyError:
            raise UsageError("role", expected="observe, verify or admin", found=repr(text)) from None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side.

    Attributes:
        certificate: Own certificate chain.
        key: Own private key.
        authority: Certificate authority that the other side's certificate must come from.
    """

    certificate: Path
    key: Path
    authority: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return key, certificate and authority.

        Raises:
            UsageError: One of them cannot be read or is no PEM file.
        """
        return _pem(self.key), _pem(self.certificate), _pem(self.authority)


def _pem(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError("cannot read a TLS file", found=error.strerror or error, where=path) from error
    if b"-----BEGIN " not in data:
        raise UsageError("not a TLS file", expected="PEM", found=f"{len(data)} bytes", where=path)
    return data


def read_secret(path: Path, *, what: str = "a secret", least: int = TOKEN_BYTES_MIN) -> str:
    """Return a secret from a file, without the white space around it.

    Args:
        path: The file.
        what: What it is, for the error.
        least: Fewest characters; fewer than a token has only for secrets that others chose.

    Raises:
        UsageError: It cannot be read, or is too short to be a secret.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {what}", found=type(error).__name__, where=path) from error
    if len(text) < least:
        raise UsageError(f"{what} is too short", expected=f"{least} characters or more", where=path)
    return text


@dataclass(frozen=True, slots=True)
class Access:
    """Which caller has which role.

    Attributes:
        by_name: Common name of a client certificate → role.
        by_token: SHA-256 of a bearer token → role; the tokens themselves are not kept.
        anyone: Role of a caller without either; ADMIN on loopback without TLS, else NONE.
    """

    by_name: Mapping[str, Role] = field(default_factory=dict)
    by_token: Mapping[bytes, Role] = field(default_factory=dict)
    anyone: Role = Role.NONE

    @classmethod
    def of(
        cls, *, names: Sequence[str] = (), tokens: Mapping[str, Role] | None = None, anyone: Role = Role.NONE
    ) -> Access:
        """Build from `NAME=ROLE` texts and tokens.

        Raises:
            UsageError: A text is not `NAME=ROLE`.
        """
        by_name = {}
        for text in names:
            name, equals, role = text.rpartition("=")
            if not equals or not name:
                raise UsageError("role of a certificate name", expected="NAME=ROLE", found=repr(text))
            by_name[name] = Role.named(role)
        hashed = {hashlib.sha256(token.encode()).digest(): role for token, role in (tokens or {}).items()}
        return cls(by_name, hashed, anyone)

    def role(self, context: Any) -> Role:
        """Return the role of the caller of a gRPC call."""
        roles = [self.anyone]
        auth = context.auth_context()
        # Only names that mutual TLS has verified are here; without a client certificate there are none.
        roles += [
            self.by_name.get(name.decode(errors="replace"), Role.NONE) for name in auth.get("x509_common_name", ())
        ]
        for key, value in context.invocation_metadata():
            if key == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
                given = hashlib.sha256(value.removeprefix("Bearer ").encode()).digest()
                # Every token is compared, in constant time, so that timing tells nothing about which came close.
                roles += [role for known, role in self.by_token.items() if hmac.compare_digest(known, given)]
        return max(roles)


def access_of(names: Sequence[str], token_files: Sequence[str]) -> Access | None:
    """Return the roles that a daemon was told, None where it was told none.

    Args:
        names: `NAME=ROLE` of client certificates.
        token_files: `ROLE=FILE` of bearer tokens.

    Raises:
        UsageError: An unknown role, or a token that cannot be read.
    """
    if not names and not token_files:
        return None
    tokens = {}
    for text in token_files:
        role, equals, path = text.partition("=")
        if not equals:
            raise UsageError("token file", expected="ROLE=FILE", found=repr(text))
        tokens[read_secret(Path(path))] = Role.named(role)
    return Access.of(names=names, tokens=tokens)


def is_loopback(address: str) -> bool:
    """Return whether an address `HOST:PORT`, `[V6]:PORT` or `unix:PATH` stays on this machine."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listen(address: str, tls: TlsFiles | None) -> None:
    """Refuse to listen off loopback without TLS.

    Raises:
        UsageError: The address is no `HOST:PORT`, or is off loopback without TLS.
    """
    if not address.startswith("unix:"):
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:  # noqa: PLR2004 - a port
            raise UsageError("address to listen on", expected="HOST:PORT", found=repr(address))
    if tls is None and not is_loopback(address):
        raise UsageError(
            "refusing to listen off loopback without credentials",
            expected="--tls-cert, --tls-key and --tls-ca, or an address on loopback",
            found=address,
            todo="readiness that anyone may set is worth nothing; give the agent a certificate",
        )


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Return mutual-TLS credentials: a client without a certificate of the authority is not let in."""
    key, certificate, authority = tls.read()
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=authority, require_client_auth=True)


@dataclass(frozen=True, slots=True)
class ChannelCredentials:
    """How a client shows who it is.

    Attributes:
        tls: Its certificate, or None for a plain connection on loopback.
        token: Bearer token, or empty.
        server_name: Name that the server's certificate carries, where it is not the address.
    """

    tls: TlsFiles | None = None
    token: str = field(default="", repr=False)
    server_name: str = ""

    def channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """Open a channel.

        Raises:
            UsageError: The address is off loopback and there is no TLS, or a file cannot be read.
        """
        if self.tls is None:
            if not is_loopback(address):
                raise UsageError(
                    "refusing a plain connection off loopback",
                    expected="TLS files",
                    found=address,
                    todo="pass the client's certificate, key and authority",
                )
            return grpc.insecure_channel(address, options=list(options))
        key, certificate, authority = self.tls.read()
        name = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.secure_channel(address, credentials, options=[*options, *name])

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def client_credentials(
    *, ca: Path | None = None, cert: Path | None = None, key: Path | None = None, token_file: Path | None = None
) -> ChannelCredentials:
    """Return a client's credentials from the files that a command line names.

    Raises:
        UsageError: A certificate without its key or authority, or a token that cannot be read.
    """
    given = [path for path in (ca, cert, key) if path is not None]
    if given and (ca is None or cert is None or key is None):
        raise UsageError(
            "half of the TLS files",
            expected="--tls-ca, --tls-cert and --tls-key together",
            found=" ".join(map(str, given)),
            todo="the agent asks for a certificate, and the client checks the agent's",
        )
    tls = TlsFiles(cert, key, ca) if ca is not None and cert is not None and key is not None else None
    return ChannelCredentials(tls, read_secret(token_file) if token_file is not None else "")


class RoleInterceptor(grpc.ServerInterceptor):  # type: ignore[misc] # grpc is untyped
    """Refuses calls whose caller lacks the needed role, before their message is read.

    Args:
        access: Who has which role.
        needed: Full method name → role. Methods that are not named need ADMIN, health checks none.
    """

    def __init__(self, access: Access, needed: Mapping[str, Role]) -> None:
        """Keep the rules."""
        self._access = access
        self._needed = needed

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Wrap the handler with the check."""
        handler = continuation(details)
        method = details.method
        needed = Role.NONE if method.startswith("/grpc.health.v1.Health/") else self._needed.get(method, Role.ADMIN)
        if handler is None or needed is Role.NONE:
            return handler
        access = self._access

        def check(context: Any) -> None:
            if access.role(context) < needed:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{method} needs the role {needed.name.lower()}")

        return _checked(handler, check)


def _checked(handler: Any, check: Callable[[Any], None]) -> Any:
    if handler.response_streaming:
        inner_stream = handler.stream_stream if handler.request_streaming else handler.unary_stream

        def streaming(request: Any, context: Any) -> Any:
            check(context)
            yield from inner_stream(request, context)

        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(streaming, handler.request_deserializer, handler.response_serializer)
    inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

    def single(request: Any, context: Any) -> Any:
        check(context)
        return inner(request, context)

    make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    return make(single, handler.request_deserializer, handler.response_serializer)
