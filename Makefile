# Each target is a script in scripts/, so that a person, an editor and CI run the same lines.
.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-all test-torch check docs dist benchmark gpu

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install:  ## make .venv with everything that the other targets need
	@scripts/install

demo: install  ## train a language model on two workers, three minutes at most
	.venv/bin/shardwise run -n 2 --zero 2 examples/language_model.py

test: install  ## the tests, without slow ones and the long products of parity tables
	@scripts/test

test-slow: install  ## the slow tests: launchers, clusters and whole programs, run by CI
	@scripts/test --slow

test-all: install  ## all tests
	@scripts/test -m ""

test-torch: install  ## unit and distributed tests under one torch: make test-torch VERSION=2.9.1
	@scripts/test-torch "$(VERSION)"

check: install  ## lint, format, types, import floors, the docs
	@scripts/check

docs: install  ## the site with guides and reference, into build/site
	@scripts/docs

dist: install  ## wheel and sdist, into dist
	@scripts/dist

benchmark: install  ## hours: step time, memory and scaling beside the peers that PYTHON has
	@scripts/benchmark

gpu: install  ## tests and figures on a GPU, in steps of nine minutes: make gpu STEP="tests first"
	@scripts/gpu $(STEP)
