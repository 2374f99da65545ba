# Two commands: `make serve` runs the daemon, `make test` its tests. Both need Python 3.11 or newer and pip.
PYTHON ?= python3
VENV ?= .venv
bin := $(VENV)/bin

.PHONY: serve test lint clean

serve: $(VENV)/installed
	$(bin)/twistd --nodaemon --pidfile= hivebash

test: $(VENV)/installed-test
	$(bin)/python -m twisted.trial --reactor=asyncio --temp-directory=$(VENV)/trial $(or $(TESTS),tests)

lint: $(VENV)/installed-lint
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

clean:
	rm -rf $(VENV) build *.egg-info

$(bin)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(bin)/python pyproject.toml setup.cfg
	$(bin)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-%: $(bin)/python pyproject.toml setup.cfg
	$(bin)/python -m pip install --quiet --disable-pip-version-check --editable .[$*]
	touch $@
