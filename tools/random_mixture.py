"""Writes a Mixtral of random weights in bfloat16 as a Hugging Face folder, to measure packed experts without a download. It needs Python alone.

    python tools/random_mixture.py FOLDER

4 blocks of 8 experts, of which a token goes to 2; 195 million parameters, 372 MiB. Numbers are those of a normal distribution with a standard deviation
of 0.02, a million of them again and again.
"""

import array
import json
import math
import pathlib
import random
import struct
import sys

LAYERS, HIDDEN, HEADS, KV_HEADS, WIDTH, EXPERTS, CHOSEN, VOCAB = 4, 1024, 16, 4, 1792, 8, 2, 4000
# A prime, so that no two rows are the same.
NUMBERS = 1_048_573


def shapes():
    yield "model.embed_tokens.weight", [VOCAB, HIDDEN]
    yield "lm_head.weight", [VOCAB, HIDDEN]
    yield "model.norm.weight", [HIDDEN]
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        yield f"{block}.input_layernorm.weight", [HIDDEN]
        yield f"{block}.post_attention_layernorm.weight", [HIDDEN]
        for part in "qkvo":
            rows = HIDDEN // HEADS * (KV_HEADS if part in "kv" else HEADS)
            yield f"{block}.self_attn.{part}_proj.weight", [rows, HIDDEN]
        yield f"{block}.block_sparse_moe.gate.weight", [EXPERTS, HIDDEN]
        for expert in range(EXPERTS):
            for part in ("w1", "w3"):
                yield f"{block}.block_sparse_moe.experts.{expert}.{part}.weight", [WIDTH, HIDDEN]
            yield f"{block}.block_sparse_moe.experts.{expert}.w2.weight", [HIDDEN, WIDTH]


def bits(number):
    """A number in bfloat16, cut off."""
    return struct.unpack("<I", struct.pack("<f", number))[0] >> 16


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "mixtral", "hidden_act": "silu", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "intermediate_size": WIDTH, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
        "vocab_size": VOCAB, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    random.seed(1)
    numbers = array.array("H", (bits(random.gauss(0, 0.02)) for _ in range(NUMBERS))).tobytes()
    at = 0
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, shape in shapes():
            left = 2 * math.prod(shape)
            if "norm" in name:
                file.write(struct.pack("<H", bits(1.0)) * (left // 2))
                continue
            while left:
                some = numbers[at : at + left]
                file.write(some)
                left -= len(some)
                at = (at + len(some)) % len(numbers)


main(pathlib.Path(sys.argv[1]))
