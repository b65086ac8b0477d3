#!/usr/bin/env bash
# All checks, and the tests at both ends of the support range.
#
#   test.sh         `make test`: the newest Python runs all tests but the longest, with
#                   a part of the tables whose rows compile a model (conftest.py), and
#                   Python 3.11 with the oldest JAX those that Python and JAX may change,
#                   each in one of its modes, and with a part of its other parameters
#   CI=true ...     the same with the pages of docs/ (Python 3.11 runs every eighth, the
#                   newest Python the others), those of Python 3.11 once more without
#                   caches, which must change nothing, and the wheel
#   test.sh --all   `make test-all`: both run all tests, Python 3.11 those that caches may
#                   change also without caches, those of forecasts with the compilers of
#                   TPUs and GPUs, and the site is built
#
# Where one of the two Pythons is missing, the other runs all tests, and with CI=true that
# is a failure. Every check runs, also after one has failed; the last lines say which
# failed, and what was not run.
set -uo pipefail
cd "$(dirname "$0")/.."

# Else each of a hundred processes compiles what it imports: the package, and the tests.
unset PYTHONDONTWRITEBYTECODE

stop() {
    echo "make test: FAILED: $1" >&2
    exit 1
}

oldest=$(scripts/find_python.sh oldest 2>/dev/null)
newest=$(scripts/find_python.sh newest 2>/dev/null)
scope=${1:-} missing= tests_of_oldest=() tests_of_newest=() chosen=()
# With these, annotations of shapes are compared with what is passed.
shapes=(-p tests.shapes src/graftree/training tests/contract/test_nn_layers)
if [ -z "$oldest$newest" ]; then
    stop "it needs Python 3.11 or newer"
elif [ -z "$oldest" ]; then
    missing="; not run: Python 3.11, with the oldest JAX"
elif [ -z "$newest" ]; then
    missing="; not run: Python 3.12 or newer, with the newest JAX"
elif [ "$scope" != --all ]; then
    chosen=(-m "not long")
    tests_of_oldest=(tests/contract tests/transforms tests/test_jax.py "${shapes[@]}"
        --end oldest)
    tests_of_newest=(--end newest)
    if [ "${CI:-}" = true ]; then
        tests_of_oldest+=(tests/docs)
    else
        chosen=(-m "not long and not pages")
        missing="; not run: the pages of docs/ (make docs runs them) and the wheel"
    fi
