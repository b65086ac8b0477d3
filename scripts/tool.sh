#!/usr/bin/env bash
# Runs one program from an environment of its own.
#
#   tool.sh NAME 'REQUIREMENT...' PROGRAM ARGUMENT...
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1 program=$3
read -ra requirements <<<"$2"
shift 3
python=$(scripts/find_python.sh any)
scripts/make_venv.sh "$name" "$python" "${requirements[@]}"
# `exec`, so that Ctrl-C reaches the program: the demo then saves its checkpoint.
exec ".venv/$name/bin/$program" "$@"
