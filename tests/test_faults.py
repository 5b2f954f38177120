"""Faults: a kill at any moment, a full disk, a folder that cannot be written, no memory, a driver that goes away.

Each ends in one clear error, and leaves nothing that a later run takes for good.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result
from crash import Children, killed_at
from fake_driver import FakeDriver
from hostile import LONG_RUN
from safetensors.numpy import load_file
from trt_cpspec.builder import rebuild as rebuild_module
from trt_cpspec.builder import sidecar
from trt_cpspec.builder.cli import build, main
from trt_cpspec.builder.engine import Backend, EngineOptions, Plan
from trt_cpspec.builder.rebuild import RebuildOptions, build_component
from trt_cpspec.builder.tts import BuildOptions, TtsBuild

from trt_cpspec import durable
from trt_cpspec import runtime as runtime_module
from trt_cpspec.cli import tts
from trt_cpspec.cuda import Device
from trt_cpspec.durable import UNFINISHED, check_finished
from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.inspection import describe_engine_dir
from trt_cpspec.memory import memory_needed
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.runtime import Runtime, open_runtime
from trt_cpspec.session import DecoderSession, GraphSession

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINTS = {name: GOLDEN / name / "checkpoint" for name in ("tts_a", "tts_b")}
COMPONENTS = ("talker", "code_predictor", "code2wav")
STREAMED = ("--streaming", "--chunkFrames", "2")


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children() as made:
        yield made


def digest(folder: Path) -> dict[str, str]:
    """Return the files of the three components, by their hashes."""
    paths = [path for name in COMPONENTS for path in sorted((folder / name).rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def sampled(moments: Sequence[int], count: int) -> list[int]:
    """Return about so many of the moments, evenly; a long run takes all."""
    return list(moments[:: -(-len(moments) // count)]) if LONG_RUN is None else list(moments)


def build_args(engine: Path, *more: str, checkpoint: str = "tts_a") -> list[str | Path]:
    given = ("--checkpointDir", CHECKPOINTS[checkpoint], "--engineDir", engine, "--backend", "onnxruntime")
    return [*given, *more]


# ---- kill -9 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["a first build", "a build over an older one"])
def test_a_killed_build_leaves_the_old_or_the_new_or_says_so(first: bool, children: Children, tmp_path: Path) -> None:
    """The moments: all of the exchange of the components, and some of what comes before.

    The older engine is of the same checkpoint in FP16: files of the two fit each other, and would be taken for good.
    """
    old, new = {}, {}
    engine = tmp_path / "engine"
    if not first:
        children.run("build", *build_args(tmp_path / "old", "--precision", "fp16"), watched=tmp_path)
        old = digest(tmp_path / "old")
    reference = children.run("build", *build_args(tmp_path / "new"), watched=tmp_path)
    new, changes = digest(tmp_path / "new"), reference["changes"]
    commit = changes.index("open", len(changes) - changes[::-1].index("fsync") - 40)
    moments = sampled(range(commit), 6) + sampled(range(commit, len(changes) + 12), 9 if first else 14)
    states = set()
    for moment in moments:
        shutil.rmtree(engine, ignore_errors=True)
        if not first:
            shutil.copytree(tmp_path / "old", engine)
        run = children.run("build", *build_args(engine), watched=engine, moment=moment)
        if not run["killed"]:
            assert (run["code"], digest(engine)) == (0, new)
            break
        try:
            Qwen3TTS.from_engine_dir(engine, threads=1)
            states.add("old" if digest(engine) == old else "new" if digest(engine) == new else "a mixture")
        except (ConfigError, EngineError) as error:
            nothing = not engine.exists() or not any(engine.iterdir())
            states.add("refused" if "cpspec-build" in str(error) or nothing else str(error))
        again = children.run("build", *build_args(engine), watched=engine)
        assert (again["code"], digest(engine)) == (0, new), (moment, again)
        assert {path.name for path in engine.iterdir()} == set(COMPONENTS)
    must = {"refused"} if first else {"old", "refused"}
    assert must <= states <= must | {"new"}


def test_a_build_that_fails_behind_a_killed_one_keeps_the_older_engine(children: Children, tmp_path: Path) -> None:
    """What a kill left half exchanged is taken back before anything else can go wrong."""
    engine = tmp_path / "engine"
    children.run("build", *build_args(engine, "--precision", "fp16"), watched=tmp_path)
    old, seen = digest(engine), 0
    total = len(children.run("build", *build_args(tmp_path / "new"), watched=tmp_path)["changes"])
    for moment in range(total - 30, total, 4):
        shutil.rmtree(engine)
        children.run("build", *build_args(engine, "--precision", "fp16"), watched=tmp_path)
        children.run("build", *build_args(engine), watched=engine, moment=moment)
        if not (engine / UNFINISHED).exists():
            continue
        seen += 1
        assert "was stopped while it put them in place" in str(CliRunner().invoke(tts, [str(engine), "Hi."]).stderr)
        failed = children.run("build", *build_args(engine), watched=engine, limit=2000)
        assert failed["code"] == 2
        assert digest(engine) == old
        check_finished(engine / "talker")
    assert seen >= 3


@pytest.mark.parametrize("how", [(), STREAMED], ids=["at once", "streamed"])
def test_a_killed_run_leaves_whole_files_only(
    how: tuple[str, ...], children: Children, lively_root: Path, tmp_path: Path
) -> None:
    def args(folder: Path) -> list[str | Path]:
        given = ["--talkerEngineDir", lively_root / "talker", "--text", "Hello.", "--seed", "1", "--threads", "1"]
        return [*given, *how, "--outputAudioDir", folder / "audio", "--outputFile", folder / "out.json",
                "--profileOutputFile", folder / "profile.json"]  # fmt: skip

    done = children.run("tts", *args(tmp_path / "good"), watched=tmp_path / "good")
    assert done["code"] == 0
    samples, _ = soundfile.read(tmp_path / "good" / "audio" / "audio_req0.wav", dtype="int16")
    codes = load_file(tmp_path / "good" / "audio" / "rvq_req0.safetensors")["rvq_codes"]
    moments = sampled(range(len(done["changes"])), 8)
    for moment in moments:
        folder = tmp_path / str(moment)
        run = children.run("tts", *args(folder), watched=folder, moment=moment)
        assert run["killed"]
        for path in folder.rglob("*"):
            if path.is_dir() or (path.name.startswith(".") and path.name.endswith(".partial")):
                continue
            if path.suffix == ".wav":
                np.testing.assert_array_equal(soundfile.read(path, dtype="int16")[0], samples)
            elif path.suffix == ".json":
                assert json.loads(path.read_text())
            else:
                np.testing.assert_array_equal(load_file(path)["rvq_codes"], codes)
    last = tmp_path / str(moments[-1])
    assert children.run("tts", *args(last), watched=last)["code"] == 0  # over what the kill left
    np.testing.assert_array_equal(load_file(last / "audio" / "rvq_req0.safetensors")["rvq_codes"], codes)


@pytest.fixture(scope="module")
def lively_root(lively: Qwen3TTS) -> Path:
    return Path(lively.tokenizer._where).parent


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Stand in for TensorRT, whose plans are the hash of the graph's weights."""

    def build_plan(trt: Any, graph: Any, profiles: Any, options: EngineOptions, *, report: Any) -> Plan:
        content = b"plan of " + sidecar.sha256_of(graph.path.parent / "model.onnx.data").encode()
        return Plan(content=content, profiles=dict(profiles), record={"flavour": "fake", "precision": graph.precision})

    monkeypatch.setattr(rebuild_module, "build_plan", build_plan)
    monkeypatch.setattr(rebuild_module, "expected_record", lambda trt, precision, options: {})
    return Backend(name="tensorrt", binding="1.0")


