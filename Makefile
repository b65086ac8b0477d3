# Each target does its own set-up, in .venv/; all it needs is Python 3.11 or newer.
#   make demo ARGS="--epochs 3"     passes arguments on; also for bench
ARGS ?=
FOR_DOCS = .[demo,display,export,peers] --group test --group docs

.PHONY: demo test test-all bench docs docs-serve format clean

demo: # Train a network on handwritten digits
	@PYTHONUNBUFFERED=1 scripts/tool.sh demo '.[demo]' python -m examples.digits $(ARGS)

test: # All checks; all tests on the newest Python found, part of them on Python 3.11
	@scripts/test.sh

test-all: # All checks; all tests on both
	@scripts/test.sh --all

bench: # Time the library beside raw JAX, Flax NNX and Equinox
	@scripts/tool.sh bench '.[peers]' python -m benchmarks $(ARGS)

docs: # Run the pages of docs/ that changed, and build the site; ARGS=--no-run: runs none
	@scripts/tool.sh docs '$(FOR_DOCS)' python -m website build $(ARGS)

docs-serve: # The same, and show it on http://localhost:8000
	@scripts/tool.sh docs '$(FOR_DOCS)' python -m website serve $(ARGS)

format: # Format the code, and fix what ruff can fix
	@scripts/tool.sh lint '. --group lint' ruff check --fix --exit-zero
	@scripts/tool.sh lint '. --group lint' ruff format

clean: # Remove the environments and everything written
	rm -rf .venv out
