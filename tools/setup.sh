#!/usr/bin/env bash
# Creates or repairs the virtual environment and installs the project into it, pinned.
#
#   VENV     path of the environment (default .venv)
#   PYTHON   interpreter that creates the environment (default: the first Python >= 3.12 found)
#   TORCH    version of torch to install instead of the version in constraints.txt
#   PARTS    what to install: "all" (default), or "pretrain" for what `make pretrain` needs
#
# A stamp in the environment records the inputs of the installation. A call with unchanged inputs
# installs nothing, and neither does one for "pretrain" after one for "all".
set -euo pipefail

readonly NEEDED="3.12"
# Version managers read .python-version from the working directory, and the stamp contains its path.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly TORCH="${TORCH:-}"
readonly VENV="${VENV:-.venv${TORCH:+-torch-$TORCH}}"
readonly PARTS="${PARTS:-all}"
readonly STAMP="$VENV/.setup-stamp"
readonly LOG="$VENV/setup.log"
# Folder of Transformer Engine, which only a rehearsal searches.
readonly REHEARSAL="$VENV/rehearsal-packages"
readonly REHEARSAL_PINNED="tools/rehearsal-packages.txt"

say() { printf 'setup: %s\n' "$*"; }

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# Prints the version of an interpreter, such as "3.12.1"; prints nothing if the interpreter fails.
version_of() {
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true
}

is_new_enough() {
    "$1" -c "import sys; sys.exit(sys.version_info < (${NEEDED/./, }))" >/dev/null 2>&1
}

# Sets `interpreter`; exits with an error message if there is no suitable interpreter.
find_interpreter() {
    local candidate found=""
    if [ -n "${PYTHON:-}" ]; then
        found="$(version_of "$PYTHON")"
        is_new_enough "$PYTHON" ||
            die "PYTHON=$PYTHON is ${found:+Python }${found:-not a Python that starts}, but Python >= $NEEDED is needed: name another one or leave PYTHON unset."
        interpreter="$PYTHON"
        return
    fi
    for candidate in "$VENV/bin/python" python3.12 python3.13 python3.14 python3 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if is_new_enough "$candidate"; then
            interpreter="$candidate"
            return
        fi
        local version
        version="$(version_of "$candidate")"
        [ -z "$version" ] || found="$found${found:+, }$candidate is $version"
    done
    die "no Python >= $NEEDED was found (${found:-there is no python3 on PATH}): install Python $NEEDED, or name one with 'make setup PYTHON=/path/to/python$NEEDED'."
}

# Prints the constraints of all packages. torch depends on packages of the same release. For another
# version of torch, a separate file pins these packages; without this file, pip selects them.
constraints() {
    if [ -z "$TORCH" ]; then
        cat constraints.txt
        return
    fi
    sed -E '/^(torch|triton|nvidia-.*|cuda-.*)==/d' constraints.txt
    if [ -f "constraints-torch-$TORCH.txt" ]; then
        cat "constraints-torch-$TORCH.txt"
    else
        printf 'torch==%s\n' "$TORCH"
    fi
}

# Prints a checksum of the environment's inputs: package lists, this script, the path of the tree.
fingerprint() {
    { pwd -P && cat pyproject.toml tools/setup.sh "$REHEARSAL_PINNED" && constraints; } | cksum
}

# Runs a command and appends its output to the log; prints the end of the log and exits on failure.
logged() {
    local what="$1"
    shift
    if ! "$@" >>"$LOG" 2>&1; then
        tail -n 20 "$LOG" >&2
        die "$what failed: the lines above are the end of $LOG."
    fi
}

create_environment() {
    if [ -x "$VENV/bin/python" ] && is_new_enough "$VENV/bin/python"; then
        say "using the environment $VENV (Python $(version_of "$VENV/bin/python"))"
    else
        say "creating $VENV with $interpreter (Python $(version_of "$interpreter"))"
        # An environment of an older Python cannot be upgraded in place. Other folders are kept.
        local clear=()
        [ ! -f "$VENV/pyvenv.cfg" ] || clear=(--clear)
        mkdir -p "$VENV"
        local messages
        messages="$("$interpreter" -m venv ${clear[@]+"${clear[@]}"} "$VENV" 2>&1)" ||
            die "'$interpreter -m venv $VENV' failed: ${messages##*$'\n'}"
    fi
    : >"$LOG"
    "$VENV/bin/python" -m pip --version >>"$LOG" 2>&1 ||
        logged "installing pip" "$VENV/bin/python" -m ensurepip
}

