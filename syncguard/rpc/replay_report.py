"""Replay verdicts and their policy to and from `syncguard.v1`. An unspecified status never becomes a pass."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, Final

from syncguard.errors import UsageError
from syncguard.replay import Difference, Power, RepeatNoise, ReplayPolicy, ReplayStatus, ReplayVerdict, WorstToken
from syncguard.v1 import agent_service_pb2, replay_pb2

_STATUS: Final = {
    ReplayStatus.PASS: replay_pb2.REPLAY_STATUS_PASS,
    ReplayStatus.FAIL: replay_pb2.REPLAY_STATUS_FAIL,
    ReplayStatus.NO_POWER: replay_pb2.REPLAY_STATUS_NO_POWER,
    ReplayStatus.UNSTABLE: replay_pb2.REPLAY_STATUS_UNSTABLE,
    ReplayStatus.INCOMPLETE: replay_pb2.REPLAY_STATUS_INCOMPLETE,
}
_STATUS_BACK: Final = {number: status for status, number in _STATUS.items()}
_LIMITS: Final = tuple(f.name for f in fields(ReplayPolicy) if f.name != "require_warm")
_OWN_FIELDS: Final = ("mae_limit_nats", "noise_factor")


def policy_to_proto(policy: ReplayPolicy, *, waived_because: str = "", warm_waived_because: str = "") -> Any:
    """Return the message of a policy."""
    return agent_service_pb2.VerifyRequest.Policy(
        **{name: getattr(policy, name) for name in _OWN_FIELDS},
        limits={name: float(getattr(policy, name)) for name in _LIMITS if name not in _OWN_FIELDS},
        replay_waived_because=waived_because,
        warm_waived_because=warm_waived_because or ("" if policy.require_warm else "by the policy"),
    )


def policy_from_proto(message: Any) -> ReplayPolicy:
    """Return the policy of a message; a limit that is absent, or zero in its own field, takes the default.

    Raises:
        UsageError: A limit without a rule here, not finite, or negative.
    """
    stated = {name: getattr(message, name) for name in _OWN_FIELDS if getattr(message, name)} | dict(message.limits)
    for name, value in stated.items():
        if name not in _LIMITS or not math.isfinite(value) or value < 0:
            raise UsageError(
                "a limit of the replay policy",
                expected=f"a finite number of 0 or more for one of {' '.join(_LIMITS)}",
                found=f"{name}={value}",
                todo="install one version on both sides",
            )
    defaults = ReplayPolicy()
    kept = {name: type(getattr(defaults, name))(value) for name, value in stated.items()}
    return replace(defaults, **kept, require_warm=not message.warm_waived_because)


def report_to_proto(verdict: ReplayVerdict) -> Any:
    """Return the message of a replay verdict."""
    report = replay_pb2.ReplayReport(
        status=_STATUS[verdict.status],
        reason=verdict.reason,
        limit_nats=verdict.limit_nats or 0.0,
        limit_source=verdict.limit_reason,
        differences=[_difference_to_proto(figure) for figure in verdict.figures],
        fingerprint=verdict.fingerprint,
        fixed_limit_nats=verdict.fixed_limit_nats or 0.0,
        relative_limit_nats=verdict.relative_limit_nats or 0.0,
        measured_noise_nats=verdict.measured_noise_nats or 0.0,
        repeats=[
            replay_pb2.RepeatNoise(
                label=noise.label,
                passes=noise.passes,
                mae_nats=noise.mae,
                worst_pair_mae_nats=noise.worst_pair_mae,
                p99_nats=noise.p99,
                max_nats=noise.maximum,
            )
            for noise in verdict.repeats
        ],
    )
    if verdict.power is not None:
        sees, power = verdict.power.sees, replay_pb2.ReplayPower
        report.power.CopyFrom(
            power(
                sight=power.SIGHT_SEES if sees else power.SIGHT_BLIND,
                change_mae_nats=verdict.power.change_mae_nats,
                needed_nats=verdict.power.needed_nats,
                followed=verdict.power.followed,
            )
        )
    return report


def report_from_proto(message: Any) -> ReplayVerdict | None:
    """Return the replay verdict of a message; None where no replay was made."""
    if message.status not in _STATUS_BACK:
        return None
    power = None
    if message.HasField("power"):
        power = Power(
            _optional(message.power, "change_mae_nats"),
            message.power.needed_nats,
            message.power.sight == replay_pb2.ReplayPower.SIGHT_SEES,
            _optional(message.power, "followed"),
        )
    return ReplayVerdict(
        status=_STATUS_BACK[message.status],
        reason=message.reason,
        fingerprint=message.fingerprint,
        limit_nats=message.limit_nats or None,
        fixed_limit_nats=message.fixed_limit_nats or None,
        relative_limit_nats=message.relative_limit_nats,
        limit_reason=message.limit_source,
        measured_noise_nats=message.measured_noise_nats,
        power=power,
        figures=tuple(_difference_from_proto(figure) for figure in message.differences),
        repeats=tuple(
            RepeatNoise(
                label=noise.label,
                passes=noise.passes,
                mae=noise.mae_nats,
                worst_pair_mae=noise.worst_pair_mae_nats,
                p99=noise.p99_nats,
                maximum=noise.max_nats,
                exact=noise.max_nats == 0,
            )
            for noise in message.repeats
        ),
    )


def _optional(message: Any, name: str) -> float | None:
    return float(getattr(message, name)) if message.HasField(name) else None


def _difference_to_proto(figure: Difference) -> Any:
    return replay_pb2.Difference(
        label=figure.label,
        count=figure.count,
        signed_mean_nats=figure.signed_mean,
        mae_nats=figure.mae,
        p95_nats=figure.p95,
        p99_nats=figure.p99,
        max_nats=figure.maximum,
        median_nats=figure.median,
        first_mae_nats=figure.first_mae,
        rest_mae_nats=figure.rest_mae,
        worst=[replay_pb2.WorstToken(position=t.position, difference_nats=t.difference) for t in figure.worst],
    )


def _difference_from_proto(message: Any) -> Difference:
    return Difference(
        label=message.label,
        count=message.count,
        signed_mean=message.signed_mean_nats,
        mae=message.mae_nats,
        median=message.median_nats,
        p95=message.p95_nats,
        p99=message.p99_nats,
        maximum=message.max_nats,
        first_mae=_optional(message, "first_mae_nats"),
        rest_mae=_optional(message, "rest_mae_nats"),
        worst=tuple(WorstToken(token.position, token.difference_nats) for token in message.worst),
    )