def test_a_killed_installation_of_another_model(fake: Backend, variants: dict[str, Any], tmp_path: Path) -> None:
    """``--onnxDir`` over an older engine exchanges plan, sidecar and side files: they are of one model, or refused."""
    sources = {}
    for name in ("old", "new"):
        sources[name] = shutil.copytree(variants["tts_a"].engine / "code_predictor", tmp_path / name)
    (tmp_path / "new" / "lm_heads.safetensors").write_bytes(  # of the same shape
        _changed_values((tmp_path / "new" / "lm_heads.safetensors").read_bytes())
    )
    shutil.copyfile(tmp_path / "old" / "model.onnx.data", tmp_path / "new" / "model.onnx.data")
    data = tmp_path / "new" / "model.onnx.data"
    data.write_bytes(_changed_values(data.read_bytes()))
    options = RebuildOptions(backup=False)
    engine = tmp_path / "engine" / "code_predictor"
    pairs = {}
    for name, source in sources.items():
        shutil.rmtree(engine, ignore_errors=True)
        build_component(source, engine, fake, options)
        pairs[_pair(engine)] = name
        if name == "old":
            shutil.copytree(engine, tmp_path / "before")
    seen: set[str] = set()
    for moment in range(0, 60, 2 if LONG_RUN is None else 1):
        shutil.rmtree(engine)
        shutil.copytree(tmp_path / "before", engine)
        if not killed_at(moment, lambda: build_component(sources["new"], engine, fake, options), watched=engine):
            break
        try:
            check_finished(engine)
            config = sidecar.read_config(engine)
            fault = sidecar.plan_fault(engine, "llm.engine", config)
            seen.add("refused" if fault else pairs[_pair(engine)])
        except EngineError as error:
            seen.add("unfinished" if "run the same cpspec-build again" in str(error) else str(error))
            assert "unfinished" in describe_engine_dir(engine.parent)[0]
        again = build_component(sources["new"], engine, fake, options)
        assert again.action in ("built", "unchanged")
        assert pairs[_pair(engine)] == "new"
        assert not [path for path in engine.iterdir() if path.name.endswith((".partial", ".next", UNFINISHED))]
    else:
        pytest.fail("the installation never ended")
    assert {"old", "unfinished"} <= seen <= {"old", "new", "unfinished", "refused"}


