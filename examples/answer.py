"""Answer a question aloud with the engines of a Qwen3-Omni checkpoint.

First build them: cpspec-build --checkpointDir CKPT --engineDir ENG
Then: python answer.py ENG "What is a codec?" --speaker ethan
"""

import argparse
import sys

import soundfile

from trt_cpspec import CpSpecError, Qwen3Omni

parser = argparse.ArgumentParser(description="Answer a question aloud.")
parser.add_argument("engines", help="the folder that cpspec-build wrote")
parser.add_argument("question")
parser.add_argument("--system", default="You are a helpful voice assistant.")
parser.add_argument("--speaker", help="see: cpspec inspect ENG (default: the first)")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--output", default="answer.wav")
args = parser.parse_args()

messages = [{"role": "system", "content": args.system}, {"role": "user", "content": args.question}]
try:
    omni = Qwen3Omni.from_engine_dir(args.engines)
    reply = omni.respond(messages, speaker=args.speaker, verify_size=3, seed=args.seed, max_generate_length=128)
    speech = reply.speech
    assert speech is not None  # from_engine_dir(..., audio=False) would answer in text alone
    soundfile.write(args.output, speech.waveform, speech.sample_rate, subtype="PCM_16")
except (CpSpecError, soundfile.LibsndfileError) as error:  # what was given cannot be used; anything else is a bug
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(2)

print(reply.text)
stats = speech.stats
print(f"{args.output}: {speech.duration_ms / 1000:.2f} s, {stats.frames} frames, ended by {speech.finish_reason}")
if stats.frames:
    print(f"{stats.passes / stats.frames:.2f} passes a frame, {stats.accepted} of {stats.proposed} drafts accepted")
