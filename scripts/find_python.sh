#!/usr/bin/env bash
# Prints the path of a Python that can make virtual environments.
#
#   find_python.sh any      `python3` if that is 3.11 or newer, else another that is
#   find_python.sh oldest   Python 3.11, the low end of the support range
#   find_python.sh newest   the newest Python found, at least 3.12: the high end
#   find_python.sh each     one of each version from 3.11 to 3.13 that is found
#   find_python.sh 3.NN     that version
#
# It looks through PATH, then through what pyenv and uv have installed. A shim that
# runs nothing, a pre-release and a Python without `venv` are passed over.
set -euo pipefail

probe='
import sys, ensurepip, venv
assert sys.version_info.releaselevel == "final"
print("%d.%02d" % sys.version_info[:2], sys.executable)
'

candidates() {
    local minor folder
    command -v python3 || true
    for minor in $(seq 30 -1 11); do
        command -v "python3.$minor" || true
    done
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin \
        "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/*/bin; do
        if [ -x "$folder/python3" ]; then echo "$folder/python3"; fi
    done
}

# Lines "3.NN path", in the order in which they were found, 3.11 and newer.
usable() {
    local candidate
    candidates | while read -r candidate; do
        "$candidate" -I -c "$probe" 2>/dev/null </dev/null || true
    done | awk '$1 >= "3.11" && !seen[$2]++'
}

found=$(usable)
case "${1:-}" in
any)
    wanted="Python 3.11 or newer"
    match=$(head -n 1 <<<"$found")
    ;;
oldest)
    wanted="Python 3.11"
    match=$(awk '$1 == "3.11"' <<<"$found" | head -n 1)
    ;;
newest)
    wanted="Python 3.12 or newer"
    match=$(awk '$1 >= "3.12"' <<<"$found" | sort -r -s -k1,1 | head -n 1)
    ;;
each)
    wanted="Python 3.11 to 3.13"
    match=$(awk '$1 <= "3.13" && !seen[$1]++' <<<"$found" | sort -k1,1)
    ;;
3.[1-9][0-9])
    wanted="Python $1"
    match=$(awk -v wanted="$1" '$1 == wanted' <<<"$found" | head -n 1)
    ;;
*)
    echo "error: $0 takes any, oldest, newest, each or 3.NN, not '${1:-}'" >&2
    exit 2
    ;;
esac

if [ -z "$match" ]; then
    paths=$(awk '{ print $2 }' <<<"$found" | paste -s -d ' ')
    echo "error: no $wanted with venv found on PATH, in pyenv or in uv" \
        "(usable: ${paths:-none})" >&2
    version=$(grep -o '3\.[0-9]*' <<<"$wanted" | head -n 1)
    echo "  Install one, for example: uv python install $version (or pyenv install" \
        "$version; on Debian also python3-venv)" >&2
    exit 1
fi
sed 's/^[^ ]* //' <<<"$match"
