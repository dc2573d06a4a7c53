#!/bin/sh
# Makes .venv and installs the project into it: `./install.sh` or `make install`. Running it again costs nothing until
# pyproject.toml or constraints.txt change. EXTRAS="test gpu deepspeed" chooses the extras (default: test).
# A failed or interrupted installation leaves no half-made .venv behind.
set -eu
cd "$(dirname "$0")"

EXTRAS=$(echo "${EXTRAS:-test}" | tr ' ' ',')
STAMP=.venv/.installed    # what was installed, and where
WORKING=.venv/.installing # there while an installation runs: a killed one cannot clean up after itself
wanted="$(cat pyproject.toml constraints.txt | cksum) $EXTRAS $PWD"

if [ -f "$STAMP" ] && [ ! -f "$WORKING" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then
    exit 0
fi

suits() { "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

# Sets $python to the first interpreter of a fitting version, $found to what else there is.
find_python() {
    python='' found=''
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON" # the user's choice, and no other
    else
        managed=$(uv python find --no-python-downloads '>=3.12,<3.14' 2>/dev/null || true)
        set -- python3.12 python3.13 python3 python "${HOME:-}"/.pyenv/versions/3.1[23]*/bin/python "$managed" \
            python3.11 python3.10 python3.14
    fi
    for candidate in "$@"; do
        path=$(command -v "$candidate" 2>/dev/null) || continue
        # a pyenv shim exists for versions that are not selected, too, and fails when it is run
        version=$("$path" -c 'import platform; print(platform.python_version())' 2>/dev/null) || continue
        if suits "$path"; then
            python=$path
            return 0
        fi
        found="$found
    $path is Python $version"
    done
    return 1
}

if ! find_python; then
    {
        echo "install: Python 3.12 or 3.13 is needed (megatron-core needs 3.12, Hydra does not run on 3.14)."
        if [ -n "$found" ]; then echo "Found only:$found"; else echo "No Python was found at all."; fi
        echo "Install one of them and try again, for example with one of:"
        echo "    pyenv install 3.12"
        echo "    uv python install 3.12"
        echo "    apt-get install python3.12 python3.12-venv   (Ubuntu 24.04 and later: its own packages)"
        echo "    conda create -n k3 python=3.12 && conda activate k3"
        echo "or name an interpreter: PYTHON=/path/to/python3.12 make install"
    } >&2
    exit 1
fi

made=no
finished=no
clean_up() {
    status=$?
    trap - EXIT INT TERM HUP
    if [ "$finished" = no ]; then
        if [ "$made" = yes ]; then
            rm -rf .venv
            echo "install: not finished; the half-made .venv is removed" >&2
        else
            rm -f "$STAMP" "$WORKING"
            echo "install: not finished; .venv is as it was, the next call tries again" >&2
        fi
        [ "$status" -ne 0 ] || status=1
    fi
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# An environment that was killed half-way, was moved, or has another Python is made anew.
if [ -e .venv ]; then
    moved=no
    [ ! -f "$STAMP" ] || case "$(cat "$STAMP")" in *" $PWD") ;; *) moved=yes ;; esac
    if [ -f "$WORKING" ] || [ "$moved" = yes ] || ! suits .venv/bin/python; then
        echo "install: the .venv that is here cannot be used; making it anew" >&2
        made=yes
        rm -rf .venv
    fi
else
    made=yes
fi
if [ "$made" = yes ]; then
    echo "install: making .venv with $("$python" --version) ($python)"
    if ! "$python" -m venv .venv; then
        echo "install: $python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    fi
fi
touch "$WORKING"

# uv inside the environment: its cache makes the next clone on this machine a matter of seconds
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
add() { .venv/bin/uv pip install --python .venv/bin/python --constraint constraints.txt "$@"; }
case ",$EXTRAS," in *,deepspeed,*)
    # comes as sources, whose setup imports the torch that it is going to run with
    add setuptools --editable .
    ;;
esac
add --no-build-isolation-package deepspeed --editable ".[$EXTRAS]"

printf '%s\n' "$wanted" >"$STAMP"
rm -f "$WORKING"
finished=yes
echo "install: done; .venv/bin/k3 --help says what there is"
