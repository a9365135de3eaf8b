"""Manifests: from a checkpoint folder, from named tensors as they are sent, from the shards of trainer ranks."""
