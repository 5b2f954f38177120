"""Speak a text in chunks, each played or piped as soon as it is made, with the engines of a Qwen3-TTS checkpoint.

First build them: cpspec-build --checkpointDir CKPT --engineDir ENG
Then: python stream.py ENG "Hello there." | ffplay -autoexit -f s16le -ar 24000 -
"""

import argparse
import sys

import numpy as np

from trt_cpspec import CpSpecError, Qwen3TTS

parser = argparse.ArgumentParser(description="Speak a text while it is made: 16-bit samples on standard output.")
parser.add_argument("engines", help="the folder that cpspec-build wrote")
parser.add_argument("text")
parser.add_argument("--speaker", help="see: cpspec inspect ENG (default: the first)")
parser.add_argument("--chunk-frames", type=int, default=5, help="of 80 ms each")
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

try:
    tts = Qwen3TTS.from_engine_dir(args.engines)
    with tts.synthesize_stream(
        args.text, speaker=args.speaker, chunk_frames=args.chunk_frames, verify_size=3, seed=args.seed
    ) as stream:
        for samples in stream:
            sys.stdout.buffer.write(np.rint(samples * 32767).astype("<i2").tobytes())
            sys.stdout.buffer.flush()
except CpSpecError as error:  # what was given cannot be used; anything else is a bug
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(2)

speech = stream.result
first_ms = speech.time_to_first_audio_ms or 0.0
print(f"first audio after {first_ms:.0f} ms, {speech.duration_ms / 1000:.2f} s in all", file=sys.stderr)
