"""Readiness on its way to those that route requests: the smg gateway's worker pool, and Kubernetes pods.

A router is told to remove a worker before a push begins and to admit it after READY. `remove` returns only when no new
request can reach the worker; requests in flight go on.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httpx

from syncguard.errors import EngineError, UnreachableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WAIT_S: Final = 60.0
_POLL_S: Final = 0.1
_BUSY: Final = ("WORKER_ALREADY_EXISTS", "WORKER_CREATE_IN_PROGRESS")
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONDITION: Final = "syncguard.dev/weights-verified"


@dataclass(slots=True)
class SmgRouter:
    """The worker pool of an smg gateway (1.13.0), through its worker API.

    Attributes:
        base_url: Of the gateway.
        workers: Worker name → the URL under which the gateway knows it.
        api_key: The gateway's key, sent as a bearer token.
        wait_s: Longest time for a removal or a registration to come through.
        transport: HTTP transport, for proxies.
    """

    base_url: str
    workers: Mapping[str, str]
    api_key: str = field(default="", repr=False)
    wait_s: float = WAIT_S
    transport: httpx.BaseTransport | None = None
    sleep: Callable[[float], object] = time.sleep
    _client: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Open a connection pool; nothing is sent yet."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self._client = httpx.Client(
            base_url=self.base_url, headers=headers, timeout=10.0, transport=self.transport, trust_env=False
        )

    @classmethod
    def of(cls, base_url: str, pairs: Sequence[str]) -> SmgRouter:
        """Build from `NAME=URL` texts.

        Raises:
            UsageError: A text is not `NAME=URL`, or there is none.
        """
        workers: dict[str, str] = {}
        for text in pairs:
            name, equals, url = text.partition("=")
            if not equals or not url.startswith("http"):
                raise UsageError("worker of the gateway", expected="NAME=URL", found=repr(text))
            if name in workers or url.rstrip("/") in workers.values():
                raise UsageError("worker of the gateway", expected="each name and each URL once", found=repr(text))
            workers[name] = url.rstrip("/")
        if not workers:
            raise UsageError("no worker of the gateway", expected="--smg-worker NAME=URL for each", found="none")
        return cls(base_url.rstrip("/"), workers)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def admit(self, worker: str) -> None:
        """Register the worker, and return when the gateway routes to it.

        Raises:
            UnreachableError: The gateway did not answer, refused, or did not take the worker in time.
        """
        url = self._url(worker)
        deadline_s = time.monotonic() + self.wait_s
        while True:
            entry = self._entry(url)
            if entry is not None and entry.get("is_healthy") and entry.get("status") == "ready":
                return
            if entry is None:
                answer = self._send("POST", "/workers", json={"url": url})
                # A removal keeps the name taken for some seconds, and a registration is not listed until it is through.
                busy = any(code in answer.text for code in _BUSY)
                if answer.status_code >= 400 and not busy:  # noqa: PLR2004 - HTTP
                    raise self._refused("register a worker", answer)
            self._wait(deadline_s, worker, "a worker that is ready", entry)

    def remove(self, worker: str, because: str) -> None:  # noqa: ARG002 - for routers that can say it
        """Take the worker out, and return when no request can reach it and none runs on it.

        The gateway stops routing at once (`draining`), lets requests in flight finish, and forgets the worker some 5 s
        later, finished or not; so the worker itself is asked whether it is idle.

        Raises:
            UnreachableError: The gateway did not answer, refused or kept the worker, or requests never finished.
        """
        url = self._url(worker)
        deadline_s = time.monotonic() + self.wait_s
        asked: set[str] = set()
        while True:
            entry = self._entry(url)
            if entry is None or (entry.get("status") == "draining" and not entry.get("load")):
                break
            name = str(entry["id"])
            if name not in asked:
                asked.add(name)
                answer = self._send("DELETE", f"/workers/{quote(name, safe='')}")
                if answer.status_code >= 400 and answer.status_code != 404:  # noqa: PLR2004 - HTTP
                    raise self._refused("remove a worker", answer)
                continue
            self._wait(deadline_s, worker, "a removed worker", entry)
        while (running := self._running(url)) > 0:
            self._wait(deadline_s, worker, "an idle worker", {"status": f"{running} requests run on it"})

    def _running(self, url: str) -> int:
        """Return the requests that run or wait on the worker (SGLang 0.5.23 `/v1/loads`); 0 when it cannot say."""
        try:
            with httpx.Client(timeout=5.0, transport=self.transport, trust_env=False) as client:
                loads = client.get(f"{url}/v1/loads", params={"include": "core"}).json()["loads"]
            return sum(int(load[key]) for load in loads for key in ("num_running_reqs", "num_waiting_reqs"))
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return 0

    def _url(self, worker: str) -> str:
        url = self.workers.get(worker)
        if url is None:
            raise UsageError(
                "worker unknown to the router", expected=" ".join(self.workers), found=worker, where=self.base_url
            )
        return url

    def _entry(self, url: str) -> dict[str, Any] | None:
        answer = self._send("GET", "/workers")
        try:
            entries = answer.json()["workers"]
            return next((dict(entry) for entry in entries if str(entry["url"]).rstrip("/") == url), None)
        except (ValueError, KeyError, TypeError) as error:
            raise self._refused("list workers", answer) from error

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise UnreachableError(
                "the gateway did not answer",
                found=f"{type(error).__name__}: {error}",
                where=f"{self.base_url}{path}",
                todo="do not push: workers that are not verified may still be served",
            ) from error

    def _refused(self, what: str, answer: httpx.Response) -> EngineError:
        return EngineError(
            f"the gateway refused to {what}", found=f"{answer.status_code}: {answer.text[:300]}", where=self.base_url
        )

    def _wait(self, deadline_s: float, worker: str, expected: str, entry: Mapping[str, Any] | None) -> None:
        if time.monotonic() >= deadline_s:
            state = {key: entry.get(key) for key in ("status", "is_healthy")} if entry is not None else "not listed"
            raise UnreachableError(
                "the gateway did not follow in time",
                expected=f"{expected} within {self.wait_s:g} s",
                found=f"{worker}: {state}",
                where=self.base_url,
            )
        self.sleep(_POLL_S)


@dataclass(slots=True)
class KubernetesRouter:
    """Pods' readiness gate: sets the condition `syncguard.dev/weights-verified` of each worker's pod.

    The pod must name the condition in `spec.readinessGates`; then Services leave the pod out while it is not True.

    Attributes:
        pods: Worker name → pod name.
        namespace: Namespace of the pods.
        api_url: API server.
        token: Bearer token of a service account that may patch `pods/status`.
        ca_file: CA of the API server.
        transport: HTTP transport, for tests.
    """

    pods: Mapping[str, str]
    namespace: str
    api_url: str = "https://kubernetes.default.svc"
    token: str = field(default="", repr=False)
    ca_file: Path | None = None
    transport: httpx.BaseTransport | None = None
    _client: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Open a connection pool; nothing is sent yet."""
        verify: Any = str(self.ca_file) if self.ca_file is not None else True
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self._client = httpx.Client(
            base_url=self.api_url,
            headers=headers,
            verify=verify,
            timeout=10.0,
            transport=self.transport,
            trust_env=False,
        )

    @classmethod
    def in_cluster(cls, pods: Mapping[str, str], folder: Path = _SERVICE_ACCOUNT) -> KubernetesRouter:
        """Use the service account that the pod of this process runs as.

        Raises:
            UsageError: Not in a pod, or the account's files cannot be read.
        """
        try:
            token = (folder / "token").read_text(encoding="utf-8").strip()
            namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise UsageError("no Kubernetes service account", found=error.strerror or error, where=folder) from error
        return cls(pods, namespace, token=token, ca_file=folder / "ca.crt")

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def admit(self, worker: str) -> None:
        """Set the condition to True.

        Raises:
            UnreachableError: The API server did not answer or refused.
        """
        self._patch(worker, "True", "Verified", "weights, replay, flush and label agree with the trainer")

    def remove(self, worker: str, because: str) -> None:
        """Set the condition to False.

        Raises:
            UnreachableError: The API server did not answer or refused.
        """
        self._patch(worker, "False", "NotVerified", because)

    def _patch(self, worker: str, status: str, reason: str, message: str) -> None:
        pod = self.pods.get(worker)
        if pod is None:
            raise UsageError("worker without a pod", expected=" ".join(self.pods), found=worker)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {
            "type": CONDITION,
            "status": status,
            "reason": reason,
            "message": message[:1000],
            "lastTransitionTime": now,
            "lastProbeTime": now,
        }
        path = f"/api/v1/namespaces/{quote(self.namespace, safe='')}/pods/{quote(pod, safe='')}/status"
        try:
            answer = self._client.patch(
                path,
                content=json.dumps({"status": {"conditions": [condition]}}),
                headers={"Content-Type": "application/strategic-merge-patch+json"},
            )
        except httpx.HTTPError as error:
            raise UnreachableError(
                "the Kubernetes API did not answer", found=f"{type(error).__name__}: {error}", where=self.api_url
            ) from error
        if answer.status_code >= 400:  # noqa: PLR2004 - HTTP
            raise EngineError(
                "the Kubernetes API refused a pod condition",
                found=f"{answer.status_code}: {answer.text[:300]}",
                where=f"{self.namespace}/{pod}",
                todo="let the service account patch pods/status",
            )
