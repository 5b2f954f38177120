"""What a run leaves behind: wavs, codes and JSON. Each file appears complete or not at all."""

from __future__ import annotations

import errno
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
import soundfile
from numpy.typing import NDArray
from safetensors.numpy import save

from . import durable
from .errors import ConfigError, CpSpecError, EngineError, SpeechError
from .guards import check_waveform
from .requests import ChatRequest, Request
from .streaming import AudioStream
from .wavstream import WavStream, pcm16

if TYPE_CHECKING:  # the pipeline loads ONNX Runtime, which can wait until the input is known to be good
    from .omni import PreparedChat, Reply
    from .pipeline import PreparedRequest, Speech

R = TypeVar("R")

FAILED = "FAILED"
"""``output_text`` of a request that failed."""

STDOUT = Path("-")
"""Stands for standard output in place of a wav's path."""


def check_folder(folder: Path) -> None:
    """Refuse a folder that could not be written, or made; nothing is made yet.

    Raises
    ------
    ConfigError
        It, or the nearest folder above it that exists, cannot be written.
    """
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        # strerror: the rest names a temporary file that nobody asked for.
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror or error}") from error


def check_file(path: Path) -> None:
    """Refuse a file that could not be written; nothing is made yet (see :func:`check_folder`)."""
    check_folder(_real_file(path).parent)


def _real_file(path: Path) -> Path:
    """Return where a file really lies: a link keeps its place, and a folder or a device is never replaced."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is a folder or a device; give the path of a file")
    return path.resolve() if path.is_symlink() else path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that takes the place of ``path`` when the block ends well; make the folder."""
    path = _real_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable.replacing(path) as partial:
        yield partial


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as partial:
        durable.fill(partial, content, path)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document."""
    _write(path, json_bytes(document))


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8."""
    _write(path, text.encode())


