#!/usr/bin/env bash
# Runs the tests whose outcome JAX may change, on a given version of JAX.
#
#   test_jax.sh --jax 0.11.0 [--python 3.12] [OPTION OF PYTEST...]
#
# The environment is .venv/jax-0.11.0, or with --python .venv/jax-0.11.0-python-3.12. It
# has no peers: other libraries may not work yet with a JAX that has just been released.
set -euo pipefail
cd "$(dirname "$0")/.."

jax='' which=any name=''
while [ $# -gt 0 ]; do
    case $1 in
    --jax) jax=${2:?--jax wants a version} name=jax-$2 ;;
    --python) which=${2:?--python wants a version, such as 3.12} ;;
    *) break ;;
    esac
    shift 2
done
if [ -z "$jax" ]; then
    echo "usage: $0 --jax VERSION [--python 3.NN] [OPTION OF PYTEST...]" >&2
    exit 2
fi
if [ "$which" != any ]; then name=$name-python-$which; fi

python=$(scripts/find_python.sh "$which")
scripts/make_venv.sh "$name" "$python" '.[demo,display,export]' --group test \
    "jax==$jax" "jaxlib==$jax"
export JAX_PLATFORMS=cpu
exec ".venv/$name/bin/python" -m pytest tests/contract tests/transforms/lifting \
    tests/core tests/test_jax.py --end oldest -m "not long and not pages" \
    --numprocesses 2 --dist worksteal --tb short "$@"