def _changed_values(content: bytes) -> bytes:
    return content[:-4] + bytes(byte ^ 1 for byte in content[-4:])


def _pair(engine: Path) -> tuple[str, str]:
    return tuple(sidecar.sha256_of(engine / name) for name in ("llm.engine", "lm_heads.safetensors"))  # type: ignore[return-value]


def test_a_build_killed_at_any_time(children: Children, tmp_path: Path) -> None:
    """Not between two changes, but in the middle of one: at random times of a fixed seed."""
    engine = tmp_path / "engine"
    children.run("build", *build_args(engine, "--precision", "fp16"), watched=tmp_path)
    old = digest(engine)
    children.run("build", *build_args(tmp_path / "new"), watched=tmp_path)
    new = digest(tmp_path / "new")
    delays = np.random.default_rng(7).uniform(0.0, 0.3, 8 if LONG_RUN is None else 60)
    for delay in delays:
        run = children.run("build", *build_args(engine), watched=engine, after_seconds=float(delay))
        assert run["killed"] or run["code"] == 0
        if digest(engine) not in (old, new):
            with pytest.raises((ConfigError, EngineError), match="cpspec-build"):
                Qwen3TTS.from_engine_dir(engine, threads=1)
    assert children.run("build", *build_args(engine), watched=engine)["code"] == 0
    assert digest(engine) == new


# ---- a full disk, a folder that cannot be written -------------------------------------------------------------------


@pytest.mark.parametrize("limit", [10, 1000, 5000, 40_000])
def test_a_build_that_may_write_no_more(limit: int, children: Children, tmp_path: Path) -> None:
    """The system refuses in the middle of a file: the file is named, and the older engine is as it was."""
    engine = tmp_path / "engine"
    children.run("build", *build_args(engine, "--precision", "fp16"), watched=tmp_path)
    old = digest(engine)
    run = children.run("build", *build_args(engine), watched=engine, limit=limit)
    assert (run["code"], digest(engine)) == (2, old)
    assert run["error"].startswith("backend: ONNX Runtime\nError: [Errno 27] File too large: '"), run["error"]
    assert str(engine) in run["error"]
    assert {path.name for path in engine.iterdir()} == set(COMPONENTS)
    run = children.run("build", *build_args(tmp_path / "other"), watched=engine, limit=limit)
    assert (run["code"], (tmp_path / "other").exists()) == (2, False)


