#!/usr/bin/env bash
# The whole suite: static checks, then all tests at both ends of the support range.
#
# Every check runs, also after one has failed; the last lines say which failed.
set -uo pipefail
cd "$(dirname "$0")/.."

# Both interpreters are required: half the range untested is a failure, not a skip.
oldest=$(scripts/find_python.sh oldest) && newest=$(scripts/find_python.sh newest) ||
    {
        echo "make test: FAILED: it needs Python 3.11 and a newer Python" >&2
        exit 1
    }
scripts/make_venv.sh oldest "$oldest" '.[test,lint,peers]' jax==0.10.2 jaxlib==0.10.2 &&
    scripts/make_venv.sh newest "$newest" '.[test,peers]' ||
    {
        echo "make test: FAILED: an environment could not be made" >&2
        exit 1
    }

versions='
import platform, jax, flax
print("Python", platform.python_version(), "| JAX", jax.__version__,
      "| Flax", flax.__version__)
'
for end in oldest newest; do
    echo "$end: $(.venv/$end/bin/python -c "$versions" 2>&1)"
done

report=()
failures=0
check() { # NAME COMMAND...
    local name=$1 start=$SECONDS outcome=ok
    shift
    echo
    echo "--- $name: $*"
    "$@" </dev/null || { outcome=FAILED && failures=$((failures + 1)); }
    report+=("$(printf '%-18s %-6s %4d s' "$name" $outcome $((SECONDS - start)))")
}

export JAX_PLATFORMS=cpu
bin=.venv/oldest/bin
check "ruff check" $bin/ruff check
check "ruff format" $bin/ruff format --check
check "import-linter" $bin/lint-imports
check "pyright" $bin/pyright --pythonpath $bin/python
check "mypy" $bin/mypy
if [ "${CI:-}" = true ]; then check "package" scripts/check_package.sh; fi
check "tests, oldest" $bin/python -m pytest --numprocesses 2 --tb short --durations 25
check "tests, newest" .venv/newest/bin/python -m pytest --numprocesses 2 --tb short --durations 25

echo
printf '%s\n' "${report[@]}"
if [ $failures -gt 0 ]; then
    echo "make test: FAILED: $failures of ${#report[@]} checks"
    exit 1
fi
echo "make test: all ${#report[@]} checks passed"
