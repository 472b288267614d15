#!/usr/bin/env bash
# Creates or repairs the environment of `make docs` and `make dist`: mkdocs, build and twine, neither
# torch nor this project. API pages are written from the sources, which are not imported.
#
#   VENV     path of the base environment (default .venv); this environment is $VENV-docs
#   PYTHON   interpreter that creates it (default: the base environment's, or python3)
#
# A stamp in the environment records the inputs of the installation. A call with unchanged inputs
# installs nothing.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly VENV="${VENV:-.venv}"
readonly DOCS="$VENV-docs"
readonly REQUIREMENTS="tools/docs-packages.txt"
readonly STAMP="$DOCS/.setup-stamp"
readonly LOG="$DOCS/setup.log"

say() { printf 'setup: %s\n' "$*"; }

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

interpreter() {
    if [ -n "${PYTHON:-}" ]; then
        printf '%s\n' "$PYTHON"
    elif [ -x "$VENV/bin/python" ]; then
        printf '%s\n' "$VENV/bin/python"
    else
        command -v python3 || die "there is no python3: name an interpreter with PYTHON=path."
    fi
}

main() {
    local wanted
    wanted="$({ pwd -P && cat tools/setup_docs.sh "$REQUIREMENTS"; } | cksum)"
    if [ -x "$DOCS/bin/python" ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then
        return
    fi
    say "creating $DOCS with the packages of $REQUIREMENTS"
    rm -rf "$DOCS"
    local python
    python="$(interpreter)"
    "$python" -m venv --without-pip "$DOCS"
    if ! "$python" -m pip --python "$DOCS/bin/python" install --disable-pip-version-check --no-input \
        --no-compile --progress-bar off --requirement "$REQUIREMENTS" >"$LOG" 2>&1; then
        tail -n 20 "$LOG" >&2
        die "pip could not install the packages: the lines above are the end of $LOG."
    fi
    printf '%s\n' "$wanted" >"$STAMP"
}

main
