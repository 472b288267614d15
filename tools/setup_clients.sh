#!/usr/bin/env bash
# Creates or repairs the environment of tests/clients. This environment is a layer over the base
# environment of tools/setup.sh: it contains the tested libraries and uses the base's packages.
#
#   VENV          path of the base environment (default .venv); the layer is $VENV-clients
#   REQUIREMENTS  list of the libraries with all that they need (default tests/clients/requirements.txt)
#
# A file newer_glibc.txt in the folder of this list has libraries whose wheels need a newer system.
#
# A stamp in the layer records the inputs of the installation. A call with unchanged inputs installs
# nothing.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly VENV="${VENV:-.venv}"
readonly CLIENTS="$VENV-clients"
readonly REQUIREMENTS="${REQUIREMENTS:-tests/clients/requirements.txt}"
readonly NEWER="$(dirname "$REQUIREMENTS")/newer_glibc.txt"
readonly STAMP="$CLIENTS/.setup-stamp"
readonly LOG="$CLIENTS/setup.log"

say() { printf 'setup: %s\n' "$*"; }

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# Prints the site-packages folder of an interpreter.
packages_of() {
    "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# Prints a checksum of the layer's inputs: requirements, this script, the path of the base's packages.
fingerprint() {
    { packages_of "$VENV/bin/python" && cat tools/setup_clients.sh "$REQUIREMENTS" && if [ -f "$NEWER" ]; then cat "$NEWER"; fi; } | cksum
}

# Adds the base's packages to the import path of the layer, after its own packages. With a plain path
# in a .pth file, Python would not read the .pth files in this path, which editable installs need.
create_layer() {
    say "creating $CLIENTS, a layer over $VENV"
    rm -rf "$CLIENTS"
    "$VENV/bin/python" -m venv --without-pip "$CLIENTS"
    printf "import site; site.addsitedir('%s')\n" "$(packages_of "$VENV/bin/python")" \
        >"$(packages_of "$CLIENTS/bin/python")/below.pth"
    # A rehearsal searches for Transformer Engine in the environment that runs it.
    ln -s "$(cd "$VENV" && pwd)/rehearsal-packages" "$CLIENTS/rehearsal-packages"
}

# Installs the libraries into the layer with pip of the base, which sees the packages of both. The list
# is complete; it may have other versions of the base's packages, which the layer then has too.
install_clients() {
    say "installing the libraries of $REQUIREMENTS"
    install --requirement "$REQUIREMENTS"
    if [ -f "$NEWER" ]; then
        # pip installs wheels for another system only into a folder.
        install --requirement "$NEWER" --target "$(packages_of "$CLIENTS/bin/python")" --only-binary :all: \
            --platform "manylinux_2_39_$(uname -m)"
    fi
}

# Installs into the layer; the arguments are those of pip.
install() {
    if ! "$VENV/bin/python" -m pip --python "$CLIENTS/bin/python" install --disable-pip-version-check --no-input \
        --progress-bar off --no-deps "$@" >"$LOG" 2>&1; then
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
