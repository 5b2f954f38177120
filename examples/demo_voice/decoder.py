"""Stage 5: train the codec's decoder on, along codes as the voice will have them.

Of most pieces the decoder hears the first codes of the speech, and deeper ones that the CodePredictor draws along it.
What is drawn says little of the speech that is asked for, so the decoder learns how far to trust it. The other pieces
keep all their codes. Encoder and codebooks stay as they are, and so do the codes. Held-out speech is not heard.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from codec import LEAD_FRAMES, SpectralLoss, Weights
from layers import Decoder, Snake, Talker, read_codec_config, snake
from speech import FRAME
from talker import Corpus, Layout, autocast, draw, input_rows, spoken_weights
from torch import Tensor
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

WHOLE = 0.25
"""Share of the pieces that keep all codes."""
TOP_K = 50


@torch.no_grad()
def drawn_codes(work: Path, corpus: Corpus, temperature: float, rows: int) -> Tensor:
    """Return the codes of all speech, ``[frames, G]``, the deeper ones drawn along the speech of a text.

    Texts that the Talker is not trained on, the test's and very long ones, keep their own.
    """
    model = Talker(corpus.layout.config).to(corpus.device).eval()
    model.load_state_dict(spoken_weights(work))
    found = corpus.codes.clone()
    for length, numbers in corpus.buckets(0, corpus.sizes[0] + corpus.sizes[1]):
        size = max(1, rows // length)
        for place in range(0, len(numbers), size):
            batch = corpus.batch(numbers[place : place + size], language=False, length=length)
            asked = batch.target.flatten() >= 0
            frames = batch.target.flatten()[asked]
            with autocast(corpus.device):
                hidden, _ = model.model.run(input_rows(model, batch, corpus.codes[batch.frame.clamp(min=0)].long()))
                first = corpus.codes[frames, 0].long()
                found[frames] = drawn_frames(model, hidden.flatten(0, 1)[asked], first, temperature).to(found.dtype)
    return found


def drawn_frames(model: Talker, states: Tensor, first: Tensor, temperature: float) -> Tensor:
    """Return codes ``[n, G]`` of the first ones ``[n]``, drawn from the CodePredictor's laws of the Talker's states."""
    predictor, codes = model.code_predictor, [first]
    rows = [states, model.model.codec_embedding(first)]
    for head, table in zip(predictor.lm_head, predictor.model.codec_embedding, strict=True):
        logits = head(predictor.hidden_states(torch.stack(rows, 1))[:, -1]).float() / temperature
        least = logits.topk(min(TOP_K, logits.shape[-1])).values[:, -1:]
        codes.append(draw(logits.masked_fill(logits < least, -torch.inf)))
        rows.append(table(codes[-1]))
    return torch.stack(codes, 1)


def train(
    work: Path, *, schedule: float, limit: float, batch: int, frames: int, judged: int, peak: float,
    temperature: float, rows: int, seed: int, fused: bool = False, eager: bool = False,
) -> None:  # fmt: skip
    """Train until the schedule, or this call's time, is over; drawing the codes is part of it."""
    device = pick_device()
    torch.manual_seed(seed)
    model, distance = Decoder(read_codec_config(work)).to(device).train(), SpectralLoss().to(device)
    whole_codec = load_weights(work, "codec")
    model.load_state_dict({name[8:]: value for name, value in whole_codec.items() if name.startswith("decoder.")})
    optimizer = adam(model.parameters(), device, betas=(0.8, 0.99), weight_decay=0.0)
    facts = load_state(work, "decoder", model, optimizer)
    clock, log, steps = Clock(schedule, limit, facts["spent"]), Log(work / "decoder_log.jsonl"), facts["steps"]
    torch.manual_seed(seed + steps)
    corpus = Corpus(work, Layout(work), device)
    speech = torch.from_numpy(np.load(work / "speech.npy")).to(device)
    real, drawn = corpus.codes, drawn_codes(work, corpus, temperature, rows)
    ends = np.cumsum(corpus.frames)[[corpus.sizes[0] - 1, corpus.sizes[0] + corpus.sizes[1] - 1]]
    begun, bounds = steps, (0, *map(int, ends))

    def losses(held_out: bool, whole: float) -> Tensor:
        low, high = bounds[held_out], bounds[held_out + 1]
        places = torch.randint(low, high - frames + 1, (batch, 1), device=device) + torch.arange(frames, device=device)
        own = torch.rand(batch, 1, 1, device=device) < whole
        codes = torch.where(own, real[places], drawn[places]).long()
        begins = torch.randint(frames - judged - LEAD_FRAMES + 1, (batch,), device=device)
        latents = model.quantizer.dequantize(codes.transpose(1, 2))
        made = model(latents, begins, judged + LEAD_FRAMES)[:, LEAD_FRAMES * FRAME :]
        starts = (places[:, 0] + begins + LEAD_FRAMES) * FRAME
        wanted = speech[starts[:, None] + torch.arange(judged * FRAME, device=device)].float() / 32768
        return torch.stack(distance(made, wanted))

    def do(_: bool) -> Tensor:
        heard, bands, spectral = parts = losses(False, WHOLE)
        norm = descend(optimizer, 3 * heard + bands + Weights().spectral * spectral, 5.0)
        return torch.stack([*parts, norm]).detach()

    @torch.no_grad()
    def examined() -> dict[str, float]:
        """Return the losses of held-out pieces, with their own codes and with drawn ones."""
        means = {
            name: torch.stack([losses(True, whole) for _ in range(16)]).mean(0).tolist()
            for name, whole in (("", 1.0), ("_drawn", 0.0))
        }
        names = ("heard", "bands", "spectral")
        return {f"dev_{part}{name}": value for name in means for part, value in zip(names, means[name], strict=True)}

    log.add(stage="decoder", step=steps, seconds=clock.spent, **examined())
    if fused:  # not before: without gradients it would be compiled once more for each shape
        Snake.kernel = staticmethod(torch.compile(snake, dynamic=True))
    step = Replayed(do, device, eager=eager)
    while not clock.over:
        rate = learning_rate(peak, steps - begun, clock.progress)
        set_rate(optimizer, rate)
        found = step(False)
        if steps % 50 == 0:  # also keeps the clock true: until here nothing waits for the device
            values = dict(zip(("heard", "bands", "spectral", "norm"), found.tolist(), strict=True))
            if steps % 200 == 0:
                log.add(stage="decoder", step=steps, seconds=clock.spent, lr=rate, **values)
        steps += 1
    Snake.kernel = staticmethod(snake)
    facts = {"spent": clock.spent, "steps": steps, "complete": clock.progress >= 1}
    save_state(work, "decoder", model, optimizer, facts)
    log.add(stage="decoder", step=steps, seconds=clock.spent, **examined())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--schedule", type=float, required=True, help="seconds of the whole stage, over all calls")
    parser.add_argument("--timeLimit", dest="limit", type=float, help="seconds of this call; default: the schedule")
    parser.add_argument("--batch", type=int, default=64, help="pieces a step")
    parser.add_argument("--frames", type=int, default=20, help="frames a piece")
    parser.add_argument("--judged", type=int, default=8, help="frames of a piece whose sound is judged")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--temperature", type=float, default=0.6, help="of the CodePredictor's draws")
    parser.add_argument("--rows", type=int, default=24576, help="the Talker's rows at a time")
    parser.add_argument("--fused", action="store_true", help="compile the activation; needs a C compiler")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    train(
        args.work, schedule=args.schedule, limit=args.limit or args.schedule, batch=args.batch, frames=args.frames,
        judged=args.judged, peak=args.lr, temperature=args.temperature, rows=args.rows, seed=args.seed,
        fused=args.fused, eager=args.eager,
    )  # fmt: skip


if __name__ == "__main__":
    main()
