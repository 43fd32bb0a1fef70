#!/usr/bin/env bash
# Promise: dist/talon-VERSION-x86_64-linux is one file that runs where glibc is 2.17 or later. `make test-dist` runs this.
#
#   tests/dist.sh FILE           checks the file; needs readelf, and for the run in an old distribution root and debootstrap
#   tests/dist.sh --twice        builds the commit in two folders of different names and compares the hashes
#
# What proves the floor: (1) every symbol that the file takes from glibc has version GLIBC_2.17 or lower, the linker
# found each of them in glibc 2.17's own list, and nothing in the file asks for a loader that is newer; (2) the file is
# run in a root of an old distribution with an empty environment. The oldest release that the mirrors still carry is
# Debian 11 (glibc 2.31), which is the default; where Debian's archive is in reach, OLD_SUITE=jessie (with
# OLD_MIRROR=URL) runs it on glibc 2.19; (3) it is run there once more with the newer functions that it uses where they
# are (it asks for them weakly) hidden from it, as glibc 2.17 lacks them. So 2.31 is proven by running, 2.17 by the symbols.
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
  # What loaders know only since glibc 2.36, and no symbol version tells.
  if readelf -dW "$1" | grep -E '\((RELR|RELRSZ|RELRENT)\)'; then
    fail "$1 has packed relocations, which glibc $FLOOR cannot read"
  fi
  if grep -aqE '/(home|root|tmp|build)/[^ ]*\.(rs|cuh?)' "$1"; then
    fail "$1 has paths of the machine that built it: strings $1 | grep '\.rs'"
  fi
  echo "dist: $size bytes, glibc $highest or later, needs" $needed
}

# Functions newer than the floor, which the file uses where they are: they have no version, and may be missing.
newer_functions() {
  readelf -W --dyn-syms "$1" | awk '$5 == "WEAK" && $7 == "UND" && $8 !~ /@/ { print $8 }'
}

# The same file with other names for these functions: what it does where glibc does not have them.
hide_newer_functions() {
  local name expressions=()
  for name in $(newer_functions "$1"); do
    # The name is in the table of symbols, and again where it is looked up by dlsym.
    expressions+=(-e "s/^$name\$/${name%?}~/")
  done
  [ ${#expressions[@]} -gt 0 ] || fail "$1 names no newer function: what is to be hidden from it?"
  # Between two zero bytes, which end sed's lines here.
  LC_ALL=C sed -z "${expressions[@]}" "$1" >"$2"
}

# Everything that a fresh box asks first, with a file of the root; $2 is what it is called.
ask_everything() {
  local code=0
  inside "$1" version | grep "^kernels: *sm_" || fail "no kernels inside"
  inside "$1" --help >/dev/null
  inside "$1" kernels --help >/dev/null
  # The root has no /proc: what cannot be read is unknown, and nothing fails.
  inside "$1" doctor | grep ' 0 failed$' || fail "doctor finds a fault, or does not end as it should"
  inside "$1" doctor --json - | grep -q '^  "checks": \[$' || fail "doctor --json has no checks"
  inside "$1" verify | grep '^verdict  *ok$' || fail "the model inside is not whole"
  inside "$1" generate "What is 17 + 25?" 2>/dev/null | grep -x '17 + 25 = 42.' || fail "the demo model answers wrongly"
  inside "$1" bench --runs 1 --max-tokens 16 2>/dev/null | grep '^text: identical' || fail "bench does not end as it should"
  # Unwinding is linked in: bad input must end with a message, not with a signal.
  inside "$1" verify --model /nowhere 2>/dev/null || code=$?
  [ "$code" = 2 ] || fail "verify of a missing folder ends with $code, not 2"
  echo "dist: runs in $SUITE $2"
}

run_in_old_root() {
  local root glibc chroot
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
  hide_newer_functions "$1" "$root/talon-hidden"
  chmod +x "$root/talon-hidden"
  chroot=$(PATH=$PATH:/usr/sbin:/sbin command -v chroot)
  inside() { env -i "$chroot" "$root" "$@"; }
  glibc=$(inside /usr/bin/ldd --version | head -n 1 | grep -oE '[0-9.]+$')
  ask_everything /talon "(glibc $glibc) with an empty environment"
  ask_everything /talon-hidden "without $(newer_functions "$1" | paste -sd ' '), which glibc $FLOOR lacks"
  if [ "$(printf '%s\n' "$FLOOR" "$glibc" | sort -V | tail -n 1)" != "$FLOOR" ]; then
    echo "dist: not run on glibc $FLOOR itself; OLD_SUITE and OLD_MIRROR choose an older root than $SUITE"
  fi
}

if [ "${1:-}" = --twice ]; then
  twice
else
  [ -f "${1:-}" ] || fail "usage: tests/dist.sh FILE | --twice; make dist builds the file"
  check_file "$1"
  run_in_old_root "$1"
fi