fi
if [ ${#chosen[@]} = 0 ]; then export TEST_ALL=1; fi # more examples of a property
if [ -n "$missing" ] && [ "${CI:-}" = true ]; then stop "CI needs both ends$missing"; fi

# Both environments at once; the static checks run in the first.
ends=() setups=() are_made=true
set_up() { # END PYTHON REQUIREMENT...
    scripts/make_venv.sh "$@" &
    setups+=($!) ends+=("$1")
}
for_tests=('.[demo,display,export,peers]' --group test) for_checks=(--group lint)
if [ -n "$oldest" ]; then
    set_up oldest "$oldest" "${for_tests[@]}" "${for_checks[@]}" \
        jax==0.10.2 jaxlib==0.10.2
    for_checks=()
fi
if [ -n "$newest" ]; then
    set_up newest "$newest" "${for_tests[@]}" ${for_checks[@]+"${for_checks[@]}"}
fi
for setup in "${setups[@]}"; do wait "$setup" || are_made=false; done
if ! $are_made; then stop "an environment could not be made"; fi

# Not by importing them, which takes two seconds for each end.
versions='
import platform
from importlib.metadata import version
print("Python", platform.python_version(), "| JAX", version("jax"),
      "| Flax", version("flax"))
'
for end in "${ends[@]}"; do
    echo "$end: $(.venv/$end/bin/python -c "$versions" 2>&1)"
done

report=()
check() { # NAME COMMAND...
    local name=$1 start=$SECONDS outcome=ok
    shift
    echo
    echo "--- $name: $*"
    "$@" </dev/null || outcome=FAILED
    report+=("$(printf '%-18s %-6s %4d s' "$name" $outcome $((SECONDS - start)))")
}
# To show the values in an `assert`, pytest rewrites it, which takes each process as long
# as all else before the first test. So only what has failed runs again, to be shown.
run_pytest() { # COMMAND...
    "$@" --assert plain && return
    "$@" --last-failed --last-failed-no-failures none
    return 1
}
run_tests() { # NAME END PATH...
    # Else both workers do that, for the same files at the same time.
    ".venv/$2/bin/python" -m compileall -qq conftest.py src tests benchmarks examples \
        website
    check "$1" run_pytest ".venv/$2/bin/python" -m pytest "${@:3}" \
        ${chosen[@]+"${chosen[@]}"} --numprocesses 2 --dist worksteal --tb short \
        --durations 25
}

export JAX_PLATFORMS=cpu
bin=.venv/${ends[0]}/bin
run_checks() {
    check "ruff check" $bin/ruff check
    check "ruff format" $bin/ruff format --check
    check "codespell" $bin/codespell
    check "import-linter" $bin/lint-imports
    check "pyright" $bin/pyright --pythonpath $bin/python
    check "mypy" $bin/mypy
    # With --all on each Python, which takes half a minute for each.
    if [ "${CI:-}" = true ] || [ "$scope" = --all ]; then check "package" scripts/check_package.sh; fi
    printf '%s\n' "${report[@]}" >out/checks.report
}

# Each of them keeps one core busy, or none while it downloads. So they run beside the
# tests, and what they print follows.
mkdir -p out
rm -f out/checks.report
run_checks >out/checks.log 2>&1 &
checks=$!
trap 'kill $checks 2>/dev/null' EXIT
if [ -n "$newest" ]; then
    run_tests "tests, newest" newest ${tests_of_newest[@]+"${tests_of_newest[@]}"}
fi
if [ -n "$oldest" ]; then
    run_tests "tests, oldest" oldest ${tests_of_oldest[@]+"${tests_of_oldest[@]}"}
fi
if [ "$scope" = --all ] || [ "${CI:-}" = true ]; then
    # What is remembered between calls is in these chapters; the others call them.
    of_caches=(tests/contract tests/core tests/transforms tests/training)
    GRAFTREE_CACHES=off run_tests "without caches" "${ends[0]}" \
        "${tests_of_oldest[@]-${of_caches[@]}}"
fi
if [ ${#tests_of_oldest[@]} = 0 ]; then
    run_tests "shapes" "${ends[0]}" "${shapes[@]}" src/graftree/nn
fi
if [ "$scope" = --all ] && [ -n "$newest" ]; then
    # With the compilers of TPUs and GPUs, which need more than a gigabyte. No other
    # environment has them: without JAX_PLATFORMS=cpu, JAX looks for the devices.
    check "compilers" scripts/make_venv.sh forecast "$newest" \
        '.[demo,peers,forecast-tpu,forecast-gpu]' --group test
    if [ -e .venv/forecast/stamp ]; then
        page='tests/docs/test_pages.py::test_code_prints_what_the_page_says'
        run_tests "forecast" forecast tests/forecast "$page[guides/forecast.md]"
    fi
fi
if [ "$scope" = --all ]; then check "site" make docs; fi

wait $checks
cat out/checks.log
if [ ! -e out/checks.report ]; then stop "the static checks were stopped"; fi
while read -r line; do report+=("$line"); done <out/checks.report

echo
printf '%s\n' "${report[@]}"
failures=$(printf '%s\n' "${report[@]}" | grep -c ' FAILED ')
if [ "$failures" -gt 0 ]; then
    echo "make test: FAILED: $failures of ${#report[@]} checks$missing"
    exit 1
fi
echo "make test: all ${#report[@]} checks passed$missing"
