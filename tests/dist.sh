#!/usr/bin/env bash
# Promise: dist/talon-VERSION-x86_64-linux is one file that runs where glibc is 2.17 or later. `make test-dist` runs this.
#
#   tests/dist.sh FILE           checks the file; needs readelf, and for the run in an old distribution root and debootstrap
#   tests/dist.sh --twice        builds the commit in two folders of different names and compares the hashes
#
# What proves the floor: (1) every symbol that the file takes from glibc has version GLIBC_2.17 or lower, and the linker
# found each of them in glibc 2.17's own list, so the dynamic loader of 2.17 has all it asks for; (2) the file is run in
# a root of an old distribution with an empty environment. The oldest release that the mirrors still carry is Debian 11
# (glibc 2.31), which is the default; where Debian's archive is in reach, OLD_SUITE=jessie (with OLD_MIRROR=URL) runs it
# on glibc 2.19. So 2.31 is proven by running, 2.17 by the symbols.
set -euo pipefail
cd "$(dirname "$0")/.."
FLOOR=2.17
LIMIT=$((64 * 1000 * 1000))
SUITE=${OLD_SUITE:-bullseye}

fail() { echo "dist: $*" >&2; exit 1; }

twice() {
  local one two hashes
  # Not local: the trap runs after this function.
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  one=$work/a two=$work/another-folder/with-a-longer-name
  for folder in "$one" "$two"; do
    git clone --quiet --no-hardlinks . "$folder"
    # The toolchain is no part of what is compared, and 1.5 GB to install.
    ln -s "$(realpath .toolchain)" "$folder/.toolchain"
    make --no-print-directory -C "$folder" dist
    (cd "$folder/dist" && sha256sum talon-*-linux) >> "$work/hashes"
    rm -rf "$folder/target"
  done
  cat "$work/hashes"
  hashes=$(sort -u "$work/hashes" | wc -l)
  [ "$hashes" = 1 ] || fail "two builds of one commit differ"
  echo "dist: two builds in two folders are the same bytes"
}

check_file() {
  local size needed highest
  size=$(stat -c %s "$1")
  [ "$size" -lt "$LIMIT" ] || fail "$1 has $size bytes, $LIMIT are allowed"
  needed=$(readelf -dW "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort)
  [ -n "$needed" ] || fail "$1 needs no library, not even libc; it could not open the CUDA driver"
  for library in $needed; do
    case $library in
      libc.so.6 | libm.so.6 | libdl.so.2 | libpthread.so.0 | librt.so.1 | ld-linux-x86-64.so.2) ;;
      *) fail "$1 needs $library, which is no part of glibc" ;;
    esac
  done
  highest=$(readelf -VW "$1" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
  highest=${highest#GLIBC_}
  [ -n "$highest" ] || fail "$1 names no glibc version"
  [ "$(printf '%s\n' "$FLOOR" "$highest" | sort -V | tail -n 1)" = "$FLOOR" ] ||
    fail "$1 needs glibc $highest, $FLOOR is the floor"
  if grep -aqE '/(home|root|tmp|build)/[^ ]*\.(rs|cuh?)' "$1"; then
    fail "$1 has paths of the machine that built it: strings $1 | grep '\.rs'"
  fi
  echo "dist: $size bytes, glibc $highest or later, needs" $needed
}

# Everything that a fresh box asks first, in a root that has nothing but the old distribution's minimum.
run_in_old_root() {
  local root glibc code=0 chroot
  root=target/dist-root/$SUITE
  if [ ! -e "$root/ready" ]; then
    [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null ||
      fail "the old distribution needs root and debootstrap: apt-get install debootstrap"
    rm -rf "$root" && mkdir -p "$root"
    debootstrap --variant=minbase "$SUITE" "$root" ${OLD_MIRROR:+"$OLD_MIRROR"} >"$root.log" 2>&1 ||
      fail "debootstrap of $SUITE failed, see $root.log"
    touch "$root/ready"
  fi
  cp "$1" "$root/talon"
  chroot=$(PATH=$PATH:/usr/sbin:/sbin command -v chroot)
  inside() { env -i "$chroot" "$root" "$@"; }
  glibc=$(inside /usr/bin/ldd --version | head -n 1 | grep -oE '[0-9.]+$')
  inside /talon version | grep "^kernels: *sm_" || fail "no kernels inside"
  inside /talon --help >/dev/null
  inside /talon kernels --help >/dev/null
  inside /talon generate "What is 17 + 25?" 2>/dev/null | grep -x '17 + 25 = 42.' || fail "the demo model answers wrongly"
  inside /talon bench --runs 1 --max-tokens 16 | grep '^text: identical' || fail "bench does not end as it should"
  # Unwinding is linked in: bad input must end with a message, not with a signal.
  inside /talon verify --model /nowhere 2>/dev/null || code=$?
  [ "$code" = 2 ] || fail "verify of a missing folder ends with $code, not 2"
  echo "dist: runs in $SUITE (glibc $glibc) with an empty environment"
}

if [ "${1:-}" = --twice ]; then
  twice
else
  [ -f "${1:-}" ] || fail "usage: tests/dist.sh FILE | --twice; make dist builds the file"
  check_file "$1"
  run_in_old_root "$1"
fi
