#!/usr/bin/env python3
"""How far a BF16 run of transformers is from an f32 run of the same GLM-5 model, position by position.

The demo checkpoint (experts in ModelOpt's NVFP4 layout, the rest BF16) is dequantised to f32 and given to
transformers' GlmMoeDsaForCausalLM twice: loaded in float32 and in bfloat16. The bfloat16 load is
from_pretrained's own, so what transformers keeps in f32 stays so (router weight and correction bias, rope
frequencies). In it the dequantised experts are rounded to BF16 too. CPU only, one thread, eager attention,
one uncached forward per sequence.

Sequences: prompt + greedy output of every chat and tool golden of greedy.json, and prompt + output of
indexer.json (longer than index_topk, so the sparse selection is active). greedy.json's outputs run on past
the end of the turn to 64 tokens; figures are given up to the end of the turn and for the whole output.

Per position: sqrt(mean((bf16 - f32)^2) / mean(f32^2)) over the vocabulary, and whether the arg-max agrees.
The f32 run is checked first against logits.safetensors and against the golden tokens; the script fails if
it does not agree.

usage: bf16_yardstick.py CHECKPOINT_DIR GOLDEN_DIR [--experts eager|grouped_mm] [--plain-cast]
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaForCausalLM

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])


def dequantise(packed, scale, scale_2):
    """U8 [out, in/2] (even column in the low nibble), E4M3 [out, in/16], F32 scalar -> f32 [out, in]"""
    w = E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]
    return (w.unflatten(-1, (-1, 16)) * scale.float()[..., None]).flatten(-2) * scale_2


def read_f32(checkpoint, layers):
    """All tensors of the main model in f32; the MTP layer, which transformers does not have, is left out."""
    raw = {}
    for shard in sorted(checkpoint.glob("model-*.safetensors")):
        raw.update(load_file(shard))
    out = {}
    for name, t in raw.items():
        if name.startswith(f"model.layers.{layers}."):
            continue
        if t.dtype == torch.uint8:
            out[name] = dequantise(t, raw[name + "_scale"], raw[name + "_scale_2"]).contiguous()
        elif not name.endswith(("weight_scale", "weight_scale_2", "input_scale")):
            out[name] = t.float()
    return out


def load(folder, dtype, experts):
    model, info = GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation=experts, output_loading_info=True
    )
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]), info
    return model.eval()


def load_both(checkpoint, experts, plain_cast):
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    config["dtype"] = "float32"
    with tempfile.TemporaryDirectory() as folder:
        weights = read_f32(checkpoint, config["num_hidden_layers"])
        save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(config))
        f32 = load(folder, torch.float32, experts)
        bf16 = load(folder, torch.float32 if plain_cast else torch.bfloat16, experts)
        return f32, bf16.to(torch.bfloat16) if plain_cast else bf16


def logits(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def check_f32(model, golden):
    stored = load_file(golden / "logits.safetensors")
    for name in sorted({k.rsplit(".", 1)[0] for k in stored}):
        want = stored[name + ".logits"]
        diff = logits(model, stored[name + ".ids"].tolist()) - want
        rel = (diff.pow(2).mean(-1) / want.pow(2).mean(-1)).sqrt().max()
        print(f"f32 against golden {name}: {len(want)} positions, max abs {diff.abs().max():.1e}, max rel. RMS {rel:.1e}")
        assert rel < 1e-5, "the f32 run must agree with the golden logits"


def compare(f32, bf16, prompt, output, turn):
    """-> (relative RMS errors, arg-max equal, inside the turn), one row per position"""
    ids = prompt + output
    b = logits(f32, ids)
    assert b.argmax(-1)[len(prompt) - 1 : -1].tolist() == output, "the f32 run must give the golden tokens"
    a = logits(bf16, ids)
    error = ((a - b).pow(2).mean(-1) / b.pow(2).mean(-1)).sqrt()
    return error, a.argmax(-1) == b.argmax(-1), torch.arange(len(ids)) < len(prompt) + turn


def report(title, error, same):
    print(
        f"{title}: {len(error)} positions, median {error.median():.3%}, p99 {error.quantile(0.99):.3%}, "
        f"largest {error.max():.3%}, above 1 %: {(error > 0.01).sum()}, "
        f"arg-max equal {same.sum()}/{len(same)} = {same.float().mean():.2%}"
    )


@torch.no_grad()
def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("checkpoint", type=Path, help="folder with config.json and model-*.safetensors")
    args.add_argument("golden", type=Path, help="folder with greedy.json, indexer.json and logits.safetensors")
    args.add_argument("--experts", choices=["eager", "grouped_mm"], help="experts implementation (transformers' default)")
    args.add_argument("--plain-cast", action="store_true", help="model.to(bfloat16) of everything, nothing kept in f32")
    args = args.parse_args()
    torch.set_num_threads(1)

    f32, bf16 = load_both(args.checkpoint, args.experts, args.plain_cast)
    tensors = [*bf16.named_parameters(), *bf16.named_buffers()]
    kept = sorted({".".join(n.split(".")[-2:]) for n, t in tensors if t.dtype == torch.float32})
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, experts {f32.config._experts_implementation}")
    print(f"f32 in the bf16 model: {', '.join(kept) or 'nothing'}")
    check_f32(f32, args.golden)

    rows, where = [], []
    for p in json.loads((args.golden / "greedy.json").read_text())["prompts"]:
        if p["kind"] in ("chat", "tool"):
            stop = p["stop_index"]
            turn = len(p["greedy_ids"]) if stop is None else stop + 1
            row = compare(f32, bf16, p["prompt_ids"], p["greedy_ids"], turn)
            rows.append(row)
            where += [(p["id"], i, len(p["prompt_ids"])) for i in range(len(row[0]))]
    error, same, turn = (torch.cat(c) for c in zip(*rows))
    report(f"{len(rows)} chat and tool goldens, up to the end of the turn", error[turn], same[turn])
    report(f"{len(rows)} chat and tool goldens, all 64 output tokens", error, same)
    for i in error.argsort(descending=True)[:8].tolist():
        name, position, prompt = where[i]
        print(f"  {error[i]:.3%} {name} position {position} (prompt {prompt}), {'in' if turn[i] else 'after'} the turn")

    long = json.loads((args.golden / "indexer.json").read_text())
    error, same, _ = compare(f32, bf16, long["prompt_ids"], long["greedy_ids"], len(long["greedy_ids"]))
    topk = f32.config.index_topk
    report("indexer golden, all positions", error, same)
    report(f"indexer golden, positions below {topk} (dense)", error[:topk], same[:topk])
    report(f"indexer golden, positions from {topk} (sparse)", error[topk:], same[topk:])


if __name__ == "__main__":
    main()
