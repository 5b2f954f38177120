"""What ``pip install`` puts on a machine, and what ``import`` does there."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import trt_cpspec

ROOT = Path(__file__).parents[1]
FOLDERS = {"trt_cpspec": "trt_cpspec", "builder": "trt_cpspec/builder", "kernels": "trt_cpspec/kernels"}
SHIPPED = (".py", ".typed", ".cu", ".cuh")
SCRIPTS = {
    "cpspec": "trt_cpspec.builder.cli:main",
    "cpspec-build": "trt_cpspec.builder.cli:build",
    "llm_inference": "trt_cpspec.cli:llm",
    "qwen3_tts_inference": "trt_cpspec.cli:tts",
}


def python(code: str, *args: str | Path, cwd: Path) -> str:
    command = [sys.executable, "-c", code, *map(str, args)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build in a copy of the sources: a build leaves folders behind, whose stale files the next one would ship."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "demo_out", "*.egg-info", "golden", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "./source"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_the_sources_and_nothing_else(wheel: Path) -> None:
    info = f"trt_cpspec-{trt_cpspec.__version__}.dist-info"
    sources = {
        f"{target}/{path.relative_to(ROOT / source)}"
        for source, target in FOLDERS.items()
        for path in (ROOT / source).rglob("*")
        if path.suffix in SHIPPED or (path.is_file() and ROOT / "builder" / "voice" in path.parents)
    }
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
        assert archive.read(f"{info}/top_level.txt").decode().split() == ["trt_cpspec"]
    assert {name for name in found if not name.startswith(f"{info}/")} == sources
    assert "trt_cpspec/py.typed" in sources
    assert {"trt_cpspec/builder/__init__.py", "trt_cpspec/kernels/__init__.py"} <= sources
    weights = {f"trt_cpspec/builder/voice/{part}model.safetensors" for part in ("", "speech_tokenizer/")}
    assert weights <= sources
    assert {f"{info}/licenses/LICENSE", f"{info}/METADATA"} <= found


def test_the_commands_of_the_wheel_exist(unpacked: Path, tmp_path: Path) -> None:
    parser = configparser.ConfigParser()
    parser.read(next(unpacked.glob("*.dist-info/entry_points.txt")))
    assert dict(parser["console_scripts"]) == SCRIPTS
    code = (
        "import sys, importlib\nsys.path.insert(0, sys.argv[1])\n"
        "for entry in sys.argv[2:]:\n"
        "    module, name = entry.split(':')\n"
        "    loaded = importlib.import_module(module)\n"
        "    print(loaded.__file__, callable(getattr(loaded, name)))\n"
    )
    lines = python(code, unpacked, *SCRIPTS.values(), cwd=tmp_path).splitlines()
    assert all(line.startswith(str(unpacked)) and line.endswith(" True") for line in lines)
    assert len(lines) == len(SCRIPTS)


HEAVY = "onnx onnxruntime tokenizers soundfile safetensors click"


def test_importing_the_package_needs_numpy_alone_and_changes_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, os, logging, warnings, signal, random, locale\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in sys.argv[1].split():\n"
        "            raise ImportError(f'blocked: {name}')\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "def state():\n"
        "    root = logging.getLogger()\n"
        "    return (dict(os.environ), root.level, root.handlers[:], logging.root.manager.disable, sys.path[:],\n"
        "            warnings.filters[:], signal.getsignal(signal.SIGINT), random.getstate(), locale.setlocale(0),\n"
        "            os.getcwd(), sys.excepthook)\n"
        "before, modules = state(), set(sys.modules)\n"
        "import trt_cpspec\n"
        "assert state() == before\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - modules} - sys.stdlib_module_names)\n"
        "from trt_cpspec import SamplingParams, ConfigError, Window\n"
        "assert state() == before\n"
        "try:\n"
        "    trt_cpspec.Qwen3TTS\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    modules, blocked = python(code, HEAVY, cwd=tmp_path).splitlines()
    assert modules == "trt_cpspec"
    assert blocked.startswith("blocked: ")


def test_every_public_name_can_be_had() -> None:
    for name in trt_cpspec.__all__:
        value = getattr(trt_cpspec, name)
        assert (value.__name__, value.__module__.split(".")[0]) == (name, "trt_cpspec")
    assert set(trt_cpspec.__all__) <= set(dir(trt_cpspec))
    with pytest.raises(AttributeError, match="no attribute 'Qwen4'"):
        _ = trt_cpspec.Qwen4


def test_texts_are_spoken_without_jinja2(tmp_path: Path) -> None:
    """Only the chat template of a Qwen3-Omni needs it."""
    code = (
        "import sys\nsys.modules['jinja2'] = None\n"
        "import trt_cpspec.outputs, trt_cpspec.cli, trt_cpspec.pipeline\n"
        "trt_cpspec.cli.tts(['--help'], standalone_mode=False)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