# Prints the number of unpacked packages every 15 seconds, while it grows.
count_unpacked() {
    local folder before now
    folder="$(packages_folder)"
    before="$(find "$folder" -maxdepth 1 -name '*.dist-info' | wc -l)"
    # A sleep that outlives this script must not hold its output open.
    while sleep 15 >/dev/null 2>&1; do
        now="$(find "$folder" -maxdepth 1 -name '*.dist-info' | wc -l)"
        [ "$now" -eq "$before" ] || say "  unpacked $now packages"
        before="$now"
    done
}

# Filters pip's output: prints the names of large downloads, without URLs, and the package count.
show_progress() {
    local line name size unit
    local download='^ *(Downloading|Using cached) (.*) \(([0-9.]+) ([MG]B)\)'
    while IFS= read -r line; do
        if [[ $line =~ $download ]]; then
            name="${BASH_REMATCH[2]##*/}" size="${BASH_REMATCH[3]}" unit="${BASH_REMATCH[4]}"
            # A wheel's name ends with its Python, its ABI and its platform.
            [[ ! $name =~ ^(.*)-[^-]*-[^-]*-[^-]*\.whl ]] || name="${BASH_REMATCH[1]}"
            if [ "$unit" = GB ] || [ "${size%.*}" -ge 20 ]; then
                say "  $name ($size $unit)"
            fi
        elif [[ $line == "Installing collected packages:"* ]]; then
            say "  unpacking $(wc -w <<<"${line#*:}") packages"
        fi
    done
}

install_project() {
    local pip=("$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off)
    local pinned="$VENV/constraints.txt"
    constraints >"$pinned"
    # With the build backend in the environment, the editable build downloads no other copy.
    logged "installing setuptools" "${pip[@]}" --constraint "$pinned" setuptools
    local extras=megatron,pretrain
    [ "$PARTS" = pretrain ] || extras=megatron,pretrain,test,docs,plan
    say "installing the project and its pinned dependencies (minutes the first time)"
    count_unpacked &
    # shellcheck disable=SC2064
    trap "kill $! 2>/dev/null || true" EXIT
    # Python compiles the few modules that are imported; pip would compile all of torch's.
    if ! PYTHONUNBUFFERED=1 "${pip[@]}" --no-compile --constraint "$pinned" --no-build-isolation --editable ".[$extras]" \
        2>&1 | tee -a "$LOG" | show_progress; then
        tail -n 20 "$LOG" >&2
        die "pip could not install the project: the lines above are the end of $LOG."
    fi
    # An editable installation of packages in two folders is an import hook, which type checkers and
    # editors do not run; they read paths.
    printf '%s\n' "$PWD" "$PWD/adapters" >"$(packages_folder)/megatron_fsdp_v2_source.pth"
}

# Prints the folder that pip installs packages into.
packages_folder() {
    "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# Compiles nothing and installs no dependencies: those of the pure wheel are compiled packages.
install_rehearsal_packages() {
    say "installing Transformer Engine's Python for rehearsals"
    rm -rf "$REHEARSAL"
    logged "installing $REHEARSAL_PINNED" "$VENV/bin/python" -m pip install --disable-pip-version-check \
        --no-input --progress-bar off --no-deps --only-binary :all: --target "$REHEARSAL" \
        --requirement "$REHEARSAL_PINNED"
}

main() {
    case "$PARTS" in all | pretrain) ;; *) die "PARTS=$PARTS is neither all nor pretrain." ;; esac
    local wanted has=""
    wanted="$(fingerprint)"
    [ ! -x "$VENV/bin/python" ] || has="$(cat "$STAMP" 2>/dev/null || true)"
    if [ "$has" = "$wanted all" ] || [ "$has" = "$wanted $PARTS" ]; then
        say "$VENV is up to date"
        return
    fi
    find_interpreter
    create_environment
    rm -f "$STAMP"
    install_project
    [ "$PARTS" = pretrain ] || install_rehearsal_packages
    printf '%s\n' "$wanted $PARTS" >"$STAMP"
    say "done: $VENV is ready"
}

main
