#!/usr/bin/env bash
# A real container engine and the images of docker-compose.yml, on a machine that may have neither.
#
#   compose_engine.sh start    use the engine that answers, else install and start one of our own
#   compose_engine.sh images   base and Redis image (pulled, else made here), then slim and engine
#   compose_engine.sh host     print the DOCKER_HOST to use; empty for the machine's own engine
#   compose_engine.sh stop     stop the engine if it is ours; its images stay for the next time
#   compose_engine.sh clean    the same, and delete everything it ever stored
#
# Exit status 3: no engine can run here; the last line of stderr says why.
#
#   BATON_COMPOSE_DIR   where our own engine keeps its data (default /var/tmp/baton-compose)
#   DOCKER_HOST         an engine of yours; then none is started
set -euo pipefail
cd "$(dirname "$0")/.."

STATE=${BATON_COMPOSE_DIR:-/var/tmp/baton-compose}
SOCKET=$STATE/docker.sock
PID_FILE=$STATE/engine.pid
LOG=$STATE/engine.log
START_TIMEOUT_S=60
STOP_TIMEOUT_S=60
PULL_TIMEOUT_S=180
NO_ENGINE=3
SLIM_IMAGE=${BATON_SLIM_IMAGE:-baton-slim:dev}
ENGINE_IMAGE=${BATON_ENGINE_IMAGE:-baton-engine:dev}
REDIS_IMAGE=${BATON_REDIS_IMAGE:-redis:7-bookworm}
# The builder that every Docker has; the newer one may not be installed.
export DOCKER_BUILDKIT=0

say() { echo "compose: $*" >&2; }
give_up() { say "$*"; exit "$NO_ENGINE"; }
seconds_since() { echo $((SECONDS - $1)); }

has_compose() { command -v docker-compose >/dev/null || docker compose version >/dev/null 2>&1; }
answers() { timeout 10 docker version >/dev/null 2>&1; }
is_ours() { [ -S "$SOCKET" ] && [ -s "$PID_FILE" ] && kill -0 "$(cat "$PID_FILE")" 2>/dev/null; }

# --- start ---------------------------------------------------------------------------------------

install_packages() {
  local missing=()
  command -v dockerd >/dev/null || missing+=(docker.io)
  has_compose || missing+=(docker-compose)
  [ "${#missing[@]}" -gt 0 ] || return 0
  command -v apt-get >/dev/null || give_up "missing ${missing[*]}, and this system has no apt-get"
  say "installing ${missing[*]}"
  mkdir -p "$STATE"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
    >"$STATE/apt.log" 2>&1 && return 0
  tail -5 "$STATE/apt.log" >&2
  give_up "apt-get cannot install ${missing[*]}"
}

launch() {
  rm -f "$PID_FILE"
  # A session of its own, so that Ctrl-C reaches the test and not the engine under it. No default
  # bridge: builds use the host's network and compose makes a network of its own.
  setsid dockerd --data-root "$STATE/data" --exec-root "$STATE/exec" --pidfile "$PID_FILE" \
    --host "unix://$SOCKET" --bridge none "$@" </dev/null >"$LOG" 2>&1 &
  local pid=$! begin_s=$SECONDS
  while ! answers; do
    kill -0 "$pid" 2>/dev/null || return 1
    if [ "$(seconds_since "$begin_s")" -ge "$START_TIMEOUT_S" ]; then
      kill -KILL "$pid"
      return 1
    fi
    sleep 0.2
  done
  say "engine started in $(seconds_since "$begin_s") s (process $pid, data in $STATE)"
}

start() {
  if [ -n "${DOCKER_HOST:-}" ]; then
    answers || give_up "no engine answers at DOCKER_HOST=$DOCKER_HOST"
    return 0
  fi
  if is_ours; then return 0; fi
  if answers; then
    has_compose || give_up "there is an engine but neither docker-compose nor the compose plugin"
    say "using the engine that already runs"
    return 0
  fi
  [ "$(id -u)" -eq 0 ] || give_up "no engine answers, and only root can start one"
  install_packages
  mkdir -p "$STATE"
  export DOCKER_HOST=unix://$SOCKET
  # Where the kernel has no packet filter, containers still reach each other, and published ports
  # go through the engine's own proxy.
  launch || { grep -qi iptables "$LOG" && launch --iptables=false --ip6tables=false; } || {
    tail -5 "$LOG" >&2
    give_up "the engine does not start here (its last words are above, the rest in $LOG)"
  }
  local driver
  driver=$(docker info --format '{{.Driver}}')
  if [ "$driver" = vfs ]; then
    stop
    give_up "the engine can only copy whole layers here (storage driver vfs)"
  fi
}

stop() {
  is_ours || return 0
  local pid begin_s=$SECONDS
  pid=$(cat "$PID_FILE")
  kill -TERM "$pid"
  while kill -0 "$pid" 2>/dev/null; do
    if [ "$(seconds_since "$begin_s")" -ge "$STOP_TIMEOUT_S" ]; then
      say "the engine ignores SIGTERM; killing process $pid"
      kill -KILL "$pid"
      break
    fi
    sleep 0.2
  done
  rm -f "$PID_FILE" "$SOCKET"
  umount "$STATE/exec/netns/default" 2>/dev/null || true
  say "engine stopped in $(seconds_since "$begin_s") s"
}

clean() {
  stop
  rm -rf "$STATE"
}

# --- images --------------------------------------------------------------------------------------

have_image() { docker image inspect "$1" >/dev/null 2>&1; }

