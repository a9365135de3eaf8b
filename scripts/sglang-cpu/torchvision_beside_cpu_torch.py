"""Lets a CUDA build of torchvision load beside a CPU build of torch; for tests and the demo only, never with a GPU.

SGLang 0.5.23 and the model files of Transformers import torchvision. The wheel on the package index is a CUDA build:
beside a CPU torch its extension does not load, `torchvision::nms` and `::qnms` are never declared, and
`torchvision/_meta_registrations.py` (0.28.0) fails on them. Importing this module costs nothing until torchvision
itself is imported.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_KEPT: list[object] = []
"""A `torch.library.Library` that is collected takes its operators along."""


class _DeclareOperators(MetaPathFinder):
    """Declares the two operators after torchvision tried its extension and before it registers their meta kernels."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            import torch

            # A torchvision that fits its torch has declared them by now.
            if not hasattr(torch.ops.torchvision, "nms"):
                library = torch.library.Library("torchvision", "FRAGMENT")
                library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                _KEPT.append(library)
        return None


sys.meta_path.insert(0, _DeclareOperators())
