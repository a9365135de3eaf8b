"""Errors across the wire: a `SyncguardError` leaves as a status with rich details and arrives as the same error.

Details follow google.rpc: one `ErrorInfo` with the stable code as its reason and the parts of the error as metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from syncguard import errors
from syncguard.errors import SyncguardError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DOMAIN: Final = "syncguard"
_PARTS: Final = ("what", "expected", "found", "where", "todo")
_TEXT_LIMIT: Final = 2_000
"""Characters of a part on the wire: trailing metadata is small (8 KiB by default in grpc)."""

_STATUS_OF: Final = {
    "USAGE": code_pb2.INVALID_ARGUMENT,
    "VERSION_ORDER": code_pb2.FAILED_PRECONDITION,
    "INCOMPLETE": code_pb2.FAILED_PRECONDITION,
    "UNSUPPORTED": code_pb2.UNIMPLEMENTED,
    "UNREACHABLE": code_pb2.UNAVAILABLE,
    "ENGINE": code_pb2.UNAVAILABLE,
    "OBSERVATION_RACED": code_pb2.ABORTED,
    "SPEC_VERSION": code_pb2.FAILED_PRECONDITION,
}


def _tree(root: type[SyncguardError]) -> Iterator[type[SyncguardError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def _error_class(code: str) -> type[SyncguardError] | None:
    return next((cls for cls in _tree(errors.SyncguardError) if cls.code == code), None)


def guarded(context: Any, work: Callable[[], Any]) -> Any:
    """Run, and end the call with the error's own status when it fails."""
    try:
        return work()
    except SyncguardError as error:
        abort(context, error)


def abort(context: Any, error: SyncguardError) -> NoReturn:
    """End a call on the server with the error's status and parts."""
    info = error_details_pb2.ErrorInfo(
        reason=error.code,
        domain=DOMAIN,
        metadata={part: str(getattr(error, part))[:_TEXT_LIMIT] for part in _PARTS},
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(
        code=_STATUS_OF.get(error.code, code_pb2.INVALID_ARGUMENT),
        message=str(error)[:_TEXT_LIMIT],
        details=[detail],
    )
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError  # abort raises


def from_rpc_error(error: grpc.RpcError, where: str) -> SyncguardError:
    """Return the error that the other side raised, or the one that fits the transport's status.

    Args:
        error: As raised by a stub.
        where: Address of the other side.
    """
    found = _from_details(error, where)
    if found is not None:
        return found
    code = error.code() if hasattr(error, "code") else None
    text = error.details() if hasattr(error, "details") else str(error)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return errors.UsageError(
            "the agent refused the credentials",
            expected="a certificate or token of the needed role",
            found=text,
            where=where,
            todo="pass --tls-cert and --tls-key, or a token file",
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.SpecVersionError(
            "a call that the other side does not have",
            found=text,
            where=where,
            todo="install one version on both sides",
        )
    if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT):
        return errors.UsageError("the other side refused the message", found=text, where=where)
    return UnreachableError(
        "no answer",
        expected="an answer in time",
        found=f"{code.name if code is not None else 'no status'}: {text}",
        where=where,
        todo="check the address, that the process runs, and its TLS settings",
    )


def _from_details(error: grpc.RpcError, where: str) -> SyncguardError | None:
    try:
        status = rpc_status.from_call(error)
    except (ValueError, AttributeError):
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            found = _error_class(info.reason)
            if found is None:
                return None
            parts = dict(info.metadata)
            return found(
                parts.get("what", ""),
                expected=parts.get("expected", ""),
                found=parts.get("found", ""),
                where=parts.get("where", "") or where,
                todo=parts.get("todo", ""),
            )
    return None
