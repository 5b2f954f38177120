"""What the engines make of codes that are given: the states of Talker and CodePredictor along real speech.

It needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trt_cpspec import Qwen3TTS
from trt_cpspec.predictor import CodePredictor
from trt_cpspec.requests import make_request


class Forced(NamedTuple):
    """States along F given frames.

    Attributes
    ----------
    talker_hidden : ndarray, shape [F, Ht], float32
        What the CodePredictor of each frame starts from.
    predictor_hidden : ndarray, shape [F, G - 1, C], float32
        What each head reads.
    """

    talker_hidden: NDArray[np.float32]
    predictor_hidden: NDArray[np.float32]


def forced_states(model: Qwen3TTS, text: str, codes: NDArray[np.int32], *, language: str = "auto") -> Forced:
    """Run the engines along the codes ``[F, G]`` of a text."""
    talker, spec = model.talker, model.talker.spec
    request = model.prepare(make_request(text, {"seed": 0, "language": language}))
    pad = talker.embed_text(np.array([spec.ids.tts_pad_token_id], np.int64))
    heard = model.predictor.embed_frame(codes) + pad
    states = [talker.prefill([talker.embed_prompt(request.prompt)])[0]]
    states += [talker.step(heard[frame : frame + 1])[0] for frame in range(len(codes) - 1)]
    hidden = np.stack(states)
    return Forced(hidden, predictor_states(model.predictor, hidden, codes))


def predictor_states(
    predictor: CodePredictor, talker_hidden: NDArray[np.float32], codes: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Return ``[F, G - 1, C]``: for each frame the states behind its codes 0 to G - 2."""
    found = []
    counts, depths = np.ones(1, np.int64), np.ones(1, np.int64)
    for hidden, frame in zip(talker_hidden, codes, strict=True):
        states = [predictor.prefill(hidden[None], frame[:1])[0]]
        for depth in range(1, predictor.num_code_groups - 1):
            states.append(predictor.forward(frame[None, depth : depth + 1], depths * depth, counts)[0, 0].copy())
        found.append(np.stack(states))
    return np.stack(found).astype(np.float32)
