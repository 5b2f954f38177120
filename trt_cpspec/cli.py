"""The command lines of the runtime: ``qwen3_tts_inference``, ``llm_inference`` and ``inspect``."""

from __future__ import annotations

import errno
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from . import outputs
from .config import AUTO, EXECUTORS, MAX_VERIFY_SIZE, MODES, Mode, checked_verify_size
from .errors import ConfigError, CpSpecError, EngineError, out_of_memory
from .inspection import describe_engine_dir, format_description
from .requests import ChatRequest, Request, RequestFile, make_chat, read_chat_file, read_request_file

if TYPE_CHECKING:  # ONNX Runtime is loaded when the input is known to be good
    from .omni import Qwen3Omni
    from .pipeline import Qwen3TTS

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

EXIT_FAILED_REQUEST = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

PathOption = click.Path(path_type=Path)
SEED = click.IntRange(0, 2**64 - 1)


class UserError(click.ClickException):
    """What the user gave cannot be used: printed without a traceback."""

    exit_code = EXIT_BAD_INPUT


def reports_errors(function: F) -> F:
    """Turn the library's errors, and the system's (a full disk), into a message and exit code 2."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            click.echo("Interrupted: files that were complete stay, no other was written.", err=True)
            raise SystemExit(EXIT_INTERRUPTED) from None
        except (CpSpecError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # click's: the reader of standard output has gone
            logger.debug("where it was raised:", exc_info=True)
            raise UserError(str(error)) from error
        except MemoryError as error:
            raise UserError(str(out_of_memory(error))) from error

    return wrapped  # type: ignore[return-value]


class RunError(UserError):
    """Something failed when speaking had begun."""

    exit_code = EXIT_FAILED_REQUEST


def refused(name: str, sentence: str, *, is_flag: bool = False) -> Callable[[F], F]:
    """Declare an option that is known and not supported yet; the help does not show it."""

    def refuse(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value not in (None, False):
            raise UserError(f"{name}: {sentence}")

    return click.option(
        name, callback=refuse, expose_value=False, is_flag=is_flag, default=False if is_flag else None, hidden=True
    )


def verify_size_option(*, auto: bool) -> Callable[[click.Context, click.Parameter, str], int | str]:
    """Return the callback of an option that takes a verify size; what is refused is told in the library's words."""

    def check(context: click.Context, parameter: click.Parameter, value: str) -> int | str:
        if auto and value == AUTO:
            return value
        try:
            return checked_verify_size(int(value))
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is no number{f', nor {AUTO!r}' if auto else ''}") from error
        except ConfigError as error:
            raise click.BadParameter(str(error)) from error

    return check


def print_json(document: Any, *, err: bool = False) -> None:
    """Print JSON on standard output, or on standard error, in UTF-8 as JSON is."""
    click.echo(outputs.json_bytes(document), nl=False, err=err)


