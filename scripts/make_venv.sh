#!/usr/bin/env bash
# Makes the virtual environment .venv/NAME with this project installed in it, editable.
#
#   make_venv.sh NAME PYTHON REQUIREMENT...     e.g. demo python3 '.[demo]'
#
# A requirement is this project with extras, which comes first; another package; or
# `--group NAME`, a dependency group of pyproject.toml.
#
# An environment that is there is kept as long as its stamp says that it was made from
# the same pyproject.toml, Python, requirements and folder; else it is made afresh. The
# stamp is written last, so an interrupted installation is never taken for a whole one.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1 python=$2
shift 2
folder=.venv/$name
wanted=$({
    pwd
    "$python" -VV
    printf '%s\n' "$@"
    cat pyproject.toml hatch_build.py
} | cksum)

if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
echo "setting up $folder ($("$python" -V)): a minute or two ..."
rm -rf "$folder"
"$python" -m venv "$folder"
# Python compiles a module when it is first imported, unless it may not keep the result.
# So pip, which compiles all modules of all packages, need not.
compile=--no-compile
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then compile=--compile; fi
log=$folder/pip.log
# Older ones know no dependency groups.
"$folder/bin/python" -m pip install --disable-pip-version-check --quiet --upgrade \
    'pip>=25.1' </dev/null >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
"$folder/bin/python" -m pip install --disable-pip-version-check --no-color $compile \
    --editable "$@" </dev/null >"$log" 2>&1 &
pip=$!
while kill -0 $pip 2>/dev/null; do
    sleep 1
    if [ $((SECONDS % 15)) = 0 ]; then
        echo "  $folder: $(grep -c '^ *Collecting' "$log") packages found, $SECONDS s"
    fi
done
if ! wait $pip; then
    cat "$log" >&2
    exit 1
fi
echo "  $folder is there after $SECONDS s"
echo "$wanted" >"$folder/stamp"
