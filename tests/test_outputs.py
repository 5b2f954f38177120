"""Files appear complete or not at all, and a place that cannot be written is known beforehand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

from trt_cpspec import ConfigError
from trt_cpspec.outputs import check_file, check_folder, json_bytes, replacing, write_json, write_wav


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


@pytest.mark.parametrize("existed", [True, False])
def test_a_failure_in_the_middle_leaves_what_was_there(existed: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if existed:
        path.write_text("old")

    def fail() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == ({"a.json"} if existed else set())
    assert not existed or path.read_text() == "old"


def test_a_file_takes_the_place_of_an_older_one_and_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    for document in ({"a": "你好"}, {"b": 1}):
        write_json(path, document)
        assert json.loads(path.read_text(encoding="utf-8")) == document
    assert names(tmp_path) == {"new", "a.json"}
    assert json_bytes("ü") == '"ü"\n'.encode()


def test_what_json_cannot_say_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert names(tmp_path) == set()


@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_a_place_is_checked_without_a_trace(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_folder(tmp_path / below)
    check_file(tmp_path / below / "out.json")
    check_file(tmp_path / "file")
    for path in (tmp_path / "file" / below / "z", Path("/proc/no_such_process") / below):
        with pytest.raises(ConfigError, match=r"the folder .* cannot be written"):
            check_folder(path)
    with pytest.raises(ConfigError, match="give the path of a file"):
        check_file(tmp_path)
    assert names(tmp_path) == {"file"}


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    pipe, folder, link = tmp_path / "pipe", tmp_path / "folder", tmp_path / "link"
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to(pipe)
    for path in (pipe, folder, link):
        with pytest.raises(ConfigError, match="is a folder or a device"):
            check_file(path)
        with pytest.raises(ConfigError, match="is a folder or a device"):
            write_json(path, {})
    assert (pipe.is_fifo(), folder.is_dir(), link.is_symlink()) == (True, True, True)
    assert names(tmp_path) == {"pipe", "folder", "link"}


def test_a_link_keeps_its_place(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "elsewhere" / "target.json"
    link.symlink_to(target)
    for number in (1, 2):
        check_file(link)
        write_json(link, number)
        assert (link.is_symlink(), json.loads(target.read_text())) == (True, number)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_folder(tmp_path / "x")


def test_a_relative_place_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_folder(Path("audio"))
    check_file(Path("out.json"))


def test_a_wav_holds_the_samples_to_the_nearest_step(tmp_path: Path) -> None:
    waveform = np.array([-1, -0.5, 0, 0.25, 1 - 1e-4, 1], np.float32)
    write_wav(tmp_path / "a.wav", waveform, 24000)
    samples, rate = soundfile.read(tmp_path / "a.wav", dtype="int16")
    assert rate == 24000
    np.testing.assert_array_equal(samples, [-32767, -16384, 0, 8192, 32764, 32767])
    write_wav(tmp_path / "empty.wav", waveform[:0], 24000)
    assert soundfile.info(tmp_path / "empty.wav").frames == 0
