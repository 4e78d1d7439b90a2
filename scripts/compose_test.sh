#!/usr/bin/env bash
# The cluster of docker-compose.yml, built and run on a real engine; timings of every step.
#
# Starts an engine of its own where there is none, and stops it again. Where none can run it prints
# SKIPPED and why, and leaves with 0. Images and build cache stay for the next run;
# `scripts/compose_engine.sh clean` removes them.
set -euo pipefail
cd "$(dirname "$0")/.."

begin_s=$SECONDS
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
reason=$(mktemp)

finish() {
  local status=$?
  trap - EXIT
  rm -f "$reason"
  scripts/compose_engine.sh stop || status=1
  echo "compose: whole run $((SECONDS - begin_s)) s, exit status $status"
  exit "$status"
}

status=0
scripts/compose_engine.sh start 2> >(tee "$reason" >&2) || status=$?
if [ "$status" -eq 3 ]; then
  echo "SKIPPED: compose on a real engine: $(tail -1 "$reason")"
  rm -f "$reason"
  exit 0
fi
trap finish EXIT
[ "$status" -eq 0 ]
export DOCKER_HOST
DOCKER_HOST=$(scripts/compose_engine.sh host)
[ -n "$DOCKER_HOST" ] || unset DOCKER_HOST
scripts/compose_engine.sh images
"$python" scripts/compose_drive.py
