#!/usr/bin/env bash
# The tests of the ucx transport, in a virtual environment of their own: what the project has, and
# the extra [ucx]. Prints SKIPPED with the reason, and ends well, where its wheels cannot be had.
#
#   scripts/test_ucx.sh [arguments for pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${BATON_UCX_VENV:-build/ucx-venv}
project=$PWD/.venv/bin/python
stamp=$folder/.extra

skipped() {
  echo "SKIPPED the ucx tests (tests/ucx): $1" >&2
  exit 0
}

[ -x "$project" ] || { echo "run make setup first" >&2; exit 1; }
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || [ "$(uname -s)-$(uname -m)" = Linux-aarch64 ] ||
  skipped "there are no wheels of UCX for $(uname -s) on $(uname -m)"

mapfile -t extra < <("$project" - <<'PYTHON'
import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"]["ucx"]))
PYTHON
)

site=$("$project" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
wanted="${extra[*]} beside $site"

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$folder"
  "$project" -m venv "$folder"
  # shellcheck disable=SC2086 # several arguments in one variable, as in the Makefile
  if ! timeout 240 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    --timeout 15 --retries 2 ${PIP_ARGS:-} "${extra[@]}" >"$folder/pip.log" 2>&1; then
    tail -n 5 "$folder/pip.log" >&2
    skipped "pip cannot install ${extra[*]}"
  fi
  # Beside the extra everything that the project has, so that nothing is installed twice.
  own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$site')" >"$own/project.pth"
  echo "$wanted" >"$stamp"
fi

"$folder/bin/python" -c 'import ucxx' 2>"$folder/import.log" ||
  skipped "ucxx does not load: $(tail -n 1 "$folder/import.log")"
status=0
"$folder/bin/python" -m pytest -q tests/ucx "$@" || status=$?
# 5: the arguments select none of them.
[ "$status" -eq 5 ] || exit "$status"
