#!/usr/bin/env bash
# scripts/setup.sh dependencies|extension|libraries VENV
#
# dependencies  make the virtual environment VENV and install what hetspmd, its examples and its tests need
# extension     build the Rust extension and install hetspmd into VENV, editable
# libraries     install the training libraries that tests/scripts runs under, into VENV/libraries
#
# The make rules say when each has to run again. PYTHON=... chooses the interpreter.
set -euo pipefail

part=$1
venv=$2

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "Python 3.11 or newer is needed and was not found." \
         "Install it (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python; or" \
         "https://www.python.org/downloads), or name one: make setup PYTHON=/path/to/python3"
}

check_toolchain() {
    command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
        fail "A C compiler is needed to link the extension and was not found." \
             "Install one (Debian, Ubuntu: apt install build-essential; Fedora: dnf install gcc; macOS: xcode-select --install)."
    command -v cargo >/dev/null ||
        fail "The Rust toolchain (cargo) is needed to build the extension and was not found." \
             "Install it from https://rustup.rs and open a new shell, so that cargo is on the PATH."
    local wanted have
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    have=$(cargo --version | cut -d' ' -f2)
    [ "$(printf '%s\n' "$wanted" "$have" | sort -V | head -n1)" = "$wanted" ] ||
        fail "Rust $wanted or newer is needed, found $have. Update it: rustup update"
}

# uv installs in seconds what pip installs in minutes; it is taken from the PATH or put into the environment.
has_uv() {
    command -v uv >/dev/null
}
run_uv() {
    if [ -x "$venv/bin/uv" ]; then "$venv/bin/uv" "$@"; else uv "$@"; fi
}

case $part in
dependencies)
    python=$(find_python)
    check_toolchain
    if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "setup: making $venv with $python"
        rm -rf "$venv"
        if has_uv; then
            uv venv --quiet --python "$python" "$venv"
        else
            "$python" -m venv "$venv" || {
                rm -rf "$venv"
                fail "$python cannot make a virtual environment (see above)." \
                     "On Debian and Ubuntu: apt install python3-venv"
            }
        fi
    fi
    if ! has_uv && ! [ -x "$venv/bin/uv" ]; then
        "$venv/bin/python" -m pip install --quiet --constraint constraints.txt uv
    fi
    echo "setup: installing the dependencies (the first time this fetches PyTorch, some gigabytes on Linux)"
    # Where Python may not write bytecode (as in many containers), every process would compile PyTorch anew.
    run_uv pip install --quiet --python "$venv/bin/python" --constraint constraints.txt \
        --requirement pyproject.toml --extra dev --extra examples \
        ${PYTHONDONTWRITEBYTECODE:+--compile-bytecode}
    ;;
extension)
    check_toolchain
    echo "setup: building the Rust extension"
    VIRTUAL_ENV=$PWD/$venv PATH=$PWD/$venv/bin:$PATH run_uv pip install --quiet --python "$venv/bin/python" \
        --no-deps --no-build-isolation --reinstall-package hetspmd --editable .
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then "$venv/bin/python" -m compileall -q python; fi
    ;;
libraries)
    # Apart from the rest: with them every process that imports transformers takes two seconds longer.
    echo "setup: installing the libraries of tests/scripts"
    run_uv pip install --quiet --python "$venv/bin/python" --constraint constraints.txt --no-deps \
        --target "$venv/libraries" accelerate peft lightning lightning-utilities torchmetrics psutil
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
        "$venv/bin/python" -m compileall -q "$venv/libraries" || true # some files are of other versions of Python
    fi
    ;;
*)
    fail "unknown part $part"
    ;;
esac
