"""Exact speculative decoding of the CodePredictor in Qwen3-TTS and Qwen3-Omni."""

__version__ = "0.1.0"
