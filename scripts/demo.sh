#!/usr/bin/env bash
# Installs what the demo needs, then runs it; arguments go to the demo.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(scripts/find_python.sh any)
scripts/make_venv.sh demo "$python" '.[demo]'
# `exec`, so that Ctrl-C reaches the demo itself, which then saves its checkpoint.
PYTHONUNBUFFERED=1 exec .venv/demo/bin/python -m examples.digits "$@"