class FullDisk:
    """``fsync`` finds the disk full from its N-th call on, as a file system that allocates late does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.calls, self.at, self.real = 0, at, os.fsync
        monkeypatch.setattr(os, "fsync", self.flush)

    def flush(self, handle: int) -> None:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            self.calls += 1
            if self.calls > self.at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.real(handle)


@pytest.mark.parametrize("at", [0, 1, 5, 12, 18])
def test_a_build_on_a_full_disk(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        FullDisk(patch, at)
        result = CliRunner().invoke(build, list(map(str, build_args(tmp_path / "engine"))))
    assert result.exit_code == 2
    assert "No space left on device: '" in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(("at", "how"), [*((at, ()) for at in range(4)), (0, STREAMED), (1, STREAMED)])
def test_a_run_on_a_full_disk(
    at: int, how: tuple[str, ...], lively_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is complete is kept; of what is not, the error names the file, and nothing half is there."""
    with monkeypatch.context() as patch:
        FullDisk(patch, at)
        result = speak(lively_root, tmp_path, "--seed", "1", *how)
    assert result.exit_code == 1
    document = json.loads(result.stdout) if at < 4 and not (tmp_path / "out.json").exists() else None
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    if at < 2:
        assert document is not None
        assert "No space left on device: '" in document["responses"][0]["error"]
        named = "rvq_req0.safetensors" if (at == 0) == (how == STREAMED) else "audio_req0.wav"  # a stream's wav is last
        assert named in document["responses"][0]["error"]
        assert names == set()
    else:
        assert names == {"audio_req0.wav", "rvq_req0.safetensors"} | ({"out.json"} if at == 3 else set())
        assert "No space left on device: '" in result.stderr
    assert "Traceback" not in result.output


def speak(root: Path, folder: Path, *args: str) -> Result:
    given = ["--talkerEngineDir", root / "talker", "--text", "Hi.", "--threads", "1"]
    given += ["--outputAudioDir", folder / "audio", "--outputFile", folder / "out.json"]
    given += ["--profileOutputFile", folder / "profile.json"]
    return CliRunner().invoke(tts, list(map(str, [*given, *args])))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder that nobody can write, root included")
def test_a_folder_that_nobody_can_write(lively_root: Path, tmp_path: Path) -> None:
    """One line, exit code 2, and before anything is spoken or built."""
    for option, name in (("--outputAudioDir", "x"), ("--outputFile", "x.json"), ("--profileOutputFile", "y.json")):
        result = speak(lively_root, tmp_path, option, f"/proc/self/fdinfo/{name}")
        assert result.exit_code == 2
        assert result.stderr.startswith("Error: the folder /proc/self/fdinfo")
        assert result.stderr.count("\n") == 1
        assert list(tmp_path.iterdir()) == []
    result = CliRunner().invoke(build, list(map(str, build_args(Path("/proc/self/fdinfo/engine")))))
    assert result.exit_code == 2
    assert "the engine folder /proc/self/fdinfo/engine cannot be written" in result.stderr


@pytest.mark.parametrize("command", ["plan", "commit"])
def test_a_read_only_folder_behind_a_build(
    command: str, fake: Backend, variants: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was writable is not any more: the older files stay, and the error is the system's with a path."""
    engine = shutil.copytree(variants["tts_a"].engine, tmp_path / "engine")
    before = digest(engine)

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *args, **kwargs)

    real = os.open
    if command == "plan":
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match=r"Read-only file system: '.*llm\.engine'"):
            build_component(engine / "code_predictor", engine / "code_predictor", fake, RebuildOptions())
    else:
        with TtsBuild(CHECKPOINTS["tts_a"], engine, BuildOptions(precision="fp16")) as late:
            for _, _, write in late.components:
                write()
            monkeypatch.setattr(os, "open", refuse)
            with pytest.raises(OSError, match=r"Read-only file system: '.*\.unfinished'"):
                late.commit()
    assert digest(engine) == before


