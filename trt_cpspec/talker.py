"""The Talker: the rows of its prefill, its steps, and the law of the first code of a frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .config import SPECIAL_CODES, RoleIds, SamplingParams, Section, TalkerSpec
from .errors import ConfigError, EngineError, NumericsError
from .runtime import PromptDecoder, Runtime
from .sampling import Law, law, penalised
from .sequences import RowExtras, SequenceBatch
from .tensorfile import RowTable, TensorFile

NO_CODE = -1
"""Codec side of a row that has none."""

ROLE_ROWS = 3
"""Tokens of ``<|im_start|>assistant\\n``."""

ANSWER_ROWS = 9
"""Rows of a Qwen3-Omni's prefill behind those of what was said: the role, five of codes, the first text token."""

CLOSING_ROWS = 5
"""Tokens of ``<|im_end|>\\n<|im_start|>assistant\\n``, which are not spoken."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prefill of one request, as ids: each row is the sum of a projected text token and an embedded code.

    Attributes
    ----------
    text_ids : ndarray, shape [R], int64
    codec_ids : ndarray, shape [R], int64
        -1 where the row has no codec side.
    trailing_text_ids : ndarray, shape [T], int64
        Token k joins the Talker's input after frame k; behind them ``tts_pad`` does.
    media : PromptMedia or None
        Rows that are neither.
    """

    text_ids: NDArray[np.int64]
    codec_ids: NDArray[np.int64]
    trailing_text_ids: NDArray[np.int64]
    media: PromptMedia | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMedia:
    """What the Talker hears of audio and images: projected hidden states of the Thinker.

    Attributes
    ----------
    places : ndarray, shape [M], int64
        Their rows in the prefill.
    hidden : ndarray, shape [M, thinker H], float32
    rotary : ndarray, shape [R, 3], int64, or None
        Time, height and width of every row; None is its place.
    """

    places: NDArray[np.int64]
    hidden: Float32
    rotary: NDArray[np.int64] | None


def assemble_prompt(
    spec: TalkerSpec,
    assistant_ids: Sequence[int],
    *,
    instruct_ids: Sequence[int] = (),
    speaker: str | None,
    language: str,
    non_streaming_mode: bool,
) -> Prompt:
    """Assemble the rows of a prefill, in the layout of the reference.

    Parameters
    ----------
    spec : TalkerSpec
    assistant_ids : sequence of int
        Ids of the assistant template with the text.
    instruct_ids : sequence of int
        Ids of the instruct template, or none.
    speaker : str or None
        A key of ``spec.speakers``.
    language : str
        ``auto``, or a key of ``spec.languages``. A speaker of a dialect turns ``auto`` and ``chinese`` into it.
    non_streaming_mode : bool
        True: the whole text stands in the prefill. False: its first token does, the rest trails frame by frame.

    Notes
    -----
    Source: ``qwen_tts`` 0.1.1, ``Qwen3TTSForConditionalGeneration.generate``.
    """
    ids = spec.ids
    text = list(assistant_ids[ROLE_ROWS:-CLOSING_ROWS])
    rows = [(token, NO_CODE) for token in [*instruct_ids, *assistant_ids[:ROLE_ROWS]]]
    rows += [(ids.tts_pad_token_id, code) for code in _think_block(spec, speaker, language)]
    if speaker is not None:
        rows.append((ids.tts_pad_token_id, spec.speakers[speaker]))
    rows.append((ids.tts_bos_token_id, ids.codec_pad_id))
    if non_streaming_mode:
        rows += [(token, ids.codec_pad_id) for token in [*text, ids.tts_eos_token_id]]
        rows.append((ids.tts_pad_token_id, ids.codec_bos_id))
        trailing = [ids.tts_pad_token_id]
    else:
        rows.append((text[0], ids.codec_bos_id))
        trailing = [*text[1:], ids.tts_eos_token_id]
    table = np.array(rows, np.int64)
    return Prompt(text_ids=table[:, 0], codec_ids=table[:, 1], trailing_text_ids=np.array(trailing, np.int64))