def set_up_logging(debug: bool) -> None:
    """Send warnings, or everything, to standard error."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr
    )


class Progress(Protocol):
    """Moves a progress bar."""

    def __call__(self, steps: int, text: str = "") -> None:
        """Add steps, and show a text behind the bar."""
        ...


@contextmanager
def progress_bar(label: str, length: int) -> Iterator[Progress]:
    """Show a bar on standard error when it is a terminal, and nothing when it is not."""

    def silent(steps: int, text: str = "") -> None: ...

    if not sys.stderr.isatty():
        yield silent
        return
    shown = {"text": ""}
    bar: Any
    with click.progressbar(
        length=length, label=f"{label:<16}", file=sys.stderr, item_show_func=lambda _: shown["text"], show_eta=False
    ) as bar:

        def update(steps: int, text: str = "") -> None:
            shown["text"] = text
            bar.update(steps)
            bar.render_progress()

        yield update


def declared(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return what declares options in the order in which the help shows them."""

    def declare(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return declare


def place_options(function: F) -> F:
    """Declare where engines run: every command that runs them takes these."""
    return declared(
        click.option(
            "--device",
            type=click.Choice(["auto", "cpu", "cuda"]),
            default="auto",
            show_default=True,
            help="auto is CUDA where every engine folder has a plan and a device is there, else the CPU.",
        ),
        click.option(
            "--threads", metavar="N", type=click.IntRange(min=1), help="Threads of one pass. [default: all cores]"
        ),
        click.option(
            "--cpExecutor",
            "executor",
            type=click.Choice(EXECUTORS),
            default="auto",
            show_default=True,
            help="What runs the CodePredictor on a GPU: one fused kernel, or the TensorRT engine. auto is the kernel "
            "where it can run the model, else the engine. A CPU has its engine alone.",
        ),
    )(function)


def place_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return what :func:`place_options` gave, as arguments of ``from_engine_dir``."""
    return {name: options[name] for name in ("device", "threads", "executor")}


def run_options(files: str) -> Callable[[F], F]:
    """Declare the options of a run that both inference commands have; ``files`` says what a run writes."""
    return declared(
        click.option(
            "--outputFile", "output_file", type=PathOption, help="Responses, as JSON. [default: standard output]"
        ),
        click.option(
            "--outputAudioDir",
            "audio_dir",
            type=PathOption,
            default=Path("audio"),
            show_default=True,
            help=f"Receives {files}.",
        ),
        click.option(
            "--batchSize",
            "batch_size",
            metavar="N",
            type=click.IntRange(min=1),
            help="Requests spoken at once; streams are spoken one by one. [default: the input file's, or 1]",
        ),
        click.option(
            "--cpSpecVerifySize",
            "verify_size",
            metavar="N",
            type=str,
            callback=verify_size_option(auto=True),
            default="0",
            show_default=True,
            help=f"0 is off; 2 to {MAX_VERIFY_SIZE} verifies that many positions in one CodePredictor pass; auto "
            "measures at load and takes the fastest, or 0 where none pays.",
        ),
        click.option(
            "--cpSpecMode",
            "mode",
            type=click.Choice(MODES),
            default="rejection",
            show_default=True,
            help="rejection: most codes a round. coupled: the very codes of --cpSpecVerifySize 0.",
        ),
        click.option(
            "--seed",
            metavar="N",
            type=SEED,
            help="From 0 to 2**64 - 1, for every request that brings none. [default: drawn, and reported]",
        ),
        place_options,
        click.option(
            "--timeLimit",
            "time_limit",
            metavar="SECONDS",
            type=click.FloatRange(min=0, min_open=True),
            help="A request that is not complete by then fails, and leaves no file.",
        ),
        click.option("--strict", is_flag=True, help="Exit with 1 also where speech has no end, or a warning."),
        click.option("--dumpOutput", "dump_output", is_flag=True, help="With --outputFile: print the responses too."),
        click.option(
            "--dumpProfile", "dump_profile", is_flag=True, help="Print the time of each stage, under 'profile'."
        ),
        click.option(
            "--profileOutputFile", "profile_file", type=PathOption, help="Write the time of each stage, as JSON."
        ),
        click.option("--debug", is_flag=True, help="Log everything, and say of an error where it was raised."),
    )


@click.command("qwen3_tts_inference", context_settings={"help_option_names": ["--help", "-h"]})
@click.argument("engine_dir", required=False, type=PathOption)
@click.argument("spoken", metavar="[TEXT]", required=False)
@click.option(
    "--talkerEngineDir",
    "talker_dir",
    type=PathOption,
    help="Folder of the Talker's engine; code_predictor is its sibling. ENGINE_DIR in its place holds both.",
)
@click.option(
    "--code2wavEngineDir", "code2wav_dir", type=PathOption, help="Folder of the codec. [default: the sibling code2wav]"
)
@click.option(
    "--tokenizerDir", "tokenizer_dir", type=PathOption, help="Folder of the tokenizer. [default: the Talker's]"
)
@click.option(
    "--checkpointDir",
    "checkpoint_dir",
    type=PathOption,
    help="Take the tokenizer from this checkpoint, unless --tokenizerDir is given.",
)
@click.option("--inputFile", "input_file", type=PathOption, help="Requests, as JSON.")
@click.option("--text", help="Speak this text instead of an input file.")
@click.option("--speaker", help="With --text: a speaker of the checkpoint.")
@click.option("--language", help="With --text: a language, or auto.")
@click.option("--instruct", help="With --text: how to speak it.")
@click.option(
    "-o",
    "wav_file",
    metavar="WAV",
    type=PathOption,
    help="The wav of a single text, without its codes. - is standard output, which then carries no JSON.",
)
@run_options("audio_req{N}.wav and rvq_req{N}.safetensors of request N")
@refused("--cloneEncoderDir", "voice clone needs the clone encoders, which are not supported yet")
@click.option(
    "--streaming", is_flag=True, help="Write the sound of each request while it is made, in chunks of --chunkFrames."
)
@click.option(
    "--chunkFrames",
    "chunk_frames",
    metavar="N",
    type=click.IntRange(min=1),
    help="With --streaming: frames of a chunk, of 80 ms.",
)
@reports_errors
def tts(**options: Any) -> None:
    """Speak texts with the engines that cpspec-build made of a Qwen3-TTS checkpoint.

    \b
    For example:
      ENG "Hello there." -o hello.wav
      ENG "Hello there." --streaming --chunkFrames 5 -o - | ffplay -
      --talkerEngineDir ENG/talker --text "Hello there." --cpSpecVerifySize 3
      --talkerEngineDir ENG/talker --inputFile input.json --outputFile output.json

    Standard output carries JSON only, or with -o - the wav. The exit code is 1 when a request failed, and 2 when the
    input cannot be used.
    """
    check_time = _time_check(options["time_limit"])
    set_up_logging(options["debug"])
    _resolve_arguments(options)
    requests = _read_requests(options)
    _check_wav(options, requests)
    _check_files(options)
    if options["streaming"] != (options["chunk_frames"] is not None):
        raise ConfigError("--streaming and --chunkFrames N go together: a chunk of N frames is written when it is made")
    model = _open_tts(options)

    def write(index: int, batch_size: int, *parts: Any) -> dict[str, Any]:
        return outputs.write_response(options["audio_dir"], index, *parts, wav=options["wav_file"])

    how = {"chunk_frames": options["chunk_frames"]} if options["streaming"] else None
    _report(_run(model, requests, write, check_time, options, streaming=how), options)


def _resolve_arguments(options: dict[str, Any]) -> None:
    """Put the short form's ENGINE_DIR and TEXT where the options of the same meaning are."""
    engine_dir, spoken = options.pop("engine_dir"), options.pop("spoken")
    if (engine_dir is None) == (options["talker_dir"] is None):
        raise ConfigError("give either ENGINE_DIR or --talkerEngineDir")
    if spoken is not None and options["text"] is not None:
        raise ConfigError("give the text once: as TEXT or with --text")
    if engine_dir is not None:
        options["talker_dir"] = engine_dir / "talker"
    options["text"] = spoken if spoken is not None else options["text"]


def _check_wav(options: dict[str, Any], requests: RequestFile[Request]) -> None:
    """Refuse a place for wavs that cannot be written."""
    wav = options["wav_file"]
    if wav is None:
        outputs.check_folder(options["audio_dir"])
        return
    if len(requests.requests) != 1:
        raise ConfigError(f"-o takes the wav of one text, there are {len(requests.requests)}: use --outputAudioDir")
    if wav != outputs.STDOUT:
        if wav.suffix.lower() != ".wav":
            raise ConfigError(f"-o {wav}: only wav is written, and the name must say so")
        outputs.check_file(wav)
    elif options["dump_output"] or options["dump_profile"]:
        raise ConfigError("-o - leaves no room on standard output: use --outputFile and --profileOutputFile")
    elif sys.stdout.isatty():
        raise ConfigError("-o - would write a wav on the terminal: pipe it, or name a file")


def _check_files(options: dict[str, Any]) -> None:
    """Refuse files that cannot be written, and one path for two of them."""
    files = ("input_file", "output_file", "profile_file", "wav_file")
    named = {name: options[name] for name in files if options.get(name) not in (None, outputs.STDOUT)}
    for name in files[1:]:
        if name not in named:
            continue
        outputs.check_file(named[name])
        for other, path in named.items():
            if other != name and path.resolve() == named[name].resolve():
                raise ConfigError(f"{path} is named twice: input, output, profile and wav must be files of their own")


def _read_requests(options: dict[str, Any]) -> RequestFile[Request]:
    path, text = options["input_file"], options["text"]
    given = {name: options[name] for name in ("speaker", "language", "instruct") if options[name] is not None}
    if (path is None) == (text is None):
        raise ConfigError("give either --inputFile or --text")
    if path is None:
        messages = [{"role": "assistant", "content": text}]
        return RequestFile(requests=(Request(text=text, messages=messages, **given),))
    for name in given:
        raise ConfigError(f"--{name} goes with --text; in an input file it is the key {name!r}")
    return read_request_file(path)


def _open_tts(options: dict[str, Any]) -> Qwen3TTS:
    from .pipeline import Qwen3TTS  # noqa: PLC0415  ONNX Runtime is loaded when the input is known to be good

    return Qwen3TTS.from_engine_dir(
        talker_dir=options["talker_dir"],
        code2wav_dir=options["code2wav_dir"],
        tokenizer_dir=options["tokenizer_dir"] or options["checkpoint_dir"],
        **place_of(options),
    )


def _run(
    model: Qwen3TTS | Qwen3Omni,
    requests: RequestFile[Any],
    write: Callable[..., dict[str, Any]],
    check_time: Callable[[], None],
    options: dict[str, Any],
    *,
    streaming: dict[str, int] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Check every request, then run them batch by batch; return responses and profile.

    ``write(index, batch_size, request, prepared, result)`` writes the files of a request and returns its response.
    With ``streaming``, what a stream is made with, the requests run one by one, and keep the names of their batches.
    """
    batch_size = options["batch_size"] or requests.batch_size
    if batch_size > model.max_batch_size:
        raise ConfigError(f"a batch size of {batch_size} exceeds the engine's max_batch_size {model.max_batch_size}")
    prepared = _prepared(model, requests, options)
    mode: Mode = options["mode"]
    at_once = min(batch_size, len(prepared)) if streaming is None else 1
    verify_size, auto = _chosen_verify_size(model, at_once, options)
    window = model.window(verify_size)
    responses: list[dict[str, Any]] = []
    frames = 0
    with progress_bar("speaking", len(prepared)) as update:

        def count(added: int) -> None:
            nonlocal frames
            frames += added
            update(0, f"{frames} frames")
            check_time()

        for start in range(0, len(prepared), batch_size):
            batch = prepared[start : start + batch_size]
            how = {"window": window, "mode": mode, "progress": count}
            results: Iterable[Any] = (
                _run_batch(model, batch, check_time, **how)
                if streaming is None
                else (_stream(model, request, check_time, **how, **streaming) for request in batch)
            )
            for index, result in enumerate(results, start):
                response = write(index, batch_size, requests.requests[index], prepared[index], result)
                responses.append(response)
                for warning in response["warnings"][len(prepared[index].warnings) :]:
                    logger.warning("requests[%d]: %s", index, warning)
                if response["output_text"] == outputs.FAILED:
                    logger.error("requests[%d] failed: %s", index, response["error"])
            update(len(batch), f"{frames} frames")
    return responses, _profile(model.times.as_profile(), responses) | auto | _device_of(model)


def _prepared(model: Qwen3TTS | Qwen3Omni, requests: RequestFile[Any], options: dict[str, Any]) -> list[Any]:
    """Check every request; warnings are logged with the request's place."""
    prepared: list[Any] = []
    for index, request in enumerate(requests.requests):
        place = f"{options['input_file']}: requests[{index}]: " if options["input_file"] is not None else ""
        try:
            prepared.append(model.prepare(request, default_seed=options["seed"]))
        except ConfigError as error:
            raise ConfigError(f"{place}{error}") from error
        for warning in prepared[-1].warnings:
            logger.warning("%s%s", place, warning)
    return prepared


def _chosen_verify_size(model: Qwen3TTS | Qwen3Omni, batch: int, options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the verify size, and under ``cp_spec_auto`` how it was measured where ``auto`` was given."""
    if options["verify_size"] != AUTO:
        return options["verify_size"], {}
    choice = model.fastest_verify_size(options["mode"], batch=batch)
    click.echo(f"--cpSpecVerifySize auto: {choice['reason']}", err=True)
    return choice["verify_size"], {"cp_spec_auto": choice}


def _device_of(model: Qwen3TTS | Qwen3Omni) -> dict[str, Any]:
    """Return under ``cp_device`` what runs the CodePredictor, where that is a GPU."""
    voice: Any = getattr(model, "voice", model)  # a Qwen3-Omni has one of its own, or none
    facts = voice.predictor.device_facts() if voice is not None else {}
    return {"cp_device": facts} if facts else {}


def _time_check(limit: float | None) -> Callable[[], None]:
    """Return what raises, in the engine's place, once the time from now on is up: rows that have ended are kept."""
    started = time.monotonic()

    def check() -> None:
        if limit is not None and time.monotonic() - started > limit:
            raise EngineError(f"the time limit of {limit:g} s was reached")

    return check


def _run_batch(
    model: Qwen3TTS | Qwen3Omni, batch: Sequence[Any], check_time: Callable[[], None], **how: Any
) -> Sequence[Any]:
    try:
        check_time()
    except EngineError as error:
        return [error] * len(batch)
    return model.run_batch(batch, **how)


def _stream(model: Qwen3TTS | Qwen3Omni, request: Any, check_time: Callable[[], None], **how: Any) -> Any:
    try:
        check_time()
    except EngineError as error:
        return error
    return model.stream(request, **how)


def _report(outcome: tuple[list[dict[str, Any]], dict[str, Any]], options: dict[str, Any]) -> None:
    """Write and print what a run gave, and exit with 1 when a request failed."""
    responses, profile = outcome
    document: dict[str, Any] = {"input_file": str(options["input_file"] or ""), "responses": responses}
    document |= {key: profile[key] for key in ("cp_spec_auto", "cp_device") if key in profile}
    try:
        if options["output_file"] is not None:
            outputs.write_json(options["output_file"], document)
        if options["profile_file"] is not None:
            outputs.write_json(options["profile_file"], profile)
    except (CpSpecError, OSError) as error:
        # What was spoken must not be lost with the file, nor a wav on standard output be followed by text.
        print_json(document, err=options.get("wav_file") == outputs.STDOUT)
        raise RunError(str(error)) from error
    printed = document if options["output_file"] is None or options["dump_output"] else {}
    if options["dump_profile"]:
        printed = printed | {"profile": profile}
    if printed and options.get("wav_file") != outputs.STDOUT:
        print_json(printed)
    elif printed and options["seed"] is None:
        click.echo(f"seed: {responses[0]['sampling']['seed']}", err=True)
    if any(_is_failure(response, strict=options["strict"]) for response in responses):
        raise SystemExit(EXIT_FAILED_REQUEST)


def _is_failure(response: dict[str, Any], *, strict: bool) -> bool:
    """Return whether a response makes the run fail; strictly, one whose speech has no end, or a warning, does."""
    if response["output_text"] == outputs.FAILED:
        return True
    end = response.get("audio_finish_reason", response["finish_reason"]) if "cp_spec" in response else None
    return strict and (end == "length" or bool(response["warnings"]))


def _profile(profile: dict[str, Any], responses: list[dict[str, Any]]) -> dict[str, Any]:
    """Add the totals of a run to the times of its stages. ``real_time_factor`` above 1 is faster than real time."""
    spoken = [response for response in responses if "cp_spec" in response]
    total = {stage["stage_id"]: stage["total_time_ms"] for stage in profile["stages"]}
    spent_ms = sum(total.values())
    return {
        "talker": {
            "total_runs": sum(s["total_runs"] for s in profile["stages"] if s["stage_id"].startswith("talker")),
            "total_audio_outputs": len(spoken),
            "total_audio_codes": sum(response["cp_spec"]["frames"] for response in spoken),
        },
        "real_time_factor": sum(r["audio_duration_ms"] for r in spoken) / spent_ms if spoken and spent_ms else None,
        **profile,
    }


@click.command("llm_inference", context_settings={"help_option_names": ["--help", "-h"]})
@click.option("--engineDir", "engine_dir", required=True, type=PathOption, help="Folder of the Thinker's engine.")
@click.option(
    "--multimodalEngineDir",
    "multimodal_dir",
    type=PathOption,
    help="Holds code2wav, and the encoders audio and visual. [default: multimodal beside the Talker's folder for "
    "code2wav, beside the Thinker's for the encoders]",
)
@click.option("--enableAudioOutput", "audio", is_flag=True, help="Speak the answers; needs --talkerEngineDir.")
@click.option(
    "--talkerEngineDir",
    "talker_dir",
    type=PathOption,
    help="Folder of the Talker's engine; code_predictor is its sibling.",
)
@click.option(
    "--code2wavEngineDir",
    "code2wav_dir",
    type=PathOption,
    help="Folder of the codec. [default: code2wav in --multimodalEngineDir]",
)
@click.option(
    "--checkpointDir",
    "checkpoint_dir",
    type=PathOption,
    help="Take tokenizer and chat template from this checkpoint. [default: the Thinker's folder]",
)
@click.option("--inputFile", "input_file", type=PathOption, help="Requests, as JSON.")
@click.option("--text", help="Answer this text instead of an input file.")
@click.option("--speaker", help="With --text: a speaker of the checkpoint.")
@click.option(
    "--maxGenerateLength",
    "max_generate_length",
    metavar="N",
    type=click.IntRange(min=1),
    help="Tokens of an answer. [default: each request's, or 256]",
)
@run_options("audio_req{I}_batch{B}.wav and rvq_req{I}_batch{B}.safetensors of place B in batch I")
@click.option(
    "--enableThinkerTalkerStreaming",
    "streaming",
    is_flag=True,
    help="Speak each answer while it is being written, and write the sound while it is made; implies "
    "--enableAudioOutput. An input file has the same under 'streaming'.",
)
@click.option(
    "--chunkFrames",
    "chunk_frames",
    metavar="N",
    type=click.IntRange(min=1),
    help="Of a stream: frames of a chunk, of 80 ms. [default: the input file's codec_chunk_frames, or 10]",
)
@refused(
    "--specDecode",
    "speculative decoding of the Thinker is not supported; --cpSpecVerifySize is the CodePredictor's",
    is_flag=True,
)
@refused("--numLogprobs", "log probabilities are not supported yet")
@reports_errors
def llm(**options: Any) -> None:
    """Answer conversations, and speak the answers, with the engines that cpspec-build made of a Qwen3-Omni checkpoint.

    \b
    For example:
      --engineDir ENG/thinker --text "What is a codec?"
      --engineDir ENG/thinker --multimodalEngineDir ENG/multimodal --enableAudioOutput --talkerEngineDir ENG/talker
        --inputFile input.json --outputFile output.json --cpSpecVerifySize 3

    Standard output carries JSON only. The exit code is 1 when a request failed, and 2 when the input cannot be used.
    """
    check_time = _time_check(options["time_limit"])
    set_up_logging(options["debug"])
    options["audio"] = options["audio"] or options["streaming"]
    _check_audio_options(options)
    requests = _read_chats(options)
    streaming = _answer_streaming(requests, options)
    if options["audio"]:
        outputs.check_folder(options["audio_dir"])
    _check_files(options)
    model = _open_omni(options)

    def write(index: int, batch_size: int, *parts: Any) -> dict[str, Any]:
        return outputs.write_reply(options["audio_dir"], divmod(index, batch_size), *parts)

    _report(_run(model, requests, write, check_time, options, streaming=streaming), options)


def _answer_streaming(requests: RequestFile[ChatRequest], options: dict[str, Any]) -> dict[str, int] | None:
    """Return what streams are made with; None where nothing is streamed. A flag goes before the input file."""
    given, chunk_frames = requests.streaming, options["chunk_frames"]
    if not (options["streaming"] or given.enable):
        if chunk_frames is not None:
            raise ConfigError("--chunkFrames belongs to --enableThinkerTalkerStreaming")
        return None
    if not options["audio"]:
        logger.warning("ignored, as nothing is spoken without --enableAudioOutput: streaming")
        return None
    return {
        "chunk_frames": given.codec_chunk_frames if chunk_frames is None else chunk_frames,
        "prefill_threshold": given.talker_prefill_threshold,
    }


def _check_audio_options(options: dict[str, Any]) -> None:
    """Refuse speech without a Talker, and say what has no effect without speech."""
    if options["audio"]:
        if options["talker_dir"] is None:
            likely = options["engine_dir"].parent / "talker"
            hint = f"; did you mean --talkerEngineDir {likely}?" if likely.is_dir() else ""
            flag = "--enableThinkerTalkerStreaming" if options["streaming"] else "--enableAudioOutput"
            raise ConfigError(f"{flag} needs --talkerEngineDir{hint}")
        return
    flags = {"talker_dir": "--talkerEngineDir", "code2wav_dir": "--code2wavEngineDir", "speaker": "--speaker"}
    idle = [flag for name, flag in flags.items() if options[name] is not None]
    idle += ["--cpSpecVerifySize"] if options["verify_size"] else []
    idle += ["--cpExecutor"] if options["executor"] != "auto" else []
    if idle:
        logger.warning("ignored, as nothing is spoken without --enableAudioOutput: %s", ", ".join(idle))


def _read_chats(options: dict[str, Any]) -> RequestFile[ChatRequest]:
    path, text, speaker = options["input_file"], options["text"], options["speaker"]
    if (path is None) == (text is None):
        raise ConfigError("give either --inputFile or --text")
    if path is None:
        messages = [{"role": "user", "content": text}]
        requests = RequestFile(requests=(make_chat(messages, {"speaker": speaker}),))
    elif speaker is not None:
        raise ConfigError("--speaker goes with --text; in an input file it is the key 'speaker'")
    else:
        requests = read_chat_file(path)
    length = options["max_generate_length"]
    if length is None:
        return requests
    return replace(requests, requests=tuple(replace(chat, max_generate_length=length) for chat in requests.requests))


def _open_omni(options: dict[str, Any]) -> Qwen3Omni:
    from .omni import Qwen3Omni  # noqa: PLC0415  ONNX Runtime is loaded when the input is known to be good

    multimodal = options["multimodal_dir"]
    if multimodal is not None and not multimodal.is_dir():
        raise ConfigError(f"--multimodalEngineDir: {multimodal} is no folder")
    return Qwen3Omni.from_engine_dir(
        thinker_dir=options["engine_dir"],
        talker_dir=options["talker_dir"],
        code2wav_dir=options["code2wav_dir"] or (multimodal and multimodal / "code2wav"),
        multimodal_dir=multimodal,
        tokenizer_dir=options["checkpoint_dir"],
        audio=options["audio"],
        **place_of(options),
    )


@click.command("inspect")
@click.argument("engine_dir", type=PathOption)
@click.option("--memory", is_flag=True, help="Say how much memory each component takes, and nothing else.")
@click.option(
    "--batchSize",
    "batch",
    metavar="N",
    type=click.IntRange(min=1),
    help="With --memory: rows spoken at once. [default: 1]",
)
@click.option(
    "--cpSpecVerifySize",
    "verify_size",
    metavar="N",
    type=int,
    help="With --memory: positions of a verify pass. [default: the engine's widest]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def inspect(engine_dir: Path, memory: bool, batch: int | None, verify_size: int | None, as_json: bool) -> None:
    """Say what an engine folder can do.

    Of each component in ENGINE_DIR: what it is, its limits, the Talker's speakers and languages, and whether and how
    wide the CodePredictor can verify. With --memory: its weights, its KV cache at the longest, and an estimate of the
    workspace of a pass.
    """
    if memory:
        from .memory import describe_memory, format_memory, memory_needed  # noqa: PLC0415  it loads ONNX Runtime

        needs = memory_needed(engine_dir, batch=batch, verify_size=verify_size)
        if as_json:
            print_json(describe_memory(needs))
        else:
            click.echo(format_memory(needs))
        return
    if batch is not None or verify_size is not None:
        raise ConfigError("--batchSize and --cpSpecVerifySize go with --memory")
    description = describe_engine_dir(engine_dir)
    if as_json:
        print_json(description)
    else:
        click.echo(format_description(description))
