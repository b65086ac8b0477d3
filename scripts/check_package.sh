#!/usr/bin/env bash
# Builds the source distribution and the wheel, and trains with what a user would install.
#
# The wheel is made from the source distribution, so both are known to be whole. It is
# installed into an empty environment, and the program in README.md is run far from here:
# on one Python, and with TEST_ALL=1 on each from 3.11 to 3.13 that is found.
set -euo pipefail
cd "$(dirname "$0")/.."

out=$PWD/out/package
rm -rf "$out"
mkdir -p "$out"
trap 'rm -rf "$out/tools" "$out/user"' EXIT # 700 MB
python=$(scripts/find_python.sh any)
# One pip installs for both. Python compiles what it imports; pip would compile all
# modules, for ten seconds.
install() { # ENVIRONMENT REQUIREMENT...
    "$out/tools/bin/python" -m pip --python "$out/$1/bin/python" install --quiet \
        --disable-pip-version-check --no-compile "${@:2}"
}

"$python" -m venv "$out/tools"
install tools 'build>=1.2' 'hatchling>=1.26' 'twine>=6.1'
"$out/tools/bin/python" -m build --no-isolation --outdir "$out/dist" .
"$out/tools/bin/twine" check --strict "$out"/dist/*

# In the wheel the package and nothing else; in the source distribution also the tests,
# the documents and what they need; in neither a cache.
"$python" - "$out"/dist/* <<'PROGRAM'
import re, sys, tarfile, zipfile

wheel, sdist = sorted(sys.argv[1:], key=lambda path: path.endswith(".gz"))
in_wheel = set(zipfile.ZipFile(wheel).namelist())
in_sdist = {name.split("/", 1)[1] for name in tarfile.open(sdist).getnames()}
package = {name for name in in_wheel if name.startswith("graftree/")}
needed = {f"src/{name}" for name in package} | {
    *("CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"),
    *("hatch_build.py", "conftest.py", "tests/conftest.py", "docs/index.md"),
}
assert "graftree/py.typed" in package
assert any(re.fullmatch(r"graftree-.*\.dist-info/licenses/LICENSE", n) for n in in_wheel)
assert "graftree/startup/flax.py" in package
# No .pth among them: nothing of ours runs when a user's Python starts.
assert all(name.endswith((".py", "py.typed")) for name in package), package
assert all(re.match(r"graftree-.*\.dist-info/", n) for n in in_wheel - package), in_wheel
assert needed <= in_sdist, needed - in_sdist
caches = re.compile(r"__pycache__|\.pyc$|^(out|\.venv)/")
assert not any(map(caches.search, in_sdist)), in_sdist
PROGRAM

sed -n '/^```python$/,/^```$/p' README.md | sed '/^```/d' >"$out/train.py"
# The same as a program for Flax, which is not installed here.
sed 's/^import graftree as nnx$/from flax import nnx/' "$out/train.py" >"$out/flax_train.py"
grep -q '^from flax import nnx$' "$out/flax_train.py"

users=$python
if [ "${TEST_ALL:-}" = 1 ]; then users=$(scripts/find_python.sh each); fi
cd "$out"
for python in $users; do
    "$python" -m venv --clear --without-pip user
    install user dist/*.whl
    JAX_PLATFORMS=cpu user/bin/python -I train.py
    JAX_PLATFORMS=cpu user/bin/python -m graftree.dropin flax_train.py
    user/bin/python -m graftree.dropin --install-startup
    GRAFTREE_DROPIN=1 JAX_PLATFORMS=cpu user/bin/python flax_train.py
    used="${used:+$used, }$(user/bin/python -c 'import platform, jax
print(platform.python_version(), "with JAX", jax.__version__)')"
done
echo "the wheel, $(basename dist/*.whl), trains in an empty environment of Python $used"
