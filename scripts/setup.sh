#!/usr/bin/env bash
# Make .venv ready. A second call with unchanged dependencies does nothing and takes a moment.
#
#   PYTHON       the interpreter to build the environment from (default: the first python3 >= 3.11)
#   TORCH_SPEC   what to install for torch (default torch==2.13.0)
#   PIP_ARGS     extra arguments for every pip call, such as --index-url of a CPU build of torch
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}
PIP_ARGS=${PIP_ARGS:-}
STAMP=.venv/.baton-installed

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

fail() {
  echo "setup: $1" >&2
  exit 1
}

python=$(find_python) || fail "Baton needs Python 3.11 or newer; found \
$(${PYTHON:-python3} --version 2>&1 || true).
Install it, or name one: make setup PYTHON=/path/to/python3.11"

# Only what pip would read counts: a change of a tool section installs nothing anew.
wanted=$("$python" - "$TORCH_SPEC" "$PWD" <<'EOF'
import hashlib, sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
parts = [project["build-system"], project["project"], project["tool"]["setuptools"], sys.argv[1:]]
print(hashlib.sha256(repr(parts).encode()).hexdigest())
EOF
)
# The native libraries are built by the installation, and again when one of their sources is newer.
build_native() {
  local step=baton/engine/libbaton_step.so log=services/kvstore/log/libbaton_log.so
  local copy=baton/arena/libbaton_copy.so
  if [ ! -f "$step" ] || [ ! -f "$log" ] || [ ! -f "$copy" ] ||
    [ -n "$(find native \( -path native/log -o -path native/copy \) -prune -o \
      -newer "$step" -type f -print -quit)" ] ||
    [ -n "$(find native/log -newer "$log" -type f -print -quit)" ] ||
    [ -n "$(find native/copy -newer "$copy" -type f -print -quit)" ]; then
    .venv/bin/python -m baton.engine.step_kernel_build
  fi
}

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then
  # Where the first attempt found no compiler, the next is the user's to ask for.
  if [ -f baton/engine/libbaton_step.so ]; then build_native; fi
  exit 0
fi

if [ ! -x .venv/bin/python ] || ! is_new_enough .venv/bin/python; then
  echo "setup: creating .venv with $("$python" --version)"
  "$python" -m venv --clear .venv || fail "python cannot create a virtual environment; on Debian \
and Ubuntu: apt-get install python3-venv"
fi

pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input install)
echo "setup: installing $TORCH_SPEC (the CUDA build is gigabytes; README.md names a CPU build)"
# shellcheck disable=SC2086 # PIP_ARGS holds several arguments
"${pip[@]}" $PIP_ARGS "$TORCH_SPEC"
echo "setup: installing Baton and its tools"
# shellcheck disable=SC2086
"${pip[@]}" --quiet $PIP_ARGS -e '.[dev]'
build_native
echo "$wanted" >"$STAMP"
echo "setup: done"