def json_bytes(document: Any) -> bytes:
    """Return a JSON document in UTF-8, whatever the locale."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def write_wav(path: Path, waveform: NDArray[np.float32], sample_rate: int) -> None:
    """Write a mono PCM16 wav.

    Parameters
    ----------
    path : Path
    waveform : ndarray, shape [n], float32
        In [-1, 1].
    sample_rate : int
        Hz.

    Raises
    ------
    EngineError
        The waveform is not finite, or constant; nothing is written.
    """
    _write(path, wav_bytes(waveform, sample_rate))


def wav_bytes(waveform: NDArray[np.float32], sample_rate: int) -> bytes:
    """Return the bytes of a mono PCM16 wav (see :func:`write_wav`)."""
    check_waveform(waveform)
    buffer = io.BytesIO()  # Python writes the file, so that a full disk is an OSError
    soundfile.write(buffer, pcm16(waveform), sample_rate, subtype="PCM_16", format="WAV")
    return buffer.getvalue()


def write_response(
    folder: Path,
    index: int,
    request: Request,
    prepared: PreparedRequest,
    result: Speech | AudioStream[Speech] | CpSpecError,
    *,
    wav: Path | None = None,
) -> dict[str, Any]:
    """Write the files of one request and return its response object.

    A request that failed, in the model or in writing, leaves no file: neither its own nor one of an earlier run.

    Parameters
    ----------
    folder : Path
        Receives ``audio_req{index}.wav`` and ``rvq_req{index}.safetensors`` (``rvq_codes``, int32 ``[frames, G]``).
    index : int
    request : Request
    prepared : PreparedRequest
    result : Speech, a stream of it, or the error that ended the request
        A stream is written while it is made: into a hidden file, which takes the place of the wav when all is
        there, or to standard output.
    wav : Path or None
        Receives the wav in place of the two files; ``STDOUT`` is standard output.
    """
    audio, codes = (wav, None) if wav is not None else _files(folder, f"req{index}")
    speech: Speech | CpSpecError
    if isinstance(result, AudioStream):
        streamed = _streamed(audio, codes, result, _itself)
        speech, outcome = streamed
    else:
        speech, outcome = result, _outcome(audio, codes, result)
    return {
        "request_idx": index,
        "output_text": "",
        "messages": request.messages,
        **outcome,
        "speaker": prepared.speaker,
        "language": prepared.language,
        "instruct": prepared.instruct,
        "non_streaming_mode": prepared.non_streaming_mode,
        "max_audio_length": prepared.max_frames,
        "sampling": prepared.sampling.as_dict(),
        "warnings": list(prepared.warnings if isinstance(speech, CpSpecError) else speech.warnings),
    }


def write_reply(
    folder: Path,
    place: tuple[int, int],
    request: ChatRequest,
    prepared: PreparedChat,
    result: Reply | AudioStream[Reply] | CpSpecError,
) -> dict[str, Any]:
    """Write the files of one answer and return its response object; of a failure, see :func:`write_response`.

    An answer whose speech failed is in the response all the same: ``text`` and ``token_ids``, and ``codes`` (frames of
    G each) where they were made.

    Parameters
    ----------
    folder : Path
        Receives ``audio_req{idx}_batch{b}.wav`` and ``rvq_req{idx}_batch{b}.safetensors`` of an answer that is spoken.
    place : tuple of int
        ``(idx, b)``: the number of the batch, and the place in it.
    request : ChatRequest
    prepared : PreparedChat
    result : Reply, a stream of it, or the error that ended the request
        Of a stream see :func:`write_response`.
    """
    from .chat import system_prompt  # noqa: PLC0415  it loads jinja2, which only answers need

    voice, files = prepared.voice, _files(folder, f"req{place[0]}_batch{place[1]}")
    reply: Reply | CpSpecError
    if isinstance(result, AudioStream):
        streamed = _streamed(*files, result, _speech_of)
        reply, sound = streamed
        speech = reply if isinstance(reply, CpSpecError) else reply.speech
    else:
        reply, speech = result, result if isinstance(result, CpSpecError) else result.speech
        sound = {} if speech is None else _outcome(*files, speech)
    if "finish_reason" in sound:
        sound["audio_finish_reason"] = sound.pop("finish_reason")
    text = {}
    if "error" in sound:
        sound |= _left_of(reply)
    elif not isinstance(reply, CpSpecError):
        text = {"output_text": reply.text, "finish_reason": reply.finish_reason}
    spoken = None if isinstance(speech, CpSpecError) else speech
    return {
        "request_idx": place[0],
        "batch_idx": place[1],
        **text,
        "messages": request.messages,
        "formatted_system_prompt": system_prompt(prepared.prompt),
        "formatted_complete_request": prepared.prompt,
        **sound,
        **({} if voice is None else {"speaker": voice.speaker, "max_audio_length": (spoken or voice).max_frames}),
        "max_generate_length": prepared.max_tokens,
        "sampling": prepared.sampling,
        "warnings": [*prepared.warnings, *(spoken.warnings if spoken is not None else ())],
    }


def _left_of(result: Reply | CpSpecError) -> dict[str, Any]:
    """Return what a failure of the speech, or of its files, leaves of an answer."""
    if isinstance(result, CpSpecError):
        return {"text": result.text, "token_ids": list(result.token_ids)} if isinstance(result, SpeechError) else {}
    codes = {} if result.speech is None else {"codes": result.speech.codes.tolist()}
    return {"text": result.text, "token_ids": list(result.token_ids), **codes}


def _files(folder: Path, name: str) -> tuple[Path, Path]:
    """Return where wav and codes lie."""
    return folder / f"audio_{name}.wav", folder / f"rvq_{name}.safetensors"


def _outcome(audio: Path, codes: Path | None, result: Speech | CpSpecError) -> dict[str, Any]:
    """Write the wav and, unless None, the codes; or remove what an earlier run left of them."""
    try:
        if isinstance(result, CpSpecError):
            raise result
        return _write_speech(audio, codes, result)
    except (CpSpecError, OSError) as error:
        return _failed(audio, codes, error)


def _failed(audio: Path, codes: Path | None, error: Exception) -> dict[str, Any]:
    for path in (audio, codes):
        if path is not None and path != STDOUT:
            with suppress(OSError):
                path.unlink()
    return {"output_text": FAILED, "error": str(error)}


def _write_speech(audio: Path, codes: Path | None, speech: Speech) -> dict[str, Any]:
    data = wav_bytes(speech.waveform, speech.sample_rate)
    if audio == STDOUT:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    elif codes is None:
        _write(audio, data)
    else:
        with replacing(audio) as partial_audio, replacing(codes) as partial_codes:
            durable.fill(partial_audio, data, audio)
            durable.fill(partial_codes, _codes_bytes(speech), codes)
    return _facts(audio, codes, speech)


def _itself(speech: Speech) -> Speech:
    return speech


def _speech_of(reply: Reply) -> Speech | None:
    return reply.speech


def _streamed(
    audio: Path, codes: Path | None, stream: AudioStream[R], speech_of: Callable[[R], Speech | None]
) -> tuple[R | CpSpecError, dict[str, Any]]:
    """Write a stream while it is made, as :func:`_outcome` writes a speech; return its result, and what was written."""
    result: R | None = None
    try:
        with ExitStack() as stack:
            partial_codes = stack.enter_context(replacing(codes)) if codes is not None else None
            file: BinaryIO = sys.stdout.buffer
            if audio != STDOUT:
                partial = stack.enter_context(replacing(audio))
                stack.enter_context(durable.naming(audio, partial))  # the last: what names no file is of this one
                file = stack.enter_context(partial.open("wb"))
            sink = WavStream(file, stream.sample_rate)
            stack.enter_context(stream)
            stack.push(lambda kind, error, trace: sink.discard() if kind is not None else None)
            for samples in stream:
                sink.write(samples)
            result = stream.result
            speech = speech_of(result)
            assert speech is not None  # a stream has sound
            if codes is not None and partial_codes is not None:
                durable.fill(partial_codes, _codes_bytes(speech), codes)
            sink.finish()
            if audio != STDOUT:
                durable.sync(file)
        return result, _facts(audio, codes, speech)
    except (CpSpecError, OSError) as error:
        if audio == STDOUT and isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # the player has gone, and nobody is left to speak to
        ended = error if isinstance(error, CpSpecError) else EngineError(str(error))
        return ended if result is None else result, _failed(audio, codes, error)


def _codes_bytes(speech: Speech) -> bytes:
    data: bytes = save({"rvq_codes": np.ascontiguousarray(speech.codes, np.int32)})
    return data


def _facts(audio: Path, codes: Path | None, speech: Speech) -> dict[str, Any]:
    """Return what the response says of a speech that was written."""
    first_ms = speech.time_to_first_audio_ms
    return {
        "audio_file": str(audio),
        "audio_samples": len(speech.waveform),
        "audio_sample_rate": speech.sample_rate,
        "audio_duration_ms": speech.duration_ms,
        **({"rvq_file": str(codes)} if codes is not None else {}),
        **({"time_to_first_audio_ms": first_ms} if first_ms is not None else {}),
        "finish_reason": speech.finish_reason,
        "cp_spec": speech.stats.as_dict(),
    }
