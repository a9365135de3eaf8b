"""`SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_qwen3_only` makes SGLang import two model files instead of some 200.

SGLang 0.5.23 (`srt/models/registry.py`) then resolves an architecture from here and imports the rest only on demand.
The classes are SGLang's own; nothing is replaced.
"""
