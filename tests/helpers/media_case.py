"""The golden conversations that hold a clip or an image, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

from trt_cpspec.omni import Qwen3Omni, Reply
from trt_cpspec.requests import ChatRequest, make_chat

GOLDEN = Path(__file__).parents[1] / "golden" / "omni_a"
GREEDY = dict.fromkeys(("temperature", "talker_temperature", "subtalker_temperature"), 0.0)


class MediaCase:
    """The golden prompt that holds a clip (``heard``) or an image (``seen``), its files and its arrays."""

    def __init__(self, name: str, model: Qwen3Omni, folder: Path) -> None:
        self.name, self.model = name, model
        self.golden = json.loads((GOLDEN / "media.json").read_text(encoding="utf-8"))
        self.prompt = self.golden["prompts"][name]
        self.arrays = np.load(GOLDEN / "media.npz")
        self.clip, self.picture = folder / "clip.wav", folder / "picture.png"
        soundfile.write(self.clip, self.arrays["heard_audio"], 16000, subtype="FLOAT")
        Image.fromarray(self.arrays["seen_image"]).save(self.picture)
        files = {"clip": str(self.clip), "picture": str(self.picture)}
        self.messages: list[dict[str, Any]] = json.loads(
            json.dumps(self.prompt["messages"]), object_hook=lambda part: renamed(part, files)
        )
        self.options = {
            "speaker": self.golden["speaker"],
            "seed": 1,
            "max_generate_length": self.prompt["thinker_max_new_tokens"],
            "max_audio_length": self.prompt["talker_max_new_tokens"] - 1,
            **GREEDY,
        }

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[f"{self.name}_{name}"]

    def request(self) -> ChatRequest:
        """What the command makes of it."""
        return make_chat(self.messages, self.options)

    def respond(self, **options: Any) -> Reply:
        reply: Reply = self.model.respond(self.messages, **self.options, **options)
        return reply


def renamed(part: dict[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    return {key: files.get(value, value) if key in ("audio", "image") else value for key, value in part.items()}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
        }
    ]
