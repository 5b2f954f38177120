"""Stage 3: train the codec on random pieces of the speech, then turn all speech into codes.

Losses: log-mel bands and magnitudes of spectra at several resolutions (no phase, no adversary), and the commitment of
the latents to their codes. For the first part of the schedule nothing is quantized; then k-means makes the codebooks,
and moving averages keep them; a code that falls out of use starts anew. A quarter of the pieces keeps only some of
their codes, so the first codes carry most.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from layers import QUIET, Decoder, Encoder, Mel, Quantizer, magnitudes, read_codec_config
from speech import FRAME
from torch import Tensor, nn
from training import Clock, Log, learning_rate, load_state, load_weights, pick_device, save_state

UNQUANTIZED = 0.1
"""Share of the schedule without quantization."""

KMEANS_LATENTS = 16384


class Codec(nn.Module):
    """Encoder and decoder."""

    def __init__(self, work: Path) -> None:
        super().__init__()
        config = read_codec_config(work)
        self.groups: int = config["num_quantizers"]
        self.encoder = Encoder(config["codebook_dim"])
        self.decoder = Decoder(config)

    def codes(self, wave: Tensor) -> Tensor:
        """Return codes ``[B, T, G]`` of waveforms ``[B, T * 1920]``."""
        latents = self.encoder(wave)
        batch, length, width = latents.shape
        return self.decoder.quantizer.quantize(latents.reshape(-1, width)).codes.view(batch, length, -1)


class SpectralLoss(nn.Module):
    """Distance of two waveforms in magnitudes, logarithmic and plain, and in log-mel bands."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (2048, 1024, 512, 256)
        for size in self.sizes:
            self.register_buffer(f"window_{size}", torch.hann_window(size))
        self.mels = nn.ModuleList((Mel(2048, 512, 128), Mel(1024, 256, 80), Mel(512, 128, 64)))

    def forward(self, made: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of magnitudes, and that of bands."""
        spectral = made.new_zeros(())
        for size in self.sizes:
            window = getattr(self, f"window_{size}")
            ours, theirs = (magnitudes(wave, size, size // 4, window) for wave in (made, wanted))
            spectral = spectral + F.l1_loss((ours + QUIET).log(), (theirs + QUIET).log())
            spectral = spectral + (ours - theirs).norm() / theirs.norm().clamp(min=1e-3)
        bands = made.new_zeros(())
        for mel in self.mels:
            bands = bands + F.l1_loss(mel(made), mel(wanted))
        return spectral / len(self.sizes), bands / len(self.mels)


@torch.no_grad()
def start_codebooks(quantizer: Quantizer, latents: Tensor, rounds: int = 8) -> None:
    """Give every codebook the k-means centres of what the ones before it leave of latents ``[n, codebook_dim]``."""
    first = quantizer.rvq_first.inward(latents)
    kept = _centres(quantizer.rvq_first.books(), first, rounds)
    rest = quantizer.rvq_rest.inward(latents - quantizer.rvq_first.outward(kept))
    _centres(quantizer.rvq_rest.books(), rest, rounds)


def _centres(books: list[nn.Module], vectors: Tensor, rounds: int) -> Tensor:
    rest, total = vectors.clone(), torch.zeros_like(vectors)
    for book in books:
        size = len(book.cluster_usage)
        table = rest[torch.randperm(len(rest), device=rest.device)[:size]].clone()
        for _ in range(rounds):
            codes = (rest @ table.T - 0.5 * table.square().sum(1)).argmax(1)
            counts = torch.bincount(codes, minlength=size).float()[:, None]
            sums = torch.zeros_like(table).index_add_(0, codes, rest)
            table = torch.where(counts > 0, sums / counts.clamp(min=1), table)
        book.cluster_usage.fill_(1.0)
        book.embedding_sum.copy_(table)
        chosen = table[(rest @ table.T - 0.5 * table.square().sum(1)).argmax(1)]
        total, rest = total + chosen, rest - chosen
    return total


def pieces_of(speech: Tensor, count: int, frames: int) -> Tensor:
    """Return random pieces ``[count, frames * 1920]`` of all speech, in [-1, 1]."""
    length = frames * FRAME
    starts = torch.randint(len(speech) - length, (count, 1), device=speech.device)
    return speech[starts + torch.arange(length, device=speech.device)].float() / 32768


def train(work: Path, *, schedule: float, limit: float, batch: int, frames: int, peak: float, seed: int) -> None:
    """Train until the schedule, or this call's time, is over."""
    device = pick_device()
    torch.manual_seed(seed)
    model, distance = Codec(work).to(device).train(), SpectralLoss().to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), peak, betas=(0.8, 0.99), weight_decay=0.0, fused=device.type == "cuda"
    )
    facts = load_state(work, "codec", model, optimizer)
    torch.manual_seed(seed + facts["steps"])
    speech = torch.from_numpy(np.load(work / "speech.npy")).to(device)
    clock, log, steps = Clock(schedule, limit, facts["spent"]), Log(work / "codec_log.jsonl"), facts["steps"]
    quantized, begun = facts.get("quantized", False), steps
    while not clock.over:
        if not quantized and clock.progress >= UNQUANTIZED:
            with torch.no_grad():
                count = -(-KMEANS_LATENTS // (64 * frames))
                latents = [model.encoder(pieces_of(speech, 64, frames)).flatten(0, 1) for _ in range(count)]
            start_codebooks(model.decoder.quantizer, torch.cat(latents))
            quantized = True
        rate = learning_rate(peak, steps - begun, clock.progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        wave = pieces_of(speech, batch, frames)
        latents = model.encoder(wave)
        commitment = latents.new_zeros(())
        if quantized:
            kept = torch.randint(1, model.groups + 1, (batch,), device=device)
            kept = torch.where(torch.rand(batch, device=device) < 0.25, kept, model.groups).repeat_interleave(frames)
            result = model.decoder.quantizer.quantize(latents.flatten(0, 1), kept)
            latents, commitment = result.latents.view_as(latents), result.loss
        spectral, bands = distance(model.decoder(latents), wave)
        loss = spectral + 2 * bands + 0.5 * commitment
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if norm.isfinite():
            optimizer.step()
        if steps % 50 == 0:
            log.add(
                stage="codec", step=steps, seconds=clock.spent, lr=rate, spectral=spectral.item(), bands=bands.item(),
                commitment=commitment.item(), norm=norm.item(),
            )  # fmt: skip
        steps += 1
    facts = {"spent": clock.spent, "steps": steps, "quantized": quantized, "complete": clock.progress >= 1}
    save_state(work, "codec", model, optimizer, facts)


def complete(work: Path) -> bool:
    """Whether the codec's schedule is over."""
    return bool(json.loads((work / "codec.json").read_text(encoding="utf-8"))["complete"])


def load_codec(work: Path, device: torch.device) -> Codec:
    """Return the trained codec."""
    model = Codec(work)
    model.load_state_dict(load_weights(work, "codec"))
    return model.to(device).eval()


@torch.inference_mode()
def encode(work: Path, batch: int) -> None:
    """Write ``codes.npy``, ``[frames, G] uint8``: the codes of all texts, one behind the other."""
    device = pick_device()
    torch.backends.cudnn.benchmark = False  # every batch has a length of its own
    model = load_codec(work, device)
    speech = torch.from_numpy(np.load(work / "speech.npy")).to(device)
    frames = np.load(work / "frames.npy")
    begins = np.concatenate([[0], np.cumsum(frames)])
    codes = np.zeros((begins[-1], model.groups), np.uint8)
    order = np.argsort(frames, kind="stable")
    for place in range(0, len(order), batch):
        chosen = order[place : place + batch]
        longest = int(frames[chosen].max())
        wave = torch.zeros(len(chosen), longest * FRAME, device=device)
        for row, index in enumerate(chosen):
            part = speech[begins[index] * FRAME : begins[index + 1] * FRAME]
            wave[row, : len(part)] = part.float() / 32768
        found = model.codes(wave).cpu().numpy()
        for row, index in enumerate(chosen):
            codes[begins[index] : begins[index + 1]] = found[row, : frames[index]]
    np.save(work / "codes.npy", codes)
    used = [int((np.bincount(codes[:, depth], minlength=256) > 0).sum()) for depth in range(model.groups)]
    print(f"{len(codes)} frames of codes; codes in use by depth: {used}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--schedule", type=float, required=True, help="seconds of the whole stage, over all calls")
    parser.add_argument("--timeLimit", dest="limit", type=float, help="seconds of this call; default: the schedule")
    parser.add_argument("--batch", type=int, default=32, help="pieces a step")
    parser.add_argument("--frames", type=int, default=20, help="frames a piece")
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    train(
        args.work, schedule=args.schedule, limit=args.limit or args.schedule, batch=args.batch, frames=args.frames,
        peak=args.lr, seed=args.seed,
    )  # fmt: skip
    if complete(args.work):
        encode(args.work, batch=256)


if __name__ == "__main__":
    main()
