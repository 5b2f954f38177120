"""Stage 4: train the Talker and the CodePredictor together on the codes of the speech.

The loss is the reference's: cross-entropy of the first code, and 0.3 times that of the other codes, each depth's head
on its own position. Nothing trains a later head to look ahead. The Talker alone has a teacher beside that: two of its
attention heads are asked to look at the letters that are being spoken, which espeak-ng's word events tell.

What the Talker hears is never quite what was spoken, since later it hears what it drew. In most frames all but the
first few codes are those of another frame with the same first code, so it learns to do without them. Some first codes
are wrong; from ``--rehearseFrom`` of the schedule on half of them are what the Talker itself draws there.

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

SUB_TALKER_WEIGHT = 0.3
WATCHED_LAYER, WATCHED_HEADS, WATCH_WEIGHT = 1, 2, 0.2
CUTS = {1: 0.4, 2: 0.2, 3: 0.15, 4: 0.1, 16: 0.15}
"""Codes of a frame that the Talker hears as they were spoken, and how often."""
WRONG = 0.1
"""Share of the frames whose first code is another one's, a neighbour's or any."""
REHEARSED = 0.5
"""Share of the frames whose first code the Talker draws, when it rehearses; most of them come out right."""
EXAMINED = {"": (1.0, 0.0), "_deep_redrawn": (0.0, 0.0), "_all_redrawn": (0.0, 1.0)}
"""What is heard along development texts: share of the frames heard as spoken, and of first codes drawn."""
MOST_ROWS = 208
"""Rows of the longest utterance that is trained on."""
LOOK_AHEAD = 7
SHARE = 0.2
"""Frames that the CodePredictor is trained on in a step, for each row of the Talker; about a third of all."""

Stage = Literal["talker", "look_ahead"]


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
        self.by_first = torch.argsort(self.codes[:, 0], stable=True)
        counts = torch.bincount(self.codes[:, 0].long(), minlength=256)
        self.first_begins, self.first_counts = counts.cumsum(0) - counts, counts
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

    def peers(self, first: Tensor) -> Tensor:
        """Return the codes ``[..., G]`` of any frames that have these first codes ``[...]``."""
        pick = (torch.rand(first.shape, device=first.device) * self.first_counts[first]).long()
        frames = self.by_first[(self.first_begins[first] + pick).clamp(max=len(self.codes) - 1)]
        return self.codes[frames].long()

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
    model: Talker, corpus: Corpus, batch: Batch, codes: Tensor, *, share: float | None = None
) -> tuple[Losses, Tensor, Tensor]:
    """Return the losses of a batch, and of its frames the Talker's states ``[n, H]`` and codes ``[n, G]``.

    Parameters
    ----------
    model : Talker
    corpus : Corpus
    batch : Batch
    codes : Tensor, [B, T, G]
        What the Talker hears.
    share : float, optional
        The CodePredictor is trained on so many frames for each row, where there are as many; default: on all frames.
    """
    hidden, shares = model.model.run(input_rows(model, batch, codes), WATCHED_LAYER, WATCHED_HEADS)
    wanted = batch.target.flatten()
    asked = wanted != -1
    own = corpus.codes[wanted.clamp(min=0)].long()
    first_wanted = torch.where(wanted >= 0, own[:, 0], corpus.layout.codec_eos)
    states = hidden.flatten(0, 1)
    logits = model.codec_head(states).float()
    first = _mean(F.cross_entropy(logits, first_wanted, reduction="none"), asked)
    right = _mean((logits.argmax(-1) == first_wanted).float(), asked)
    if share is None:
        kept = torch.nonzero(wanted >= 0)[:, 0]
    else:  # of a fixed number, for the graph; rows without a frame come last
        kept = (torch.rand(wanted.shape, device=wanted.device) + (wanted >= 0)).topk(int(share * len(wanted))).indices
    states, own = states[kept], own[kept]
    depths = depth_losses(model, states, own, wanted[kept] >= 0)
    assert shares is not None
    return Losses(first, depths, _watch_loss(shares, batch.spans), right), states, own


def _mean(values: Tensor, told: Tensor) -> Tensor:
    """Return the mean over the last axis of those that are told."""
    return (values * told).sum(-1) / told.sum().clamp(min=1)


def input_rows(model: Talker, batch: Batch, codes: Tensor) -> Tensor:
    """Return the Talker's inputs ``[B, T, H]``, with the codes ``[B, T, G]`` in the rows of frames."""
    heard = model.embed_frames(codes) * (batch.frame >= 0)[..., None]
    special = model.model.codec_embedding(batch.codec.clamp(min=0)) * (batch.codec >= 0)[..., None]
    return model.embed_text(batch.text) + heard + special


