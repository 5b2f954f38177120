"""``cpspec demo`` as a newcomer meets it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner
from trt_cpspec.builder import demo as demo_module
from trt_cpspec.builder.cli import main
from trt_cpspec.builder.synthetic import SyntheticSpec, write_checkpoint

ROOT = Path(__file__).parents[1]
CPSPEC = Path(sys.executable).with_name("cpspec")


def run(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def report(folder: Path) -> str:
    result = run(CPSPEC, "demo", cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def numbers(report: str) -> dict[int, tuple[int, float]]:
    """Return frames and passes a frame for each N."""
    found = re.findall(r"^N=(\d): (\d+) frames, ([\d.]+) passes a frame", report, re.MULTILINE)
    return {int(n): (int(frames), float(passes)) for n, frames, passes in found}


def test_speculation_saves_passes_and_changes_no_code(report: str, folder: Path) -> None:
    (plain_frames, plain_passes), (frames, passes) = (numbers(report)[n] for n in (0, 3))
    assert plain_frames == frames
    assert (plain_passes, passes < 12) == (15, True)
    assert 'spoke "Hello there, this is a short test." with the voice of the package, seed 7' in report
    assert f"codes identical: yes, all {16 * frames}" in report
    assert re.search(r"acceptance by draft offset: 1: \d+ %, 2: \d+ %", report)
    waves = [soundfile.read(folder / "demo_out" / f"demo_n{n}.wav")[0] for n in (0, 3)]
    assert len(waves[0]) == 1920 * frames
    assert (waves[0] == waves[1]).all()
    assert {path.name for path in (folder / "demo_out").iterdir()} == {
        "engines", "demo_n0.wav", "demo_n3.wav",
    }  # fmt: skip


def test_the_voice_ends_where_its_text_does(report: str, tmp_path: Path) -> None:
    short = CliRunner().invoke(main, ["demo", "--outputDir", str(tmp_path), "--text", "Hello."])
    assert short.exit_code == 0, short.output
    frames = numbers(short.output)[0][0]
    assert 5 <= frames < 20
    assert frames < numbers(report)[0][0] < 60  # the limits are 50 and 106
    assert "warning" not in report + short.output


def test_the_voice_is_small_and_says_what_it_is() -> None:
    folder = demo_module.VOICE
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= 12_000_000
    card = (folder / "README.md").read_text()
    assert all(f"## {name}" in card for name in ("Data", "Training", "Limits", "Licence", "Make it again"))


def test_the_next_commands_run_as_they_are_printed(report: str, folder: Path) -> None:
    commands = [shlex.split(line) for line in report.split("next:\n")[1].splitlines()]
    assert [Path(command[0]).name for command in commands] == ["cpspec", "qwen3_tts_inference"]
    for command in commands:
        result = run(*command, cwd=folder)
        assert (result.returncode, result.stderr) == (0, "")
    assert (folder / "demo_out" / "audio" / "audio_req0.wav").is_file()


def test_a_second_demo_takes_the_random_weights_of_the_first(tmp_path: Path) -> None:
    args = ["demo", "--outputDir", str(tmp_path), "--randomWeights", "--seed", "8", "--cpSpecVerifySize", "8"]
    weights = tmp_path / "checkpoint" / "model.safetensors"
    written = []
    for text in ("Say this.", "Say more."):
        result = CliRunner().invoke(main, [*args, "--text", text])
        assert result.exit_code == 0, result.output
        assert f'spoke "{text}" with random weights (the sound is noise), seed 8' in result.output
        assert set(numbers(result.output)) == {0, 8}
        written.append(weights.stat().st_mtime_ns)
    assert written[0] == written[1]


@pytest.mark.parametrize("marker", [None, "another version"])
def test_a_folder_of_somebody_else_is_left_alone(marker: str | None, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "mine").write_text("keep me")
    if marker is not None:
        (checkpoint / "cpspec_demo.txt").write_text(marker)
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(main, ["demo", "--outputDir", str(tmp_path), "--randomWeights"])
    assert result.exit_code == 2
    assert "is left as it is, choose another --outputDir" in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_demo_that_is_interrupted_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(folder: Path, spec: object) -> None:
        folder.mkdir()
        (folder / "model.safetensors").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_module, "write_checkpoint", half)
        result = CliRunner().invoke(main, ["demo", "--outputDir", str(tmp_path), "--randomWeights"])
        assert result.exit_code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--text", " "), "holds nothing visible"),
        (("--outputDir", "file/x"), "cannot be written"),
        (
            ("--cpSpecVerifySize", "1"),
            "a verify size of 1 is not possible: give 0 to switch speculation off, or 2 to 8",
        ),
        (("--cpSpecVerifySize", "9"), "a verify size of 9 is not possible"),
        (("--cpSpecVerifySize", "0"), "0 is what the demo compares with: give 2 to 8"),
        (("--cpSpecVerifySize", "auto"), "'auto' is no number"),
        (("--seed", "-1"), "--seed"),
        (("--randomWeights", "--checkpointDir", "any"), "--checkpointDir and --randomWeights exclude each other"),
    ],
)
def test_what_a_demo_refuses(
    args: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["demo", *args])
    assert (result.exit_code, message in result.stderr) == (2, True)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_codes_that_differ_are_a_bug(report: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def codes_of(_model: object, _text: str, _seed: int, verify_size: int, _frames: int) -> SimpleNamespace:
        return SimpleNamespace(codes=np.full((1, 16), verify_size))

    monkeypatch.setattr(demo_module, "_speak", codes_of)
    result = CliRunner().invoke(main, ["demo", "--outputDir", str(folder / "demo_out")])
    assert isinstance(result.exception, AssertionError)


def test_a_checkpoint_that_is_given_speaks(tmp_path: Path) -> None:
    checkpoint, output = tmp_path / "mine", tmp_path / "out"
    write_checkpoint(checkpoint, SyntheticSpec.tiny(agreement=0.9))
    args = ["demo", "--outputDir", str(output), "--text", "Hi."]
    given = CliRunner().invoke(main, [*args, "--checkpointDir", str(checkpoint)])
    assert given.exit_code == 0, given.output
    assert f'spoke "Hi." with the checkpoint {checkpoint}, seed 7' in given.output
    (frames, _), _ = numbers(given.output).values()
    assert frames <= 38 + 2 * len("Hi.")
    assert "--speaker serena" in given.output
    assert not (output / "checkpoint").exists()


def test_a_checkpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    args = ["demo", "--outputDir", str(tmp_path / "out"), "--checkpointDir", str(tmp_path / "nothing")]
    result = CliRunner().invoke(main, args)
    assert (result.exit_code, "does not exist" in result.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


# ---- make demo ------------------------------------------------------------------------------------------------------

TEXTS = [
    "Say this one.",
    'it\'s "quoted"',
    "costs $5 or $HOME",
    "`touch ran` $(touch ran)",
    "a; touch ran #",
    "你好",
]


def make_demo(work: Path, *args: str, **environment: str) -> list[str]:
    """Run ``make demo`` with a stand-in for cpspec; return the arguments that reach it."""
    (work / "bin").mkdir()
    (work / "installed").touch()  # newer than pyproject.toml: nothing is installed
    stand_in = work / "bin" / "cpspec"
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open({str(work / 'seen')!r}, 'w'))\n"
    )
    stand_in.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("TEXT", "MAKEFLAGS", "MAKEOVERRIDES")}
    result = subprocess.run(
        ["make", "demo", f"VENV={work}", *args],
        cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    seen: list[str] = json.loads((work / "seen").read_text())
    return seen


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("where", ["command line", "environment"])
def test_make_demo_passes_the_text_as_it_is(text: str, where: str, tmp_path: Path) -> None:
    given = {"TEXT": text} if where == "environment" else {}
    args = [] if given else [f"TEXT={text}"]
    assert make_demo(tmp_path, *args, **given) == ["demo", "--text", text]
    assert not (ROOT / "ran").exists()


def test_make_demo_without_a_text_leaves_the_default(tmp_path: Path) -> None:
    assert make_demo(tmp_path) == ["demo"]


def test_make_demo_shows_no_text_to_the_shell() -> None:
    result = run("make", "--dry-run", "--no-print-directory", "demo", "TEXT=Say this one.", cwd=ROOT)
    assert result.returncode == 0
    assert result.stdout.strip().endswith('/cpspec demo --text "$TEXT"')
