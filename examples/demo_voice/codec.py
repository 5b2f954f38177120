"""Stage 3: train the codec on random pieces of the speech, then turn all speech into codes.

The first code is to tell what is said, as in the released codec: a small classifier, which is not exported, hears
nothing but the first code of a frame and names the phoneme of each of its four parts. The other losses are spectral:
log-mel bands as a recogniser hears them, finer ones, and magnitudes with a small weight; no phase, no adversary; and
the commitment of the latents to their codes. For the first part of the schedule nothing is quantized; then k-means
makes the codebooks, and moving averages keep them; a code that falls out of use starts anew. Most pieces keep only
their first codes, so these carry nearly all, and a deep one that is drawn wrongly does little harm.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from layers import QUIET, Decoder, Encoder, Listener, Mel, Quantizer, Snake, magnitudes, read_codec_config, snake
from speech import FRAME, PARTS
from torch import Tensor, nn
from training import (
    Clock,
    Log,
    Replayed,
    adam,
    descend,
    learning_rate,
    load_state,
    load_weights,
    pick_device,
    save_state,
    set_rate,
)

UNQUANTIZED = 0.1
"""Share of the schedule without quantization."""

KMEANS_LATENTS = 16384

LEAD_FRAMES = 2
"""Frames of a piece that are made and not judged: the last convolutions hear silence before them."""


class Codec(nn.Module):
    """Encoder, decoder, and the classifier that teaches the first code."""

    def __init__(self, work: Path) -> None:
        super().__init__()
        config = read_codec_config(work)
        self.groups: int = config["num_quantizers"]
        self.encoder = Encoder(config["codebook_dim"])
        self.decoder = Decoder(config)
        names = json.loads((work / "phones.json").read_text(encoding="utf-8"))
        self.listener = Listener(config["codebook_dim"], len(names), PARTS)

    def codes(self, wave: Tensor) -> Tensor:
        """Return codes ``[B, T, G]`` of waveforms ``[B, T * 1920]``."""
        latents = self.encoder(wave)
        batch, length, width = latents.shape
        return self.decoder.quantizer.quantize(latents.reshape(-1, width)).codes.view(batch, length, -1)


class SpectralLoss(nn.Module):
    """Distance of two waveforms in log-mel bands, and in magnitudes, logarithmic and plain."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = Mel(600, 240, 64, 8000)  # windows and steps of recognisers: 25 and 10 ms
        self.mels = nn.ModuleList((Mel(2048, 512, 128), Mel(512, 128, 64)))
        self.register_buffer("window", torch.hann_window(1024), persistent=False)

    def forward(self, made: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of what a recogniser hears, that of other bands, and that of magnitudes."""
        heard = F.l1_loss(self.heard(made), self.heard(wanted))
        bands = torch.stack([F.l1_loss(mel(made), mel(wanted)) for mel in self.mels]).mean()
        ours, theirs = (magnitudes(wave, 1024, 256, self.window) for wave in (made, wanted))
        spectral = F.l1_loss((ours + QUIET).log(), (theirs + QUIET).log())
        spectral = spectral + (ours - theirs).norm() / theirs.norm().clamp(min=1e-3)
        return heard, bands, spectral


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


class Pieces:
    """All speech and its phonemes, on the device."""

    def __init__(self, work: Path, device: torch.device) -> None:
        self.speech = torch.from_numpy(np.load(work / "speech.npy")).to(device)
        self.phones = torch.from_numpy(np.load(work / "phones.npy")).flatten().to(device)

    def draw(self, count: int, frames: int) -> tuple[Tensor, Tensor]:
        """Return random pieces ``[count, frames * 1920]`` in [-1, 1], and phonemes ``[count, frames, 4]``."""
        device, step = self.speech.device, FRAME // PARTS
        starts = torch.randint(len(self.phones) - frames * PARTS, (count, 1), device=device)
        wave = self.speech[starts * step + torch.arange(frames * FRAME, device=device)].float() / 32768
        phones = self.phones[starts + torch.arange(frames * PARTS, device=device)].long()
        return wave, phones.view(count, frames, PARTS)


class Weights(NamedTuple):
    """What differs between codecs: weights of losses, and how many codes a piece keeps."""

    phones: float = 1.5
    spectral: float = 0.3
    whole: float = 0.1
    """Share of the pieces that keep all codes."""
    shallow: float = 0.5
    """Of the others: the chance to keep k codes is about this to the power of k."""


def kept_codes(count: int, groups: int, weights: Weights, device: torch.device) -> Tensor:
    """Draw how many codes each piece keeps, ``[count]``, 1 to G."""
    chance = torch.rand(count, 2, device=device)
    few = 1 + ((1 - chance[:, 0] * (1 - weights.shallow**groups)).log() / math.log(weights.shallow)).long()
    return torch.where(chance[:, 1] < weights.whole, groups, few.clamp(1, groups))


def train(
    work: Path, *, schedule: float, limit: float, batch: int, frames: int, judged: int, peak: float, seed: int,
    weights: Weights, fused: bool = False,
) -> None:  # fmt: skip
    """Train until the schedule, or this call's time, is over."""
    device = pick_device()
    if fused:
        Snake.kernel = staticmethod(torch.compile(snake, dynamic=True))
    torch.manual_seed(seed)
    model, distance = Codec(work).to(device).train(), SpectralLoss().to(device)
    optimizer = adam(model.parameters(), device, betas=(0.8, 0.99), weight_decay=0.0)
    facts = load_state(work, "codec", model, optimizer)
    torch.manual_seed(seed + facts["steps"])
    pieces = Pieces(work, device)
    clock, log, steps = Clock(schedule, limit, facts["spent"]), Log(work / "codec_log.jsonl"), facts["steps"]
    quantized, begun = facts.get("quantized", False), steps

    def do(quantized: bool) -> Tensor:
        wave, phones = pieces.draw(batch, frames)
        latents = model.encoder(wave)
        flat = latents.flatten(0, 1)
        if quantized:
            kept = kept_codes(batch, model.groups, weights, device).repeat_interleave(frames)
            _, flat, first, commitment = model.decoder.quantizer.quantize(flat, kept)
        else:
            books = model.decoder.quantizer.rvq_first
            first, commitment = books.outward(books.inward(flat)), flat.new_zeros(())
        said = model.listener(first)
        told = F.cross_entropy(said.flatten(0, 1), phones.flatten())
        right = (said.argmax(-1).flatten() == phones.flatten()).float().mean()
        begins = torch.randint(frames - judged - LEAD_FRAMES + 1, (batch,), device=device)
        made = model.decoder(flat.view_as(latents), begins, judged + LEAD_FRAMES)[:, LEAD_FRAMES * FRAME :]
        places = (begins[:, None] + LEAD_FRAMES) * FRAME + torch.arange(judged * FRAME, device=device)
        heard, bands, spectral = distance(made, wave.gather(1, places))
        loss = 3 * heard + bands + weights.spectral * spectral + 0.5 * commitment + weights.phones * told
        norm = descend(optimizer, loss, 5.0)
        return torch.stack([heard, bands, spectral, commitment, told, right, norm]).detach()

    step = Replayed(do, device)
    while not clock.over:
        if not quantized and clock.progress >= UNQUANTIZED:
            with torch.no_grad():
                count = -(-KMEANS_LATENTS // (64 * frames))
                latents = [model.encoder(pieces.draw(64, frames)[0]).flatten(0, 1) for _ in range(count)]
            start_codebooks(model.decoder.quantizer, torch.cat(latents))
            quantized = True
        rate = learning_rate(peak, steps - begun, clock.progress)
        set_rate(optimizer, rate)
        found = step(quantized)
        if steps % 50 == 0:  # also keeps the clock true: until here nothing waits for the device
            names = ("heard", "bands", "spectral", "commitment", "phones", "right", "norm")
            values = dict(zip(names, found.tolist(), strict=True))
            if steps % 200 == 0:
                log.add(stage="codec", step=steps, seconds=clock.spent, lr=rate, **values)
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
    parser.add_argument("--batch", type=int, default=64, help="pieces a step")
    parser.add_argument("--frames", type=int, default=20, help="frames a piece")
    parser.add_argument("--judged", type=int, default=8, help="frames of a piece whose sound is judged")
    parser.add_argument("--phones", type=float, default=Weights().phones, help="weight of the first code's teacher")
    parser.add_argument("--whole", type=float, default=Weights().whole, help="see Weights")
    parser.add_argument("--shallow", type=float, default=Weights().shallow, help="see Weights")
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--fused", action="store_true", help="compile the activation; needs a C compiler")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    train(
        args.work, schedule=args.schedule, limit=args.limit or args.schedule, batch=args.batch, frames=args.frames,
        judged=args.judged, peak=args.lr, seed=args.seed,
        weights=Weights(phones=args.phones, whole=args.whole, shallow=args.shallow), fused=args.fused,
    )  # fmt: skip
    if complete(args.work):
        encode(args.work, batch=256)


if __name__ == "__main__":
    main()
