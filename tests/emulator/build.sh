#!/bin/bash
# Builds OUT/libcuda.so.1 from kernels/*.cu and the emulator: tests/emulator/build.sh OUT
# It needs g++ 12 or later and CUDA's headers, which come with nvcc (make toolchain).
set -euo pipefail
out=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/tests/emulator
cuda=${CUDA_HOME:-$root/.toolchain/cuda/nvidia/cu13}/include
mkdir -p "$out"
options=(-std=c++17 -O2 -g1 -fPIC -mtls-dialect=gnu2 -mavx2 -mfma -mf16c -ffp-contract=off -fno-strict-aliasing
    -fvisibility=hidden -Wno-unknown-pragmas -Wno-attributes
    -I "$here/include" -I "$here" -isystem "$cuda")

# A kernel's source, then a line for each kernel that it defines.
compile() {
    local stem=$1
    local unit="$out/$stem.cpp"
    # Files may have functions of the same name.
    printf '#include "kernel.h"\nnamespace {\n#include "%s/kernels/%s.cu"\n}\n' "$root" "$stem" > "$unit"
    # The words stay when their own macros are left out.
    g++ "${options[@]}" -E -P -D__emulator_names "$unit" | tr '\n' ' ' |
        grep -oP 'EMULATED_KERNEL\s+void\s+(EMULATED_CLUSTER\(\w+\)\s*)?\w+(?=\()' |
        sed -E 's/EMULATED_KERNEL\s+void\s+(EMULATED_CLUSTER\((\w+)\)\s*)?(\w+)/\2 \3/' |
        while read -r one two; do
            if [ -n "$two" ]; then cluster=$one name=$two; else cluster=1 name=$one; fi
            echo "static emulator::Registration of_$name(\"$name\", $cluster, $name);"
        done >> "$unit"
    g++ "${options[@]}" -c "$unit" -o "$out/$stem.o"
}
export -f compile

stems=()
for source in "$root"/kernels/*.cu; do stems+=("$(basename "$source" .cu)"); done
for stem in "${stems[@]}"; do
    compile "$stem" &
    while [ "$(jobs -r | wc -l)" -ge "$(nproc)" ]; do wait -n; done
done
wait
g++ "${options[@]}" -c "$here/block.cpp" -o "$out/block.o"
g++ "${options[@]}" -fvisibility=default -c "$here/driver.cpp" -o "$out/driver.o"
g++ -shared -o "$out/libcuda.so.1" "$out"/*.o -lpthread
