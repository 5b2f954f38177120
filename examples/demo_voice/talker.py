"""Stage 4: train the Talker and the CodePredictor together on the codes of the speech.

The loss is the reference's: cross-entropy of the first code, and 0.3 times that of the other codes, each depth's head
on its own position. Nothing trains a later head to look ahead. The Talker alone has a teacher beside that: two of its
attention heads are asked to look at the letters that are being spoken, which espeak-ng's word events tell.

``--rehearsal`` is a stage behind that: it goes on with the same losses, but half of what the Talker hears was drawn by
the model itself, so that it finds its way from there.

``--lookAhead`` is another stage, for comparison only: it trains a copy of the CodePredictor with a loss that does train
the later heads to look ahead, and saves that under its own name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from layers import Talker, read_config
from torch import Tensor, nn
from training import Clock, Log, learning_rate, load_state, load_weights, pick_device, save_state

SUB_TALKER_WEIGHT = 0.3
WATCHED_LAYER, WATCHED_HEADS, WATCH_WEIGHT = 1, 2, 0.2
CORRUPTED = 0.06
"""Chance of a code that the Talker hears to be another one: what it samples later is not always right either."""
REHEARSED = 0.5
"""Share of the frames that the Talker hears with codes of its own drawing, in the stage for that."""
MOST_ROWS = 208
"""Rows of the longest utterance that is trained on."""
LOOK_AHEAD = 7

Stage = Literal["talker", "rehearsal", "look_ahead"]


class Prefix(NamedTuple):
    """Rows before the text, as text ids and codec ids; -1 is no code."""

    text: list[int]
    codec: list[int]


class Layout:
    """The rows of an utterance, as ``trt_cpspec.talker.assemble_prompt`` lays them out, the text before the frames."""

    def __init__(self, work: Path) -> None:
        self.config = read_config(work)
        talker = self.config["talker_config"]
        vocabulary = json.loads((work / "skeleton" / "vocab.json").read_text(encoding="utf-8"))
        self.pad, self.eos = self.config["tts_pad_token_id"], self.config["tts_eos_token_id"]
        self.codec_pad, self.codec_bos = talker["codec_pad_id"], talker["codec_bos_id"]
        self.codec_eos: int = talker["codec_eos_token_id"]
        self.groups: int = talker["num_code_groups"]
        role = [self.config["im_start_token_id"], self.config["assistant_token_id"], vocabulary["Ċ"]]
        (speaker,), (language,) = talker["spk_id"].values(), talker["codec_language_id"].values()
        think_bos, think_eos = talker["codec_think_bos_id"], talker["codec_think_eos_id"]
        thoughts = [
            [talker["codec_nothink_id"], think_bos, think_eos],
            [talker["codec_think_id"], think_bos, language, think_eos],
        ]
        self.prefixes = [
            Prefix(
                [*role, *[self.pad] * (len(thought) + 1), self.config["tts_bos_token_id"]],
                [-1, -1, -1, *thought, speaker, self.codec_pad],
            )
            for thought in thoughts
        ]
        """Without a language, and with it."""


class Batch(NamedTuple):
    """Rows ``[B, T]`` of utterances.

    Attributes
    ----------
    text, codec : Tensor, [B, T] int64
        -1 where a row has none.
    frame : Tensor, [B, T] int64
        The frame whose codes stand in a row, an index into all codes; -1 in other rows.
    target : Tensor, [B, T] int64
        The frame that a row predicts; -2 the end, -1 nothing.
    spans : Tensor, [B, T, 2, 2] int64
        For each watched head the rows of text from which to behind which it is to look; -1 where nobody says.
    """

    text: Tensor
    codec: Tensor
    frame: Tensor
    target: Tensor
    spans: Tensor


class Corpus:
    """Texts and codes, on the device; batches are of utterances of about one length."""

    def __init__(self, work: Path, layout: Layout, device: torch.device) -> None:
        sets = json.loads((work / "corpus.json").read_text(encoding="utf-8"))
        self.sizes = [len(sets[name]) for name in ("train", "dev", "test")]
        stored = np.load(work / "corpus.npz")
        frames, codes, places = (np.load(work / f"{name}.npy") for name in ("frames", "codes", "places"))
        self.layout, self.device = layout, device
        self.fold = torch.from_numpy(stored["fold"]).to(device)
        self.codes = torch.from_numpy(codes.astype(np.int16)).to(device)
        self.frames, self.letters = frames.astype(np.int64), stored["lengths"].astype(np.int64)
        ends = np.cumsum(self.letters)
        self.tokens = torch.from_numpy(stored["tokens"].astype(np.int64)).to(device)
        self.token_begins, self.frame_begins = ends - self.letters, np.cumsum(self.frames) - self.frames
        self.spans = torch.from_numpy(self._spans(places, stored["starts"])).to(device)
        self.rows = self.letters + self.frames + 2 + max(len(prefix.text) for prefix in layout.prefixes)

    def _spans(self, places: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return ``[frames, 2, 2]``: tokens of the frame's word, and tokens around its letter, within their text."""
        spans = np.full((len(places), 2, 2), -1, np.int64)
        for index, count in enumerate(self.letters):
            own = starts[self.token_begins[index] : self.token_begins[index] + count]
            inside = slice(self.frame_begins[index], self.frame_begins[index] + self.frames[index])
            first, behind, middle = places[inside].T
            low, high = np.searchsorted(own, first, "right") - 1, np.searchsorted(own, behind)
            letter = np.searchsorted(own, middle, "right") - 1
            around = np.stack([np.maximum(letter - 1, 0), np.minimum(letter + 3, count)], 1)
            found = np.stack([np.stack([np.maximum(low, 0), np.maximum(high, low + 1)], 1), around], 1)
            spans[inside] = np.where((first >= 0)[:, None, None], found, -1)
        return spans

    def batch(self, chosen: np.ndarray, *, language: bool, length: int) -> Batch:
        """Return the rows of utterances, padded to a length."""
        layout, device = self.layout, self.device
        prefix = layout.prefixes[language]
        lead = len(prefix.text)
        letters, frames, token_begins, frame_begins = (
            torch.from_numpy(values[chosen])[:, None].to(device, non_blocking=True)
            for values in (self.letters, self.frames, self.token_begins, self.frame_begins)
        )
        place = torch.arange(length, device=device)[None] - lead  # [1, T], 0 at the first letter
        is_text, is_lead = (place >= 0) & (place < letters), (place < 0).expand(len(chosen), -1)
        before = torch.tensor(prefix.text, device=device), torch.tensor(prefix.codec, device=device)
        slot = (place + lead).clamp(max=lead - 1).expand(len(chosen), -1)
        spoken = place - letters - 2  # the frame of a row
        is_frame = (spoken >= 0) & (spoken < frames)
        text = self.tokens[(token_begins + place).clamp(0, len(self.tokens) - 1)]
        text = torch.where(is_text, text, torch.where(place == letters, layout.eos, layout.pad))
        text = torch.where(is_lead, before[0][slot], text)
        codec = torch.where(is_text | (place == letters), layout.codec_pad, -1)
        codec = torch.where(place == letters + 1, layout.codec_bos, codec)
        codec = torch.where(is_lead, before[1][slot], codec)
        frame = torch.where(is_frame, frame_begins + spoken, -1)
        target = torch.where((spoken >= -1) & (spoken + 1 < frames), frame_begins + spoken + 1, -1)
        target = torch.where(spoken + 1 == frames, -2, target)
        spans = self.spans[target.clamp(min=0)]
        spans = torch.where((target >= 0)[..., None, None] & (spans >= 0), spans + lead, -1)
        return Batch(self.fold[text], codec, frame, target, spans)

    def buckets(self, first: int, count: int, step: int = 16) -> list[tuple[int, np.ndarray]]:
        """Return lengths and the utterances of each, of ``count`` from ``first`` on."""
        numbers = np.arange(first, first + count)
        numbers = numbers[self.rows[numbers] <= MOST_ROWS]
        lengths = -(-self.rows[numbers] // step) * step
        return [(int(length), numbers[lengths == length]) for length in np.unique(lengths)]


class Losses(NamedTuple):
    """Mean losses of a batch; ``depths`` ``[G - 1]`` are the CodePredictor's."""

    first: Tensor
    depths: Tensor
    watch: Tensor
    right: Tensor


def run(
    model: Talker, corpus: Corpus, batch: Batch, *, corrupted: float, rehearsed: float = 0.0, share: float = 1.0
) -> tuple[Losses, Tensor, Tensor]:
    """Return the losses of a batch, and of its frames the Talker's states ``[n, H]`` and codes ``[n, G]``.

    Parameters
    ----------
    model : Talker
    corpus : Corpus
    batch : Batch
    corrupted : float
        Chance of a code that the Talker hears to be any other.
    rehearsed : float
        Share of the frames that the Talker hears with codes of its own drawing, see :func:`rehearse`.
    share : float
        Share of the frames that the CodePredictor is trained on.
    """
    codes = corpus.codes[batch.frame.clamp(min=0)].long()
    if rehearsed:
        codes = rehearse(model, corpus, batch, codes, rehearsed)
    if corrupted:
        others = torch.randint_like(codes, 256)
        codes = torch.where(torch.rand(codes.shape, device=codes.device) < corrupted, others, codes)
    hidden, shares = model.model.run(input_rows(model, batch, codes), WATCHED_LAYER, WATCHED_HEADS)
    flat = batch.target.flatten()
    asked = torch.nonzero(flat != -1)[:, 0]
    states, wanted = hidden.flatten(0, 1)[asked], flat[asked]
    is_frame = torch.nonzero(wanted >= 0)[:, 0]
    own = corpus.codes[wanted.clamp(min=0)].long()
    first_wanted = torch.where(wanted >= 0, own[:, 0], corpus.layout.codec_eos)
    logits = model.codec_head(states).float()
    first = F.cross_entropy(logits, first_wanted)
    right = (logits.argmax(-1) == first_wanted).float().mean()
    if share < 1:
        is_frame = is_frame[torch.rand(len(is_frame), device=flat.device) < share]
    states, own = states[is_frame], own[is_frame]
    depths = depth_losses(model, states, own)
    assert shares is not None
    return Losses(first, depths, _watch_loss(shares, batch.spans), right), states, own


def input_rows(model: Talker, batch: Batch, codes: Tensor) -> Tensor:
    """Return the Talker's inputs ``[B, T, H]``, with the codes ``[B, T, G]`` in the rows of frames."""
    heard = model.embed_frames(codes) * (batch.frame >= 0)[..., None]
    special = model.model.codec_embedding(batch.codec.clamp(min=0)) * (batch.codec >= 0)[..., None]
    return model.embed_text(batch.text) + heard + special


@torch.no_grad()
def rehearse(model: Talker, corpus: Corpus, batch: Batch, codes: Tensor, share: float) -> Tensor:
    """Return codes ``[B, T, G]`` of which a share of the frames is drawn from the model's own laws.

    The laws are those along the real codes, at temperature 1, so one pass gives all of them. Half of the drawn frames
    keep their first code. When it speaks, the Talker hears what it drew, which is never quite what it was trained on.
    """
    model.eval()
    hidden, _ = model.model.run(input_rows(model, batch, codes))
    inside = (batch.target[:, :-1] >= 0) & (batch.frame[:, 1:] >= 0)
    inside &= torch.rand(inside.shape, device=inside.device) < share
    own, states = codes[:, 1:][inside], hidden[:, :-1][inside]
    first = draw(model.codec_head(states)[:, : model.code_predictor.lm_head[0].out_features])
    kept = torch.rand(len(own), device=own.device) < 0.5
    first = torch.where(kept, own[:, 0], first)
    predictor = model.code_predictor
    rows = predictor.rows(states, model.model.codec_embedding(first), own)
    others = draw(predictor.logits(predictor.hidden_states(rows))).T
    model.train()
    codes = codes.clone()
    codes[:, 1:][inside] = torch.cat([first[:, None], others], 1)
    return codes


def draw(logits: Tensor) -> Tensor:
    """Draw from the last axis at temperature 1."""
    noise = torch.rand_like(logits, dtype=torch.float32).clamp(min=1e-9)
    return (logits.float() - (-noise.log()).log()).argmax(-1)


def depth_losses(model: Talker, states: Tensor, codes: Tensor) -> Tensor:
    """Return the CodePredictor's loss of each depth, ``[G - 1]``."""
    predictor = model.code_predictor
    rows = predictor.rows(states, model.model.codec_embedding(codes[:, 0]), codes)
    logits = predictor.logits(predictor.hidden_states(rows))
    return F.cross_entropy(logits.transpose(1, 2), codes[:, 1:].T, reduction="none").mean(1)


def look_ahead_loss(model: Talker, states: Tensor, codes: Tensor) -> Tensor:
    """Return the mean loss of every head on the positions before its own, up to 7 ahead."""
    predictor = model.code_predictor
    rows = predictor.rows(states, model.model.codec_embedding(codes[:, 0]), codes)
    hidden, heads = predictor.hidden_states(rows), predictor.heads()
    losses = []
    for ahead in range(1, LOOK_AHEAD + 1):
        early = hidden[:, :-ahead].transpose(0, 1)
        logits = torch.bmm(early, heads[ahead:].to(early.dtype).transpose(1, 2)).float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), codes[:, 1 + ahead :].T))
    return torch.stack(losses).mean()


