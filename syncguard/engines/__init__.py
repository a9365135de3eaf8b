"""Inference engines behind one adapter protocol: embedded, SGLang; and the probe inside their ranks."""
