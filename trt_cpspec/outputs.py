"""What a run leaves behind: wavs, codes and JSON. Each file appears complete or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from safetensors.numpy import save_file

from .errors import ConfigError, CpSpecError
from .requests import Request

if TYPE_CHECKING:  # the pipeline loads ONNX Runtime, which can wait until the input is known to be good
    from .pipeline import PreparedRequest, Speech

FAILED = "FAILED"
"""``output_text`` of a request that failed."""


def writable_folder(folder: Path) -> Path:
    """Create a folder if need be and return it; a ConfigError says when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error}") from error
    return folder


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that takes its place when the block ends well."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_wav(path: Path, waveform: NDArray[np.float32], sample_rate: int) -> None:
    """Write a mono PCM16 wav.

    Parameters
    ----------
    path : Path
    waveform : ndarray, shape [n], float32
        In [-1, 1].
    sample_rate : int
        Hz.
    """
    samples = np.rint(waveform * 32767).astype(np.int16)
    with replacing(path) as partial:
        soundfile.write(partial, samples, sample_rate, subtype="PCM_16", format="WAV")


def write_response(
    folder: Path, index: int, request: Request, prepared: PreparedRequest, result: Speech | CpSpecError
) -> dict[str, Any]:
    """Write the files of one request and return its response object.

    Parameters
    ----------
    folder : Path
        Receives ``audio_req{index}.wav`` and ``rvq_req{index}.safetensors`` (``rvq_codes``, int32 ``[frames, G]``).
    index : int
    request : Request
    prepared : PreparedRequest
    result : Speech, or the error that ended the request
    """
    response: dict[str, Any] = {"request_idx": index, "output_text": "", "messages": request.messages}
    resolved = {
        "speaker": prepared.speaker,
        "language": prepared.language,
        "sampling": prepared.sampling.as_dict(),
        "warnings": list(prepared.warnings),
    }
    if isinstance(result, CpSpecError):
        return response | {"output_text": FAILED, "error": str(result)} | resolved
    audio, codes = folder / f"audio_req{index}.wav", folder / f"rvq_req{index}.safetensors"
    write_wav(audio, result.waveform, result.sample_rate)
    with replacing(codes) as partial:
        save_file({"rvq_codes": np.ascontiguousarray(result.codes, np.int32)}, partial)
    files = {
        "audio_file": str(audio),
        "audio_samples": len(result.waveform),
        "audio_sample_rate": result.sample_rate,
        "audio_duration_ms": result.duration_ms,
        "rvq_file": str(codes),
        "finish_reason": result.finish_reason,
    }
    return response | files | resolved | {"cp_spec": result.stats.as_dict()}
