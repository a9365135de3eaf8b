"""How the demo's trainer pushes weights into a real SGLang server (0.5.23): from disk, or in a tensor session.

The tensor call of SGLang carries a pickle by its own definition; this is the one place of the project that writes one,
and nothing of ours reads any.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from syncguard.errors import EngineError, UnreachableError

if TYPE_CHECKING:
    import torch


class SglangPush:
    """Pushes weights to one server.

    Args:
        base_url: Such as `http://127.0.0.1:30000`.
        tp: Tensor-parallel ranks; the tensor call carries one payload for each.
    """

    def __init__(self, base_url: str, tp: int) -> None:
        """Open a connection pool."""
        self._client = httpx.Client(base_url=base_url, timeout=300.0, trust_env=False)
        self._tp = tp

    def from_disk(self, folder: Path, label: str) -> None:
        """Let the server load a checkpoint folder."""
        self._call("/update_weights_from_disk", {"model_path": str(folder), "weight_version": label})

    def from_tensors(self, by_rank: list[Mapping[str, torch.Tensor]], label: str) -> None:
        """Send whole named tensors in one session; rank r of the server loads `by_rank[r]`."""
        if len(by_rank) != self._tp:
            raise EngineError("payloads of a tensor update", expected=self._tp, found=len(by_rank))
        self._call("/begin_weight_update", {})
        try:
            payloads = [base64.b64encode(pickle.dumps(list(named.items()))).decode() for named in by_rank]
            self._call("/update_weights_from_tensor", {"serialized_named_tensors": payloads, "weight_version": label})
        finally:
            self._call("/end_weight_update", {})

    def set_label(self, label: str) -> None:
        """Set the weight version label alone: what a skipped push does to a worker that trusts labels."""
        self._call("/update_weight_version", {"new_version": label})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, path: str, payload: dict[str, Any]) -> None:
        try:
            response = self._client.post(path, json=payload)
        except httpx.HTTPError as error:
            raise UnreachableError("weight push", found=error, where=path, todo="see the server's log") from error
        if response.status_code != httpx.codes.OK or not response.json().get("success", False):
            raise EngineError("weight push", expected="success", found=response.text[:300], where=path)