def test_two_runs_do_not_write_into_each_other_s_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with durable.replacing(path) as one:
        with durable.replacing(path) as other:
            assert one != other
            durable.fill(other, b"other", path)
        durable.fill(one, b"one", path)
    assert path.read_bytes() == b"one"
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def test_permissions_are_those_of_a_new_file_or_of_the_older_one(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        durable.write_file(tmp_path / "new", b"")
        (tmp_path / "old").write_bytes(b"")
        (tmp_path / "old").chmod(0o604)
        durable.write_file(tmp_path / "old", b"1")
    finally:
        os.umask(mask)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("new", "old")] == [0o640, 0o604]


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_what_the_sessions_take(lively_root: Path, lively: Qwen3TTS) -> None:
    """KV caches and weights are exact; the workspace is no less than the arrays of a pass that are known."""
    for batch in (1, 4):
        needs = {need.folder: need for need in memory_needed(lively_root, batch=batch, verify_size=8)}
        spec = lively.talker.spec
        talker = DecoderSession(
            lively_root / "talker" / "model.onnx", spec.decoder, capacity=spec.limits.max_kv_cache_capacity, threads=1
        )
        talker.start(batch, spec.limits.max_kv_cache_capacity)
        assert needs["talker"].kv_cache_bytes == sum(array.nbytes for array in talker._cache.values())
        predictor = lively.predictor
        session = DecoderSession(
            lively_root / "code_predictor" / "model.onnx",
            predictor.spec.decoder,
            capacity=predictor.spec.limits.max_kv_cache_capacity,
            threads=1,
        )
        session.start(batch, predictor.num_code_groups + predictor.spec.max_verify_size)
        assert needs["code_predictor"].kv_cache_bytes == sum(array.nbytes for array in session._cache.values())
        assert needs["code_predictor"].weights_bytes == (
            (lively_root / "code_predictor" / "model.onnx.data").stat().st_size
            + predictor._tables.heads.nbytes
            + (lively_root / "code_predictor" / "codec_embeddings.safetensors").stat().st_size
            + (lively_root / "code_predictor" / "small_to_mtp_projection.safetensors").stat().st_size
        )
        waveform = 4 * 325 * lively.codec.samples_per_frame
        assert needs["code2wav"].workspace_bytes >= waveform
        assert needs["talker"].workspace_bytes >= batch * 512 * 4 * spec.decoder.num_attention_heads * 4096
        assert {need.place for need in needs.values()} == {"CPU"}


def test_memory_of_plans(lively_root: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(lively_root, tmp_path / "engine")
    for name, plan in zip(COMPONENTS, ("llm.engine", "llm.engine", "code2wav.engine"), strict=True):
        (engine / name / plan).write_bytes(bytes(3_000_000))
    result = CliRunner().invoke(main, ["inspect", "--memory", str(engine), "--batchSize", "2", "--json"])
    document = json.loads(result.stdout)
    needs = {entry["folder"]: entry for entry in document["components"]}
    assert {entry["place"] for entry in needs.values()} == {"GPU"}
    assert needs["talker"]["weights_bytes"] == needs["code2wav"]["weights_bytes"] == 3_000_000
    tables = ("lm_heads", "codec_embeddings", "small_to_mtp_projection")
    files = [engine / "code_predictor" / f"{name}.safetensors" for name in tables]
    files.append(engine / "talker" / "embedding.safetensors")
    assert needs["code_predictor"]["weights_bytes"] == 3_000_000 + sum(path.stat().st_size for path in files)
    assert document["total_bytes"]["GPU"] == sum(entry["total_bytes"] for entry in needs.values())
    text = CliRunner().invoke(main, ["inspect", "--memory", str(engine), "--batchSize", "2"]).stdout
    assert [line.split()[0] for line in text.splitlines()] == ["component", *sorted(COMPONENTS), "total"]
    assert f"{document['total_bytes']['GPU'] / 1e6:,.1f} MB" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--memory", "--batchSize", "5"], "takes batches of 1 to 4 (max_batch_size), not 5"),
        (["--memory", "--cpSpecVerifySize", "9"], "a verify size of 9 is not possible"),
        (["--batchSize", "2"], "go with --memory"),
    ],
)
def test_memory_of_what_is_not_possible(args: list[str], words: str, lively_root: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(lively_root), *args])
    assert (result.exit_code, words in result.stderr) == (2, True), result.stderr