@torch.no_grad()
def spoiled(
    model: Talker, corpus: Corpus, batch: Batch, *, rehearsed: float, wrong: float = WRONG, whole: float | None = None
) -> Tensor:
    """Return what the Talker hears of a batch, ``[B, T, G]``.

    Parameters
    ----------
    model : Talker
    corpus : Corpus
    batch : Batch
    rehearsed : float
        Share of the first codes that the Talker draws, at temperature 1, having heard the others spoiled already: one
        pass draws them all.
    wrong : float
        Share of the first codes that are other ones.
    whole : float, optional
        Share of the frames whose deeper codes all stay, the others losing all; default: as in ``CUTS``.
    """
    codes = corpus.codes[batch.frame.clamp(min=0)].long()
    random = torch.rand(3, *codes.shape[:2], device=codes.device)
    anywhere = corpus.codes[torch.randint_like(batch.frame, len(corpus.codes)), 0].long()
    neighbour = torch.where(random[1] < 0.25, codes[..., 0].roll(1, 1), codes[..., 0].roll(-1, 1))
    other = torch.where(random[1] < 0.5, neighbour, anywhere)
    first = torch.where(random[0] < wrong, other, codes[..., 0])
    cut, bound = torch.zeros_like(first), 0.0
    for depth, chance in (CUTS if whole is None else {1: 1 - whole, 16: whole}).items():
        cut = torch.where(random[2] >= bound, depth, cut)
        bound += chance
    heard = _with_first(corpus, codes, first, cut)
    if not rehearsed:
        return heard
    hidden, _ = model.model.run(input_rows(model, batch, heard))
    logits = model.codec_head(hidden[:, :-1])[..., : model.code_predictor.lm_head[0].out_features]
    chosen = torch.rand(codes.shape[:2], device=codes.device) < rehearsed
    first = torch.cat([first[:, :1], torch.where(chosen[:, 1:], draw(logits), first[:, 1:])], 1)
    return _with_first(corpus, codes, first, cut)


def _with_first(corpus: Corpus, codes: Tensor, first: Tensor, cut: Tensor) -> Tensor:
    """Return codes with other first ones; from the cut on, or behind a first code that is wrong, they are a peer's."""
    cut = torch.where(first == codes[..., 0], cut, 1)
    depths = torch.arange(codes.shape[-1], device=codes.device)
    mixed = torch.where(depths >= cut[..., None], corpus.peers(first), codes)
    return torch.cat([first[..., None], mixed[..., 1:]], -1)


def draw(logits: Tensor) -> Tensor:
    """Draw from the last axis at temperature 1."""
    noise = torch.rand_like(logits, dtype=torch.float32).clamp(min=1e-9)
    return (logits.float() - (-noise.log()).log()).argmax(-1)


