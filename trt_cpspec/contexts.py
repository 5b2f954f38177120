"""Where the frames of a measurement begin: Talker states and first codes, of a real text or drawn at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from .config import Section, Window
from .errors import ConfigError, CpSpecError
from .frame import FrameResult
from .pipeline import Qwen3TTS, SpeechModel, Trial
from .predictor import CodePredictor
from .runtime import GRAPH_FILE

COMPONENTS = ("talker", "code_predictor", "code2wav")


class Contexts(NamedTuple):
    """Where frames begin.

    Attributes
    ----------
    talker_hidden : ndarray, shape [n, Ht], float32
    code0 : ndarray, shape [n], int32
    source : str
        Where they come from, in words.
    """

    talker_hidden: NDArray[np.float32]
    code0: NDArray[np.int32]
    source: str


def random_contexts(predictor: CodePredictor, count: int = 64, seed: int = 1) -> Contexts:
    """Return Talker states from a normal law, for an engine without its Talker."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((count, predictor.spec.talker_hidden_size), np.float32)
    codes = random.integers(0, predictor.codebook_size, count).astype(np.int32)
    return Contexts(hidden, codes, f"{count} random hidden states")


def spoken_contexts(model: SpeechModel, trial: Trial, count: int = 64, seed: int = 1) -> Contexts:
    """Speak a text, again and with other seeds until there are enough frames, and return where they began.

    Parameters
    ----------
    model : SpeechModel
    trial : callable
        What is spoken.
    count : int
        Frames.
    seed : int
        Of the first time.

    Raises
    ------
    ConfigError
        The text cannot be spoken.
    NumericsError, EngineError
        The model failed on it.
    """
    recorder = _Recorder(model.predictor)
    listening = SpeechModel(model.talker, cast(CodePredictor, recorder), model.codec)
    for turn in range(count):  # an utterance has a frame at least, or never will
        missing = count - len(recorder.codes)
        if missing <= 0:
            break
        (speech,) = listening.run_batch([trial(seed + turn, missing)], window=Window(), mode="rejection")
        if isinstance(speech, CpSpecError):
            raise speech
    if not recorder.codes:
        return random_contexts(model.predictor, count, seed)
    frames = len(recorder.codes)
    return Contexts(np.stack(recorder.hidden), np.array(recorder.codes, np.int32), f"{frames} frames of a spoken text")


class _Recorder:
    """Stands before a CodePredictor and keeps what it is asked for."""

    def __init__(self, predictor: CodePredictor) -> None:
        self._predictor = predictor
        self.hidden: list[NDArray[np.float32]] = []
        self.codes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._predictor, name)

    def decode_frame(self, talker_hidden: NDArray[np.float32], code0: NDArray[np.int32], **how: Any) -> FrameResult:
        self.hidden += list(talker_hidden.copy())
        self.codes += code0.tolist()
        return self._predictor.decode_frame(talker_hidden, code0, **how)


class Loaded(NamedTuple):
    """An engine folder, opened for a measurement.

    Attributes
    ----------
    predictor : CodePredictor
    model : Qwen3TTS or None
        Where the folder has Talker and codec too.
    folder : Path
        Of the CodePredictor.
    """

    predictor: CodePredictor
    model: Qwen3TTS | None
    folder: Path

    def graph(self) -> CodePredictor | None:
        """Return the graph that a plan was built from, on the CPU; None where no plan runs, or no graph is there."""
        if not self.predictor.device_facts() or not (self.folder / GRAPH_FILE).is_file():
            return None
        return CodePredictor.from_engine_dir(self.folder, device="cpu")

    def contexts(self, text: str, count: int, *, spoken: bool = True) -> Contexts:
        """Return where frames begin: in a spoken text where that is possible and wanted, else at random."""
        if self.model is None or not spoken:
            return random_contexts(self.predictor, count)
        return spoken_contexts(self.model, self.model.saying(text), count)


def load_engines(
    engine_dir: Path, *, device: str = "auto", threads: int | None = None, executor: str = "auto"
) -> Loaded:
    """Open the root of an engine folder, or its ``code_predictor`` alone; of a Qwen3-Omni that is all there is.

    Raises
    ------
    ConfigError, EngineError
        It is neither, or cannot be used.
    """
    if _speaks(engine_dir):
        model = Qwen3TTS.from_engine_dir(engine_dir, device=device, threads=threads, executor=executor)
        return Loaded(model.predictor, model, engine_dir / "code_predictor")
    if (engine_dir / "config.json").is_file() and not Section.from_file(engine_dir / "config.json").has("model"):
        raise ConfigError(
            f"{engine_dir} is no engine folder (a checkpoint?): name what cpspec-build wrote, or its code_predictor"
        )
    folder = engine_dir / "code_predictor" if (engine_dir / "code_predictor").is_dir() else engine_dir
    predictor = CodePredictor.from_engine_dir(folder, device=device, threads=threads, executor=executor)
    return Loaded(predictor, None, folder)


def _speaks(engine_dir: Path) -> bool:
    """Return whether a folder has all that Qwen3-TTS needs."""
    configs = [engine_dir / name / "config.json" for name in COMPONENTS]
    return all(path.is_file() for path in configs) and Section.from_file(configs[0]).has("tts_model_type")
