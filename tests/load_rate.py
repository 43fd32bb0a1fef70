"""How fast talon loads a checkpoint, beside dd: python load_rate.py target/release/talon FOLDER [ROUNDS]

Writes a checkpoint of about 10 GB into FOLDER, which should be on the disk that is asked about: names,
shapes and formats of GLM-5.2's NVFP4 export, cut to one dense layer and one of experts. In each round dd
and talon read it, from the disk and from the page cache, in an order that changes from round to round.
The checkpoint is removed at the end. Needs Python's standard library and dd, and no root.

dd is run in two ways, and the faster one is what talon is held against: with as many readers as talon
has, each 512 MiB at a time in the order of the files, and alone. Both with talon's block of 16 MiB. A
third way goes around the page cache (iflag=direct) and shows what the disk has left.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).parent.parent
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 1 << 30
BLOCK = 16 << 20
PIECE_BLOCKS = 32
BAR = 0.9
# Other work may push pages out between two runs.
ATTEMPTS = 5
# As src/weights/reading.rs has it.
READERS = min(max(2 * len(os.sched_getaffinity(0)), 4), 16)
NUMBER_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


def config():
    file = REPOSITORY / "weights-manifest/configs/glm-5.2.json"
    config = json.loads(file.read_text())
    config.update(num_hidden_layers=2, num_nextn_predict_layers=0, first_k_dense_replace=1)
    config.update(mlp_layer_types=["dense", "sparse"], indexer_types=["full", "full"])
    return config


def tensors(config):
    """Name, dtype and shape of every tensor, by the manifest."""
    manifest = json.loads((REPOSITORY / "weights-manifest/glm5.json").read_text())
    formats = {entry["name"]: entry["parts"] for entry in manifest["formats"]}
    layers = {"once": [None], "every": [0, 1], "indexer": [0, 1], "dense": [0], "moe": [1], "mtp": []}
    for entry in manifest["entries"]:
        # Sums of products of sizes are Python's own expressions.
        shape = [eval(size, {}, config) for size in entry["shape"]]
        plain = entry["formats"][0] if isinstance(entry["formats"], list) else "bf16"
        parts = formats["nvfp4" if entry["group"] == "experts" else plain]
        experts = range(config["n_routed_experts"]) if "{expert}" in entry["name"] else [None]
        for layer in layers[entry["layers"]]:
            for expert in experts:
                name = entry["name"].format(layer=layer, expert=expert)
                for part in parts:
                    yield (
                        part["tensor"].format(name=name, module=name.removesuffix(".weight")),
                        part["dtype"], part_shape(part["shape"], shape))


def part_shape(kind, shape):
    if kind == "full":
        return shape
    if kind == "scalar":
        return []
    return [shape[0], shape[1] // {"half_columns": 2, "per_16_columns": 16}[kind]]


def size(tensor):
    _, dtype, shape = tensor
    count = NUMBER_BYTES[dtype]
    for dim in shape:
        count *= dim
    return count


def pools():
    """Random bytes that are sound numbers of each dtype."""
    random = os.urandom(64 << 20)
    exponents = bytes(0x3C | byte & 0x81 for byte in range(256))
    bf16 = bytearray(random)
    bf16[1::2] = random[1::2].translate(exponents)
    scales = random.translate(bytes(0x30 | byte & 0x0F for byte in range(256)))
    single = struct.pack("<f", 0.004) * 1024
    return {"BF16": bytes(bf16), "U8": random, "F8_E4M3": scales, "F32": single}


def write(folder):
    """Writes the checkpoint; returns its shards and the bytes of its tensors."""
    whole = config()
    shards, filled = [[]], 0
    for tensor in tensors(whole):
        if filled + size(tensor) > SHARD_BYTES and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size(tensor)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    numbers = pools()
    for name, shard in zip(names, shards):
        header, at = {}, 0
        for tensor in shard:
            header[tensor[0]] = {
                "dtype": tensor[1], "shape": tensor[2], "data_offsets": [at, at + size(tensor)]}
            at += size(tensor)
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            for tensor in shard:
                left, pool = size(tensor), memoryview(numbers[tensor[1]])
                while left > 0:
                    left -= file.write(pool[:left])
            file.flush()
            os.fsync(file.fileno())
    total = sum(size(tensor) for shard in shards for tensor in shard)
    weight_map = {tensor[0]: name for name, shard in zip(names, shards) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "prompt.json").write_text("[1]")
    return [folder / name for name in names], total


def drop_pages(files):
    """Takes files out of the page cache, whoever runs this."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def dd(files, readers, *more):
    """Seconds that dd takes for the files."""
    def read(piece):
        file, skip = piece
        command = ["dd", f"if={file}", "of=/dev/null", f"bs={BLOCK}", f"skip={skip}"]
        command += [f"count={PIECE_BLOCKS}", *more]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    pieces = [(file, skip) for file in files
              for skip in range(0, -(-file.stat().st_size // BLOCK), PIECE_BLOCKS)]
    begun = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, pieces))
    return time.perf_counter() - begun


def talon(binary, folder):
    """Seconds of talon's reading, by its own word, and from its start until it is loaded."""
    command = [binary, "generate", "-v", "--model", folder, "--backend", "cpu", "--draft", "none",
               "--context", "64", "--max-tokens", "1", "--tokens", folder / "prompt.json"]
    begun = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines, reading, loaded = [], None, None
    for line in child.stderr:
        lines.append(line)
        if found := re.search(r"weights read in ([0-9.]+) s", line):
            reading = float(found[1])
        if "cpu backend" in line:
            loaded = time.perf_counter() - begun
            break
    child.kill()
    child.wait()
    if reading is None or loaded is None:
        raise SystemExit("talon did not load the checkpoint: " + "".join(lines))
    return reading, loaded


class Figures:
    """Rates by what was run and how."""

    def __init__(self, total):
        self.total = total
        self.rates = {}

    def add(self, name, seconds):
        self.rates.setdefault(name, []).append(self.total / seconds / 1e9)

    def line(self, name):
        rates = self.rates[name]
        return f"{statistics.median(rates):6.2f} GB/s  ({min(rates):.2f} to {max(rates):.2f})"


def run(what, files, cold):
    """Seconds by name, of a run that found the pages where they should have been."""
    total = sum(file.stat().st_size for file in files)
    for _ in range(ATTEMPTS):
        if cold:
            drop_pages(files)
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
        seconds = what()
        # In blocks of 512 bytes, whatever the disk has.
        blocks = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - before
        share = 512 * blocks / total
        if share > 0.95 if cold else share < 0.01:
            return seconds
        print(f"again: {share:.0%} came from the disk, not {'all' if cold else 'nothing'}", flush=True)
    raise SystemExit("the page cache does not keep to it; is FOLDER on a disk, and is there memory?")


def measure(binary, folder, rounds):
    files, total = write(folder)
    print(f"{total / 1e9:.2f} GB in {len(files)} shards, {READERS} readers, {rounds} rounds; "
          "medians and ranges", flush=True)
    kinds = {
        "dd": lambda: {f"dd, {READERS} readers": dd(files, READERS)},
        "dd alone": lambda: {"dd, 1 reader": dd(files, 1)},
        "talon": lambda: dict(zip(["talon, reading", "talon, start to loaded"],
                                  talon(binary, folder))),
    }
    kept = {True: Figures(total), False: Figures(total)}
    direct = Figures(total)
    for round in range(rounds):
        drop_pages(files)
        direct.add("dd, iflag=direct", dd(files, READERS, "iflag=direct"))
        order = list(kinds)
        for _ in range(round % len(order)):
            order.append(order.pop(0))
        for cold in (True, False):
            for kind in order:
                for name, seconds in run(kinds[kind], files, cold).items():
                    kept[cold].add(name, seconds)
    print("around the page cache\n  dd, iflag=direct        " + direct.line("dd, iflag=direct"))
    met = True
    for cold, figures in kept.items():
        print("from the disk" if cold else "from the page cache")
        for name in figures.rates:
            print(f"  {name:24}{figures.line(name)}")
        median = {name: statistics.median(rates) for name, rates in figures.rates.items()}
        best = max(rate for name, rate in median.items() if name.startswith("dd"))
        for name in ("talon, reading", "talon, start to loaded"):
            print(f"  {name} / the faster dd: {median[name] / best:.2f}")
        met &= median["talon, start to loaded"] >= BAR * best
    return met


def main():
    binary, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    folder.mkdir(parents=True, exist_ok=True)
    own = pathlib.Path(tempfile.mkdtemp(prefix="talon-load-", dir=folder))
    try:
        met = measure(pathlib.Path(binary).resolve(), own, rounds)
    finally:
        shutil.rmtree(own)
    print("the bar, 90 % of dd: " + ("met" if met else "NOT met"))
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
