#!/usr/bin/env bash
# Creates or repairs an environment for tests/clients: the libraries those tests are about, in a layer
# over the environment of tools/setup.sh, whose packages are used and not installed again.
#
#   VENV     the environment below (default .venv), made by tools/setup.sh; the layer is $VENV-clients
#
# A stamp in the layer remembers what it was made from, so that a second call only compares.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly VENV="${VENV:-.venv}"
readonly CLIENTS="$VENV-clients"
readonly REQUIREMENTS="tests/clients/requirements.txt"
readonly STAMP="$CLIENTS/.setup-stamp"
readonly LOG="$CLIENTS/setup.log"

say() { printf 'setup: %s\n' "$*"; }

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# Where an interpreter has its packages.
packages_of() {
    "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# What the layer depends on: these files, and which environment is below.
fingerprint() {
    { packages_of "$VENV/bin/python" && cat tools/setup_clients.sh "$REQUIREMENTS" constraints.txt; } | cksum
}

# Has the layer find the packages below, after its own. A plain path in a .pth file would be searched,
# but the .pth files in it would not be read, and editable installs are such files.
create_layer() {
    say "creating $CLIENTS, a layer over $VENV"
    rm -rf "$CLIENTS"
    "$VENV/bin/python" -m venv --without-pip "$CLIENTS"
    printf "import site; site.addsitedir('%s')\n" "$(packages_of "$VENV/bin/python")" \
        >"$(packages_of "$CLIENTS/bin/python")/below.pth"
}

# pip of the environment below installs into the layer, and sees the packages of both.
install_clients() {
    say "installing the libraries of $REQUIREMENTS"
    if ! "$VENV/bin/python" -m pip --python "$CLIENTS/bin/python" install --disable-pip-version-check --no-input \
        --progress-bar off --constraint constraints.txt --requirement "$REQUIREMENTS" >"$LOG" 2>&1; then
        tail -n 20 "$LOG" >&2
        die "pip could not install the libraries: the lines above are the end of $LOG."
    fi
}

main() {
    [ -x "$VENV/bin/python" ] || die "there is no environment $VENV to put a layer over: run 'make setup' first."
    local wanted
    wanted="$(fingerprint)"
    if [ -x "$CLIENTS/bin/python" ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then
        say "$CLIENTS is up to date"
        return
    fi
    create_layer
    install_clients
    printf '%s\n' "$wanted" >"$STAMP"
    say "done: $CLIENTS is ready"
}

main
