"""Records tests/data/config_fields.json: the fields of Transformers' config classes with their defaults, and the other names they have.

Run it with the version of Transformers that is followed, and look at what is new in the difference:

    python tools/config_fields.py tests/data/config_fields.json
"""

import dataclasses
import json
import sys

from transformers import CONFIG_MAPPING, PreTrainedConfig, __version__

MODELS = [
    "llama", "llama4_text", "mistral", "ministral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "gemma4_unified_text",
    "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "smollm3", "olmo2", "olmo3", "exaone4",
    "granite", "cohere2", "glm4", "starcoder2", "gpt2", "gpt_neox", "phi", "seed_oss", "ernie4_5", "mamba", "falcon_mamba", "gpt_oss", "glm4_moe",
    "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "lfm2", "lfm2_moe", "mamba2", "bamba", "granitemoehybrid",
    "falcon_h1", "nemotron_h", "jamba", "bert", "whisper",
]  # fmt: skip


def fields(config):
    return {field.name: field.default for field in dataclasses.fields(config) if field.default is not dataclasses.MISSING}


of_all = fields(PreTrainedConfig)
record = {"transformers": __version__, "of_all": of_all, "models": {}}
for model_type in MODELS:
    config = CONFIG_MAPPING[model_type]
    own = {name: default for name, default in fields(config).items() if of_all.get(name, "none") != default or name not in of_all}
    record["models"][model_type] = {"fields": own, "aliases": config.attribute_map}
with open(sys.argv[1], "w") as file:
    # Infinity is written as configs have it.
    json.dump(PreTrainedConfig._encode_special_floats(record), file, indent=1)
    file.write("\n")
