"""Speak a text with the engines of a Qwen3-TTS checkpoint.

First build them: cpspec-build --checkpointDir CKPT --engineDir ENG
Then: python speak.py ENG "Hello there." --speaker vivian
"""

import argparse
import sys

import soundfile

from trt_cpspec import CpSpecError, Qwen3TTS

parser = argparse.ArgumentParser(description="Speak a text.")
parser.add_argument("engines", help="the folder that cpspec-build wrote")
parser.add_argument("text")
parser.add_argument("--speaker", help="see: cpspec inspect ENG (default: the first)")
parser.add_argument("--language", help="for example english (default: auto)")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--output", default="speech.wav")
args = parser.parse_args()

try:
    tts = Qwen3TTS.from_engine_dir(args.engines)
    speech = tts.synthesize(args.text, speaker=args.speaker, language=args.language, verify_size=3, seed=args.seed)
    soundfile.write(args.output, speech.waveform, speech.sample_rate, subtype="PCM_16")
except (CpSpecError, soundfile.LibsndfileError) as error:  # what was given cannot be used; anything else is a bug
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(2)

stats = speech.stats
print(f"{args.output}: {speech.duration_ms / 1000:.2f} s, {stats.frames} frames, ended by {speech.finish_reason}")
print(f"{stats.passes / stats.frames:.2f} passes a frame, {stats.accepted} of {stats.proposed} drafts accepted")
if stats.window.reason:
    print(f"without speculation: {stats.window.reason}")
