"""Pod conditions against a real HTTP server, and deployment files against the schemas of Kubernetes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from syncguard.errors import EngineError, UnreachableError, UsageError
from syncguard.gate.routing import CONDITION, KubernetesRouter, SmgRouter

DEPLOY = Path(__file__).parents[3] / "scripts" / "deploy"


class ApiServer:
    """Answers patches as the Kubernetes API does, and notes them."""

    def __init__(self) -> None:
        self.patches: list[tuple[str, str, dict]] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.patches.append((self.path, self.headers["Authorization"], body))
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def api():
    made = ApiServer()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_pods_condition_follows_readiness(api: ApiServer) -> None:
    router = KubernetesRouter({"r0": "rollout-0"}, "rollout", api_url=api.url, token="secret-token")
    router.remove("r0", "run@1 is about to be pushed")
    router.admit("r0")
    assert [path for path, _, _ in api.patches] == ["/api/v1/namespaces/rollout/pods/rollout-0/status"] * 2
    assert {token for _, token, _ in api.patches} == {"Bearer secret-token"}
    conditions = [body["status"]["conditions"][0] for _, _, body in api.patches]
    assert [(c["type"], c["status"]) for c in conditions] == [(CONDITION, "False"), (CONDITION, "True")]
    assert "about to be pushed" in conditions[0]["message"]
    assert "secret-token" not in repr(router)


def test_a_refusal_of_the_api_is_an_error_with_a_remedy(api: ApiServer) -> None:
    api.status = 403
    router = KubernetesRouter({"r0": "rollout-0"}, "rollout", api_url=api.url)
    with pytest.raises(EngineError, match="patch pods/status"):
        router.admit("r0")
    with pytest.raises(UsageError, match="without a pod"):
        router.admit("r9")


def test_routers_that_do_not_answer_are_unreachable() -> None:
    with pytest.raises(UnreachableError):
        KubernetesRouter({"r0": "p"}, "n", api_url="http://127.0.0.1:9").admit("r0")
    with pytest.raises(UnreachableError, match="do not push"):
        SmgRouter("http://127.0.0.1:9", {"r0": "http://127.0.0.1:8"}).remove("r0", "test")


@pytest.mark.parametrize(
    "pairs", [[], ["r0"], ["r0=ftp://x"], ["r0=http://a", "r0=http://b"], ["r0=http://a", "r1=http://a/"]]
)
def test_workers_of_a_gateway_are_named_with_their_urls(pairs: list[str]) -> None:
    with pytest.raises(UsageError):
        SmgRouter.of("http://127.0.0.1:1", pairs)


def objects() -> list[tuple[str, dict]]:
    return [(path.name, one) for path in sorted(DEPLOY.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize(
    ("name", "found"), objects(), ids=lambda value: value if isinstance(value, str) else value["kind"]
)
@pytest.mark.parametrize("version", ["1.27", "1.30", "1.33"])
def test_deployment_files_fit_the_schemas_of_kubernetes(name: str, found: dict, version: str) -> None:
    kubernetes_validate.validate(found, version, strict=True)


def test_the_deployed_agent_is_probed_on_the_health_port_and_gated_by_our_condition() -> None:
    (pod,) = [one["spec"]["template"]["spec"] for _, one in objects() if one["kind"] == "StatefulSet"]
    assert pod["readinessGates"] == [{"conditionType": CONDITION}]
    (agent,) = [c for c in pod["containers"] if c["name"] == "syncguard"]
    assert "--health-listen=0.0.0.0:50052" in agent["args"]
    assert agent["readinessProbe"]["grpc"]["port"] == 50052
