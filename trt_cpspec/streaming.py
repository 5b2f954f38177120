"""Speech in chunks: what cuts the frames of an utterance into sound, and what a consumer iterates over."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, EngineError, out_of_memory
from .guards import check_waveform

if TYPE_CHECKING:  # it loads ONNX Runtime
    from .codec import Code2Wav

CHUNK_FRAMES = 10
"""Frames of a chunk where nobody says: 0.8 s, the default of Edge-LLM's input format (``codec_chunk_frames``)."""

PREFILL_THRESHOLD = 4
"""Tokens of an answer, if it has them, that are written before the Talker begins (``talker_prefill_threshold``)."""

Float32 = NDArray[np.float32]
Progress = Callable[[int], None]
R_co = TypeVar("R_co", covariant=True)


def checked_chunk_frames(chunk_frames: int) -> int:
    """Return the frames of a chunk; a ConfigError says what is wrong with them."""
    if isinstance(chunk_frames, bool) or not isinstance(chunk_frames, int) or chunk_frames < 1:
        raise ConfigError(f"chunk_frames is {chunk_frames!r}, it must be an integer of at least 1")
    return chunk_frames


class ChunkMaker:
    """Cuts the frames of one utterance into chunks of sound.

    Parameters
    ----------
    codec : Code2Wav
    chunk_frames : int
    timed : callable
        Told of each run of the codec, with the time at which it began.
    """

    def __init__(self, codec: Code2Wav, chunk_frames: int, timed: Callable[[str, float], None]) -> None:
        self._stream, self._chunk_frames, self._timed = codec.stream(), chunk_frames, timed
        self._made: list[Float32] = []
        self._given = 0  # chunks

    def take(self, frames: Sequence[NDArray[np.int32]], *, last: bool = False) -> Float32:
        """Return the samples that can be given out now, none as long as there is no chunk of frames.

        Parameters
        ----------
        frames : sequence of ndarray, each of shape [G]
            All frames so far.
        last : bool
            No more will come: a shorter chunk is one too.

        Raises
        ------
        EngineError
            The sound is not finite; or, at the end, constant throughout.
        """
        fresh = frames[self._stream.frames :]
        if fresh and (last or len(fresh) >= self._chunk_frames):
            started = time.perf_counter()
            self._made.append(self._stream.push(np.stack(fresh)))
            self._timed("code2wav", started)
        if last:
            check_waveform(self.waveform())
        if not last and not self._given and _is_constant(self.waveform()):
            return np.zeros(0, np.float32)  # a constant is no speech: it waits until something else has come
        fresh_samples = _joined(self._made[self._given :])
        self._given = len(self._made)
        return fresh_samples

    def waveform(self) -> Float32:
        """Return all samples so far."""
        return _joined(self._made)

    def close(self) -> None:
        """Free the codec's state."""
        self._stream.close()


def _joined(parts: Sequence[Float32]) -> Float32:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _is_constant(waveform: Float32) -> bool:
    return bool((waveform == waveform[:1]).all())


class Chunks(Protocol[R_co]):
    """Makes the generator that a stream runs: of chunks, and of the result at its end."""

    def __call__(self, *, progress: Progress) -> Generator[Float32, None, R_co]:
        """Return it; ``progress`` is called behind each frame, and ends it by raising."""
        ...


class _ClosedError(Exception):
    """The consumer does not want the rest."""


class AudioStream(Generic[R_co]):
    """Chunks of sound, each given out as soon as it is made: iterate over it, then read :attr:`result`.

    A thread of its own makes the chunks from the first one that is asked for on. It does not wait for its consumer, so
    a slow one holds up no other request. Leaving the stream early stops it: use it as a context manager, call
    :meth:`close`, from any thread and any callback, or drop it. Chunks are for one thread at a time.

    Parameters
    ----------
    chunks : Chunks
    sample_rate : int
        Hz.
    progress : callable or None
        Called by the stream's thread.
    check : callable
        Called by who asks for a chunk; refuses one for whom the stream's thread would wait
        (:meth:`~trt_cpspec.turns.Turn.check_outside`).

    Attributes
    ----------
    sample_rate : int
        Hz.

    Notes
    -----
    What fails while the sound is made is raised where the next chunk is asked for.
    """

    def __init__(
        self,
        chunks: Chunks[R_co],
        sample_rate: int,
        progress: Progress | None = None,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.sample_rate = sample_rate
        self._check = check
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._ended = False
        self._results: list[R_co] = []
        arguments = (chunks, progress, self._made, self._stop)
        self._thread = threading.Thread(target=_make, args=arguments, name="speech", daemon=True)
        # A stream that is dropped, or open when Python exits, ends its thread.
        self._finalize = weakref.finalize(self, _end, self._stop, self._thread)

    def __iter__(self) -> AudioStream[R_co]:
        """Return the stream."""
        return self

    def __next__(self) -> Float32:
        """Return the next chunk, ``[n]`` float32 in [-1, 1]; wait for it.

        Raises
        ------
        ConfigError
            It is asked for within a call of the same model, for which the stream would wait; the stream stays open.
        CpSpecError
            The speech failed; what was given out before is not all of it.
        """
        if self._ended:
            raise StopIteration
        self._check()
        if self._thread.ident is None:
            self._thread.start()
        item = self._made.get()
        if isinstance(item, np.ndarray):
            return item
        self.close()
        if isinstance(item, _ClosedError):  # by another thread, or by the stream's own callback
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        self._results.append(item.value)
        raise StopIteration

    @property
    def result(self) -> R_co:
        """What was spoken, when the last chunk has been given out; until then it is an EngineError to ask."""
        if not self._results:
            raise EngineError("the stream has no result: its chunks were not all taken, or it failed")
        return self._results[0]

    def close(self) -> None:
        """End the stream, and wait until the model is free again; what was not taken is lost."""
        self._ended = True
        self._finalize()

    def __enter__(self) -> AudioStream[R_co]:
        """Return the stream."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the stream."""
        self.close()


class _Result(Generic[R_co]):
    """What stands behind the last chunk."""

    def __init__(self, value: R_co) -> None:
        self.value = value


def _make(chunks: Chunks[Any], progress: Progress | None, made: queue.SimpleQueue[Any], stop: threading.Event) -> None:
    """Make the chunks of a stream. It knows nothing of the stream, which can so be dropped."""

    def watched(frames: int) -> None:
        if stop.is_set():
            raise _ClosedError
        if progress is not None:
            progress(frames)

    generator = chunks(progress=watched)
    try:
        while True:
            made.put(next(generator))
    except StopIteration as end:
        made.put(_Result(end.value))
    except MemoryError as error:
        made.put(out_of_memory(error))
    except BaseException as error:  # it is the consumer's to see
        made.put(error)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join()