def assemble_answer_prompt(
    spec: TalkerSpec, roles: RoleIds, prompt_ids: Sequence[int], answer_ids: Sequence[int], speaker: str
) -> Prompt | None:
    """Assemble the rows of a prefill that speaks a Thinker's answer, in the layout of the reference.

    Of the conversation only the user's segments are heard: system segments and earlier answers are skipped.

    Parameters
    ----------
    spec : TalkerSpec
    roles : RoleIds
    prompt_ids : sequence of int
        The Thinker's prompt, which ends in the header of the answer.
    answer_ids : sequence of int
        The tokens of the answer that are spoken.
    speaker : str
        A key of ``spec.speakers``.

    Returns
    -------
    Prompt or None
        None where there is nothing to speak.

    Raises
    ------
    ConfigError
        A segment of the prompt is of no known role, or the last one is not the assistant's.

    Notes
    -----
    Source: ``transformers`` 4.57.3, ``Qwen3OmniMoeForConditionalGeneration.generate``.
    """
    ids = spec.ids
    *earlier, last = _segments(roles, prompt_ids)
    if last[1] != roles.assistant_token_id:
        raise ConfigError("the chat template does not end in the header of an assistant's answer")
    segment = [*last, *answer_ids]
    header, text = segment[:ROLE_ROWS], segment[ROLE_ROWS:]
    if not text:
        return None
    heard = [token for part in earlier if part[1] == roles.user_token_id for token in part]
    codec = [*_think_block(spec, None, "auto"), spec.speakers[speaker], ids.codec_pad_id]
    rows = [(token, NO_CODE) for token in [*heard, *header]]
    rows += zip([ids.tts_pad_token_id] * (len(codec) - 1) + [ids.tts_bos_token_id], codec, strict=True)
    table = np.array([*rows, (text[0], ids.codec_bos_id)], np.int64)
    trailing = np.array([*text[1:], ids.tts_eos_token_id], np.int64)
    return Prompt(text_ids=table[:, 0], codec_ids=table[:, 1], trailing_text_ids=trailing)


def _segments(roles: RoleIds, prompt_ids: Sequence[int]) -> list[Sequence[int]]:
    """Split a prompt at its segment starts; what stands before the first is dropped, as in the reference."""
    starts = [place for place, token in enumerate(prompt_ids) if token == roles.im_start_token_id]
    parts = [prompt_ids[start:end] for start, end in pairwise([*starts, len(prompt_ids)])]
    known = (roles.system_token_id, roles.user_token_id, roles.assistant_token_id)
    if not parts or any(len(part) < 2 or part[1] not in known for part in parts):
        raise ConfigError(
            "the chat template writes a segment that is neither system, user nor assistant: the Talker has no row for "
            "it; ask for text only"
        )
    return parts


def _think_block(spec: TalkerSpec, speaker: str | None, language: str) -> list[int]:
    ids = spec.ids
    if speaker in spec.dialects and language in ("auto", "chinese"):
        language = spec.dialects[speaker]
    if language == "auto":
        return [ids.codec_nothink_id, ids.codec_think_bos_id, ids.codec_think_eos_id]
    return [ids.codec_think_id, ids.codec_think_bos_id, spec.languages[language], ids.codec_think_eos_id]


