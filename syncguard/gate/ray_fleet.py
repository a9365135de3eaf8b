"""A gate over agents that are Ray actors (`syncguard.agent.ray_actor`); needs the extra `ray`.

Ray is asked for the agents' addresses only. From then on the gate speaks gRPC to them, under the credentials that it is
given: an actor that dies is an agent that does not answer, and its worker is not ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncguard.errors import UnreachableError
from syncguard.gate.controller import Gate

if TYPE_CHECKING:
    from collections.abc import Iterable


def addresses_of(actors: Iterable[Any], *, timeout_s: float = 60.0) -> list[str]:
    """Return the gRPC address of each agent, waiting until its engine answered.

    Args:
        actors: Actor handles of `AgentActor`.
        timeout_s: Longest wait for all of them together.

    Raises:
        UnreachableError: An actor died or could not start, or did not answer in time.
    """
    import ray

    asked = [actor.address.remote() for actor in actors]
    try:
        return [str(address) for address in ray.get(asked, timeout=timeout_s)]
    except ray.exceptions.RayError as error:
        raise UnreachableError(
            "an agent's actor did not tell its address",
            expected=f"{len(asked)} addresses within {timeout_s:g} s",
            found=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}",
            where="ray",
            todo="see the actor's log; is its engine up, and are its certificate files on that node?",
        ) from error


def gate_of_actors(actors: Iterable[Any], *, start_timeout_s: float = 60.0, **options: Any) -> Gate:
    """Return a gate over these agents; `options` are those of `Gate`.

    Raises:
        UnreachableError: An actor died or could not start, or did not answer in time.
        UsageError: No actors, one named twice, or credentials that cannot be used.
    """
    return Gate(addresses_of(actors, timeout_s=start_timeout_s), **options)