def test_memory_of_answers(omni: Any) -> None:
    """With the encoders, and with what a stream of sound carries from call to call."""
    needs = {need.folder: need for need in memory_needed(omni.engine)}
    assert list(needs) == [
        "code_predictor", "multimodal/audio", "multimodal/code2wav", "multimodal/visual", "talker", "thinker",
    ]  # fmt: skip
    state = omni.model.voice.codec._graph.begin()._state
    assert needs["multimodal/code2wav"].kv_cache_bytes == 2 * sum(array.nbytes for array in state.values()) > 0
    for name, key in (("audio", "audio_config"), ("visual", "vision_config")):
        need, folder = needs[f"multimodal/{name}"], omni.engine / "multimodal" / name
        config = json.loads((folder / "config.json").read_text())
        assert need.weights_bytes == (folder / "model.onnx.data").stat().st_size
        if name == "audio":
            windows, sizes = config["builder_config"]["max_windows"], config[key]
            rows = config["window_chunks"] * config["chunk_rows"]
            scores = windows * sizes["encoder_attention_heads"] * rows**2
            frames = windows * config["window_chunks"] * config["chunk_frames"]
            least = max(scores, frames * sizes["num_mel_bins"] * sizes["downsample_hidden_size"] // 4)
        else:
            least = config[key]["num_heads"] * config["builder_config"]["max_patches"] ** 2
        assert least * 4 <= need.workspace_bytes < 40 * least * 4


def test_memory_of_an_encoders_plan(omni: Any, tmp_path: Path) -> None:
    engine = shutil.copytree(omni.engine, tmp_path / "engine")
    for name, plan in (("audio", "audio_encoder.engine"), ("visual", "visual.engine")):
        (engine / "multimodal" / name / plan).write_bytes(bytes(3_000_000))
    needs = {need.folder: need for need in memory_needed(engine)}
    assert {name: need.weights_bytes for name, need in needs.items() if need.place == "GPU"} == {
        "multimodal/audio": 3_000_000,
        "multimodal/visual": 3_000_000,
    }


def test_memory_of_the_host_that_is_used_up(lively: Qwen3TTS, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise MemoryError("Unable to allocate 9 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(lively.talker, "prefill", refuse)
        with pytest.raises(EngineError, match=r"memory of this machine is used up \(Unable to allocate 9 GiB\)"):
            lively.synthesize("Hi.", max_audio_length=1)
    assert len(lively.synthesize("Hi.", seed=1, max_audio_length=1).codes) == 1


# ---- a GPU that has too little memory, or goes away -----------------------------------------------------------------


class OnDevice(DecoderSession):
    """A decoder whose passes wait for a device, as those of TensorRT do."""

    device: Device

    def forward(self, *args: Any) -> Any:
        self.device.make_current()
        hidden = super().forward(*args)
        self.device.synchronize()
        return hidden


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A fake driver, under sessions that run on the CPU and talk to it."""

    def decoder(self: Runtime, folder: Path, spec: Any, capacity: int, *, keep_buffers: bool = False) -> Any:
        session = OnDevice(folder / "model.onnx", spec, capacity=capacity, threads=1)
        assert self.cuda is not None
        session.device = self.cuda
        return session

    monkeypatch.setattr(Runtime, "decoder", decoder)
    monkeypatch.setattr(Runtime, "graph", lambda self, folder: GraphSession(folder / "model.onnx", threads=1))
    return FakeDriver().install(monkeypatch)


def on_gpu(root: Path, folder: Path, *args: str) -> Result:
    return speak(root, folder, "--device", "cuda", "--cpExecutor", "engine", "--seed", "1", *args)


def test_a_device_without_room_for_the_plans(driver: FakeDriver, lively_root: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(lively_root, tmp_path / "engine")
    for name, plan in zip(COMPONENTS, ("llm.engine", "llm.engine", "code2wav.engine"), strict=True):
        (engine / name / plan).write_bytes(bytes(2_000_000))
    driver.total = 5_500_000
    result = on_gpu(engine, tmp_path / "out")
    assert result.exit_code == 2
    assert "needs 6.0 MB of device memory, 5.5 MB are free on Fake GPU" in result.stderr
    assert "talker 2.0 MB, code_predictor 2.0 MB, code2wav 2.0 MB" in result.stderr
    assert "cuMemAlloc" not in driver.calls, "nothing is allocated before the comparison"
    assert "Traceback" not in result.output
    driver.total = 6_000_000
    assert on_gpu(engine, tmp_path / "out").exit_code == 0


def test_an_encoder_s_memory_is_compared_when_it_is_opened(
    driver: FakeDriver, omni_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: a model that only reads text needs none for it."""
    folder = omni_copy / "multimodal" / "visual"
    (folder / "visual.engine").write_bytes(bytes(2_000_000))
    (omni_copy / "thinker" / "llm.engine").write_bytes(bytes(1_000_000))
    config = json.loads((folder / "config.json").read_text())
    plan = sidecar.plan_record("visual.engine", bytes(2_000_000))
    versions = {"flavour": "tensorrt", "tensorrt_version": "1.0", "compute_capabilities": []}
    config["builder_config"]["engine"] = {**versions, "plan": plan}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(runtime_module, "import_binding", lambda flavour: SimpleNamespace(__version__="1.0"))
    monkeypatch.setattr(runtime_module, "Plan", lambda path, binding, data: len(data))
    driver.total = 1_500_000
    opened = open_runtime("cuda", [omni_copy / "thinker", folder])
    words = r"opening .*visual\.engine needs 2\.0 MB of device memory, 1\.5 MB are free on Fake GPU"
    with pytest.raises(EngineError, match=words):
        opened._plan(folder, "visual.engine")
    driver.total = 2_000_000
    assert opened._plan(folder, "visual.engine") == 2_000_000


def test_an_array_that_does_not_fit_has_both_numbers(driver: FakeDriver) -> None:
    driver.total = 1_000_000
    device = Device()
    kept = device.zeros((100, 1000), np.float32)
    with pytest.raises(EngineError, match=r"an array needs 0\.8 MB of device memory, 0\.6 MB are free on Fake GPU"):
        device.empty((200, 1000), np.float32)
    assert list(driver.taken.values()) == [kept.nbytes]
    device.require(600_000, "what fits")


@pytest.mark.parametrize("after", [0, 3, 8])
def test_a_driver_that_is_gone_before_anything_is_loaded(
    after: int, driver: FakeDriver, lively_root: Path, tmp_path: Path
) -> None:
    driver.lost_after = after
    result = on_gpu(lively_root, tmp_path / "out")
    assert result.exit_code == 2
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("calls", [1, 5, 17, 40])
def test_a_driver_that_goes_away_while_speaking(
    calls: int, driver: FakeDriver, lively_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts that were complete are kept, the others have one clear error each, and the command ends with 1."""
    request = {"messages": [{"role": "assistant", "content": "Hi."}], "max_audio_length": 2}
    requests = [{**request, "seed": seed} for seed in (1, 2)]
    (tmp_path / "input.json").write_text(json.dumps({"requests": requests}))
    monkeypatch.setattr(Qwen3TTS, "prepare", _armed(driver, calls))
    args = ["--talkerEngineDir", lively_root / "talker", "--inputFile", tmp_path / "input.json", "--device", "cuda"]
    args += ["--cpExecutor", "engine", "--outputFile", tmp_path / "out.json", "--outputAudioDir", tmp_path / "audio"]
    result = CliRunner().invoke(tts, list(map(str, args)))
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    responses = json.loads((tmp_path / "out.json").read_text())["responses"]
    failed = [response for response in responses if response["output_text"] == "FAILED"]
    assert len(failed) == (1 if calls == 40 else 2)
    for response in failed:
        words = "cuStreamSynchronize failed: CUDA_ERROR_LAUNCH_FAILED (719); the GPU cannot be used"
        assert response["error"].startswith(words)
    assert len(list((tmp_path / "audio").glob("*.wav"))) == 2 - len(failed)
    gc.collect()  # what is freed now is freed on a device that is gone, and complains of nothing


def _armed(driver: FakeDriver, calls: int) -> Callable[..., Any]:
    """Let the driver go away so many calls behind the last request's preparation."""
    real = Qwen3TTS.prepare

    def prepare(self: Qwen3TTS, *args: Any, **kwargs: Any) -> Any:
        driver.lost_after = calls
        return real(self, *args, **kwargs)

    return prepare


def test_every_thread_has_the_context(driver: FakeDriver) -> None:
    """A thread's number is taken over by the next thread when it has ended; its context is not."""
    device, numbers, faults = Device(), [], []

    def work() -> None:
        numbers.append(threading.get_ident())
        try:
            device.make_current()
            device.zeros((4,), np.float32)
        except EngineError as error:
            faults.append(str(error))

    for _ in range(8):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert faults == []
    assert len(set(numbers)) < len(numbers), "no number came again: this test showed nothing"


def test_memory_is_freed_by_whichever_thread_drops_it(driver: FakeDriver) -> None:
    device = Device()
    held = [device.zeros((1000,), np.float32)]
    assert list(driver.taken.values()) == [4000]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert driver.taken == {}


def test_a_killed_child_is_seen_as_killed(tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    assert killed_at(0, lambda: durable.write_file(tmp_path / "x", b"1"), watched=tmp_path)
    assert not killed_at(99, lambda: durable.write_file(tmp_path / "x", b"1"), watched=tmp_path)
    assert (tmp_path / "x").read_bytes() == b"1"
    assert signal.SIGKILL == 9