class Talker(SequenceBatch):
    """The outer loop's model on its engine. One batch at a time; not safe for several threads.

    Make one with :meth:`from_engine_dir`.

    Attributes
    ----------
    spec : TalkerSpec
    """

    def __init__(self, spec: TalkerSpec, session: PromptDecoder, tables: TalkerTables) -> None:
        super().__init__(session, spec.decoder.hidden_size)
        self.spec = spec
        self._tables = tables

    @classmethod
    def from_engine_dir(
        cls, folder: Path | str, *, thinker_dir: Path | None = None, runtime: Runtime | None = None
    ) -> Talker:
        """Load a ``talker`` folder that ``cpspec-build`` wrote.

        Parameters
        ----------
        folder : path
        thinker_dir : path or None
            Of a Qwen3-Omni: where the text embedding lies. None for a Qwen3-TTS, whose Talker has its own.
        runtime : Runtime or None
            Where it runs; None is the CPU.

        Raises
        ------
        ConfigError, EngineError
            A file is missing, damaged, or contradicts ``config.json``; or the folder is of the other model.
        """
        folder = Path(folder)
        spec = TalkerSpec.from_section(Section.from_file(folder / "config.json"))
        if spec.is_omni != (thinker_dir is not None):
            model, command = ("Omni", "llm_inference") if spec.is_omni else ("TTS", "qwen3_tts_inference")
            raise ConfigError(f"{folder} holds the Talker of a Qwen3-{model}: speak with {command}")
        session = (runtime or Runtime()).decoder(folder, spec.decoder, spec.limits.max_kv_cache_capacity)
        return cls(spec, session, TalkerTables.from_dir(folder, spec, thinker_dir))

    def embed_prompt(self, prompt: Prompt) -> Float32:
        """Return the prefill rows of a prompt, ``[R, H]``."""
        rows = self.embed_text(prompt.text_ids)
        spoken = prompt.codec_ids != NO_CODE
        rows[spoken] += self._tables.codec[prompt.codec_ids[spoken]]
        if prompt.media is not None:
            rows[prompt.media.places] = self._tables.project_hidden(prompt.media.hidden)
        return rows

    def prefill_prompts(self, prompts: Sequence[Prompt]) -> Float32:
        """Start a batch of sequences; return the last hidden states ``[B, H]``."""
        extras = [
            None if prompt.media is None or prompt.media.rotary is None else RowExtras(rotary=prompt.media.rotary)
            for prompt in prompts
        ]
        return self.prefill([self.embed_prompt(prompt) for prompt in prompts], extras)

    def embed_text(self, ids: NDArray[np.int64]) -> Float32:
        """Return projected text tokens, ``[n]`` to ``[n, H]``."""
        distinct, places = np.unique(ids, return_inverse=True)
        return self._tables.project_text(distinct)[places]

    def logits(self, hidden: Float32) -> Float32:
        """Apply the codec head to one hidden state, ``[H]`` to ``[V]``."""
        logits: Float32 = self._tables.head @ hidden
        return logits


def processed_logits(
    spec: TalkerSpec, logits: NDArray[np.floating], seen: Sequence[int], penalty: float
) -> NDArray[np.float64]:
    """Apply repetition penalty, minimum length and suppression, in the reference's order.

    Parameters
    ----------
    spec : TalkerSpec
    logits : ndarray, shape [V]
    seen : sequence of int
        The codes sampled so far; their number is the step.
    penalty : float

    Returns
    -------
    ndarray, shape [V], float64
        ``-inf`` where a code is forbidden.
    """
    out = penalised(logits, seen, penalty)
    end = spec.ids.codec_eos_token_id
    end_logit = out[end] if len(seen) >= spec.min_frames else -np.inf
    out[len(out) - SPECIAL_CODES :] = -np.inf
    out[end] = end_logit
    return out


def talker_law(spec: TalkerSpec, logits: NDArray[np.floating], seen: Sequence[int], params: SamplingParams) -> Law:
    """Return the law of the next first code. Parameters are those of :func:`processed_logits`."""
    if np.isnan(logits).any():  # before suppression hides it
        raise NumericsError("Talker: the logits hold nan: they describe no law")
    return law(processed_logits(spec, logits, seen, params.repetition_penalty), params)


