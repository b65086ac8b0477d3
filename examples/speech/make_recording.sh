#!/usr/bin/env bash
# How recording.wav was made, with espeak-ng 1.51 and SoX 14.4.2: two sentences, and
# between them a second of noise as loud as they are.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
cd "$(mktemp -d)"

espeak-ng -v en-gb -s 150 -w first.wav \
    "A loader that drops a tensor keeps quiet about it."
espeak-ng -v en-us+f3 -s 160 -w second.wav "This one tells you."
# -R: the same random numbers each time.
sox -R first.wav -r 16000 -b 16 1.wav gain -n -9 pad 0.8 2.1
sox -R second.wav -r 16000 -b 16 2.wav gain -n -9 pad 0 0.9
sox -R 1.wav 2.wav speech.wav
sox -R -r 16000 -n burst.wav synth 0.9 pinknoise gain -n -9 fade 0.05 0.9 0.05 pad 4.8
sox -R -r 16000 -n hiss.wav synth 8.8 brownnoise gain -n -30
sox -R -m -v 1 speech.wav -v 1 burst.wav -v 1 hiss.wav -b 16 "$folder/recording.wav"
