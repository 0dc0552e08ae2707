"""Records the embeddings that sentence-transformers computes with tiny models.

    python tools/embedding_cases.py tests/fixtures/transformers-5.23.0-embeddings

Needs torch, transformers 5.23.0 and sentence-transformers 5.2.0, on the CPU. `kiln conformance` runs the folder. Each model has its modules as
sentence-transformers writes them. Rows of a batch are padded on the right. `hidden` are the hidden states of all rows, one after the other.
"""

import json
import os
import sys

import torch
import transformers
from recorder import VOCAB, Recorder, ids
from sentence_transformers import models as modules

recorder = Recorder(sys.argv[1])
sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64,
             pad_token_id=0, attn_implementation="eager")
grouped = dict(num_key_value_heads=2, head_dim=8)


def write(name, parts, limits=dict(max_seq_length=64, do_lower_case=False), prompts=None):
    """Writes the modules after the first as `SentenceTransformer.save` does."""
    folder = os.path.join(recorder.out, "models", name)
    listed = [dict(idx=0, name="0", path="", type="sentence_transformers.models.Transformer")]
    for i, part in enumerate(parts, 1):
        kind = type(part).__name__
        path = f"{i}_{kind}"
        os.makedirs(os.path.join(folder, path), exist_ok=True)
        part.save(os.path.join(folder, path))
        listed.append(dict(idx=i, name=str(i), path=path, type=f"sentence_transformers.models.{kind}"))
    files = {"modules.json": listed, "sentence_bert_config.json": limits,
             "config_sentence_transformers.json": dict(prompts=prompts or {}, default_prompt_name=None)}
    for file, content in files.items():
        with open(os.path.join(folder, file), "w") as to:
            json.dump(content, to, indent=2)


def record(made, name, case, rows, parts, **arguments):
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    hidden = made(input_ids=tokens, attention_mask=mask).last_hidden_state
    features = dict(token_embeddings=hidden.clone(), attention_mask=mask)
    for part in parts:
        features = part(features)
    own = torch.cat([hidden[i, : len(row)] for i, row in enumerate(rows)])
    recorder.cases.append(dict(
        model=name, case=case, input_ids=rows, kwargs=arguments,
        hidden=recorder.put(f"{name}.{case}.hidden", own),
        embeddings=recorder.put(f"{name}.{case}.embeddings", features["sentence_embedding"])))


def cases(made, name, parts):
    record(made, name, "alone", ids(11, 3).tolist(), parts)
    record(made, name, "one_token", [[5]], parts)
    record(made, name, "rows", [ids(n, 10 + n).tolist()[0] for n in (9, 1, 23, 9, 40)], parts)
    if any(isinstance(part, modules.Dense) for part in parts):
        return
    for kind in modules.Pooling.POOLING_MODES:
        record(made, name, kind, [ids(n, 30 + n).tolist()[0] for n in (7, 16)], [modules.Pooling(32, kind)], pooling=kind, normalize=False)


def dense(inputs, outputs, seed, **arguments):
    torch.manual_seed(seed)
    part = modules.Dense(inputs, outputs, **arguments)
    return part


bert = recorder.model(transformers.BertModel, transformers.BertConfig(**sizes), "bert", 601)
parts = [modules.Pooling(32, "mean"), modules.Normalize()]
write("bert", parts, dict(max_seq_length=48, do_lower_case=False))
cases(bert, "bert", parts)

other = dict(sizes, hidden_size=24, num_attention_heads=3, num_hidden_layers=2, type_vocab_size=1, hidden_act="gelu_new", layer_norm_eps=1e-5)
made = recorder.model(lambda config: transformers.BertModel(config, add_pooling_layer=False), transformers.BertConfig(**other), "bert_other", 603)
# And the mean, which is on by default.
parts = [modules.Pooling(24, pooling_mode_cls_token=True, pooling_mode_max_tokens=True), dense(72, 20, 1), modules.Normalize()]
write("bert_other", parts)
record(made, "bert_other", "rows", [ids(n, 50 + n).tolist()[0] for n in (4, 30, 17)], parts)

# The window is 9: half of 16, and the token itself.
window = dict(sliding_window=16, use_bidirectional_attention=True, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
config = transformers.Gemma3TextConfig(**sizes, **grouped, **window)
made = recorder.model(transformers.Gemma3TextModel, config, "gemma3_text", 605)
activation = torch.nn.Identity()
parts = [modules.Pooling(32, "mean"), dense(32, 56, 2, bias=False, activation_function=activation),
         dense(56, 32, 3, bias=False, activation_function=activation), modules.Normalize()]
write("gemma3_text", parts, prompts={"query": "task: search result | query: ", "document": "title: none | text: "})
cases(made, "gemma3_text", parts)

for name, cls, config in (
    ("qwen3", transformers.Qwen3Model, transformers.Qwen3Config(**sizes, **grouped)),
    ("llama", transformers.LlamaModel, transformers.LlamaConfig(**sizes, **grouped, tie_word_embeddings=False)),
):
    made = recorder.model(cls, config, name, 611)
    parts = [modules.Pooling(32, "lasttoken" if name == "qwen3" else "weightedmean"), modules.Normalize()]
    write(name, parts, dict(max_seq_length=None, do_lower_case=False))
    cases(made, name, parts)

recorder.write()