# Run a step, its output in a file; the end of it when the step fails.
logged() {
  local log=$STATE/$1.log begin_s=$SECONDS
  shift
  if ! "$@" >"$log" 2>&1; then
    tail -25 "$log" >&2
    say "failed after $(seconds_since "$begin_s") s: $*"
    return 1
  fi
}

pull() {
  have_image "$1" || timeout "$PULL_TIMEOUT_S" docker pull --quiet "$1" >/dev/null 2>&1
}

# The base under the name that Dockerfile gives it. Where it cannot be pulled it is made of Debian's
# own packages, with this machine's certificates, so that a build here reaches what we reach.
base_image() {
  local base suite root=$STATE/rootfs begin_s=$SECONDS
  base=$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)
  if pull "$base"; then return 0; fi
  suite=${base#*:}
  suite=${suite%-slim}
  command -v debootstrap >/dev/null \
    || logged apt apt-get install -y -qq --no-install-recommends debootstrap
  rm -rf "$root"
  logged debootstrap debootstrap --variant=minbase --include=ca-certificates "$suite" "$root"
  if [ -s /etc/ssl/certs/ca-certificates.crt ]; then
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
  fi
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root/etc/resolv.conf"
  tar -C "$root" -c . | docker import - "$base" >/dev/null
  rm -rf "$root"
  say "made $base with debootstrap in $(seconds_since "$begin_s") s"
}

redis_image() {
  if pull "$REDIS_IMAGE"; then return 0; fi
  local base begin_s=$SECONDS
  base=$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)
  logged build-redis docker build --network host --tag "$REDIS_IMAGE" - <<END
FROM $base
RUN apt-get update \\
    && apt-get install -y --no-install-recommends redis-server \\
    && rm -rf /var/lib/apt/lists/*
END
  say "made $REDIS_IMAGE from Debian's package in $(seconds_since "$begin_s") s"
}

pip_setting() {
  local python=python3
  [ ! -x .venv/bin/python ] || python=.venv/bin/python
  "$python" -m pip config get "global.$1" 2>/dev/null || true
}

# Addresses, of this machine's pip settings, that a build can reach too: files it cannot.
reachable() {
  local word
  for word in $1; do
    case "$word" in http://* | https://*) printf '%s ' "$word" ;; esac
  done
}

torch_folder() {
  local folder
  for folder in ${PIP_FIND_LINKS:-} $(pip_setting find-links); do
    folder=${folder#file://}
    if compgen -G "$folder/torch-*.whl" >/dev/null; then echo "$folder"; return 0; fi
  done
}

SERVER=
# Torch lies in a folder here: serve it on loopback, which a build on the host's network reaches.
# The port is always the same one, or every build would be a new one to the engine's cache.
serve_folder() {
  local port=18765
  python3 -u -m http.server --bind 127.0.0.1 --directory "$1" "$port" >"$STATE/wheels.log" 2>&1 &
  SERVER=$!
  local begin_s=$SECONDS
  until grep -q '^Serving HTTP' "$STATE/wheels.log"; do
    if ! kill -0 "$SERVER" 2>/dev/null || [ "$(seconds_since "$begin_s")" -ge 20 ]; then
      tail -1 "$STATE/wheels.log" >&2
      say "the wheels in $1 cannot be served on port $port"
      return 1
    fi
    sleep 0.2
  done
  find_links="http://127.0.0.1:$port/"
}
stop_server() { [ -z "$SERVER" ] || kill "$SERVER" 2>/dev/null || true; }

build() {
  local target=$1 tag=$2 begin_s=$SECONDS
  shift 2
  logged "build-$target" docker build --network host --target "$target" --tag "$tag" "$@" .
  local bytes
  bytes=$(docker image inspect --format '{{.Size}}' "$tag")
  say "built $tag in $(seconds_since "$begin_s") s ($((bytes / 1000000)) MB)"
}

images() {
  local find_links='' folder arguments=()
  mkdir -p "$STATE"
  base_image
  redis_image
  folder=$(torch_folder)
  trap stop_server EXIT
  if [ -n "$folder" ]; then
    serve_folder "$folder"
  else
    find_links=$(reachable "${PIP_FIND_LINKS:-} $(pip_setting find-links)")
    say "no folder of wheels has torch; pip decides which build of it comes"
  fi
  local index extra
  index=$(reachable "${PIP_INDEX_URL:-$(pip_setting index-url)}")
  extra=$(reachable "${PIP_EXTRA_INDEX_URL:-$(pip_setting extra-index-url)}")
  [ -z "$index" ] || arguments+=(--build-arg "PIP_INDEX_URL=${index% }")
  [ -z "$extra" ] || arguments+=(--build-arg "PIP_EXTRA_INDEX_URL=${extra% }")
  [ -z "$find_links" ] || arguments+=(--build-arg "PIP_FIND_LINKS=${find_links% }")
  build slim "$SLIM_IMAGE" "${arguments[@]}"
  build engine "$ENGINE_IMAGE" "${arguments[@]}"
  # What the last build left without a name; the cache of this one stays.
  docker image prune --force --filter until=24h >/dev/null
}

command=${1:-}
if [ "$command" != start ] && [ -z "${DOCKER_HOST:-}" ] && is_ours; then
  export DOCKER_HOST=unix://$SOCKET
fi
case "$command" in
  start | stop | clean | images) "$command" ;;
  host) echo "${DOCKER_HOST:-}" ;;
  *) say "usage: $0 start | images | host | stop | clean"; exit 2 ;;
esac
