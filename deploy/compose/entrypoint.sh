#!/bin/sh
# Tells a service what only its container knows, then becomes that service.
#
#   entrypoint.sh gateway|kvstore|merger|prefill|decode [flags]   or any other command
#
# Everything is set as the service's own environment variable and only where none is set, so that
# compose, a flag or `docker run -e` has the last word. Beside those variables it reads:
#   CLUSTER_KEY_HEX          hex digits, for gateway and kvstore; empty: the development key
#   CLUSTER_WORKER_CAPABILITY  for workers and merger; empty: one of the development key
set -eu

case "${1:-}" in
  gateway | kvstore | merger | prefill | decode) role=$1 ;;
  "") echo "entrypoint: name a service: gateway, kvstore, merger, prefill or decode" >&2; exit 2 ;;
  *) exec "$@" ;;
esac
shift
prefix=BATON_$(echo "$role" | tr '[:lower:]' '[:upper:]')

# default NAME VALUE: the service's setting, unless it is set already
default() {
  eval "[ -n \"\${${prefix}_$1:-}\" ] || export ${prefix}_$1=\"\$2\""
}

# shellcheck disable=SC3028 # Docker sets HOSTNAME
name=${HOSTNAME:-$(hostname)}

# The network between containers is theirs alone; plain text beyond loopback is still said aloud.
default HOST 0.0.0.0
default INSECURE_BIND true
default METRICS_PORT 9464

case "$role" in
  gateway) default GATEWAY_ID "gateway-$name" ;;
  *)
    port=
    eval "port=\${${prefix}_PORT:-7000}"
    default PORT "$port"
    # A container's own name is resolved by the others on its network, however many there are.
    default ADVERTISE "$name:$port"
    ;;
esac
case "$role" in
  prefill | decode | merger)
    default WORKER_ID "$role-$name"
    if [ -n "${CLUSTER_WORKER_CAPABILITY:-}" ]; then
      default WORKER_CAPABILITY "$CLUSTER_WORKER_CAPABILITY"
    fi
    ;;
  gateway | kvstore)
    if [ -n "${CLUSTER_KEY_HEX:-}" ]; then
      (umask 077 && printf '%s\n' "$CLUSTER_KEY_HEX" >/tmp/cluster.key)
      default CLUSTER_KEY_FILE /tmp/cluster.key
    fi
    ;;
esac
unset CLUSTER_KEY_HEX CLUSTER_WORKER_CAPABILITY

exec "baton-$role" "$@"