class TalkerTables:
    """The side files of a Talker.

    Attributes
    ----------
    codec : RowTable
        ``[V, H]``: embeddings of first codes and special codes, mapped.
    head : ndarray, shape [V, H], float32
    """

    def __init__(
        self,
        *,
        codec: RowTable,
        text: RowTable,
        head: Float32,
        projection: dict[str, Float32],
        hidden_projection: dict[str, Float32] | None = None,
    ) -> None:
        self.codec = codec
        self.head = head
        self._text = text
        self._projection, self._hidden_projection = projection, hidden_projection

    @classmethod
    def from_dir(cls, folder: Path, spec: TalkerSpec, thinker_dir: Path | None = None) -> TalkerTables:
        """Read the tables and check their shapes against the spec. The text embedding is mapped, not loaded."""
        width, text_width, codes = spec.decoder.hidden_size, spec.text_hidden_size, spec.decoder.vocab_size
        codec = TensorFile(folder / "embedding.safetensors")
        codec.check("embedding", (codes, width))
        shapes = {
            "linear_fc1": (spec.projection_size, text_width),
            "linear_fc2": (width, spec.projection_size),
        }
        return cls(
            codec=codec.rows("embedding"),
            text=_text_table(folder, spec, thinker_dir),
            head=TensorFile(folder / "codec_head.safetensors").read_weight("codec_head.weight", (codes, width)),
            projection=_projection(folder / "text_projection.safetensors", shapes),
            hidden_projection=(_projection(folder / "hidden_projection.safetensors", shapes) if spec.is_omni else None),
        )

    def project_text(self, ids: NDArray[np.int64]) -> Float32:
        """Return ``fc2(silu(fc1(text_embedding[ids])))``, ``[n]`` to ``[n, H]``."""
        return _projected(self._projection, self._text[ids])

    def project_hidden(self, hidden: Float32) -> Float32:
        """Return the same of hidden states of a Thinker, by a projection of their own, ``[n, H']`` to ``[n, H]``."""
        assert self._hidden_projection is not None  # the tables are of a Qwen3-Omni
        return _projected(self._hidden_projection, hidden)


def _projection(path: Path, shapes: dict[str, tuple[int, int]]) -> dict[str, Float32]:
    """Read an MLP of two linear layers with biases, of known shapes."""
    file, layers = TensorFile(path), {}
    for name, shape in shapes.items():
        layers[f"{name}.weight"] = file.read_weight(f"{name}.weight", shape)
        file.check(f"{name}.bias", shape[:1])
        layers[f"{name}.bias"] = file.read(f"{name}.bias")
    return layers


def _projected(part: dict[str, Float32], rows: Float32) -> Float32:
    inner: Float32 = rows @ part["linear_fc1.weight"].T + part["linear_fc1.bias"]
    with np.errstate(over="ignore"):  # exp of a large negative: the product is 0, as it should be
        inner /= 1 + np.exp(-inner)
    out: Float32 = inner @ part["linear_fc2.weight"].T + part["linear_fc2.bias"]
    return out


def _text_table(folder: Path, spec: TalkerSpec, thinker_dir: Path | None) -> RowTable:
    """Map the text embedding: the Talker's own, or that of its Thinker."""
    if thinker_dir is None:
        file = TensorFile(folder / "text_embedding.safetensors")
        file.check("text_embedding", (spec.text_vocab_size, spec.text_hidden_size))
        return file.rows("text_embedding")
    table = TensorFile(thinker_dir / "embedding.safetensors").rows("embedding")
    if table.shape[1] != spec.text_hidden_size:
        raise EngineError(
            f"{thinker_dir}: embedding has shape {list(table.shape)}, the Talker in {folder} needs rows of "
            f"thinker_hidden_size {spec.text_hidden_size}"
        )
    largest = max(spec.ids.tts_pad_token_id, spec.ids.tts_bos_token_id, spec.ids.tts_eos_token_id)
    if largest >= len(table):
        raise EngineError(
            f"{thinker_dir}: embedding has {len(table)} tokens, the Talker in {folder} needs the token {largest}: they "
            f"are of different checkpoints"
        )
    return table
