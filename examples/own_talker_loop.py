"""Decode the residual codes of audio frames behind a Talker of your own, with and without speculation.

Run: python own_talker_loop.py ENG
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trt_cpspec import CodePredictor, CpSpecError

FRAMES = 20
SEED = 42


class StandInTalker:
    """Stands where your Talker stands: hidden states and first codes from a random generator.

    A real one runs its decoder on the embedded frame (and the text side), and samples the code from its own head.
    """

    def __init__(self, hidden_size: int) -> None:
        self.random = np.random.default_rng(SEED)
        self.hidden_size = hidden_size

    def step(self, embedded_frame: NDArray[np.float32] | None) -> tuple[NDArray[np.float32], int]:
        hidden = self.random.standard_normal(self.hidden_size, np.float32)  # [Ht], after the final norm
        return hidden, int(self.random.integers(2048))


def decode(predictor: CodePredictor, verify_size: int) -> tuple[NDArray[np.int32], float]:
    """Return the codes [FRAMES, G] and the CodePredictor's passes a frame."""
    talker = StandInTalker(predictor.spec.talker_hidden_size)
    frames, passes, embedded = [], 0, None
    for frame in range(FRAMES):
        hidden, code0 = talker.step(embedded)
        result = predictor.decode_frame(
            hidden, code0, seeds=SEED, frames=frame, verify_size=verify_size, mode="coupled"
        )
        frames.append(result.codes[0])
        passes += 1 + len(result.rounds[0])  # the prefill, and one pass a round
        embedded = predictor.embed_frame(result.codes)[0]  # [Ht], the Talker's next input
    return np.stack(frames), passes / FRAMES


def main(engines: Path) -> None:
    predictor = CodePredictor.from_engine_dir(engines / "code_predictor")
    codes, passes = decode(predictor, 0)
    speculative_codes, speculative_passes = decode(predictor, 3)
    print(f"N=0: {passes:.2f} passes a frame")
    print(f"N=3: {speculative_passes:.2f} passes a frame")
    print(f"codes identical: {'yes' if np.array_equal(codes, speculative_codes) else 'no'}")


if len(sys.argv) != 2:
    sys.exit(__doc__)
try:
    main(Path(sys.argv[1]))
except CpSpecError as error:  # a path or an engine that cannot be used; anything else is a bug
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(2)
