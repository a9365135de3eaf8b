"""How an agent and the probe inside an engine rank talk through a channel that carries only text.

A request is an action string, `syncguard.observe:{"spec_version":1,...}`; an answer is base64 text of zlib-compressed
msgpack. Partial digests travel as packed integers, 24 bytes a binding. No pickle, and sizes are bounded both ways.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import msgspec

from syncguard.digest import PartialDigest
from syncguard.engines.base import RankScrub, RankStatus
from syncguard.errors import EngineError, SpecVersionError, SyncguardError, UnsupportedError, UsageError
from syncguard.layout.model import RankLayout
from syncguard.manifest.model import RankObservation
from syncguard.spec import SPEC_VERSION

ACTION_PREFIX: Final = "syncguard."
ANSWER_LIMIT_BYTES: Final = 1 << 30
_PACKED: Final = struct.Struct("<QQQ")


class ProbeOp(str, Enum):
    """What a probe can be asked; all of them only read."""

    STATUS = "status"
    LAYOUT = "layout"
    OBSERVE = "observe"
    COLLECT = "collect"
    """What later pipeline stages said to the request of a nonce."""
    SCRUB = "scrub"


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """A question to every rank.

    Attributes:
        op: What is asked.
        key_seed_hex: Key seed for `observe` and `scrub`, in hex.
        nonce: Random name of the request, under which later pipeline stages leave their answers.
        known_layouts: Fingerprints of the layouts that the agent has kept; a rank does not send one of these again.
        turn: Turn of a `scrub`.
        budget_bytes: Bytes that each rank digests in a `scrub`.
        spec_version: Specification that the agent speaks.
    """

    op: ProbeOp
    key_seed_hex: str = ""
    nonce: str = ""
    known_layouts: tuple[str, ...] = ()
    turn: int = 0
    budget_bytes: int = 0
    spec_version: int = SPEC_VERSION


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """One rank's answer; exactly the field of the question is set, or `error`.

    Attributes:
        status: Answer to `status`.
        layout: Answer to `layout`.
        known_layout: Answer to `layout`, when it is still one that the agent knows: its fingerprint.
        observation: Answer to `observe`, without its partial digests.
        scrub: Answer to `scrub`.
        packed_partials: Partial digests of the observation: count, coverage, data as little-endian u64, one after the other.
        error: Parts of the error that the probe met, as `SyncguardError.as_dict`.
        spec_version: Specification that the probe speaks.
    """

    status: RankStatus | None = None
    layout: RankLayout | None = None
    known_layout: str = ""
    observation: RankObservation | None = None
    scrub: RankScrub | None = None
    packed_partials: bytes = b""
    error: dict[str, str | int] = field(default_factory=dict)
    spec_version: int = SPEC_VERSION


class _Version(msgspec.Struct):
    spec_version: int


def encode_request(request: ProbeRequest) -> str:
    """Return the action string."""
    return f"{ACTION_PREFIX}{request.op.value}:{msgspec.json.encode(request).decode()}"


def decode_request(action: str) -> ProbeRequest:
    """Read an action string back.

    Raises:
        UsageError: Not a request of ours.
        SpecVersionError: The agent speaks another specification.
    """
    _, _, text = action.removeprefix(ACTION_PREFIX).partition(":")
    try:
        version = msgspec.json.decode(text, type=_Version).spec_version
        if version != SPEC_VERSION:
            raise SpecVersionError(
                "specification of the agent",
                expected=SPEC_VERSION,
                found=version,
                where="in-rank probe",
                todo="install one version of syncguard beside the engine and beside the agent",
            )
        return msgspec.json.decode(text, type=ProbeRequest)
    except msgspec.MsgspecError as error:
        raise UsageError("probe request", expected="a syncguard action", found=error, where="in-rank probe") from error


def pack_observation(observation: RankObservation) -> ProbeAnswer:
    """Return the answer that carries an observation."""
    packed = b"".join(_PACKED.pack(p.count, p.coverage, p.data) for p in observation.partials)
    return ProbeAnswer(observation=replace(observation, partials=()), packed_partials=packed)


def unpack_observation(answer: ProbeAnswer) -> RankObservation:
    """Return the observation of an answer.

    Raises:
        EngineError: The answer holds none, or its packed part is torn.
    """
    if answer.observation is None or len(answer.packed_partials) % _PACKED.size:
        raise EngineError("answer of the in-rank probe", expected="an observation", found="none, or a torn one")
    partials = tuple(PartialDigest(*values) for values in _PACKED.iter_unpack(answer.packed_partials))
    return replace(answer.observation, partials=partials)


def encode_answer(answer: ProbeAnswer) -> str:
    """Return the text of an answer."""
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(answer), 1)).decode()


def decode_answer(text: str, where: str) -> ProbeAnswer:
    """Read an answer back, raising again what the probe met.

    Raises:
        EngineError: Not an answer of ours, too large, or an error inside the rank.
        SpecVersionError: The probe speaks another specification.
        UnsupportedError: The probe has no rule for what was asked.
    """
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), ANSWER_LIMIT_BYTES)
        if inflater.unconsumed_tail or not inflater.eof:
            raise EngineError("answer of the in-rank probe", found="too large or cut short", where=where)
        version = msgspec.msgpack.decode(data, type=_Version).spec_version
        if version != SPEC_VERSION:
            raise SpecVersionError(
                "specification of the in-rank probe",
                expected=SPEC_VERSION,
                found=version,
                where=where,
                todo="install one version of syncguard beside the engine and beside the agent",
            )
        answer = msgspec.msgpack.decode(data, type=ProbeAnswer)
    except (binascii.Error, zlib.error, msgspec.MsgspecError) as error:
        raise EngineError(
            "answer of the in-rank probe", expected="a syncguard answer", found=error, where=where
        ) from error
    if answer.error:
        raise _raised(answer.error, where)
    return answer


def _raised(parts: dict[str, str | int], where: str) -> SyncguardError:
    classes: dict[str, type[SyncguardError]] = {
        kind.code: kind for kind in (SpecVersionError, UnsupportedError, UsageError)
    }
    kind = classes.get(str(parts.get("code")), EngineError)
    found = " ".join(str(parts[key]) for key in ("found", "where") if parts.get(key))
    return kind(
        str(parts.get("what", "in-rank probe")),
        expected=parts.get("expected", ""),
        found=found,
        where=where,
        todo=str(parts.get("todo", "")),
    )
