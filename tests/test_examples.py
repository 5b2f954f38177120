"""The examples run as they are, on the engines of a small checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from trt_cpspec.builder.synthetic import SyntheticSpec, write_checkpoint
from trt_cpspec.builder.tts import BuildOptions, TtsBuild

from trt_cpspec import Qwen3TTS

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    write_checkpoint(folder / "checkpoint", SyntheticSpec.tiny(agreement=0.9))
    with TtsBuild(folder / "checkpoint", folder / "eng", BuildOptions()) as build:
        for _, _, write in build.components:
            write(lambda: None)
        build.commit()
    return folder / "eng"


def run(example: str, *args: str | Path, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / example), *map(str, args)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_speak(engines: Path, tmp_path: Path) -> None:
    options = {"speaker": "ryan", "language": "english", "seed": 3}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    printed = run("speak.py", engines, "Hello there.", *flags, cwd=tmp_path)
    speech = Qwen3TTS.from_engine_dir(engines).synthesize("Hello there.", verify_size=3, **options)
    stats = speech.stats
    assert f"speech.wav: {0.08 * stats.frames:.2f} s, {stats.frames} frames, ended by" in printed
    assert f"{stats.passes / stats.frames:.2f} passes a frame, {stats.accepted} of {stats.proposed} drafts" in printed
    wave, rate = soundfile.read(tmp_path / "speech.wav", dtype="float32")
    assert rate == 24000
    np.testing.assert_allclose(wave, speech.waveform, atol=1e-4)


def test_stream(engines: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "stream.py"), str(engines), "Hello there.", "--chunk-frames", "2"]
    result = subprocess.run([*command, "--seed", "3"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    speech = Qwen3TTS.from_engine_dir(engines).synthesize("Hello there.", verify_size=3, seed=3)
    assert result.returncode == 0
    assert re.fullmatch(
        rf"first audio after \d+ ms, {speech.duration_ms / 1000:.2f} s in all\n", result.stderr.decode()
    )
    samples = np.frombuffer(result.stdout, "<i2").astype(int)
    assert np.abs(samples - np.rint(speech.waveform * 32767)).max() <= 1


def test_own_talker_loop(engines: Path, tmp_path: Path) -> None:
    printed = run("own_talker_loop.py", engines, cwd=tmp_path)
    passes = {n: float(value) for n, value in re.findall(r"N=(\d): ([\d.]+) passes a frame", printed)}
    assert passes["0"] == 15
    assert 6 < passes["3"] < 12
    assert "codes identical: yes" in printed


def test_answer(omni: Any, tmp_path: Path) -> None:
    printed = run("answer.py", omni.engine, "Tell me of the river.", "--speaker", "ethan", "--seed", "4", cwd=tmp_path)
    messages = [
        {"role": "system", "content": "You are a helpful voice assistant."},
        {"role": "user", "content": "Tell me of the river."},
    ]
    reply = omni.model.respond(messages, speaker="ethan", verify_size=3, seed=4, max_generate_length=128)
    stats = reply.speech.stats
    assert printed.startswith(
        f"{reply.text}\nanswer.wav: {reply.speech.duration_ms / 1000:.2f} s, {stats.frames} frames"
    )
    assert f"{stats.passes / stats.frames:.2f} passes a frame, {stats.accepted} of {stats.proposed} drafts" in printed
    wave, rate = soundfile.read(tmp_path / "answer.wav", dtype="float32")
    assert rate == 24000
    np.testing.assert_allclose(wave, reply.speech.waveform, atol=1e-4)


@pytest.mark.parametrize(
    "command",
    [
        ("examples/speak.py", "nowhere", "Hello."),
        ("examples/speak.py", "ENG", "Hello.", "--output", "nowhere/x.wav"),
        ("examples/speak.py", "ENG", "Hello.", "--speaker", "vivan"),
        ("examples/stream.py", "nowhere", "Hello."),
        ("examples/stream.py", "ENG", "Hello.", "--speaker", "vivan"),
        ("examples/own_talker_loop.py", "nowhere"),
        ("examples/answer.py", "nowhere", "Hello."),
        ("benchmarks/frame.py", "--engineDir", "nowhere"),
        ("benchmarks/frame.py", "--engineDir", "ENG", "--json", "file/nowhere.json"),
        ("benchmarks/streaming.py", "nowhere"),
        ("benchmarks/talker.py", "--random-weights", "--json", "file/nowhere.json"),
        ("benchmarks/build_memory.py", "--workDir", "nowhere"),
    ],
    ids=" ".join,
)
def test_a_mistyped_path_is_an_error_and_no_traceback(command: tuple[str, ...], engines: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script, *args = [str(engines) if word == "ENG" else word for word in command]
    result = subprocess.run(
        [sys.executable, str(EXAMPLES.parent / script), *args],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr
    assert re.search("nowhere|vivian|the folder file cannot be written", result.stderr)


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "speak.py", "stream.py", "answer.py", "own_talker_loop.py",
    }  # fmt: skip
