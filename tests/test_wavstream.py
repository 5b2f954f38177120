"""A wav that grows: its header in a file and in a pipe, and what is left where it is not completed."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile

from trt_cpspec import outputs
from trt_cpspec.wavstream import HEADER_BYTES, WavStream, pcm16, wav_header

RATE = 24000


@pytest.fixture
def waveform() -> np.ndarray:
    return np.random.default_rng(1).uniform(-1, 1, 5000).astype(np.float32)


def write_pieces(stream: WavStream, waveform: np.ndarray) -> None:
    for piece in np.array_split(waveform, [100, 101, 3000]):
        stream.write(piece)


def test_a_file_is_the_one_that_is_written_at_once(waveform: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    with path.open("wb") as file:
        stream = WavStream(file, RATE)
        write_pieces(stream, waveform)
        growing = path.read_bytes()
        stream.finish()
    assert growing[:HEADER_BYTES] == wav_header(RATE, None)
    np.testing.assert_array_equal(soundfile.read(io.BytesIO(growing), dtype="int16")[0], pcm16(waveform))
    assert path.read_bytes() == outputs.wav_bytes(waveform, RATE)


def test_a_wav_without_samples_is_a_header(tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    with path.open("wb") as file:
        WavStream(file, RATE).finish()
    assert path.read_bytes() == outputs.wav_bytes(np.zeros(0, np.float32), RATE)


def test_a_pipe_gets_a_length_that_is_not_known_and_all_samples(waveform: np.ndarray) -> None:
    source, target = os.pipe()
    found = bytearray()

    def read() -> None:
        with os.fdopen(source, "rb") as file:
            while data := file.read(1000):
                found.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(target, "wb") as file:
        stream = WavStream(file, RATE)
        write_pieces(stream, waveform)
        stream.finish()
    reader.join(timeout=20)
    assert found[4:8] == found[40:44] == b"\xff" * 4
    samples, rate = soundfile.read(io.BytesIO(bytes(found)), dtype="int16")
    assert rate == RATE
    np.testing.assert_array_equal(samples, pcm16(waveform))


def test_the_header_is_that_of_libsndfile() -> None:
    for samples in (0, 1, 4000):
        data = outputs.wav_bytes(np.linspace(-1, 1, samples, dtype=np.float32), RATE)
        assert data[:HEADER_BYTES] == wav_header(RATE, samples)


def test_what_stands_in_front_of_the_wav_stays(waveform: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(b"front")
        stream = WavStream(file, RATE)
        write_pieces(stream, waveform)
        stream.finish()
        file.write(b"behind")
    assert path.read_bytes() == b"front" + outputs.wav_bytes(waveform, RATE) + b"behind"


def test_a_file_that_is_appended_to_is_a_pipe(waveform: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"front")
    with path.open("ab") as file:
        stream = WavStream(file, RATE)
        write_pieces(stream, waveform)
        stream.finish()
    assert path.read_bytes() == b"front" + wav_header(RATE, None) + pcm16(waveform).tobytes()
    with path.open("ab") as file:
        stream = WavStream(file, RATE)
        stream.write(waveform)
        stream.discard()
    assert len(path.read_bytes()) == 5 + 2 * (HEADER_BYTES + 2 * len(waveform))


def test_a_stream_that_failed_is_taken_back(waveform: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(b"front")
        stream = WavStream(file, RATE)
        stream.discard()
        write_pieces(stream, waveform)
        stream.discard()
    assert path.read_bytes() == b"front"