def depth_losses(model: Talker, states: Tensor, codes: Tensor, told: Tensor) -> Tensor:
    """Return the CodePredictor's mean loss of each depth over the frames that are told, ``[G - 1]``."""
    predictor = model.code_predictor
    rows = predictor.rows(states, model.model.codec_embedding(codes[:, 0]), codes)
    logits = predictor.logits(predictor.hidden_states(rows))
    return _mean(F.cross_entropy(logits.transpose(1, 2), codes[:, 1:].T, reduction="none"), told)


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
    found: dict[str, Any] = {}
    for name, (whole, drawn) in EXAMINED.items():
        total, weights = [], []
        for length, numbers in corpus.buckets(corpus.sizes[0], corpus.sizes[1]):
            size = max(1, batch_rows // length)
            for place in range(0, len(numbers), size):
                chosen = numbers[place : place + size]
                batch = corpus.batch(chosen, language=False, length=length)
                with autocast(corpus.device):
                    codes = spoiled(model, corpus, batch, rehearsed=drawn, wrong=0.0, whole=whole)
                    losses, _, _ = run(model, corpus, batch, codes)
                total.append([losses.first.item(), losses.right.item(), losses.watch.item(), *losses.depths.tolist()])
                weights.append(corpus.frames[chosen].sum())
        first, right, watch, *depths = np.average(np.array(total), axis=0, weights=np.array(weights)).tolist()
        found |= {f"dev_first{name}": first, f"dev_right{name}": right, f"dev_watch{name}": watch}
        found[f"dev_depths{name}"] = [round(x, 3) for x in depths]
    model.train()
    return found


def spoken_weights(work: Path) -> dict[str, Tensor]:
    """Return the weights of the voice."""
    return load_weights(work, "talker")


def autocast(device: torch.device) -> torch.autocast:
    """Compute in BF16 on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def train(
    work: Path, *, schedule: float, limit: float, batch_rows: int, peak: float, dropout: float, seed: int,
    name: Stage = "talker", share: float = SHARE, rehearse_from: float = 1.0, eager: bool = False,
) -> None:  # fmt: skip
    """Train until the schedule, or this call's time, is over."""
    device, look_ahead = pick_device(), name == "look_ahead"
    torch.manual_seed(seed)
    layout = Layout(work)
    corpus, model = Corpus(work, layout, device), Talker(layout.config, dropout).to(device).train()
    if look_ahead:  # the Talker stays as it is: its states are what both CodePredictors read
        model.load_state_dict(spoken_weights(work))
        model.requires_grad_(False)
        model.code_predictor.requires_grad_(True)
        model.code_predictor.model.codec_embedding.requires_grad_(False)
    trained = model.code_predictor if look_ahead else model
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adam(learning, device, betas=(0.9, 0.98), weight_decay=0.02)
    facts = load_state(work, name, trained, optimizer)
    torch.manual_seed(seed + facts["steps"])
    random = np.random.default_rng(seed + facts["steps"])
    buckets = corpus.buckets(0, corpus.sizes[0])
    chances = np.array([len(numbers) * length for length, numbers in buckets], float)
    clock, log = Clock(schedule, limit, facts["spent"]), Log(work / f"{name}_log.jsonl")
    steps = begun = facts["steps"]

    def do(rehearsing: bool, *rows: Tensor) -> Tensor:
        batch = Batch(*rows)
        with autocast(device):  # one of its own: weights that are narrowed without gradients would be used again
            codes = spoiled(model, corpus, batch, rehearsed=REHEARSED if rehearsing else 0.0)
        with autocast(device):
            losses, states, own = run(model, corpus, batch, codes, share=share)
            if look_ahead:
                ahead = look_ahead_loss(model, states, own)
                loss = losses.depths.mean() + ahead
            else:
                ahead = losses.first.new_zeros(())
                loss = losses.first + SUB_TALKER_WEIGHT * losses.depths.mean() + WATCH_WEIGHT * losses.watch
        norm = descend(optimizer, loss, 1.0)
        return torch.stack([losses.first, losses.depths.mean(), losses.watch, losses.right, ahead, norm]).detach()

    step = Replayed(do, device, eager=eager)
    while not clock.over:
        length, numbers = buckets[random.choice(len(buckets), p=chances / chances.sum())]
        chosen = random.choice(numbers, max(1, batch_rows // length))
        rate = learning_rate(peak, steps - begun, clock.progress)
        set_rate(optimizer, rate)
        batch = corpus.batch(chosen, language=bool(random.random() < 0.3), length=length)
        found = step(clock.progress >= rehearse_from, *batch)
        if steps % 50 == 0:  # also keeps the clock true: until here nothing waits for the device
            names = ("first", "others", "watch", "right", "ahead", "norm")
            values = dict(zip(names, found.tolist(), strict=True))
            if steps and steps % 1000 == 0:
                values |= evaluate(model, corpus, batch_rows)
            if steps % 200 == 0:
                log.add(stage=name, step=steps, seconds=clock.spent, lr=rate, **values)
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
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--share", type=float, default=SHARE, help="frames a row for the CodePredictor's loss")
    parser.add_argument(
        "--rehearseFrom", dest="rehearse_from", type=float, default=1.0,
        help="share of the schedule from which on the Talker hears first codes that it draws; 1: never",
    )  # fmt: skip
    parser.add_argument(
        "--lookAhead", dest="name", action="store_const", const="look_ahead", help="the stage for comparison"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    train(
        args.work, schedule=args.schedule, limit=args.limit or args.schedule, batch_rows=args.rows, peak=args.lr,
        dropout=args.dropout, seed=args.seed, name=args.name or "talker", share=args.share,
        rehearse_from=args.rehearse_from, eager=args.eager,
    )  # fmt: skip


if __name__ == "__main__":
    main()
