from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def _module(name):
    # Loaded by path: this folder is not on the import path.
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


checkpoint_folder = _module("checkpoint_folder")


@pytest.fixture
def tensors():
    return checkpoint_folder.random_tensors(checkpoint_folder.expected_shapes())


@pytest.fixture
def folder(tmp_path, tensors):
    return checkpoint_folder.write_folder(tmp_path / "checkpoint", tensors)
