"""Stage 6: write the trained weights as a checkpoint in the official format, in FP16, and prove it.

The proof builds engines from the checkpoint with ``trt_cpspec.builder`` and compares them with the model in torch, both
with the rounded weights: Talker states of teacher-forced development texts, CodePredictor states of their frames, and
the waveform of their codes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import corpus as texts
import numpy as np
import torch
from codec import Codec
from forced import forced_states
from layers import Talker, read_config
from safetensors.torch import load_file, save_file
from talker import Corpus, Layout, input_rows, spoken_weights
from torch import Tensor
from training import load_weights
from trt_cpspec.builder.build import BuildOptions
from trt_cpspec.builder.synthetic import write_checkpoint
from trt_cpspec.builder.tts import TtsBuild

from trt_cpspec import Qwen3TTS

MOST_BYTES = 12_000_000
HIDDEN_TOLERANCE, WAVE_TOLERANCE = 2e-4, 2e-4


def export(work: Path, folder: Path, *, look_ahead: bool) -> None:
    """Write the checkpoint; its tensors must be those of the format, by name and shape."""
    weights = {f"talker.{name}": value for name, value in spoken_weights(work).items()}
    if look_ahead:
        weights |= {f"talker.code_predictor.{name}": value for name, value in load_weights(work, "look_ahead").items()}
    table = weights["talker.model.text_embedding.weight"]
    weights["talker.model.text_embedding.weight"] = table[torch.from_numpy(np.load(work / "corpus.npz")["fold"])]
    codec = load_weights(work, "codec")
    # The encoder of the format serves voice clones alone; this one is another and stays behind.
    codec = {name: value for name, value in codec.items() if name.startswith("decoder.")}
    codec |= {f"decoder.{name}": value for name, value in load_weights(work, "decoder").items()}
    for name in [name for name in codec if name.endswith("cluster_usage")]:
        sums = name.replace("cluster_usage", "embedding_sum")
        codec[sums] = codec[sums] / codec[name].clamp(min=1e-5)[:, None]
        codec[name] = torch.ones_like(codec[name])
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "skeleton", folder)
    for path, tensors in ((folder, weights), (folder / "speech_tokenizer", codec)):
        narrow = {name: value.half().contiguous() for name, value in tensors.items()}
        broken = [name for name, value in narrow.items() if not value.isfinite().all()]
        if broken:
            raise SystemExit(f"not finite in FP16: {', '.join(broken)}")
        save_file(narrow, path / "model.safetensors", {"format": "pt"})
    check_names(work, folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise SystemExit(f"{folder} has {size} bytes, more than {MOST_BYTES}")
    print(f"{folder}: {size / 1e6:.2f} MB")


def check_names(work: Path, folder: Path) -> None:
    """Compare names and shapes with those that the generator of checkpoints gives a model of these sizes."""
    with TemporaryDirectory() as temporary:
        write_checkpoint(Path(temporary) / "reference", texts.voice_spec())
        for part in ("", "speech_tokenizer"):
            wanted, found = (
                {
                    name: tuple(value.shape)
                    for name, value in load_file(top / part / "model.safetensors").items()
                    if not name.startswith("encoder.")
                }
                for top in (Path(temporary) / "reference", folder)
            )
            if wanted != found:
                differ = sorted(set(wanted.items()) ^ set(found.items()))
                raise SystemExit(f"{part or 'model'}: not the tensors of the format: {differ[:6]}")


def rounded(model: torch.nn.Module, path: Path, prefix: str) -> torch.nn.Module:
    """Load a model with the FP16 weights of the checkpoint."""
    tensors = load_file(path / "model.safetensors")
    model.load_state_dict(
        {name[len(prefix) :]: value.float() for name, value in tensors.items() if name.startswith(prefix)}
    )
    return model.eval()


@torch.no_grad()
def compare(work: Path, folder: Path, engines: Path, count: int = 4) -> dict[str, float]:
    """Return the largest differences between the model in torch and the engines, over development texts."""
    device = torch.device("cpu")
    talker = rounded(Talker(read_config(work)), folder, "talker.")
    decoder = rounded(Codec(work).decoder, folder / "speech_tokenizer", "decoder.")
    corpus = Corpus(work, Layout(work), device)
    engine = Qwen3TTS.from_engine_dir(engines, device="cpu", threads=1)
    worst: dict[str, float] = {"talker_hidden": 0.0, "predictor_hidden": 0.0, "waveform": 0.0}
    for index in range(corpus.sizes[0], corpus.sizes[0] + count):
        length = int(corpus.rows[index])
        batch = corpus.batch(np.array([index]), language=True, length=length)
        codes = corpus.codes[batch.frame.clamp(min=0)].long()
        hidden = talker.model.run(input_rows(talker, batch, codes))[0][0]
        found = engine_states(engine, work, index)
        kept = int(corpus.letters[index]) + len(corpus.layout.prefixes[1].text) + 1
        states = hidden[kept : kept + len(found["talker"])]
        _note(worst, "talker_hidden", states, found["talker"])
        frames = torch.from_numpy(np.load(work / "codes.npy").astype(np.int64))
        begin = int(corpus.frame_begins[index])
        own = frames[begin : begin + int(corpus.frames[index])]
        inputs = talker.code_predictor.rows(states, talker.model.codec_embedding(own[:, 0]), own)
        _note(worst, "predictor_hidden", talker.code_predictor.hidden_states(inputs), found["predictor"])
        wave = decoder(decoder.quantizer.dequantize(own.T[None]))[0].clamp(-1, 1)
        _note(worst, "waveform", wave, found["wave"])
    return worst


def engine_states(engine: Qwen3TTS, work: Path, index: int) -> dict[str, Any]:
    """Return what the engines make of a text's own codes: Talker and CodePredictor states, and the waveform."""
    sets = json.loads((work / "corpus.json").read_text(encoding="utf-8"))
    text = [*sets["train"], *sets["dev"], *sets["test"]][index]
    frames = np.load(work / "frames.npy")
    begin = int(frames[:index].sum())
    codes = np.load(work / "codes.npy")[begin : begin + frames[index]].astype(np.int32)
    forced = forced_states(engine, text, codes, language="english")
    return {"talker": forced.talker_hidden, "predictor": forced.predictor_hidden, "wave": engine.codec.decode(codes)}


def _note(worst: dict[str, float], name: str, ours: Tensor, theirs: np.ndarray) -> None:
    worst[name] = float(np.maximum(worst[name], np.abs(ours.numpy() - theirs).max()))  # keeps a NaN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--output", type=Path, required=True, help="receives the checkpoint; an older one is replaced")
    parser.add_argument("--lookAhead", dest="look_ahead", action="store_true", help="with the CodePredictor to compare")
    args = parser.parse_args()
    export(args.work, args.output, look_ahead=args.look_ahead)
    with TemporaryDirectory() as temporary:
        engines = Path(temporary) / "engines"
        with TtsBuild(args.output, engines, BuildOptions()) as build:
            for _, _, write in build.components:
                write(lambda: None)
            build.commit()
        worst = compare(args.work, args.output, engines)
    print(json.dumps(worst))
    bounds = {"talker_hidden": HIDDEN_TOLERANCE, "predictor_hidden": HIDDEN_TOLERANCE, "waveform": WAVE_TOLERANCE}
    if not all(worst[name] <= bounds[name] for name in bounds):
        raise SystemExit(f"torch and the engines differ by more than {bounds}")


if __name__ == "__main__":
    main()