def _watch_loss(shares: Tensor, spans: Tensor) -> Tensor:
    """Return the mean of minus the logarithm of the share of attention that lies where it should."""
    places = torch.arange(shares.shape[-1], device=shares.device)
    low, high = spans[..., 0].transpose(1, 2), spans[..., 1].transpose(1, 2)  # [B, heads, T]
    inside = (places >= low[..., None]) & (places < high[..., None])
    mass = (shares.exp() * inside).sum(-1)
    told = low >= 0
    return -((mass + 1e-4).log() * told).sum() / told.sum().clamp(min=1)


@torch.no_grad()
def evaluate(model: Talker, corpus: Corpus, batch_rows: int) -> dict[str, Any]:
    """Return the losses over the development texts."""
    model.eval()
    total, weights = [], []
    for length, numbers in corpus.buckets(corpus.sizes[0], corpus.sizes[1]):
        size = max(1, batch_rows // length)
        for place in range(0, len(numbers), size):
            chosen = numbers[place : place + size]
            with autocast(corpus.device):
                losses, _, _ = run(model, corpus, corpus.batch(chosen, language=False, length=length), corrupted=0.0)
            total.append([losses.first.item(), losses.watch.item(), losses.right.item(), *losses.depths.tolist()])
            weights.append(corpus.frames[chosen].sum())
    model.train()
    first, watch, right, *depths = np.average(np.array(total), axis=0, weights=np.array(weights)).tolist()
    return {"dev_first": first, "dev_right": right, "dev_watch": watch, "dev_depths": [round(x, 4) for x in depths]}


def spoken_weights(work: Path) -> dict[str, Tensor]:
    """Return the weights of the voice: those of the last stage that there is."""
    return load_weights(work, "rehearsal") or load_weights(work, "talker")


def autocast(device: torch.device) -> torch.autocast:
    """Compute in BF16 on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def train(
    work: Path, *, schedule: float, limit: float, batch_rows: int, peak: float, dropout: float, seed: int,
    name: Stage = "talker", share: float = 1.0,
) -> None:  # fmt: skip
    """Train until the schedule, or this call's time, is over."""
    device, look_ahead = pick_device(), name == "look_ahead"
    torch.manual_seed(seed)
    layout = Layout(work)
    corpus, model = Corpus(work, layout, device), Talker(layout.config, dropout).to(device).train()
    if name != "talker":
        model.load_state_dict(spoken_weights(work))
    if look_ahead:  # the Talker stays as it is: its states are what both CodePredictors read
        model.requires_grad_(False)
        model.code_predictor.requires_grad_(True)
        model.code_predictor.model.codec_embedding.requires_grad_(False)
    trained = model.code_predictor if look_ahead else model
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, peak, betas=(0.9, 0.98), weight_decay=0.02, fused=device.type == "cuda")
    facts = load_state(work, name, trained, optimizer)
    torch.manual_seed(seed + facts["steps"])
    random = np.random.default_rng(seed + facts["steps"])
    buckets = corpus.buckets(0, corpus.sizes[0])
    chances = np.array([len(numbers) * length for length, numbers in buckets], float)
    clock, log = Clock(schedule, limit, facts["spent"]), Log(work / f"{name}_log.jsonl")
    steps = begun = facts["steps"]
    while not clock.over:
        length, numbers = buckets[random.choice(len(buckets), p=chances / chances.sum())]
        chosen = random.choice(numbers, max(1, batch_rows // length))
        rate = learning_rate(peak, steps - begun, clock.progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = corpus.batch(chosen, language=bool(random.random() < 0.3), length=length)
        with autocast(device):
            losses, states, codes = run(
                model, corpus, batch, corrupted=0.0 if look_ahead else CORRUPTED,
                rehearsed=REHEARSED if name == "rehearsal" else 0.0, share=share,
            )  # fmt: skip
            if look_ahead:
                ahead = look_ahead_loss(model, states, codes)
                loss = losses.depths.mean() + ahead
            else:
                loss = losses.first + SUB_TALKER_WEIGHT * losses.depths.mean() + WATCH_WEIGHT * losses.watch
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(learning, 1.0)
        if norm.isfinite():
            optimizer.step()
        if steps % 100 == 0:
            values = {
                "stage": name, "step": steps, "seconds": clock.spent, "lr": rate, "first": losses.first.item(),
                "others": losses.depths.mean().item(), "watch": losses.watch.item(), "right": losses.right.item(),
                "norm": norm.item(),
            }  # fmt: skip
            if look_ahead:
                values["ahead"] = ahead.item()
            if steps % 1000 == 0:
                values |= evaluate(model, corpus, batch_rows)
            log.add(**values)
        steps += 1
    log.add(stage=name, step=steps, seconds=clock.spent, **evaluate(model, corpus, batch_rows))
    save_state(
        work, name, trained, optimizer,
        {"spent": clock.spent, "steps": steps, "complete": clock.progress >= 1},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--schedule", type=float, required=True, help="seconds of the whole stage, over all calls")
    parser.add_argument("--timeLimit", dest="limit", type=float, help="seconds of this call; default: the schedule")
    parser.add_argument("--rows", type=int, default=24576, help="rows a step: utterances times their padded length")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--share", type=float, default=1.0, help="of the frames, for the CodePredictor's loss")
    stage = parser.add_mutually_exclusive_group()
    stage.add_argument(
        "--rehearsal", dest="name", action="store_const", const="rehearsal", help="the stage behind the first"
    )
    stage.add_argument(
        "--lookAhead", dest="name", action="store_const", const="look_ahead", help="the stage for comparison"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    train(
        args.work, schedule=args.schedule, limit=args.limit or args.schedule, batch_rows=args.rows, peak=args.lr,
        dropout=args.dropout, seed=args.seed, name=args.name or "talker", share=args.share,
    )  # fmt: skip


if __name__ == "__main__":
    main()
